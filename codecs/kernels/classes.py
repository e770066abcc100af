"""Loops that count the elements of each class between changes; `deltabus.codecs.conditional` says what a class is.

The class of an element is `bits >> shift & mask`, below `CLASSES`. To look at every element by itself takes too long.
So the frequent classes have a **column** each, one of 15, and a segment is taken in tiles of 64 words, a bit of which
stands for an element. Vector instructions write an element's column as a bit in each of four words. Which elements of
a word are of a column, one `and` tells, once the four are put together by twos; and their ones are counted, eight words
at a time. Elements without a column are few and looked at one by one.

Words lie in eight rows. Those that follow each other stand one below the other, so that vectors that go through the
rows count in eight places of the tile at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import inlined, loop
from .columns import NO_COLUMN, PLANES, SINGLE_COLUMN, Columns, count_both, write_planes
from .words import CAN_DEPOSIT, LANES_BYTES, deposit, ones, prefetch, trailing_zeros

__all__ = ["CLASSES", "Room", "count_between", "find_counted", "room"]

CLASSES = 256
"""At most so many classes."""

_TILE = 4096
_ROWS = 8
_WORDS = 64
_TABLES = 4

# Where words lie that belong together: the bits of columns; the four ways to set the lower two of these bits, and the
# upper two; and which elements have no column.
_BITS, _LOWER, _UPPER, _OTHERS = (part * _WORDS for part in (0, PLANES, PLANES + 4, PLANES + 8))
_PARTS = PLANES + 9

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic. And
# places are unsigned, because others could count from the end, which is looked at each time.
_0, _1, _2, _3, _4, _5, _6, _7, _8, _9 = (np.uint64(n) for n in range(10))
_16, _32 = np.uint64(16), np.uint64(32)
_FROM_LOWER, _FROM_UPPER, _FROM_OTHERS = (np.uint64(place) for place in (_LOWER, _UPPER, _OTHERS))
_IN_TILE, _LAST_BIT, _ALL_WORDS = np.uint64(_TILE), np.uint64(63), np.uint64(_WORDS)
_WITHOUT = np.uint64(NO_COLUMN)
_NEVER = np.uint64((1 << 64) - 1)
_BYTE = np.uint64(0xFF)
_EACH_BYTE = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_PAIRS, _FOURS, _EIGHTS = (np.uint64(n) for n in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))

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
        words: Of a tile, part by part.
        above: For each column and word, how many of the column stand above it.
        before: For each column and place in the rows, how many elements stand before that in the segment.
        found: For each word, which elements are found.
        found_before: For each word, how many are found before it in the tile.
        listed: Some words of the tile.
        places: Of what is found in the tile, in no order.
        numbers: And the number of each.
        tables: Some tables by class or column.
    """

    words: _U64
    above: _U16
    before: _U64
    found: _U64
    found_before: _U32
    listed: _U32
    places: _U32
    numbers: _U32
    tables: _U64


def room() -> Room:
    """Return room for one call of a loop."""
    return Room(
        np.zeros(_PARTS * _WORDS, np.uint64),
        np.zeros(NO_COLUMN * _WORDS, np.uint16),
        np.zeros(NO_COLUMN * _ROWS, np.uint64),
        np.zeros(_WORDS, np.uint64),
        np.zeros(_WORDS, np.uint32),
        np.zeros(_WORDS, np.uint32),
        np.zeros(_TILE, np.uint32),
        np.zeros(_TILE, np.uint32),
        np.zeros((_TABLES, CLASSES), np.uint64),
    )


@inlined
def _in_rows(word: np.uint64) -> np.uint64:
    """Return where a word of the tile lies."""
    return ((word & _7) << _3) + (word >> _3)


@loop
def _write_last(bits: _Bits, start: np.uint64, word: np.uint64, columns: Columns, words: _U64) -> None:
    """Write the columns of the last elements, too few for a word; those that are missing are of column 0."""
    place = _in_rows(word)
    for plane in range(PLANES):
        words[np.uint64(plane * _WORDS) + place] = _0
    for i in range(bits.size - np.int64(start)):
        column = np.uint64(columns.of[_class_of(bits[start + np.uint64(i)], columns)])
        for plane in range(PLANES):
            words[np.uint64(plane * _WORDS) + place] |= ((column >> np.uint64(plane)) & _1) << np.uint64(i)


@loop
def _tally(bits: _Bits, start: np.uint64, columns: Columns, work: Room, passed: _U64) -> None:
    """Count the elements of each column up to the words of a tile, and add what the tile holds to `passed`."""
    words, above, before = work.words, work.above, work.before
    whole = min(_IN_TILE, np.uint64(bits.size) - start) >> _6
    word = _0
    while word < whole:
        at = start + (word << _6)
        for line in range(bits.itemsize):
            prefetch(bits, at + _IN_TILE + np.uint64(line * LANES_BYTES // bits.itemsize))
        write_planes(bits, at, columns, words, _in_rows(word))
        word += _1
    if word < _ALL_WORDS:
        _write_last(bits, start + (word << _6), word, columns, words)
        word += _1
    while word < _ALL_WORDS:
        for plane in range(PLANES):
            words[np.uint64(plane * _WORDS) + _in_rows(word)] = _0
        word += _1
    for place in range(_WORDS):
        a, b = words[_BITS + place], words[_BITS + _WORDS + place]
        c, d = words[_BITS + 2 * _WORDS + place], words[_BITS + 3 * _WORDS + place]
        words[_LOWER + place], words[_LOWER + _WORDS + place] = ~(a | b), a & ~b
        words[_LOWER + 2 * _WORDS + place], words[_LOWER + 3 * _WORDS + place] = b & ~a, a & b
        words[_UPPER + place], words[_UPPER + _WORDS + place] = ~(c | d), c & ~d
        words[_UPPER + 2 * _WORDS + place], words[_UPPER + 3 * _WORDS + place] = d & ~c, c & d
        words[_OTHERS + place] = a & b & c & d
    for number in range(NO_COLUMN):
        if number >= np.int64(columns.width) and number != SINGLE_COLUMN:
            continue
        column = np.uint64(number)
        lanes = column << _3
        count_both(words, _lower(column), _upper(column), above, column << _6, before, lanes)
        total = passed[column]
        for _ in range(_ROWS):
            here = before[lanes]
            before[lanes] = total
            total += here
            lanes += _1
        passed[column] = total


@inlined
def _lower(column: np.uint64) -> np.uint64:
    """Return where the words begin that tell the elements whose column has the same lower bits."""
    return _FROM_LOWER + ((column & _3) << _6)


@inlined
def _upper(column: np.uint64) -> np.uint64:
    """Return where the words begin that tell the elements whose column has the same upper bits."""
    return _FROM_UPPER + ((column >> _2) << _6)


@inlined
def _words_with_others(work: Room) -> int:
    """List the words in which elements have no column; returns how many, without a branch that is mispredicted."""
    some = 0
    for word in range(_WORDS):
        work.listed[some] = word
        some += int(work.words[_FROM_OTHERS + _in_rows(np.uint64(word))] != _0)
    return some


@inlined
def _class_of(bits: np.unsignedinteger, columns: Columns) -> np.uint64:
    its: np.uint64 = (np.uint64(bits) >> columns.shift) & columns.mask
    return its


@loop
def count_between(  # noqa: PLR0912, PLR0917 - calls cost, and arguments go by place
    bits: _Bits, positions: _U32, old: _Bits, columns: Columns, counts: _Counts, order: _U32, gaps: _U32, work: Room
) -> int:
    """Sort changed places by class, and count the elements of its class that lie between each and the one before.

    Adds the changes of each class to `counts`; fills in the number of each change in the order of positions, class by
    class, and the gaps in the same order. Returns -1, or the number of a change that does not find its old bits.
    """
    words, above, before, tables, listed = work.words, work.above, work.before, work.tables, work.listed
    passed, passed_others, after, slots = tables[0], tables[1], tables[2], tables[3]
    for bits_before in old:
        counts[_class_of(bits_before, columns)] += 1
    for c in range(1, counts.size):
        slots[c] = slots[c - 1] + np.uint64(counts[c - 1])
    k, number, start = _0, np.uint64(positions.size), _0
    while k < number:
        stop = start + _IN_TILE
        _tally(bits, start, columns, work, passed)
        some, left, rest = _words_with_others(work), 0, _0
        while k < number and np.uint64(positions[k]) < stop:
            at, its = np.uint64(positions[k]), _class_of(old[k], columns)
            if bits[at] != old[k]:
                return int(np.int64(k))
            at -= start
            column = np.uint64(columns.of[its])
            if column != _WITHOUT:
                place = _in_rows(at >> _6)
                members = words[_lower(column) + place] & words[_upper(column) + place]
                rank = before[(column << _3) + (at >> _9)] + np.uint64(above[(column << _6) + place])
                rank += ones(members & ((_1 << (at & _LAST_BIT)) - _1))
            else:
                # It is among the others itself, so that the list does not end before it.
                while True:
                    if not rest:
                        rest = words[_FROM_OTHERS + _in_rows(np.uint64(listed[left]))]
                        left += 1
                    other = (np.uint64(listed[left - 1]) << _6) + trailing_zeros(rest)
                    if other >= at:
                        break
                    rest &= rest - _1
                    passed_others[_class_of(bits[start + other], columns)] += _1
                rank = passed_others[its]
            slot = slots[its]
            slots[its] = slot + _1
            gaps[slot] = np.uint32(rank - after[its])
            order[slot] = np.uint32(k)
            after[its] = rank + _1
            k += _1
        while True:
            while rest:
                other = start + (np.uint64(listed[left - 1]) << _6) + trailing_zeros(rest)
                rest &= rest - _1
                passed_others[_class_of(bits[other], columns)] += _1
            if left == some:
                break
            rest = words[_FROM_OTHERS + _in_rows(np.uint64(listed[left]))]
            left += 1
        start = stop
    return -1


@inlined
def _nth_one(word: np.uint64, n: np.uint64) -> np.uint64:
    """Return the place of the n-th bit that is one, from 0."""
    return trailing_zeros(deposit(_1 << n, word)) if CAN_DEPOSIT else _nth_one_anywhere(word, n)


@inlined
def _nth_one_anywhere(word: np.uint64, n: np.uint64) -> np.uint64:
    """Return the same on any processor (Vigna, "Broadword implementation of rank/select", 2008)."""
    sums = word - ((word >> _1) & _PAIRS)
    sums = (sums & _FOURS) + ((sums >> _2) & _FOURS)
    sums = ((sums + (sums >> _4)) & _EIGHTS) * _EACH_BYTE
    byte = ones((((n * _EACH_BYTE) | _TOPS) - sums) & _TOPS) * _8
    n -= ((sums << _8) >> byte) & _BYTE
    return byte + np.uint64(_NTH[n, (word >> byte) & _BYTE])


@inlined
def _put_in_order(  # noqa: PLR0917 - compiled functions take their arguments by place
    bits: _Bits,
    start: np.uint64,
    count: np.uint64,
    filled: np.uint64,
    work: Room,
    positions: _U32,
    order: _U32,
    old: _Bits,
) -> np.uint64:
    """Append what was found in a tile to `positions`, `order` and `old`, by position; returns how many there are then.

    Behind the end of the bits lies what only fills the tile.
    """
    found, before, places, numbers = work.found, work.found_before, work.places, work.numbers
    total = beyond = _0
    for place in range(_WORDS):
        before[place] = np.uint32(total)
        total += ones(found[place])
    stop = np.uint64(bits.size)
    k = _0
    while k < count:
        at = np.uint64(places[k])
        word = at >> _6
        to = filled + np.uint64(before[word]) + ones(found[word] & ((_1 << (at & _LAST_BIT)) - _1))
        at += start
        if at < stop:
            positions[to], order[to], old[to] = np.uint32(at), numbers[k], bits[at]
        else:
            beyond += _1
        k += _1
    for place in range(_WORDS):
        found[place] = _0
    return filled + count - beyond


@loop
def find_counted(  # noqa: PLR0915, PLR0917 - calls cost, and arguments go by place
    bits: _Bits,
    columns: Columns,
    counts: _Counts,
    gaps: _U32,
    positions: _U32,
    order: _U32,
    old: _Bits,
    work: Room,
) -> int:
    """Find the places that lie behind the gaps, their order, and the bits there; the inverse of `count_between`.

    Returns how many there are: fewer than gaps when a class has too few elements for its gaps.
    """
    words, above, before, tables = work.words, work.above, work.before, work.tables
    found, places, numbers, listed = work.found, work.places, work.numbers, work.listed
    passed, target, slots, stops = tables[0], tables[1], tables[2], tables[3]
    end = _0
    for c in range(counts.size):
        slots[c] = end
        target[c] = np.uint64(gaps[end]) if counts[c] else _NEVER
        end += np.uint64(counts[c])
        stops[c] = end
    start, filled, most = _0, _0, np.uint64(positions.size)
    while start < np.uint64(bits.size) and filled < most:
        _tally(bits, start, columns, work, passed)
        count = _0
        for number in range(NO_COLUMN):
            column, its = np.uint64(number), np.uint64(columns.single)
            if number < np.int64(columns.width):
                its = np.uint64(columns.first) + column
            elif number != SINGLE_COLUMN:
                continue
            rank, slot, end, stop = target[its], slots[its], passed[column], stops[its]
            row, lanes, lower, upper = column << _6, column << _3, _lower(column), _upper(column)
            while rank < end:
                # Without a branch, which would be mispredicted.
                lane = np.uint64(before[lanes + _4] <= rank) << _2
                lane += np.uint64(before[lanes + lane + _2] <= rank) << _1
                lane += np.uint64(before[lanes + lane + _1] <= rank)
                n = rank - before[lanes + lane]
                place = (np.uint64(np.uint64(above[row + lane + _32]) <= n) << _5) + lane
                place += np.uint64(np.uint64(above[row + place + _16]) <= n) << _4
                place += np.uint64(np.uint64(above[row + place + _8]) <= n) << _3
                bit = _nth_one(words[lower + place] & words[upper + place], n - np.uint64(above[row + place]))
                word = (lane << _3) + (place >> _3)
                found[word] |= _1 << bit
                places[count], numbers[count] = np.uint32((word << _6) + bit), np.uint32(slot)
                count += _1
                slot += _1
                rank = rank + _1 + np.uint64(gaps[slot]) if slot < stop else _NEVER
            slots[its], target[its] = slot, rank
        some = _words_with_others(work)
        for n in range(some):
            word = np.uint64(listed[n])
            rest = words[_FROM_OTHERS + _in_rows(word)]
            while rest:
                bit = trailing_zeros(rest)
                rest &= rest - _1
                at = (word << _6) + bit
                its = _class_of(bits[start + at], columns)
                rank = target[its]
                if rank:
                    target[its] = rank - np.uint64(rank != _NEVER)
                else:
                    slot = slots[its]
                    found[word] |= _1 << bit
                    places[count], numbers[count] = np.uint32(at), np.uint32(slot)
                    count += _1
                    slot += _1
                    slots[its] = slot
                    target[its] = np.uint64(gaps[slot]) if slot < stops[its] else _NEVER
        filled = _put_in_order(bits, start, count, filled, work, positions, order, old)
        start += _IN_TILE
    return int(np.int64(filled))
