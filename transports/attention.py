"""When a tail looks into the store besides its own polling: upon announcements, and while nobody would announce.

However many announcements come, what they cost is bounded: after a look in vain the next one waits longer, up to a
second, until a record is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Attention"]

_GAPS = (0.05, 1.0)
"""Seconds between two looks in vain: at first, and at most."""

_TRIES = 6
"""Looks for a record that was announced, because a store may show it a moment later; they take about 1.5 seconds."""

_UNTOLD = 1.0
"""Seconds between two looks while announcements cannot come."""


class Attention:
    """What one tail has seen and heard of.

    Args:
        look: Makes the tail look at once.
        seen: The position of the last record that the tail has.
        told: Whether announcements come now.
        loop: Tells the time, and calls back.
    """

    def __init__(self, look: Callable[[], None], *, seen: int, told: bool, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._look = look
        self._seen = seen
        self._told = told
        self._announced = -1
        self._tries = 0
        self._gap = 0.0
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._plan_next()

    def hear(self, position: int) -> None:
        """Take in that a record was announced; what the tail has already is nothing new."""
        if position > self._seen:
            self._announced = max(self._announced, position)
            self._tries = _TRIES
            self._plan_next()

    def see(self, position: int) -> None:
        """Take in that the tail has found a record, behind which it looks again by itself."""
        self._seen = position
        self._last, self._gap = self._loop.time(), 0.0
        self.close()
        if self._announced <= position:
            self._tries = 0
        self._plan_next(_GAPS[0])

    def turn(self, *, told: bool) -> None:
        """Take in that announcements come from now on, or no longer; when they begin, some may have been missed."""
        self._told = told
        if told:
            self._tries = max(self._tries, 1)
        self._plan_next()

    def close(self) -> None:
        """Look no more, until something else is heard or seen."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _plan_next(self, pause: float = 0.0) -> None:
        if self._tries:
            when = self._last + max(self._gap, pause)
        elif not self._told:
            when = self._last + _UNTOLD
        else:
            return
        if self._timer is None or when < self._timer.when():
            self.close()
            self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._last = self._loop.time()
        self._gap = min(max(2 * self._gap, _GAPS[0]), _GAPS[1])
        self._tries = max(self._tries - 1, 0)
        if not self._tries:
            self._announced = -1  # else one of a position that never comes would count for ever
        self._look()
        self._plan_next()
