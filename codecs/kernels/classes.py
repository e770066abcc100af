"""Loops that count the elements of each class between changes; `deltabus.codecs.conditional` says what a class is.

The class of an element is `bits >> shift & mask`, below `CLASSES`. To look at every element by itself takes too long.
So the segment is taken in tiles, whose elements' classes are written out as bytes, and the bytes in blocks of 64, which
vector instructions compare with one class at a time: the answer is a word whose ones are counted. That is done for the
classes that are frequent, each of which has a *column*; elements of the `others` are few and looked at one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import inlined, loop
from .words import matching, ones, trailing_zeros

__all__ = ["CLASSES", "COLUMNS", "NO_COLUMN", "Room", "count_between", "find_counted", "room"]

CLASSES = 256
"""At most so many classes."""

COLUMNS = 16
"""At most so many frequent classes."""

NO_COLUMN = 255
"""What stands for a class without a column."""

_TILE = 4096
_BLOCK = 64
_BLOCKS = _TILE // _BLOCK
_TABLES = 4

_NEVER = np.uint32((1 << 32) - 1)

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic.
_ONE = np.uint32(1)
_1, _2, _4, _8 = (np.uint64(n) for n in (1, 2, 4, 8))
_ALL = np.uint64((1 << 64) - 1)
_IN_BLOCK = np.uint64(_BLOCK - 1)
_BYTE = np.uint64(0xFF)
_EACH_BYTE = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_PAIRS, _FOURS, _EIGHTS = (np.uint64(n) for n in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))

# The known types of floats: with numbers that it knows, the compiler makes vectors of narrow elements.
_BF16, _F16, _F32, _F64, _E4M3, _E5M2 = (np.uint64(shift) for shift in (7, 10, 23, 55, 3, 2))
_8_BITS, _5_BITS, _4_BITS = (np.uint64((1 << bits) - 1) for bits in (8, 5, 4))

_NTH = np.zeros((8, 256), np.uint8)
"""The place of a byte's n-th bit that is one."""
for _byte in range(256):
    for _n, _place in enumerate(place for place in range(8) if _byte >> place & 1):
        _NTH[_n, _byte] = _place

_Bits = npt.NDArray[np.unsignedinteger]
_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]
_Counts = npt.NDArray[np.int64]


class Room(NamedTuple):
    """What one call of a loop works in; all zero at first.

    Attributes:
        classes: Of the elements of a tile.
        before: For each column, how many elements of its class stand before each block of the tile.
        totals: For each column, how many stand in the tile.
        others: For each block, which elements have no column.
        found: For each block, which elements are found.
        found_before: For each block, how many are found before it in the tile.
        places: Of what is found in the tile, in no order.
        numbers: And the number of each.
        tables: Some tables by class or column.
    """

    classes: _U8
    before: _U16
    totals: _U16
    others: _U64
    found: _U64
    found_before: _U32
    places: _U32
    numbers: _U32
    tables: _U32


def room() -> Room:
    """Return room for one call of a loop."""
    return Room(
        np.zeros(_TILE, np.uint8),
        np.zeros((COLUMNS, _BLOCKS), np.uint16),
        np.zeros(COLUMNS, np.uint16),
        np.zeros(_BLOCKS, np.uint64),
        np.zeros(_BLOCKS, np.uint64),
        np.zeros(_BLOCKS, np.uint32),
        np.zeros(_TILE, np.uint32),
        np.zeros(_TILE, np.uint32),
        np.zeros((_TABLES, CLASSES), np.uint32),
    )


@inlined
def _write_classes(bits: _Bits, shift: np.uint64, mask: np.uint64, classes: _U8) -> None:
    for i in range(bits.size):
        classes[i] = np.uint8((np.uint64(bits[i]) >> shift) & mask)


@loop
def _classify(bits: _Bits, shift: np.uint64, mask: np.uint64, classes: _U8) -> None:
    """Write the class of each element of a tile; behind them 0."""
    if shift == _BF16 and mask == _8_BITS:
        _write_classes(bits, _BF16, _8_BITS, classes)
    elif shift == _F32 and mask == _8_BITS:
        _write_classes(bits, _F32, _8_BITS, classes)
    elif shift == _F16 and mask == _5_BITS:
        _write_classes(bits, _F16, _5_BITS, classes)
    elif shift == _F64 and mask == _8_BITS:
        _write_classes(bits, _F64, _8_BITS, classes)
    elif shift == _E4M3 and mask == _4_BITS:
        _write_classes(bits, _E4M3, _4_BITS, classes)
    elif shift == _E5M2 and mask == _5_BITS:
        _write_classes(bits, _E5M2, _5_BITS, classes)
    else:
        _write_classes(bits, shift, mask, classes)
    for i in range(bits.size, _TILE):
        classes[i] = 0


@loop
def _tally(classes: _U8, columns: _U8, before: _U16, totals: _U16, others: _U64) -> None:
    """Count the classes that have columns, up to each block of a tile and in all, and mark elements of the others."""
    for block in range(_BLOCKS):
        others[block] = _ALL
    for column in range(columns.size):
        its = columns[column]
        row = before[column]
        total = np.uint64(0)
        for block in range(_BLOCKS):
            matches = matching(classes, block * _BLOCK, its)
            others[block] &= ~matches
            row[block] = np.uint16(total)
            total += ones(matches)
        totals[column] = np.uint16(total)


@loop
def count_between(  # noqa: PLR0912, PLR0917 - calls cost, and arguments go by place
    bits: _Bits,
    positions: _U32,
    old: _Bits,
    shift: np.uint64,
    mask: np.uint64,
    columns: _U8,
    column_of: _U8,
    counts: _Counts,
    order: _U32,
    gaps: _U32,
    work: Room,
) -> int:
    """Sort changed places by class, and count the elements of its class that lie between each and the one before.

    Adds the changes of each class to `counts`; fills in the number of each change in the order of positions, class by
    class, and the gaps in the same order. Returns -1, or the number of a change that does not find its old bits.
    """
    classes, before, totals, others, tables = work.classes, work.before, work.totals, work.others, work.tables
    passed, passed_others, after, slots = tables[0], tables[1], tables[2], tables[3]
    for k in range(positions.size):
        counts[(np.uint64(old[k]) >> shift) & mask] += 1
    for c in range(1, counts.size):
        slots[c] = slots[c - 1] + np.uint32(counts[c - 1])
    k = start = 0
    while k < positions.size:
        stop = min(start + _TILE, bits.size)
        _classify(bits[start:stop], shift, mask, classes)
        _tally(classes, columns, before, totals, others)
        left = 0
        while k < positions.size and np.int64(positions[k]) < stop:
            at = int(np.int64(positions[k]))
            if bits[at] != old[k]:
                return k
            at -= start
            its = classes[at]
            column, block = column_of[its], at >> 6
            if column != NO_COLUMN:
                below = (_1 << (np.uint64(at) & _IN_BLOCK)) - _1
                rank = passed[column] + np.uint32(before[column, block])
                rank += np.uint32(ones(matching(classes, block * _BLOCK, its) & below))
            else:
                while True:
                    rest = others[left]
                    if not rest:
                        left += 1
                        continue
                    other = left * _BLOCK + int(np.int64(trailing_zeros(rest)))
                    if other >= at:
                        break
                    others[left] = rest & (rest - _1)
                    passed_others[classes[other]] += _ONE
                rank = passed_others[its]
            slot = slots[its]
            slots[its] = slot + _ONE
            gaps[slot] = rank - after[its]
            order[slot] = k
            after[its] = rank + _ONE
            k += 1
        for column in range(columns.size):
            passed[column] += np.uint32(totals[column])
        for block in range(left, _BLOCKS):
            rest = others[block]
            while rest:
                passed_others[classes[block * _BLOCK + int(np.int64(trailing_zeros(rest)))]] += _ONE
                rest &= rest - _1
        start = stop
    return -1


@inlined
def _place_of(word: np.uint64, n: np.uint64) -> np.uint64:
    """Return the place of the n-th bit that is one, from 0 (Vigna, "Broadword implementation of rank/select", 2008)."""
    sums = word - ((word >> _1) & _PAIRS)
    sums = (sums & _FOURS) + ((sums >> _2) & _FOURS)
    sums = ((sums + (sums >> _4)) & _EIGHTS) * _EACH_BYTE
    byte = ones((((n * _EACH_BYTE) | _TOPS) - sums) & _TOPS) * _8
    n -= ((sums << _8) >> byte) & _BYTE
    return byte + np.uint64(_NTH[n, (word >> byte) & _BYTE])


@inlined
def _block_of(rank: np.uint32, row: _U16) -> int:
    """Return the last block before which there are at most so many; without a branch, which would be mispredicted."""
    block = 0
    block += 32 * int(np.uint32(row[block + 32]) <= rank)
    block += 16 * int(np.uint32(row[block + 16]) <= rank)
    block += 8 * int(np.uint32(row[block + 8]) <= rank)
    block += 4 * int(np.uint32(row[block + 4]) <= rank)
    block += 2 * int(np.uint32(row[block + 2]) <= rank)
    block += 1 * int(np.uint32(row[block + 1]) <= rank)
    return block


@loop
def _put_in_order(  # noqa: PLR0917 - compiled functions take their arguments by place
    start: int, stop: int, count: int, filled: int, work: Room, positions: _U32, order: _U32
) -> int:
    """Append what was found in a tile to `positions` and `order`, by position; returns how many there are then.

    Behind the end of the bits lies what only fills the tile.
    """
    found, before, places, numbers = work.found, work.found_before, work.places, work.numbers
    total = np.uint64(0)
    for block in range(_BLOCKS):
        before[block] = np.uint32(total)
        total += ones(found[block])
    beyond = 0
    for k in range(count):
        at = int(np.int64(places[k]))
        block = at >> 6
        below = (_1 << (np.uint64(at) & _IN_BLOCK)) - _1
        to = filled + int(np.int64(before[block])) + int(np.int64(ones(found[block] & below)))
        positions[to], order[to] = start + at, numbers[k]
        beyond += int(start + at >= stop)
    for block in range(_BLOCKS):
        found[block] = np.uint64(0)
    return filled + count - beyond


@loop
def find_counted(  # noqa: PLR0915, PLR0917 - calls cost, and arguments go by place
    bits: _Bits,
    shift: np.uint64,
    mask: np.uint64,
    columns: _U8,
    column_of: _U8,
    counts: _Counts,
    gaps: _U32,
    positions: _U32,
    order: _U32,
    work: Room,
) -> int:
    """Find the places that lie behind the gaps, and their order; the inverse of `count_between`.

    Returns how many there are: fewer than gaps when a class has too few elements for its gaps.
    """
    classes, before, totals, others, tables = work.classes, work.before, work.totals, work.others, work.tables
    found, places, numbers = work.found, work.places, work.numbers
    left, left_others, slots, stops = tables[0], tables[1], tables[2], tables[3]
    end = 0
    for c in range(counts.size):
        slots[c] = end
        first = gaps[end] if counts[c] else _NEVER
        end += counts[c]
        stops[c] = end
        if column_of[c] != NO_COLUMN:
            left[column_of[c]] = first
        else:
            left_others[c] = first
    filled = start = 0
    while start < bits.size and filled < positions.size:
        stop = min(start + _TILE, bits.size)
        _classify(bits[start:stop], shift, mask, classes)
        _tally(classes, columns, before, totals, others)
        count = 0
        for column in range(columns.size):
            total, rank = np.uint32(totals[column]), left[column]
            its = columns[column]
            slot = slots[its]
            row = before[column]
            while rank < total:
                block = _block_of(rank, row)
                place = _place_of(matching(classes, block * _BLOCK, its), np.uint64(rank - np.uint32(row[block])))
                found[block] |= _1 << place
                places[count], numbers[count] = block * _BLOCK + int(np.int64(place)), slot
                count += 1
                slot += _ONE
                rank = rank + _ONE + gaps[slot] if slot < stops[its] else _NEVER
            slots[its] = slot
            left[column] = rank - total if rank != _NEVER else _NEVER
        for block in range(_BLOCKS):
            rest = others[block]
            while rest:
                bit = trailing_zeros(rest)
                rest &= rest - _1
                at = block * _BLOCK + int(np.int64(bit))
                its = classes[at]
                rank = left_others[its]
                if rank:
                    left_others[its] = rank - np.uint32(rank != _NEVER)
                else:
                    slot = slots[its]
                    found[block] |= _1 << bit
                    places[count], numbers[count] = at, slot
                    count += 1
                    slot += _ONE
                    slots[its] = slot
                    left_others[its] = gaps[slot] if slot < stops[its] else _NEVER
        filled = _put_in_order(start, stop, count, filled, work, positions, order)
        start = stop
    return filled
