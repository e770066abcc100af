"""Ranks within classes: how many elements of a change's class lie between it and the change before it, and back.

The class of an element is the exponent of its old bits; `deltabus.codecs.conditional` says what it is for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deltabus.bus.errors import UsageError

from . import on_device
from .changes import Bits, SegmentChanges
from .dtypes import DType, Order
from .held import Held, first_not_holding, sampled, take
from .kernels import classes
from .kernels.columns import NO_COLUMN, SINGLE_COLUMN, Columns
from .schema import Segment
from .scratch import Scratch

__all__ = ["Classes", "Places", "Ranks", "places_of", "ranks_of"]

_MOST_CLASS_BITS = 8

_SPARSELY = 8
"""A sample that tells frequent classes may be so much smaller than one that sizes are estimated by."""

_NEARLY_ALL = 0.99
"""A share of the elements that is enough to have columns; others are looked at one by one."""

_ABOVE, _BELOW = 1, 3
"""Classes beside those that a sample meets: of small weights there are half as many with each exponent."""


class Classes(NamedTuple):
    """How the bits of an element tell its class: `bits >> shift & mask`."""

    shift: np.uint64
    mask: np.uint64

    @classmethod
    def of(cls, dtype: DType) -> Classes:
        """Return the classes of a type: its exponents, the top 8 bits of them where there are more, or a single one."""
        if dtype.order is Order.PLAIN:
            return cls(np.uint64(0), np.uint64(0))
        below_sign = dtype.size * 8 - 1
        kept = min(below_sign - dtype.mantissa, _MOST_CLASS_BITS)
        return cls(np.uint64(below_sign - kept), np.uint64((1 << kept) - 1))

    @property
    def number(self) -> int:
        """How many classes there are."""
        return int(self.mask) + 1

    def __call__(self, bits: Bits) -> npt.NDArray[np.int64]:
        """Return the class of each element."""
        return ((bits >> bits.dtype.type(self.shift)) & bits.dtype.type(self.mask)).astype(np.int64)


class Ranks(NamedTuple):
    """Changes, sorted by class, and within a class by position.

    Attributes:
        counts: How many there are in each class; int64.
        order: The number of each in the order of positions; uint32.
        gaps: How many elements of its class lie between each and the one before in its class, or the segment's begin;
            uint32.
    """

    counts: npt.NDArray[np.int64]
    order: npt.NDArray[np.uint32]
    gaps: npt.NDArray[np.uint32]


class Places(NamedTuple):
    """Changes by rising position.

    Attributes:
        positions: Of each; uint32.
        order: The number of each in the order by class; uint32.
        old: The bits that lie there.
    """

    positions: npt.NDArray[np.uint32]
    order: npt.NDArray[np.uint32]
    old: Bits


def ranks_of(segment: Segment, base: Held, changes: SegmentChanges, scratch: Scratch) -> Ranks:
    """Return the ranks of changes among the elements of a segment.

    Args:
        segment: Where they belong.
        base: The bits of the whole segment before the changes, of its size and dtype.
        changes: In order of position, inside the segment.
        scratch: Where the ranks may lie.

    Raises:
        UsageError: If the base does not hold the bits that a change starts from.
        StorageFullError: If the base lies on a device that has no memory for the work.
    """
    classed, count = Classes.of(segment.dtype), changes.positions.size
    positions, old = (np.ascontiguousarray(each) for each in (changes.positions, changes.old))
    if isinstance(base, Tensor):
        _check(segment, positions, first_not_holding(base, positions, old))
        return Ranks(*on_device.count_between(base, positions, int(classed.shift), int(classed.mask)))
    counts = np.zeros(classed.number, np.int64)
    order, gaps = (scratch.array(name, count, np.uint32) for name in ("order", "gaps"))
    base = np.ascontiguousarray(base)
    columns = _columns(classed, base)
    wrong = classes.count_between(base, positions, old, columns, counts, order, gaps, classes.room())
    _check(segment, positions, wrong)
    return Ranks(counts, order, gaps)


def places_of(
    segment: Segment, base: Held, counts: npt.NDArray[np.int64], gaps: npt.NDArray[np.uint32], scratch: Scratch
) -> Places:
    """Return the places that ranks lead to; the inverse of `ranks_of`.

    They are fewer than gaps when a class has too few elements.

    Args:
        segment: Where they belong.
        base: The bits of the whole segment before the changes, of its size and dtype.
        counts: How many there are in each class, at least one in all.
        gaps: As in `Ranks`, each below the segment's size.
        scratch: Where the order may lie.

    Raises:
        StorageFullError: If the base lies on a device that has no memory for the work.
    """
    classed = Classes.of(segment.dtype)
    if isinstance(base, Tensor):
        positions, order = on_device.find_counted(base, counts, gaps, int(classed.shift), int(classed.mask))
        return Places(positions, order, take(base, positions))
    base, order = np.ascontiguousarray(base), scratch.array("order", gaps.size, np.uint32)
    places = Places(np.empty(gaps.size, np.uint32), order, np.empty(gaps.size, base.dtype))
    found = classes.find_counted(base, _columns(classed, base), counts, gaps, *places, classes.room())
    return Places(*(each[:found] for each in places))


def _check(segment: Segment, positions: npt.NDArray[np.uint32], wrong: int) -> None:
    if wrong >= 0:
        raise UsageError(
            f"the base of segment {segment.index} holds other bits at element {positions[wrong]} than its change "
            "starts from; pass the bits as they were before"
        )


def _columns(classed: Classes, base: Bits) -> Columns:
    """Return columns for frequent classes; how they are chosen alters no result.

    A run of exponents, as trained weights have them, and one beside it: many weights may be zero.
    """
    frequency = np.bincount(classed(sampled(base)[::_SPARSELY]), minlength=classes.CLASSES)
    choice = _run_and_single(frequency, None)
    if choice[0] < frequency.sum() * _NEARLY_ALL:
        choice = max(choice, _run_and_single(frequency, int(np.argmax(frequency))))
    _, first, width, single = choice
    of = np.full(classes.CLASSES, NO_COLUMN, np.uint8)
    of[first : first + width] = np.arange(width)
    of[single] = SINGLE_COLUMN
    return Columns(*classed, np.uint8(first), np.uint8(width), np.uint8(single), of)


def _run_and_single(frequency: npt.NDArray[np.int64], leave: int | None) -> tuple[int, int, int, int]:
    """Return the run of classes with most elements of all but one, and the most frequent class outside of it.

    Returns how many elements these have, the run's first class, its width, and the class outside.
    """
    rest = frequency.copy()
    if leave is not None:
        rest[leave] = 0
    sums = np.concatenate(([0], np.cumsum(rest)))
    first = int(np.argmax(sums[SINGLE_COLUMN:] - sums[:-SINGLE_COLUMN]))
    last = first + SINGLE_COLUMN
    while last - first > 1 and not rest[last - 1]:
        last -= 1
    while last - first > 1 and not rest[first]:
        first += 1
    last = min(last + _ABOVE, classes.CLASSES)
    first = max(first - _BELOW, last - SINGLE_COLUMN, 0)
    outside = frequency.copy()
    outside[first:last] = -1
    single = int(np.argmax(outside))
    return int(frequency[first:last].sum() + outside[single]), first, last - first, single
