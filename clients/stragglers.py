"""How long a follower waits for the rest of a step and what it rests on, and when it says for whom."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deltabus.bus.errors import StragglerError
from deltabus.bus.progress import Awaited, Dependence

from .events import Event, EventKind, Listener

__all__ = ["StragglerWatch"]

_log = logging.getLogger("deltabus.subscriber")

_FIRST_REPORT = 10.0
"""Seconds that a group's step may be incomplete before that is told, and from then on ever more seldom."""


class StragglerWatch:
    """Watches the steps that wait for writers: those of their group, and those whose updates they rest on.

    Args:
        topic: Named in what is told.
        limit: Seconds that a step may wait; None is for ever.
        tell: Told when it takes long.
        first_report: Seconds until it is told for the first time.
    """

    def __init__(self, topic: str, *, limit: float | None, tell: Listener, first_report: float = _FIRST_REPORT) -> None:
        self._topic = topic
        self._tell = tell
        self._limit = limit
        self._first_report = first_report
        self._since: dict[tuple[type[Awaited], str, int, int], tuple[float, float]] = {}

    def look(self, waiting: Sequence[Awaited], now: float) -> float | None:
        """Take note of the steps that wait now, and return in how many seconds to look again; None is only on news.

        Each group has a time of its own, from the moment on when its step was first seen to wait.

        Args:
            waiting: What the sequencer says.
            now: In seconds, of a clock that never goes back.

        Raises:
            StragglerError: If the limit is reached; looked at again, it counts anew.
        """
        before, self._since = self._since, {}
        due: list[float] = []
        for awaited in waiting:
            key = type(awaited), awaited.group, awaited.generation, awaited.step
            began, report = before.get(key, (now, self._first_report))
            waited = now - began
            if self._limit is not None and waited >= self._limit:
                raise StragglerError(
                    f"{self._topic}: {awaited}. Nothing came for {waited:.0f} s: {_remedy(awaited)}, or raise "
                    "`straggler_timeout`",
                    writers=awaited.missing,
                )
            if waited >= report:
                _log.warning("%s: %s, for %.0f s now", self._topic, awaited, waited)
                detail = str(awaited)
                self._tell(Event(kind=EventKind.WAITING, topic=self._topic, step=awaited.step, detail=detail))
                report *= 2
            self._since[key] = began, report
            due.append((report if self._limit is None else min(report, self._limit)) - waited)
        return max(min(due), 0.0) if due else None


def _remedy(awaited: Awaited) -> str:
    if isinstance(awaited, Dependence):
        return f"start {', '.join(awaited.missing[:8])} again, leave them out (`writers=`)"
    return "restart the group with a new generation"
