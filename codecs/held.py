"""Held bits: all bits of a segment as somebody holds them, in an array in host memory or in a tensor on a device.

What is done to them is done where they lie: by compiled loops for arrays, by torch for tensors. Both give the same.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from . import dtypes, on_device
from .changes import Bits, Differing, SegmentChanges, find_differing
from .kernels import compare, mix
from .planes import thin_out
from .schema import Segment

__all__ = [
    "Held",
    "changes_from",
    "copied",
    "copy_into",
    "differing",
    "first_not_holding",
    "fits",
    "sampled",
    "scatter",
    "sum_run",
    "take",
    "to_host",
]

Held: TypeAlias = Bits | Tensor
"""Bit patterns of elements, one dimension: an unsigned array, or a tensor of the type that `dtypes.INTEGERS` has."""


def fits(segment: Segment, held: Held) -> bool:
    """Return whether bits can be those of a whole segment: of its size and dtype."""
    expected = dtypes.INTEGERS[segment.dtype.size] if isinstance(held, Tensor) else segment.dtype.bits
    return held.dtype == expected and tuple(held.shape) == (segment.size,)


def to_host(held: Held) -> Bits:
    """Return the bits as an array; maybe the same memory, not to be written to."""
    return on_device.as_array(held) if isinstance(held, Tensor) else held


def copied(held: Held) -> Held:
    """Return a copy in the same place.

    Raises:
        StorageFullError: If a device has no memory for it.
    """
    return on_device.copied(held) if isinstance(held, Tensor) else held.copy()


def copy_into(held: Held, source: Held) -> None:
    """Overwrite bits by others of the same size and type, wherever these lie."""
    if isinstance(held, Tensor):
        on_device.copy_into(held, source if isinstance(source, Tensor) else on_device.as_tensor(source, held.device))
    else:
        np.copyto(held, to_host(source))


def sampled(held: Held) -> Bits:
    """Return an evenly spaced sample, a bounded number; see `thin_out`."""
    return to_host(cast(Held, thin_out(cast(Bits, held))))  # slices alone, which tensors have too


def take(held: Held, positions: npt.NDArray[np.uint32]) -> Bits:
    """Return the bits at some positions.

    Raises:
        StorageFullError: If a device has no memory for them.
    """
    return on_device.take(held, positions) if isinstance(held, Tensor) else held.take(positions)


def scatter(held: Held, positions: npt.NDArray[np.uint32], values: Bits) -> None:
    """Set `held[positions[k]] = values[k]` for all `k`; no position occurs twice.

    Raises:
        StorageFullError: If a device has no memory for positions and values.
    """
    if isinstance(held, Tensor):
        on_device.scatter(held, positions, values)
    else:
        compare.scatter(held, positions, values, 0)


def first_not_holding(held: Held, positions: npt.NDArray[np.uint32], expected: Bits) -> int:
    """Return the first `k` with `held[positions[k]] != expected[k]`, or -1.

    Raises:
        StorageFullError: If a device has no memory for positions and bits.
    """
    if isinstance(held, Tensor):
        return on_device.first_not_holding(held, positions, expected)
    return int(compare.first_not_holding(held, positions, expected, 0))


def differing(held: Held, live: Held) -> Differing:
    """Return where two runs of one size and type differ, and what they hold there; compared where the first lies.

    Raises:
        StorageFullError: If a device has no memory to compare.
    """
    if isinstance(held, Tensor):
        other = live if isinstance(live, Tensor) else on_device.as_tensor(live, held.device)
        return on_device.differing(held, other)
    return find_differing(held, to_host(live))


def changes_from(held: Held, live: Held) -> SegmentChanges | None:
    """Return what differs between two states of a segment; None when nothing does.

    Raises:
        StorageFullError: If a device has no memory to compare.
    """
    found = differing(held, live)
    return SegmentChanges(*found) if found.positions.size else None


def sum_run(held: Held, key: int) -> int:
    """Return the sum of the digest's terms of consecutive elements, of which the first has this key, modulo 2^64.

    Raises:
        StorageFullError: If a device has no memory for the sum.
    """
    return on_device.sum_run(held, key) if isinstance(held, Tensor) else int(mix.sum_run(held, np.uint64(key)))
