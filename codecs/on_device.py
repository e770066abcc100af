"""What is done to all elements of a segment, for bits that lie in tensors, on any device; the compiled loops' twin.

Bits in a tensor are signed integers as wide as the dtype (unsigned for one byte), because torch lacks operations for
wider unsigned ones. Positions, and the bits of changed elements, go in and out as arrays in host memory: what crosses
between host and device is in proportion to the changes. Each function waits until its work on the device is done, so
that bits may be used in one thread's stream after the other's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltabus.bus.errors import StorageFullError

from .changes import Bits, Differing
from .kernels.mix import MASK
from .state import settle

__all__ = [
    "as_array",
    "as_tensor",
    "copied",
    "copy_into",
    "count_between",
    "differing",
    "find_counted",
    "first_not_holding",
    "scatter",
    "sum_run",
    "take",
    "zeros",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_U32 = npt.NDArray[np.uint32]
_Counts = npt.NDArray[np.int64]

_SUMMED = 1 << 20
"""Elements whose terms are computed at once: enough to keep a device busy, few enough to take little memory."""


def _signed(number: int) -> int:
    """Return the number of 64 bits with sign that has the same bits."""
    return number - (1 << 64) if number >> 63 else number


_GAMMA, _FIRST, _SECOND = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _guarded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function write to tensors made in inference mode too, and raise an error of ours when memory runs out."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            with torch.inference_mode():
                return function(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise StorageFullError(
                f"no room on the device for a copy of weights or for work on it ({error}); let the copy lie in the "
                "host's memory (shadow='ram'), or leave more memory of the device free"
            ) from error

    return called


def as_tensor(bits: Bits, device: torch.device) -> Tensor:
    """Return an array's bits as a tensor on a device; on the host it may be the array's own memory."""
    # torch shares writable memory only.
    writable = np.require(bits, requirements=["C", "W"])
    shared = torch.from_numpy(writable.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else writable)
    return shared.to(device)


def as_array(bits: Tensor) -> Bits:
    """Return a tensor's bits as an array in host memory; of a tensor there it may be the same memory."""
    array: Bits = bits.cpu().numpy()
    return array.view(f"<u{array.itemsize}")


@_guarded
def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros.

    Raises:
        StorageFullError: If the device has no memory for it.
    """
    made = torch.zeros(size, dtype=dtype, device=device)
    settle((made,))
    return made


@_guarded
def copied(bits: Tensor) -> Tensor:
    """Return a copy on the same device.

    Raises:
        StorageFullError: If the device has no memory for it.
    """
    copy = bits.clone()
    settle((copy,))
    return copy


@_guarded
def copy_into(bits: Tensor, source: Tensor) -> None:
    """Overwrite bits by those of a tensor on any device."""
    bits.copy_(source)
    settle((bits, source))


@_guarded
def take(bits: Tensor, positions: _U32) -> Bits:
    """Return the bits at some positions.

    Raises:
        StorageFullError: If the device has no memory for them.
    """
    return as_array(bits.index_select(0, _places(positions, bits.device)))


@_guarded
def scatter(bits: Tensor, positions: _U32, values: Bits) -> None:
    """Set `bits[positions[k]] = values[k]` for all `k`; no position occurs twice.

    Raises:
        StorageFullError: If the device has no memory for positions and values.
    """
    # Unlike `put_`, this may be used where torch is told to refuse what is not deterministic.
    bits.index_copy_(0, _places(positions, bits.device), as_tensor(values, bits.device))
    settle((bits,))


@_guarded
def first_not_holding(bits: Tensor, positions: _U32, expected: Bits) -> int:
    """Return the first `k` with `bits[positions[k]] != expected[k]`, or -1.

    Raises:
        StorageFullError: If the device has no memory for positions and bits.
    """
    held = bits.index_select(0, _places(positions, bits.device))
    wrong = (held != as_tensor(expected, bits.device)).nonzero()[:1].tolist()
    return int(wrong[0][0]) if wrong else -1


@_guarded
def differing(old: Tensor, new: Tensor) -> Differing:
    """Return where two tensors of one size and type differ, and what they hold there; compared where `old` lies.

    Raises:
        StorageFullError: If the device has no memory: a byte for each element, and 16 bytes for each that differs.
    """
    new = new.to(old.device)
    places = (old != new).nonzero().view(-1)
    found = (as_array(each.index_select(0, places)) for each in (old, new))
    return Differing(_positions(places), *found)


@_guarded
def sum_run(bits: Tensor, key: int) -> int:
    """Return the sum of the digest's terms of consecutive elements, of which the first has this key, modulo 2^64.

    Raises:
        StorageFullError: If the device has no memory: about 30 MiB.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    width = 8 * bits.element_size()
    for start in range(0, bits.numel(), _SUMMED):
        run = bits[start : start + _SUMMED]
        keys = torch.arange(start, start + run.numel(), dtype=torch.int64, device=bits.device)
        keys.mul_(_GAMMA).add_(_signed(key))
        x = run.to(torch.int64, copy=True)
        if width < 64:
            x &= (1 << width) - 1
        x ^= keys
        x ^= _shifted(x, 30)
        x.mul_(_FIRST).add_(keys)
        x ^= _shifted(x, 27)
        x.mul_(_SECOND)
        x ^= _shifted(x, 31)
        total += x.sum()
    return int(total) & MASK


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers shifted right as if they had no sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@_guarded
def count_between(bits: Tensor, positions: _U32, shift: int, mask: int) -> tuple[_Counts, _U32, _U32]:
    """Return how many changed places each class has, their order by class, and their gaps; see `Ranks`.

    An element's class is `bits >> shift & mask`.

    Raises:
        StorageFullError: If the device has no memory: about 30 bytes for each element.
    """
    where = _places(positions, bits.device)
    by_class = _ByClass.of(bits, shift, mask)
    changed = torch.zeros(bits.numel(), dtype=torch.bool, device=bits.device).index_fill_(0, where, True)
    slots = changed.index_select(0, by_class.places).nonzero().view(-1)
    ends = torch.searchsorted(slots, by_class.ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    # A slot of another class is before this class's first, so that the larger of the two is the one that counts.
    before = torch.cat((slots.new_tensor([-1]), slots[:-1]))
    gaps = slots - torch.maximum(before, by_class.starts.repeat_interleave(counts) - 1) - 1
    order = torch.searchsorted(where, by_class.places.index_select(0, slots))
    return counts.cpu().numpy(), _positions(order), _positions(gaps)


@_guarded
def find_counted(bits: Tensor, counts: _Counts, gaps: _U32, shift: int, mask: int) -> tuple[_U32, _U32]:
    """Return the places that lie behind the gaps, rising, and their order; the inverse of `count_between`.

    They are fewer than gaps when a class has too few elements for its gaps.

    Raises:
        StorageFullError: If the device has no memory: about 30 bytes for each element.
    """
    by_class = _ByClass.of(bits, shift, mask)
    number = torch.from_numpy(counts).to(bits.device)
    passed = (_places(gaps, bits.device) + 1).cumsum(0)
    # What was passed in earlier classes is taken off again: at the end of each, that is the sum so far.
    sums = torch.cat((passed.new_zeros(1), passed)).index_select(0, number.cumsum(0) - number)
    slots = passed + (by_class.starts - sums - 1).repeat_interleave(number)
    found = (slots < by_class.ends.repeat_interleave(number)).nonzero().view(-1)
    places, order = by_class.places.index_select(0, slots.index_select(0, found)).sort()
    return _positions(places), _positions(found.index_select(0, order))


class _ByClass(NamedTuple):
    """All places of a segment in slots: sorted by class, and within a class by place.

    Attributes:
        places: The place in each slot.
        starts: The first slot of each class.
        ends: The slot behind its last.
    """

    places: Tensor
    starts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, bits: Tensor, shift: int, mask: int) -> _ByClass:
        if not mask:
            all_of_them = torch.tensor([bits.numel()], device=bits.device)
            return cls(torch.arange(bits.numel(), device=bits.device), torch.zeros_like(all_of_them), all_of_them)
        classes = (bits >> shift).bitwise_and_(mask).to(torch.uint8)
        # Numbers of one byte are sorted in linear time.
        sizes = classes.bincount(minlength=mask + 1)
        ends = sizes.cumsum(0)
        return cls(classes.sort(stable=True).indices, ends - sizes, ends)


def _places(positions: _U32, device: torch.device) -> Tensor:
    """Return positions, below 2^31, as torch takes them; they cross in 4 bytes each."""
    return as_tensor(positions, device).to(torch.int64)


def _positions(places: Tensor) -> _U32:
    return as_array(places.to(torch.int32)).view(np.uint32)
