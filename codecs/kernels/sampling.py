"""Loops that count what an estimate of `conditional` goes by; `deltabus.codecs.conditional` says what that is."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from . import inlined, loop
from .steps import beyond_next, step_between
from .words import leading_zeros, prefetch

__all__ = ["count_changed", "count_held", "entropy", "entropy_of_choice"]

_Bits = npt.NDArray[np.unsignedinteger]
_Cells = npt.NDArray[np.float64]

_AHEAD = 32
"""Elements of a sample that are on their way to a cache, because each waits for memory."""


@inlined
def _class_of(bits: np.unsignedinteger, shift: np.uint64, mask: np.uint64) -> np.uint64:
    its: np.uint64 = (np.uint64(bits) >> shift) & mask
    return its


@inlined
def _stretch_of(at: int, size: int, stretches: int) -> tuple[int, int]:
    """Return the stretch in which a place lies, and where it ends; `size` places are cut into as many as given."""
    stretch = at * stretches // size
    return stretch, ((stretch + 1) * size + stretches - 1) // stretches


@loop
def count_held(bits: _Bits, stride: int, shift: np.uint64, mask: np.uint64, cells: _Cells) -> None:
    """Add 1 to the cell of each element's stretch and class: a row for each stretch, a column for each class.

    One element in `stride` counts. The class of one is `bits >> shift & mask`.
    """
    rows, row, stop = cells.shape[0], 0, 0
    for k in range(0, bits.size, stride):
        if k >= stop:
            row, stop = _stretch_of(k, bits.size, rows)
        prefetch(bits, np.uint64(k + _AHEAD * stride))
        cells[row, _class_of(bits[k], shift, mask)] += 1.0


@loop
def count_changed(  # noqa: PLR0917 - compiled functions take their arguments by place
    positions: npt.NDArray[np.uint32],
    old: _Bits,
    new: _Bits,
    stride: int,
    size: int,
    shift: np.uint64,
    mask: np.uint64,
    below_sign: np.uint64,
    every: np.uint64,
    cells: _Cells,
    lengths: _Cells,
) -> int:
    """Add 1 to the cell of each change's stretch and class, and to that of its magnitude's bit length and class.

    One in `stride` counts. The magnitude is that of the step, less one; the masks are those of `steps.take_apart`.
    Returns the sum of all lengths above 1, each less one.
    """
    rows, row, stop = cells.shape[0], 0, 0
    beyond_first = 0
    for k in range(0, positions.size, stride):
        its, at = _class_of(old[k], shift, mask), int(np.int64(positions[k]))
        if at >= stop:
            row, stop = _stretch_of(at, size, rows)
        cells[row, its] += 1.0
        magnitude = beyond_next(step_between(old[k], new[k], below_sign, every), every)
        length = 64 - int(np.int64(leading_zeros(magnitude))) if magnitude else 0
        lengths[length, its] += 1.0
        beyond_first += max(length - 1, 0)
    return beyond_first


@inlined
def _times_logarithm(number: float) -> float:
    return number * math.log2(number) if number > 0.0 else 0.0


@loop
def entropy(cells: _Cells) -> float:
    """Return the bits that it takes to say in which row each one is, given its column, by how many are in each cell."""
    total = 0.0
    for column in range(cells.shape[1]):
        together = 0.0
        for row in range(cells.shape[0]):
            together += cells[row, column]
            total -= _times_logarithm(cells[row, column])
        total += _times_logarithm(together)
    return total


@loop
def entropy_of_choice(chosen: _Cells, weight: float, among: _Cells, weight_among: float) -> float:
    """Return the bits that it takes to say which are chosen of those in each cell; each one counts so many times."""
    total = 0.0
    for row in range(chosen.shape[0]):
        for column in range(chosen.shape[1]):
            some = chosen[row, column] * weight
            others = max(among[row, column] * weight_among - some, 0.0)
            total += _times_logarithm(some + others) - _times_logarithm(some) - _times_logarithm(others)
    return total
