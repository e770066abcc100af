"""Loops that count what an estimate of `conditional` goes by; `deltabus.codecs.conditional` says what that is."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from . import inlined, loop
from .steps import place_of

__all__ = ["count_changed", "count_held", "sum_of_logarithms"]

_Bits = npt.NDArray[np.unsignedinteger]
_Cells = npt.NDArray[np.float64]

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic.
_1 = np.uint64(1)


@inlined
def _class_of(bits: np.unsignedinteger, shift: np.uint64, mask: np.uint64) -> np.uint64:
    its: np.uint64 = (np.uint64(bits) >> shift) & mask
    return its


@loop
def count_held(bits: _Bits, shift: np.uint64, mask: np.uint64, cells: _Cells) -> None:
    """Add 1 to the cell of each element's stretch and class: a row for each stretch, a column for each class.

    The class of an element is `bits >> shift & mask`.
    """
    for k in range(bits.size):
        cells[k * cells.shape[0] // bits.size, _class_of(bits[k], shift, mask)] += 1.0


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
    beyond_first = 0
    for k in range(0, positions.size, stride):
        its = _class_of(old[k], shift, mask)
        cells[np.int64(positions[k]) * cells.shape[0] // size, its] += 1.0
        step = (place_of(np.uint64(new[k]), below_sign) - place_of(np.uint64(old[k]), below_sign)) & every
        magnitude = ~step & every if step > every >> _1 else step - _1
        length = 0
        while magnitude:
            magnitude >>= _1
            length += 1
        lengths[length, its] += 1.0
        beyond_first += max(length - 1, 0)
    return beyond_first


@loop
def sum_of_logarithms(numbers: npt.NDArray[np.float64]) -> float:
    """Return the sum of n log2 n."""
    total = 0.0
    for number in numbers:
        if number > 0:
            total += number * math.log2(number)
    return total
