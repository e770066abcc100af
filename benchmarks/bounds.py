"""How few bits a step could take: the entropy of what changed (Shannon 1948), under two models of it.

Both are empirical: the frequencies are those of the very data, and nothing is counted for sending them. A coder can be
smaller only if it knows more than the model, such as rows without gradient or what changed in the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from data import Pair, chunks

from deltabus.codecs.dtypes import Order
from deltabus.codecs.steps import zigzag_between

__all__ = ["Bounds", "bounds_of"]

_MANTISSA, _EXPONENTS = 7, 256


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits for a whole step.

    Attributes:
        independent: Each element changes with the same probability, by a step in ULP of one distribution.
        conditional: Probability and distribution are those of the tensor and of the exponent of the old value.
    """

    independent: float
    conditional: float


def bounds_of(pair: Pair) -> Bounds:
    """Return the least bits for a step under each model."""
    conditional = 0.0
    steps = np.zeros(1 << 16, np.int64)
    for old, new in zip(pair.arrays(pair.old), pair.arrays(pair.new), strict=True):
        before, after = old.ravel(), new.ravel()
        total = np.zeros(_EXPONENTS, np.int64)
        keys = []
        for place in chunks(before.size):
            total += np.bincount(_exponents(before[place]), minlength=_EXPONENTS)
            at = np.flatnonzero(before[place] != after[place])
            held = before[place][at]
            moved = zigzag_between(held, after[place][at], Order.SIGN_MAGNITUDE)
            steps += np.bincount(moved, minlength=steps.size)
            keys.append(_exponents(held).astype(np.uint32) << np.uint32(16) | moved)
        kinds, counts = np.unique(np.concatenate(keys), return_counts=True)
        changed = np.bincount(kinds >> 16, counts, _EXPONENTS).astype(np.int64)
        conditional += _spread(np.stack((changed, total - changed))) + _nlogn(changed) - _nlogn(counts)
    changed_all = steps.sum()
    independent = (
        _spread(np.array([[changed_all], [pair.old.size - changed_all]])) + _nlogn(changed_all) - _nlogn(steps)
    )
    return Bounds(independent, conditional)


def _exponents(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    return (bits >> np.uint16(_MANTISSA)) & np.uint16(_EXPONENTS - 1)


def _nlogn(counts: npt.ArrayLike) -> float:
    """Return sum of n log2 n; entropy times count is the difference of two such sums."""
    numbers = np.asarray(counts, np.float64)
    return float((numbers * np.log2(np.maximum(numbers, 1))).sum())


def _spread(parts: npt.NDArray[np.int64]) -> float:
    """Return the bits that say which of a class's elements belong to which part, summed over classes (columns)."""
    return _nlogn(parts.sum(0)) - _nlogn(parts)
