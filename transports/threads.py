"""Blocking work in a thread, from asyncio: with a limit on standing still, and without loose ends when cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NoProgressError", "Work", "run_in_thread"]

_Result = TypeVar("_Result")


class NoProgressError(Exception):
    """The work made no progress for the whole limit, and goes on, unwatched, until it next calls `advance`."""


class _AbandonedError(Exception):
    """Nobody waits for the work any more; it must undo what it began."""


class Work:
    """What the thread and the loop tell each other."""

    __slots__ = ("abandoned", "progress")

    def __init__(self) -> None:
        self.abandoned = False
        self.progress = 0

    def advance(self) -> None:
        """Say that a part is done; called by the thread between parts, and before what cannot be undone.

        It raises, through the work's `finally` clauses, when nobody waits any more.
        """
        if self.abandoned:
            raise _AbandonedError
        self.progress += 1


async def run_in_thread(function: Callable[[Work], _Result], *, limit: float) -> _Result:
    """Return what a blocking function returns.

    When the caller is cancelled, the function is told at its next `advance`; the cancellation is passed on once it has
    ended, so that its effects do not come later, or after the limit, in seconds.

    Raises:
        NoProgressError: If the function stood still for the limit, in seconds.
    """
    work = Work()
    future = asyncio.get_running_loop().run_in_executor(None, _begin, function, work)
    # Whoever stops waiting leaves the outcome to nobody; asyncio would report it as forgotten.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        seen = -1
        while not future.done() and work.progress != seen:
            seen = work.progress
            await asyncio.wait((future,), timeout=limit)
    except asyncio.CancelledError:
        work.abandoned = True
        if work.progress:
            await asyncio.wait((future,), timeout=limit)
        raise
    if not future.done():
        work.abandoned = True
        raise NoProgressError
    return future.result()


def _begin(function: Callable[[Work], _Result], work: Work) -> _Result:
    work.advance()
    return function(work)
