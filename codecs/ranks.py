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
from .held import Held, first_not_holding, sampled
from .kernels import classes
from .schema import Segment

__all__ = ["Classes", "Ranks", "places_of", "ranks_of"]

_MOST_CLASS_BITS = 8

_COVERED = 1 - 2.0**-11
"""The share of elements in classes that are counted together; a column more costs as much as a few elements in 1000."""


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


def ranks_of(segment: Segment, base: Held, changes: SegmentChanges) -> Ranks:
    """Return the ranks of changes among the elements of a segment.

    Args:
        segment: Where they belong.
        base: The bits of the whole segment before the changes, of its size and dtype.
        changes: In order of position, inside the segment.

    Raises:
        UsageError: If the base does not hold the bits that a change starts from.
        StorageFullError: If the base lies on a device that has no memory for the work.
    """
    classed, count = Classes.of(segment.dtype), changes.positions.size
    positions, old = (np.ascontiguousarray(each) for each in (changes.positions, changes.old))
    if isinstance(base, Tensor):
        _check(segment, positions, first_not_holding(base, positions, old))
        return Ranks(*on_device.count_between(base, positions, int(classed.shift), int(classed.mask)))
    counts, order, gaps = np.zeros(classed.number, np.int64), np.empty(count, np.uint32), np.empty(count, np.uint32)
    columns = _columns(classed, base)
    wrong = classes.count_between(base, positions, old, *classed, *columns, counts, order, gaps, classes.room())
    _check(segment, positions, wrong)
    return Ranks(counts, order, gaps)


def places_of(
    segment: Segment, base: Held, counts: npt.NDArray[np.int64], gaps: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the positions that ranks lead to, rising, and the number of each in the order by class; from `ranks_of`.

    They are fewer than gaps when a class has too few elements.

    Args:
        segment: Where they belong.
        base: The bits of the whole segment before the changes, of its size and dtype.
        counts: How many there are in each class, at least one in all.
        gaps: As in `Ranks`, each below the segment's size.

    Raises:
        StorageFullError: If the base lies on a device that has no memory for the work.
    """
    classed = Classes.of(segment.dtype)
    if isinstance(base, Tensor):
        return on_device.find_counted(base, counts, gaps, int(classed.shift), int(classed.mask))
    positions, order = np.empty(gaps.size, np.uint32), np.empty(gaps.size, np.uint32)
    columns = _columns(classed, base)
    found = classes.find_counted(base, *classed, *columns, counts, gaps, positions, order, classes.room())
    return positions[:found], order[:found]


def _check(segment: Segment, positions: npt.NDArray[np.uint32], wrong: int) -> None:
    if wrong >= 0:
        raise UsageError(
            f"the base of segment {segment.index} holds other bits at element {positions[wrong]} than its change "
            "starts from; pass the bits as they were before"
        )


def _columns(classed: Classes, base: Bits) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the most frequent classes, and the column of each class; how they are chosen alters no result."""
    frequency = np.bincount(classed(sampled(base)), minlength=classes.CLASSES)
    by_frequency = np.argsort(-frequency, kind="stable")
    covered = np.cumsum(frequency[by_frequency])
    needed = int(np.searchsorted(covered, covered[-1] * _COVERED)) + 1
    columns = by_frequency[: min(needed, classes.COLUMNS)].astype(np.uint8)
    column_of = np.full(classes.CLASSES, classes.NO_COLUMN, np.uint8)
    column_of[columns] = np.arange(columns.size)
    return columns, column_of
