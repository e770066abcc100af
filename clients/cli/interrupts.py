"""Ctrl-C while modules are imported."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["INTERRUPTED", "importing"]

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128 and the number of the signal."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Hold an interruption back until modules are imported: the initialisers of some swallow it, others abort.

    A second interruption is not held back. Outside of the main thread, where no signal arrives, it does nothing.

    Raises:
        KeyboardInterrupt: At the end, if there was an interruption.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
