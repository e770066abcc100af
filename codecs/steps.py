"""ULP steps: how far apart two bit patterns lie in the order of their type.

Training moves a weight to a near neighbour among the floats. The distance, counted in representable values, is almost
always 1 or 2, whatever the exponent, so it costs far fewer bits than the new pattern.

Everything here is arithmetic modulo 2^width on bit patterns, so that it is exact for each of them: NaN payloads,
infinities, denormals, and -0.0 as distinct from +0.0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .changes import Bits
from .dtypes import Order
from .kernels import steps as kernels

__all__ = [
    "Steps",
    "advance",
    "advance_zigzag",
    "distances_between",
    "masks_of",
    "ordered",
    "steps_between",
    "zigzag_between",
]


class Steps(NamedTuple):
    """Signed, non-zero distances, taken apart.

    Attributes:
        negative: Whether each step leads down; bool.
        beyond: How far each step leads beyond the next value: its magnitude less one; unsigned, as the patterns or
            wider.
    """

    negative: npt.NDArray[np.bool_]
    beyond: Bits


def ordered(bits: Bits, order: Order) -> Bits:
    """Return each pattern's place in the order of its type, modulo 2^width; the function is its own inverse.

    For `Order.SIGN_MAGNITUDE` a pattern b with a clear sign bit is its own place, and one with the sign bit set has the
    place -1 - (b without the sign bit): the bits below the sign are flipped. For `Order.PLAIN` each is its own place.

    >>> ordered(np.array([0x0000, 0x8000, 0x8001], np.uint16), Order.SIGN_MAGNITUDE).view(np.int16)
    array([ 0, -1, -2], dtype=int16)

    Args:
        bits: Unsigned patterns of any shape.
        order: The order of their type.
    """
    if order is Order.PLAIN:
        return bits
    width = bits.dtype.itemsize * 8
    below_sign = bits.dtype.type((1 << (width - 1)) - 1)
    return bits ^ ((bits >> bits.dtype.type(width - 1)) * below_sign)


def steps_between(old: Bits, new: Bits, order: Order) -> Steps:
    """Return the steps from `old` to `new`, which differ everywhere; same dtype, one dimension."""
    steps = Steps(np.empty(old.size, np.bool_), np.empty(old.size, old.dtype))
    # Loops are compiled anew for arrays of another layout.
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    kernels.take_apart(old, new, *masks_of(old.dtype, order), *steps)
    return steps


def distances_between(old: Bits, new: Bits, order: Order) -> Bits:
    """Return how far apart patterns lie, without sign and, unlike steps, without wrapping around the ends.

    >>> infinities = np.array([0xFF80], np.uint16), np.array([0x7F80], np.uint16)
    >>> distances_between(*infinities, Order.SIGN_MAGNITUDE)
    array([65281], dtype=uint16)

    Args:
        old: Unsigned patterns of any shape.
        new: As many, of the same dtype.
        order: The order of their type; for `Order.PLAIN` they are unsigned numbers.
    """
    if order is not Order.PLAIN:
        # Negative places, modulo 2^width, must come below the others.
        top = old.dtype.type(1 << (old.dtype.itemsize * 8 - 1))
        old, new = ordered(old, order) ^ top, ordered(new, order) ^ top
    distances: Bits = np.maximum(old, new) - np.minimum(old, new)
    return distances


def advance(old: Bits, steps: Steps, order: Order) -> Bits:
    """Return the patterns that the steps lead to, modulo 2^width; the inverse of `steps_between`."""
    new = np.empty(old.size, old.dtype)
    kernels.put_together(np.ascontiguousarray(old), *steps, *masks_of(old.dtype, order), new)
    return new


def masks_of(dtype: np.dtype[np.unsignedinteger], order: Order) -> tuple[np.uint64, np.uint64]:
    """Return a pattern of all bits below the sign, none where there is no sign, and one of all bits, for loops."""
    width = dtype.itemsize * 8
    signed = order is Order.SIGN_MAGNITUDE
    return np.uint64((1 << (width - 1)) - 1 if signed else 0), np.uint64((1 << width) - 1)


def zigzag_between(old: Bits, new: Bits, order: Order) -> Bits:
    """Return the steps from `old` to `new` as 0, -1, 1, -2, 2, ... counted from 0; no change is 0."""
    width = old.dtype.itemsize * 8
    step = ordered(new, order) - ordered(old, order)
    down = step >> old.dtype.type(width - 1)
    return (step << old.dtype.type(1)) ^ (old.dtype.type(0) - down)


def advance_zigzag(old: Bits, steps: Bits, order: Order) -> Bits:
    """Return the patterns that zigzag steps lead to; the inverse of `zigzag_between`."""
    one = old.dtype.type(1)
    step = (steps >> one) ^ (old.dtype.type(0) - (steps & one))
    return ordered(ordered(old, order) + step, order)
