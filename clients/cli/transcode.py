"""`deltabus transcode`: runs until a signal, and tells of each version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Protocol

from deltabus.keys import ACCEPTED_KEYS
from deltabus.transcoding import Transcoded

from .output import plain_text, size_text

__all__ = ["accepted_keys", "attend"]


class _Work(Protocol):
    def __call__(self, *, tell: Callable[[Transcoded], object]) -> Awaitable[None]: ...


def accepted_keys() -> str | None:
    """Return the keys that the environment names; None where it names none."""
    return os.environ.get(ACCEPTED_KEYS)


def attend(work: _Work, *, attended: bool, as_json: bool) -> None:
    """Run until the work fails, a signal says to stop, or whoever started it has ended.

    Args:
        work: Transcodes, and tells of each version.
        attended: Whether to end when standard input ends.
        as_json: Whether each line is JSON.
    """
    asyncio.run(_attend(work, attended=attended, as_json=as_json))


async def _attend(work: _Work, *, attended: bool, as_json: bool) -> None:
    def tell(done: Transcoded) -> None:
        sys.stdout.write(f"{json.dumps(asdict(done)) if as_json else _line(done)}\n")
        sys.stdout.flush()

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if attended:
        file = sys.stdin.fileno()

        def look() -> None:
            with contextlib.suppress(BlockingIOError):
                if not os.read(file, 4096):
                    loop.remove_reader(file)
                    stop.set()

        loop.add_reader(file, look)
    running = asyncio.ensure_future(work(tell=tell))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (running, stopping):
        if not task.done():
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _line(done: Transcoded) -> str:
    if done.kind == "held":
        return f"goes on from version {done.version}, step {done.step}"
    return plain_text(
        f"version {done.version}, step {done.step}: {done.kind}, {size_text(done.received)} became "
        f"{size_text(done.sent)}, {done.seconds['since']:.2f} s after it was made"
    )
