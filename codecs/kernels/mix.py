"""Loops that sum the digest's terms; `deltabus.codecs.digest` says what the terms are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import kernel

__all__ = ["MASK", "mix", "sum_changed", "sum_run"]

_Bits = npt.NDArray[np.unsignedinteger]

MASK = (1 << 64) - 1
"""Brings a number of Python, which has no end, into 64 bits: terms and their sums are modulo 2^64."""

# Typed constants: a Python int in the expressions below would turn them into signed or floating-point arithmetic.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@kernel
def mix(key: np.uint64, bits: np.uint64) -> np.uint64:
    """Return the term of one element."""
    x = key ^ bits
    x = (x ^ (x >> _30)) * _FIRST
    x += key
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@kernel
def sum_run(bits: _Bits, key: np.uint64) -> np.uint64:
    """Return the sum of the terms of consecutive elements, of which the first has this key."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += mix(key, np.uint64(bits[i]))
        key += _GAMMA
    return total


@kernel
def sum_changed(positions: npt.NDArray[np.uint32], old: _Bits, new: _Bits, origin: np.uint64) -> np.uint64:
    """Return the terms of new bits at these positions less those of the old ones; position 0 has the key `origin`."""
    total = np.uint64(0)
    for k in range(positions.size):
        key = origin + np.uint64(positions[k]) * _GAMMA
        total += mix(key, np.uint64(new[k])) - mix(key, np.uint64(old[k]))
    return total
