"""How long a follower waits where nothing leads on, and when it looks again at what could not be had."""

from __future__ import annotations

import logging

from deltabus.bus.errors import CorruptPayloadError, RetentionGapError, UsageError

from .events import Event, EventKind, Listener

__all__ = ["GapWatch"]

_log = logging.getLogger("deltabus.subscriber")

_LOOK_AGAIN = 30.0
"""Seconds after which what was missing or damaged is tried once more, while nothing else leads on."""


class GapWatch:
    """Watches the time in which nothing leads on from what is held: it was removed, or is damaged.

    Args:
        topic: Named in what is told.
        limit: Seconds that this may last.
        tell: Told when it begins.

    Attributes:
        broken: Why a message could not be had, of those that were tried last; None when all could.

    Raises:
        UsageError: If the limit is negative.
    """

    def __init__(self, topic: str, *, limit: float, tell: Listener) -> None:
        if limit < 0:
            raise UsageError(f"gap_timeout={limit} is negative; 0 does not wait at all")
        self.broken: Exception | None = None
        self._topic = topic
        self._limit = limit
        self._tell = tell
        self._began: float | None = None
        self._looked = 0.0

    def over(self) -> None:
        """Note that something led on."""
        self._began = None

    def look(self, gap: RetentionGapError, now: float) -> float:
        """Take note that nothing leads on, and return in how many seconds at most to look again.

        Args:
            gap: What is missing.
            now: In seconds, of a clock that never goes back.

        Raises:
            CorruptPayloadError: If the limit is reached, and something was damaged.
            RetentionGapError: If the limit is reached.
        """
        if self._began is None:
            self._began = self._looked = now
            _log.warning("%s: %s Waiting up to %g s for an anchor.", self._topic, gap, self._limit)
            self._tell(Event(kind=EventKind.WAITING, topic=self._topic, detail=str(gap)))
        end = self._began + self._limit
        if self._looked >= end:
            what = f"{self.broken or gap} No anchor came within {self._limit:g} s."
            if isinstance(self.broken, CorruptPayloadError):
                raise CorruptPayloadError(what) from self.broken
            raise RetentionGapError(what, topic=self._topic, writer=gap.writer) from (self.broken or gap)
        return max(self._due - now, 0.0)

    def looks_again(self, now: float) -> bool:
        """Return whether it is time to look again at what could not be had, and take note that this is done.

        However much news there is: deltas that start from what is missing lead nowhere.
        """
        if now < self._due:
            return False
        self._looked = now
        return True

    @property
    def _due(self) -> float:
        end = self._began + self._limit if self._began is not None else 0.0
        return min(self._looked + _LOOK_AGAIN, end)
