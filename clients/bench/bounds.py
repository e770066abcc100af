"""How few bits a step could take: the entropy of what changed (Shannon 1948), under two models of it.

Both are empirical: the frequencies are those of the very data, and nothing is counted for sending them. A coder can be
smaller only if it knows more than the model, such as rows without gradient or what changed in the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltabus.codecs import dtypes
from deltabus.codecs.changes import Bits
from deltabus.codecs.dtypes import DType, Order
from deltabus.codecs.steps import zigzag_between

from .states import Pair, chunks

__all__ = ["Bounds", "bounds_of"]

_MOST_CLASSES = 1 << 11


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits for a whole step.

    Attributes:
        independent: Each element of a dtype changes with the same probability, by a step in ULP of one distribution.
        conditional: Probability and distribution are those of the tensor and of the exponent of the old value.
    """

    independent: float
    conditional: float


def bounds_of(pair: Pair) -> Bounds:
    """Return the least bits for a step under each model."""
    independent = conditional = 0.0
    for name in dict.fromkeys(spec.dtype for spec in pair.schema.tensors):
        dtype = dtypes.by_name(name)
        moved_by_all, size = [], 0
        for old, new in _tensors_of(pair, name):
            total = np.zeros(_MOST_CLASSES, np.int64)
            classes, moves = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
            for place in chunks(old.size):
                total += np.bincount(_exponents(old[place], dtype), minlength=_MOST_CLASSES)
                at = np.flatnonzero(old[place] != new[place])
                held = old[place][at]
                classes.append(_exponents(held, dtype).astype(np.uint64))
                moves.append(zigzag_between(held, new[place][at], dtype.order).astype(np.uint64))
            kinds, moved = np.concatenate(classes), np.concatenate(moves)
            changed = np.bincount(kinds.astype(np.int64), minlength=_MOST_CLASSES)
            conditional += _spread(np.stack((changed, total - changed)))
            conditional += _nlogn(changed) - _nlogn(_counts(kinds, moved))
            moved_by_all.append(moved)
            size += old.size
        steps = np.unique(np.concatenate(moved_by_all), return_counts=True)[1]
        changed_all = int(steps.sum())
        independent += _spread(np.array([[changed_all], [size - changed_all]])) + _nlogn(changed_all) - _nlogn(steps)
    return Bounds(independent, conditional)


def _tensors_of(pair: Pair, dtype: str) -> Iterator[tuple[Bits, Bits]]:
    for spec, old, new in zip(pair.schema.tensors, pair.old.arrays(), pair.new.arrays(), strict=True):
        if spec.dtype == dtype:
            yield old.ravel(), new.ravel()


def _exponents(bits: Bits, dtype: DType) -> npt.NDArray[np.int64]:
    """Return each pattern's exponent without its sign; of what has none, 0."""
    if dtype.order is not Order.SIGN_MAGNITUDE:
        return np.zeros(bits.size, np.int64)
    below_sign = (1 << (8 * dtype.size - 1 - dtype.mantissa)) - 1
    return (bits >> bits.dtype.type(dtype.mantissa)).astype(np.int64) & below_sign


def _counts(kinds: npt.NDArray[np.uint64], moved: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return how often each pair of a class and a step occurs."""
    if not moved.size or int(moved.max()) < 1 << 32:
        counts: npt.NDArray[np.int64] = np.unique(kinds << np.uint64(32) | moved, return_counts=True)[1]
        return counts
    order = np.lexsort((moved, kinds))
    kinds, moved = kinds[order], moved[order]
    starts = np.flatnonzero(np.diff(kinds, prepend=kinds[:1] + np.uint64(1)) | np.diff(moved, prepend=moved[:1]))
    return np.diff(starts, append=kinds.size)


def _nlogn(counts: npt.ArrayLike) -> float:
    """Return sum of n log2 n; entropy times count is the difference of two such sums."""
    numbers = np.asarray(counts, np.float64)
    return float((numbers * np.log2(np.maximum(numbers, 1))).sum())


def _spread(parts: npt.NDArray[np.int64]) -> float:
    """Return the bits that say which of a class's elements belong to which part, summed over classes (columns)."""
    return _nlogn(parts.sum(0)) - _nlogn(parts)
