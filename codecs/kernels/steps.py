"""Loops that take steps apart and put them together; `deltabus.codecs.steps` says what a step is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import inlined, loop

__all__ = ["beyond_next", "place_of", "put_together", "step_between", "take_apart"]

_Bits = npt.NDArray[np.unsignedinteger]
_Flags = npt.NDArray[np.bool_]

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic.
_1 = np.uint64(1)


@inlined
def place_of(bits: np.uint64, below_sign: np.uint64) -> np.uint64:
    """Return the place of a pattern in the order of its type.

    Args:
        bits: The pattern.
        below_sign: All bits below the sign; 0 if a pattern is its own place.
    """
    place: np.uint64 = bits ^ below_sign if below_sign and bits > below_sign else bits
    return place


@inlined
def step_between(
    old: np.unsignedinteger, new: np.unsignedinteger, below_sign: np.uint64, every: np.uint64
) -> np.uint64:
    """Return how far one pattern lies above another, modulo the number of patterns; masks as for `take_apart`."""
    step: np.uint64 = (place_of(np.uint64(new), below_sign) - place_of(np.uint64(old), below_sign)) & every
    return step


@inlined
def beyond_next(step: np.uint64, every: np.uint64) -> np.uint64:
    """Return a step's magnitude less one: up or down, whichever is shorter; no branch on a sign that is random."""
    return min(step - _1, ~step & every)


@loop
def take_apart(  # noqa: PLR0917 - compiled functions take their arguments by place
    old: _Bits, new: _Bits, below_sign: np.uint64, every: np.uint64, negative: _Flags, beyond: _Bits
) -> None:
    """Fill in whether each step leads down, and its magnitude less one.

    `every` has all bits of a pattern set, `below_sign` as for `place_of`.
    """
    half = every >> _1
    for k in range(old.size):
        step = step_between(old[k], new[k], below_sign, every)
        negative[k] = step > half
        beyond[k] = beyond_next(step, every)


@loop
def put_together(  # noqa: PLR0917 - compiled functions take their arguments by place
    old: _Bits, negative: _Flags, beyond: _Bits, below_sign: np.uint64, every: np.uint64, new: _Bits
) -> None:
    """Fill in where the steps lead to; the inverse of `take_apart`."""
    for k in range(old.size):
        far = np.uint64(beyond[k])
        step = ~far if negative[k] else far + _1
        new[k] = place_of((place_of(np.uint64(old[k]), below_sign) + step) & every, below_sign)
