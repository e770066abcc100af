"""Loops that count the elements of each class between changes; `deltabus.codecs.conditional` says what a class is.

The class of an element is `bits >> shift & mask`, below `CLASSES`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import loop

__all__ = ["CLASSES", "TABLES", "count_between", "find_counted"]

CLASSES = 256
"""At most so many classes."""

TABLES = 6
"""Tables of zeros, of `CLASSES` numbers each, that the loops work in."""

_NEVER = np.uint32((1 << 32) - 1)

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic.
_ONE = np.uint32(1)
_1, _2, _3, _4 = (np.uint64(n) for n in (1, 2, 3, 4))

_Bits = npt.NDArray[np.unsignedinteger]
_U32 = npt.NDArray[np.uint32]
_Counts = npt.NDArray[np.int64]


@loop
def count_between(  # noqa: PLR0917 - compiled functions take their arguments by place
    bits: _Bits,
    positions: _U32,
    old: _Bits,
    shift: np.uint64,
    mask: np.uint64,
    counts: _Counts,
    order: _U32,
    gaps: _U32,
    tables: _U32,
) -> int:
    """Sort changed places by class, and count the elements of its class that lie between each and the one before.

    Adds the changes of each class to `counts`; fills in the number of each change in the order of positions, class by
    class, and the gaps in the same order. Returns -1, or the number of a change that does not find its old bits.
    """
    # Four tables in turn, so that one count need not wait until the one before it is stored.
    first, second, third, fourth, after, slots = tables[0], tables[1], tables[2], tables[3], tables[4], tables[5]
    for k in range(positions.size):
        counts[(np.uint64(old[k]) >> shift) & mask] += 1
    for c in range(1, counts.size):
        slots[c] = slots[c - 1] + np.uint32(counts[c - 1])
    i = np.uint64(0)
    for k in range(positions.size):
        stop = np.uint64(positions[k])
        while i + _4 <= stop:
            first[(np.uint64(bits[i]) >> shift) & mask] += _ONE
            second[(np.uint64(bits[i + _1]) >> shift) & mask] += _ONE
            third[(np.uint64(bits[i + _2]) >> shift) & mask] += _ONE
            fourth[(np.uint64(bits[i + _3]) >> shift) & mask] += _ONE
            i += _4
        if bits[stop] != old[k]:
            return k
        its = (np.uint64(bits[stop]) >> shift) & mask
        rank = first[its] + second[its] + third[its] + fourth[its]
        # At most three elements before this one are not counted yet; looked at without a branch, and kept to count.
        for at in (i, i + _1, i + _2):
            before = min(at, stop)
            rank += np.uint32((before < stop) & (((np.uint64(bits[before]) >> shift) & mask) == its))
        slot = slots[its]
        slots[its] = slot + _ONE
        gaps[slot] = rank - after[its]
        order[slot] = k
        after[its] = rank + _ONE
    return -1


@loop
def find_counted(  # noqa: PLR0917 - compiled functions take their arguments by place
    bits: _Bits,
    shift: np.uint64,
    mask: np.uint64,
    counts: _Counts,
    gaps: _U32,
    positions: _U32,
    order: _U32,
    tables: _U32,
) -> int:
    """Find the places that lie behind the gaps, and their order; the inverse of `count_between`.

    Returns how many there are: fewer than gaps when a class has too few elements for its gaps.
    """
    left, slots, stops = tables[0], tables[1], tables[2]
    stop = 0
    for c in range(counts.size):
        slots[c] = stop
        left[c] = gaps[stop] if counts[c] else _NEVER
        stop += counts[c]
        stops[c] = stop
    found = 0
    for i in range(bits.size):
        its = (np.uint64(bits[i]) >> shift) & mask
        passed = left[its]
        left[its] = passed - _ONE
        if passed == np.uint32(0):
            slot = slots[its]
            positions[found] = i
            order[found] = slot
            found += 1
            if found == positions.size:
                break
            slot += _ONE
            slots[its] = slot
            left[its] = gaps[slot] if slot < stops[its] else _NEVER
    return found
