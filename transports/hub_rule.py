"""Who stands at a place of a bucket that lets everybody write everywhere: pure decisions.

The Hub's own interface has no conditional write. So nobody writes at a place itself. Everybody adds a candidate, under
a name that nobody else uses, and the Hub says when it was stored:

    <place>~<SHA-256 of the bytes, in hexadecimal>-<16 random hexadecimal digits>

A name is used for one upload only, so that no candidate is ever stored again, later than it was. Then:

1. Of a place's candidates, the one stored first stands there; of those stored in the same moment, the one with the
   lowest hash, and then the lowest name. It may be any of them while a candidate may still appear that was stored
   before it.
2. A log is the run of positions without a hole that ends at the highest position that has a candidate, and it reaches
   down only as long as no record was stored later than the one behind it. This leaves out what a writer that was
   asleep adds in front of a log whose beginning was removed meanwhile.
3. A record is decided once there is a candidate at the next position, because that is added only behind a decided
   record; or once a listing that began at least `settle` seconds after somebody first saw it still has it.

It is assumed that a listing shows whatever was stored more than `settle` seconds before it began, and that the times
that the Hub writes down are right, among themselves, to less than `settle`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

__all__ = ["Candidate", "Sightings", "choose", "name_candidate", "parse_candidate", "trace_log"]

_CANDIDATE = re.compile(r"(?P<place>[^~]+)~(?P<identity>[0-9a-f]{64})-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What somebody added for a place.

    Attributes:
        path: Its name in the bucket.
        place: Where it wants to stand.
        identity: The SHA-256 of its bytes, in hexadecimal.
        stored: When, as the Hub says.
        size: Its bytes.
        content: What Xet calls its bytes.
    """

    path: str
    place: str
    identity: str
    stored: datetime
    size: int
    content: str


def name_candidate(place: str, identity: str, nonce: str) -> str:
    """Return the name of a candidate; `nonce` is 16 hexadecimal digits that were drawn for this upload alone.

    >>> name_candidate("logs/main/00000000000000000007", 64 * "0", 16 * "f")[-20:]
    '000-ffffffffffffffff'
    """
    return f"{place}~{identity}-{nonce}"


def parse_candidate(path: str, *, stored: str, size: int, content: str) -> Candidate | None:
    """Return what a file of the bucket is a candidate for; None if its name is that of none.

    Args:
        path: Its name.
        stored: When it was stored, as ISO 8601 text with a time zone.
        size: Its bytes.
        content: What Xet calls its bytes.

    Raises:
        ValueError: If the time is malformed.
    """
    match = _CANDIDATE.fullmatch(path)
    if match is None:
        return None
    moment = datetime.fromisoformat(stored)
    if moment.tzinfo is None:
        raise ValueError(f"{stored!r} has no time zone")
    place, identity = match["place"], match["identity"]
    return Candidate(path=path, place=place, identity=identity, stored=moment, size=size, content=content)


def choose(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return which of a place's candidates stands there (rule 1); None if there are none."""
    return min(candidates, key=lambda one: (one.stored, one.identity, one.path), default=None)


def trace_log(candidates: Mapping[int, Iterable[Candidate]]) -> dict[int, Candidate]:
    """Return a log's records by position, in order (rules 1 and 2); the last may not be decided yet."""
    run: list[tuple[int, Candidate]] = []
    for position in sorted(candidates, reverse=True):
        found = choose(candidates[position])
        if found is None:
            continue
        if run and (position != run[-1][0] - 1 or found.stored > run[-1][1].stored):
            break
        run.append((position, found))
    return dict(reversed(run))


class Sightings:
    """When the last record of each log was first seen, on this process's clock (rule 3).

    Args:
        settle: Seconds after which what was stored before it would have been seen too.
    """

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._last: dict[str, tuple[int, str, float]] = {}

    def note(self, log: str, position: int, path: str, now: float) -> None:
        """Note that a candidate is there, `now`, unless one further back in the log is known."""
        known = self._last.get(log)
        if known is None or position > known[0]:
            self._last[log] = position, path, now

    def ready(self, log: str, position: int) -> float:
        """Return from when on a listing decides the log's last record, if it is at this position; 0 if any does."""
        known = self._last.get(log)
        return known[2] + self._settle if known is not None and known[0] == position else 0.0

    def expect(self, log: str) -> float:
        """Return from when on a listing decides the furthest candidate that is known; 0 if any does."""
        known = self._last.get(log)
        return known[2] + self._settle if known is not None else 0.0

    def decide(self, log: str, position: int, path: str, *, began: float, now: float) -> bool:
        """Return whether a listing decides the last record that it shows.

        Args:
            log: The log.
            position: The record's.
            path: The record's.
            began: When the listing began.
            now: When it was there.
        """
        known = self._last.get(log)
        if known is None or known[:2] != (position, path):
            # Another one, or one that is stored before the one seen first: the wait begins anew.
            self._last[log] = position, path, now
            return False
        return began >= known[2] + self._settle
