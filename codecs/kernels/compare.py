"""Loops that find, check and write changed elements of one-dimensional arrays of bit patterns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import kernel

__all__ = ["CHUNK", "find_differing", "first_not_holding", "merge", "scatter"]

_Bits = npt.NDArray[np.unsignedinteger]

CHUNK = 1024
"""Words that are compared before their elements are looked at."""


@kernel
def find_differing(  # noqa: PLR0917 - compiled functions take their arguments by place
    old: _Bits,
    new: _Bits,
    old_words: npt.NDArray[np.uint64],
    new_words: npt.NDArray[np.uint64],
    offset: int,
    positions: npt.NDArray[np.uint32],
    filled: int,
) -> tuple[int, int]:
    """Append to `positions[filled:]` where `old` and `new` differ, each plus `offset`.

    The words are the same memory as the elements, 8 bytes at a time. Stops early when the places that are left may not
    suffice. Returns the number of words compared, and of places filled.
    """
    per_word = 8 // old.itemsize
    candidates = np.empty(CHUNK, np.uint32)
    # Counting from a constant lets the compiler drop the handling of negative indices.
    word = 0
    while word < old_words.size:
        stop = min(word + CHUNK, old_words.size)
        # Appending without a branch, first words and then elements, costs less than a branch that is mispredicted at
        # every change.
        found = 0
        for k in range(word, stop):
            candidates[found] = k
            found += old_words[k] != new_words[k]
        if filled + found * per_word >= positions.size:
            return word, filled
        for c in range(found):
            first = np.int64(candidates[c]) * per_word
            for i in range(first, first + per_word):
                positions[filled] = offset + i
                filled += old[i] != new[i]
        word = stop
    return word, filled


@kernel
def first_not_holding(bits: _Bits, positions: npt.NDArray[np.uint32], expected: _Bits) -> int:
    """Return the first `k` with `bits[positions[k]] != expected[k]`, or -1."""
    for k in range(positions.size):
        if bits[positions[k]] != expected[k]:
            return k
    return -1


@kernel
def scatter(bits: _Bits, positions: npt.NDArray[np.uint32], values: _Bits) -> None:
    """Set `bits[positions[k]] = values[k]` for all `k`."""
    for k in range(positions.size):
        bits[positions[k]] = values[k]


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
