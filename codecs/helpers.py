"""Helpers: threads that take over some of the work of whoever calls them, and are never waited for before they come."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Helpers", "share_out"]

_T = TypeVar("_T")


class Helpers:
    """Threads for work in memory that takes milliseconds; they start when they are first called.

    Args:
        count: How many, besides the thread that calls; maybe none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="deltabus-help") if count > 0 else None

    def share(self, work: Callable[[_T], object], items: Iterable[_T]) -> None:
        """Do the work on each item, in this thread and in those that come, in no order.

        When this returns or raises, nobody works any more, however often it was interrupted. After an error nothing
        more is begun. Of several errors the last one that met this thread is raised.

        Raises:
            BaseException: What the work raised.
        """
        waiting = deque(items)
        # Held by whoever works. A helper that comes when all is done finds nothing, and is not waited for.
        turns = [threading.Lock() for _ in range(min(self._count, len(waiting) - 1))]
        ended: list[BaseException] = []
        errors: list[BaseException] = []

        def help_out(turn: threading.Lock) -> None:
            with turn:
                try:
                    for item in _taken(waiting):
                        work(item)
                except BaseException as error:
                    waiting.clear()
                    errors.append(error)

        def wait() -> None:
            while True:
                try:
                    waiting.clear()
                    for turn in turns:
                        with turn:
                            pass
                    return  # noqa: TRY300 - in an `else` it would be one more place to strike
                except BaseException as error:
                    ended.append(error)

        try:
            try:
                self._call(help_out, turns)
                for item in _taken(waiting):
                    work(item)
            except BaseException as error:
                ended.append(error)
            wait()
        finally:
            # Where several signals are due at once, one may strike on the way out of a handler, and so out of `wait`.
            try:
                wait()
            finally:
                wait()
        for reason in (*reversed(ended), *errors):
            raise reason

    def _call(self, help_out: Callable[[threading.Lock], object], turns: Sequence[threading.Lock]) -> None:
        try:
            for turn in turns:
                assert self._pool is not None
                self._pool.submit(help_out, turn)
        except RuntimeError as error:
            # The threads have ended, or Python does: nobody comes, as in a process that was forked from theirs. If it
            # comes of another error it hides an interrupt that struck within a lock.
            if error.__context__ is not None:
                raise

    def end(self) -> None:
        """Let the threads end; whoever shares work out afterwards does it alone."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def share_out(work: Callable[[_T], object], items: Iterable[_T], helpers: Helpers | None) -> None:
    """Do the work on each item, with helpers if there are any, as `Helpers.share` does.

    Raises:
        BaseException: What the work raised.
    """
    if helpers is None:
        for item in items:
            work(item)
    else:
        helpers.share(work, items)


def _taken(waiting: deque[_T]) -> Iterator[_T]:
    with contextlib.suppress(IndexError):
        while True:
            yield waiting.popleft()
