"""A publisher's retention: prunes the topic in the background, now and then."""

from __future__ import annotations

import asyncio
import logging

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import DeltabusError
from deltabus.bus.message import Kind
from deltabus.bus.pruner import Pruner
from deltabus.bus.retention import Retention
from deltabus.bus.transport import Transport

__all__ = ["BackgroundPruner"]

_log = logging.getLogger("deltabus.publisher")
_LOOK = 60.0
_SHORTEST = 0.05
_SELDOM = 3600.0
"""Seconds after which a topic is pruned in any case, for what crashes left and for what grew too old."""


class BackgroundPruner:
    """Prunes when an anchor has come, and is older than the policy's grace; and once an hour.

    What fails, however it does, is told in the log, and tried again the next time; it never holds up a publication.

    Args:
        transport: The topic, opened.
        writer: The publisher's end of its log, opened.
        policy: What to keep.
    """

    def __init__(self, transport: Transport, writer: LogWriter, policy: Retention) -> None:
        self._pruner = Pruner(transport, policy, keys=writer.keys)
        self._url = transport.url
        self._writer = writer
        self._grace = policy.grace
        self._seen: tuple[int, float] = (0, 0.0)
        self._done = 0
        self._last_run: float | None = None
        self._told = ""

    async def run(self) -> None:
        """Prune when it is time to, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(_LOOK, max(_SHORTEST, self._grace / 10)))
            if self._is_due(clock()):
                await self._prune()

    def _is_due(self, now: float) -> bool:
        """Return whether to prune now; if so, the newest anchor counts as dealt with."""
        anchors = [message.position for message in self._writer.history if message.kind is Kind.ANCHOR]
        newest = max(anchors, default=-1) + 1
        if newest > self._seen[0]:
            self._seen = newest, now
        self._last_run = now if self._last_run is None else self._last_run
        fresh = self._seen[0] > self._done and now - self._seen[1] >= self._grace
        if not fresh and now - self._last_run < _SELDOM:
            return False
        self._done, self._last_run = self._seen[0] if fresh else self._done, now
        return True

    async def _prune(self) -> None:
        try:
            pruning = await self._pruner.prune()
        except DeltabusError as error:
            level = logging.DEBUG if self._told == str(error) else logging.WARNING
            _log.log(level, "%s was not pruned: %s", self._url, error)
            self._told = str(error)
            return
        except Exception:  # nobody waits for this task: its end would be noticed on a full disk
            _log.exception("%s was not pruned", self._url)
            return
        self._told = ""
        if not pruning.empty:
            removal = pruning.removal
            _log.info(
                "%s: retention removed %d messages, with %d bytes, and %d blobs that no message named",
                self._url,
                len(removal.records),
                removal.nbytes,
                len(pruning.garbage),
            )
