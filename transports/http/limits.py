"""How much anybody may do: sizes, rates, connections, and how slow a client may be."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from deltabus.bus.errors import UsageError
from deltabus.bus.message import MAX_BLOB_BYTES

__all__ = ["Limits", "Rates"]

_MAX_CLIENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one service allows.

    Args:
        body: Bytes of a blob.
        rate: Requests a second of one client, and ten times as many at once.
        connections: At a time.
        stall: Seconds in which a client must take or give something.
        slowest: Bytes a second that a body must bring, after the first `stall` seconds.
        heartbeat: Seconds between signs of life to those who follow.

    Raises:
        UsageError: If one is not above 0.
    """

    body: int = MAX_BLOB_BYTES
    rate: float = 2000.0
    connections: int = 4096
    stall: float = 60.0
    slowest: float = 1024.0
    heartbeat: float = 10.0

    def __post_init__(self) -> None:
        if min(self.body, self.rate, self.connections, self.stall, self.slowest, self.heartbeat) <= 0:
            raise UsageError("limits of the service must be above 0")


class Rates:
    """Counts the requests of each client: a bucket that fills with time, and that each request takes one from.

    Args:
        rate: Requests a second.
        clock: Tells seconds that never go back.
    """

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._most = 10 * rate
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> bool:
        """Return whether a client may make a request now, and count it."""
        now = self._clock()
        held, then = self._buckets.pop(client, (self._most, now))
        held = min(self._most, held + (now - then) * self._rate)
        allowed = held >= 1
        self._buckets[client] = (held - 1 if allowed else held, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return allowed
