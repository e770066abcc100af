"""Processes of the simulation: tasks that die together, at any request, without a word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

__all__ = ["Process", "task_factory"]

_current: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """One incarnation of a trainer, a reader or somebody who prunes.

    Args:
        loop: Where it runs.
        name: For people, and unique.
        chance: Draws its random bytes and its clock.

    Attributes:
        began: When it was started.
        dead: Whether it was killed.
        cut_off: Whether nothing gets to the store from here.
        failure: What ended it, if that was no crash.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, chance: random.Random) -> None:
        self.name = name
        self.began = loop.time()
        self.dead = False
        self.cut_off = False
        self.failure: BaseException | None = None
        self.main: asyncio.Task[None] | None = None
        self._loop = loop
        self._chance = chance
        self._skew = chance.uniform(-1e6, 1e6)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._requests_left: int | None = None
        self._phase = ""

    def start(self, work: Coroutine[Any, Any, None], *, ended: Callable[[Process], None]) -> None:
        """Run its main task, and tell when that has ended."""
        token = _current.set(self)
        try:
            self.main = self._loop.create_task(work)
        finally:
            _current.reset(token)

        def done(task: asyncio.Task[None]) -> None:
            self.failure = None if task.cancelled() else task.exception()
            ended(self)

        self.main.add_done_callback(done)

    def clock(self) -> float:
        """The time of day on its own clock, which is wrong."""
        return 1e9 + self._skew + self._loop.time()

    def change_clock(self) -> None:
        """Let its clock jump."""
        self._skew = self._chance.uniform(-1e6, 1e6)

    def draw(self, count: int) -> bytes:
        return self._chance.randbytes(count)

    def doom(self, requests: int, phase: str) -> None:
        """Let it die at one of its next requests: before it is sent, meanwhile, or behind its answer."""
        self._requests_left, self._phase = requests, phase

    def next_request(self) -> str:
        """Count a request, and return when to die on its way; empty if it lives on."""
        if self.dead:
            raise asyncio.CancelledError
        if self._requests_left is None:
            return ""
        self._requests_left -= 1
        return self._phase if self._requests_left <= 0 else ""

    def crash(self) -> None:
        """Die: nothing of it runs any more, and what it sent is on its own."""
        self.dead = True
        for task in list(self._tasks):
            task.cancel()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        _ = task.cancelled() or task.exception()  # whoever started it asks, unless it died first


def task_factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task, of the process that starts it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    process = _current.get()
    if process is not None:
        process.adopt(task)
    return task
