"""Wake those who wait for a log when its directory changes.

Notification is a shortcut, never the only way: network file systems have none, the kernel's limits may be reached, and
a directory may be replaced. Whoever waits also looks again by itself from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from watchfiles import Change, watch

__all__ = ["Watcher"]

_STEP = 5
"""Milliseconds between two looks of the watching thread at what the kernel reported; latency is about twice that."""

_GROUPING = 10
"""Milliseconds for which reports are gathered at most."""

_LOOKS = (0.05, 1.0)
"""Seconds between two looks for a directory that is not there yet: at first, and after a while."""

_logger = logging.getLogger(__name__)


class _Stop:
    """Tells the thread to end: when asked to, and when the program ends without having asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def is_set(self) -> bool:
        return self.asked.is_set() or not threading.main_thread().is_alive()


class Watcher:
    """Watches the directories of logs with one thread, while anybody listens.

    Args:
        directory: What holds the logs' directories; it need not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._listeners: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, str]] = {}
        self._thread: threading.Thread | None = None
        self._stop = _Stop()

    @contextlib.contextmanager
    def listening(self, log: str) -> Iterator[asyncio.Event]:
        """Give an event of the running loop that is set whenever the log may have changed."""
        event = asyncio.Event()
        with self._lock:
            self._listeners[event] = asyncio.get_running_loop(), log
            if self._thread is None:
                self._stop = _Stop()
                self._thread = threading.Thread(
                    target=self._watch, args=(self._stop,), name=f"deltabus-watch {self._directory}"
                )
                self._thread.start()
        try:
            yield event
        finally:
            with self._lock:
                del self._listeners[event]
                if not self._listeners:
                    self._stop.asked.set()
                    self._thread = None

    def wake(self, log: str | None = None) -> None:
        """Set the events of those who listen to a log, or of all."""
        with self._lock:
            for event, (loop, name) in self._listeners.items():
                if log in (None, name):
                    # A loop that was closed with a listener still in it has nobody left to wake.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(event.set)

    def _watch(self, stop: _Stop) -> None:
        pause, longest = _LOOKS
        while not stop.is_set():
            try:
                for _ in watch(
                    self._directory,
                    watch_filter=self._notice,
                    debounce=_GROUPING,
                    step=_STEP,
                    rust_timeout=0,
                    stop_event=stop,
                    raise_interrupt=False,
                    force_polling=False,
                ):
                    pass
            except FileNotFoundError:
                stop.asked.wait(pause)
                pause = min(2 * pause, longest)
                if self._directory.is_dir():
                    self.wake()
            except (OSError, RuntimeError) as error:
                _logger.debug("no notifications for %s, polling instead: %s", self._directory, error)
                return

    def _notice(self, change: Change, path: str) -> bool:
        """Wake whom a change concerns, and filter it out, because `watch` would report each that it passes on."""
        changed = Path(path)
        if change is not Change.deleted and not changed.name.startswith("."):
            self.wake(changed.name if changed.parent == self._directory else changed.parent.name)
        return False
