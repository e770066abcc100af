"""Holding back: which changes are sent now, and which wait because they are small.

What is held back is not lost and not forgotten: changes are found by comparing with what was *published*, so that an
element that was held back is among the next changes again, with all that has happened to it since. `Limits` says what
may wait, `split` sorts changes by it.

How large a change is, is its distance: how many representable values lie between old and new bits (ULP). Types without
fractions, such as integers and booleans, know no small changes: a threshold never holds them back, and a budget takes
them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltabus.bus.errors import UsageError

from .ahead import in_order
from .changes import Bits, Changes, SegmentChanges
from .dtypes import Order
from .encodings import ENCODINGS
from .held import Held
from .steps import distances_between

__all__ = ["PATIENCE", "SEGMENT_BYTES", "Limits", "Split", "estimate_bytes", "split"]

PATIENCE = 16
"""Publications after which a threshold is lifted once, unless limits say otherwise."""

SEGMENT_BYTES = 128
"""What a segment takes in a part's header beside its own bytes: name, shape, range and checksum, about."""

_AHEAD = 64

_CLOSE = 64
"""A budget is filled to within this share of it."""

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be held back.

    Attributes:
        threshold: Changes of at most so many ULP wait; 0 lets none wait.
        budget: Bytes that a message may take, by estimate; what does not fit waits. None is no limit.
        patience: Every so many publications the threshold is lifted, so that no small change waits longer.

    Raises:
        UsageError: If one of them is out of range.
    """

    threshold: int = 0
    budget: int | None = None
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        given = (("threshold", self.threshold, 0), ("budget", self.budget, 1), ("patience", self.patience, 1))
        for name, value, least in given:
            if name == "budget" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name}={value!r} is not a whole number of at least {least}")

    def __bool__(self) -> bool:
        return self.threshold > 0 or self.budget is not None


@dataclass(frozen=True, slots=True)
class Split:
    """Changes, sorted into those that are sent and those that wait; both lead from the same state.

    Attributes:
        sent: What is sent now.
        held: What waits.
        small: How many of those wait for the threshold, and not for the budget.
    """

    sent: Changes
    held: Changes
    small: int


def estimate_bytes(
    changes: Changes,
    *,
    base: Callable[[int], Held] | None = None,
    encoding: str | None = None,
    pool: Executor | None = None,
) -> int:
    """Return about how many bytes a delta of these changes takes, headers included, in O(changed).

    Args:
        changes: What it would hold.
        base: Returns the bits of a whole segment before the changes; without it, encodings that need these are left
            out.
        encoding: The one that will be used; None is the smallest for each segment.
        pool: Looks at several segments at once.

    Raises:
        UsageError: If the encoding needs `base`, and there is none.
    """
    ways = [each for each in ENCODINGS.values() if base is not None or not each.needs_base]
    if encoding is not None:
        ways = [ENCODINGS[encoding]]

    def cost(index: int) -> int:
        segment, change = changes.schema.segments[index], changes.segments[index]
        held = base(index) if base is not None and any(way.needs_base for way in ways) else None
        return SEGMENT_BYTES + min(way.estimate(segment, change, held) for way in ways)

    return sum(in_order(cost, changes.segments, pool=pool, ahead=_AHEAD))


def split(
    changes: Changes, *, threshold: int = 0, budget: int | None = None, estimate: Callable[[Changes], int]
) -> Split:
    """Sort changes into those that are sent and those that wait.

    What the threshold lets through competes for the budget: the largest first, of equal ones the first in the schema.
    Where there is something to send, at least one element is sent, however small the budget, so that nothing waits for
    ever once the changes stop. Takes memory in O(changed), and time for sorting once what exceeds a budget.

    Args:
        changes: What differs between what was published and what there is now.
        threshold: Changes of at most so many ULP wait.
        budget: About how many bytes may be sent; None is no limit.
        estimate: Returns about how many bytes changes would take, such as `estimate_bytes`.
    """
    sent: dict[int, _Mask | None] = dict.fromkeys(changes.segments)
    if threshold:
        sent = {index: _above(changes, index, threshold) for index in changes.segments}
    passed = _taken(changes, sent)
    small = changes.count - passed.count
    size = 0 if budget is None else estimate(passed)
    if budget is not None and size > budget:
        ranking = _Ranking(passed)
        within = ranking.largest(_fitting(ranking, size, budget, estimate))
        sent |= {index: _narrowed(sent[index], mask) for index, mask in within.items()}
        passed = _taken(passed, within)
    held = {index: mask if mask is None else ~mask for index, mask in sent.items()}
    kept = {index: change for index, change in changes.segments.items() if held[index] is not None}
    return Split(passed, _taken(Changes(changes.schema, kept), held), small)


class _Ranking:
    """The distances of changes, and which are the largest."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        segments = changes.schema.segments
        floats = [segments[index].dtype for index in changes.segments if segments[index].dtype.order is not Order.PLAIN]
        common = max((dtype.bits for dtype in floats), key=lambda bits: bits.itemsize, default=np.dtype(np.uint8))
        self._distances = {index: self._of(index, common) for index in changes.segments}
        # Stable sorting takes linear time for numbers of two bytes, which bf16 and fp16 have.
        self._sorted = np.sort(np.concatenate(list(self._distances.values())), kind="stable")

    def _of(self, index: int, common: np.dtype[np.unsignedinteger]) -> Bits:
        order, change = self._changes.schema.segments[index].dtype.order, self._changes.segments[index]
        if order is Order.PLAIN:
            return np.full(change.positions.size, np.iinfo(common).max, common)
        return distances_between(change.old, change.new, order).astype(common, copy=False)

    @property
    def count(self) -> int:
        """How many changes there are."""
        return self._sorted.size

    def largest(self, count: int) -> dict[int, _Mask]:
        """Return for each segment which changes are among the `count` largest of all, at least one."""
        least = self._sorted[self.count - count]
        room = count - (self.count - int(np.searchsorted(self._sorted, least, side="right")))
        chosen: dict[int, _Mask] = {}
        for index, distance in self._distances.items():
            mask = distance > least
            equal = np.flatnonzero(distance == least)[:room]
            mask[equal] = True
            room -= equal.size
            chosen[index] = mask
        return chosen

    def taken(self, count: int) -> Changes:
        """Return the `count` largest changes."""
        return _taken(self._changes, self.largest(count))


def _fitting(ranking: _Ranking, size: int, budget: int, estimate: Callable[[Changes], int]) -> int:
    """Return how many of the largest changes fit into a budget that is too small for the size of all; at least one.

    A search between a number that fits and one that does not, by turns where a straight line says and in the middle.
    """
    fits, over = 0, ranking.count
    least, most, halve = 0, size, False
    while over - fits > 1 and least < budget - budget // _CLOSE:
        aim = budget - budget // (2 * _CLOSE)
        ahead = (over - fits) // 2 if halve else (over - fits) * (aim - least) // max(most - least, 1)
        count = min(max(fits + ahead, fits + 1), over - 1)
        size = estimate(ranking.taken(count))
        if size <= budget:
            fits, least = count, size
        else:
            over, most = count, size
        halve = not halve
    return max(fits, 1)


def _above(changes: Changes, index: int, threshold: int) -> _Mask | None:
    """Return which changes of a segment are larger than the threshold; None for all."""
    order, change = changes.schema.segments[index].dtype.order, changes.segments[index]
    if order is Order.PLAIN:
        return None
    mask: _Mask = distances_between(change.old, change.new, order) > min(threshold, np.iinfo(change.old.dtype).max)
    return None if mask.all() else mask


def _taken(changes: Changes, masks: Mapping[int, _Mask | None]) -> Changes:
    """Return the changes that masks choose; no mask chooses all of a segment."""
    segments: dict[int, SegmentChanges] = {}
    for index, change in changes.segments.items():
        mask = masks[index]
        if mask is None:
            segments[index] = change
        elif mask.any():
            chosen = np.flatnonzero(mask)
            segments[index] = SegmentChanges(
                change.positions.take(chosen), change.old.take(chosen), change.new.take(chosen)
            )
    return Changes(changes.schema, segments)


def _narrowed(outer: _Mask | None, inner: _Mask) -> _Mask:
    """Return which elements an inner mask chooses among those that an outer one chose."""
    if outer is None:
        return inner
    both = outer.copy()
    both[outer] = inner
    return both
