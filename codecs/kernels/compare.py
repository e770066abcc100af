"""Loops that find, check and write changed elements of one-dimensional arrays of bit patterns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import kernel, loop
from .words import LANES_BYTES, apart, prefetch, trailing_zeros

__all__ = [
    "CHUNK",
    "Room",
    "find_differing",
    "first_malformed",
    "first_not_holding",
    "merge",
    "replace",
    "room",
    "scatter",
]

_Bits = npt.NDArray[np.unsignedinteger]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]

CHUNK = 64
"""Blocks of `LANES_BYTES` that are compared before their elements are looked at."""

_AHEAD = 128
"""Changes whose places are on their way to a cache, because each waits for memory."""

_0, _1 = np.uint64(0), np.uint64(1)  # typed, because a Python int beside an unsigned number would make it a float


class Room(NamedTuple):
    """What calls of `find_differing` work in.

    Attributes:
        blocks: Those in which something differs.
        lanes: And which of their elements.
        filled: How many places were found so far: one number.
    """

    blocks: _U32
    lanes: _U64
    filled: npt.NDArray[np.int64]


def room() -> Room:
    """Return room for calls that find places one behind the other."""
    return Room(np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.uint64), np.zeros(1, np.int64))


@loop
def find_differing(  # noqa: PLR0917 - compiled functions take their arguments by place
    old: _Bits, new: _Bits, start: int, origin: int, work: Room, positions: _U32, before: _Bits, after: _Bits
) -> int:
    """Append where two arrays differ from `start` on, and what they hold there, to the last three arrays.

    Places are counted from `origin` on. Takes whole blocks of `LANES_BYTES`, as many as there are, but stops early when
    the room may not suffice. Returns where it stopped.
    """
    lanes = LANES_BYTES // old.itemsize
    filled = int(work.filled[0])
    while old.size - start >= lanes:
        blocks = min(CHUNK, (old.size - start) // lanes)
        if filled + blocks * lanes > positions.size:
            break
        # Appending without a branch costs less than a branch that is mispredicted at every change.
        found = 0
        for block in range(blocks):
            differ = apart(old, new, start + block * lanes)
            work.blocks[found], work.lanes[found] = block, differ
            found += differ != _0
        for k in range(found):
            first, differ = start + int(np.int64(work.blocks[k])) * lanes, work.lanes[k]
            while differ:
                at = first + int(np.int64(trailing_zeros(differ)))
                differ &= differ - _1
                positions[filled], before[filled], after[filled] = origin + at, old[at], new[at]
                filled += 1
        start += blocks * lanes
    work.filled[0] = filled
    return start


@kernel
def first_not_holding(bits: _Bits, positions: _U32, expected: _Bits, origin: int) -> int:
    """Return the first `k` with `bits[positions[k] - origin] != expected[k]`, or -1."""
    first, last = np.uint64(origin), positions.size - 1
    for k in range(positions.size):
        prefetch(bits, np.uint64(positions[min(k + _AHEAD, last)]) - first)
        if bits[np.uint64(positions[k]) - first] != expected[k]:
            return k
    return -1


@kernel
def scatter(bits: _Bits, positions: _U32, values: _Bits, origin: int) -> None:
    """Set `bits[positions[k] - origin] = values[k]` for all `k`."""
    first, last = np.uint64(origin), positions.size - 1
    for k in range(positions.size):
        prefetch(bits, np.uint64(positions[min(k + _AHEAD, last)]) - first)
        bits[np.uint64(positions[k]) - first] = values[k]


@kernel
def replace(  # noqa: PLR0917 - compiled functions take their arguments by place
    bits: _Bits, positions: _U32, old: _Bits, new: _Bits, done: npt.NDArray[np.bool_], number: int
) -> int:
    """Set `bits[positions[k]]` from `old[k]` to `new[k]` for all `k`, and then `done[number]`: all or nothing.

    No position occurs twice. Returns -1, or the first `k` that other bits were found for.
    """
    last = positions.size - 1
    for k in range(positions.size):
        prefetch(bits, np.uint64(positions[min(k + _AHEAD, last)]))
        at = np.uint64(positions[k])
        if bits[at] != old[k]:
            for before in range(k):
                bits[np.uint64(positions[before])] = old[before]
            return k
        bits[at] = new[k]
    done[number] = True
    return -1


@kernel
def first_malformed(positions: _U32, old: _Bits, new: _Bits, size: int) -> int:
    """Return the first `k` whose position is not above the one before, or not below `size`, or that does not change.

    Or -1 when there is none.
    """
    # First whether there is one, which vector instructions can tell.
    some = np.uint32(positions.size > 0 and positions[-1] >= size)
    for k in range(1, positions.size):
        some |= np.uint32(positions[k] <= positions[k - 1])
    for k in range(positions.size):
        some |= np.uint32(old[k] == new[k])
    if not some:
        return -1
    expected = np.int64(0)
    for k in range(positions.size):
        position = np.int64(positions[k])
        if position < expected or position >= size or old[k] == new[k]:
            return k
        expected = position + 1
    return -1


@kernel
def merge(  # noqa: PLR0917 - compiled functions take their arguments by place
    first_positions: npt.NDArray[np.uint32],
    first_old: _Bits,
    first_new: _Bits,
    second_positions: npt.NDArray[np.uint32],
    second_old: _Bits,
    second_new: _Bits,
    positions: npt.NDArray[np.uint32],
    old: _Bits,
    new: _Bits,
) -> tuple[int, int]:
    """Write the composition of two sorted lists of changes; places that return to their old bits are left out.

    The last three arrays have room for all places of both. Returns the places written and -1; or, where the second
    list does not start from what the first left, 0 and that index in the second list.
    """
    i = j = count = 0
    while i < first_positions.size or j < second_positions.size:
        if j == second_positions.size or (i < first_positions.size and first_positions[i] < second_positions[j]):
            positions[count], old[count], new[count] = first_positions[i], first_old[i], first_new[i]
            i += 1
            count += 1
        elif i == first_positions.size or second_positions[j] < first_positions[i]:
            positions[count], old[count], new[count] = second_positions[j], second_old[j], second_new[j]
            j += 1
            count += 1
        else:
            if first_new[i] != second_old[j]:
                return 0, j
            positions[count], old[count], new[count] = first_positions[i], first_old[i], second_new[j]
            count += first_old[i] != second_new[j]
            i += 1
            j += 1
    return count, -1
