"""Patches: changes of one tensor in one segment, laid ready beside the tensor's memory for a short write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .changes import Bits, SegmentChanges
from .kernels import compare
from .on_device import as_tensor
from .schema import Piece, Segment
from .slices import Place, Window
from .state import as_integers

__all__ = ["Mismatch", "Patch", "first_mismatch", "memory_of", "patch_of", "places_in", "write_all"]


class Mismatch(NamedTuple):
    """An element that does not hold the bits that its change starts from.

    Attributes:
        segment: Index of its segment.
        position: Its position in the segment.
        held: The bits that it holds.
        expected: The bits that it should hold.
    """

    segment: int
    position: int
    held: int
    expected: int


@dataclass(frozen=True, slots=True)
class _HostPatch:
    """For a contiguous tensor in host memory, which compiled loops reach.

    torch's own indexed operations take ten times as long there, most of it for handing out small pieces to threads.
    """

    segment: int
    offset: int
    tensor: Tensor
    run: Bits
    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits

    def mismatch(self) -> Mismatch | None:
        index = compare.first_not_holding(self.run, self.positions, self.old, self.offset)
        if index < 0:
            return None
        position = int(self.positions[index])
        return Mismatch(self.segment, position, int(self.run[position - self.offset]), int(self.old[index]))

    def write(self, *, back: bool) -> None:
        compare.scatter(self.run, self.positions, self.old if back else self.new, self.offset)
        # What autograd does by itself when torch writes: a backward pass that still needs the old values must notice.
        # Tensors that were made in inference mode have no counter.
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)


@dataclass(frozen=True, slots=True)
class _TorchPatch:
    """For tensors on any device, in any layout."""

    segment: int
    positions: npt.NDArray[np.uint32]
    memory: Tensor
    places: Tensor
    old: Tensor
    new: Tensor

    def held(self) -> Tensor:
        """Return what the touched elements hold now."""
        return self.memory.index_select(0, self.places)

    def mismatch(self) -> Mismatch:
        held, old = self.held().cpu(), self.old.cpu()
        index = int((held != old).nonzero()[0])
        mask = (1 << 8 * held.element_size()) - 1
        return Mismatch(self.segment, int(self.positions[index]), int(held[index]) & mask, int(old[index]) & mask)

    def write(self, *, back: bool) -> None:
        self.memory.index_copy_(0, self.places, self.old if back else self.new)


Patch: TypeAlias = _HostPatch | _TorchPatch
"""Changes of one tensor in one segment: places in its memory, the bits that they hold, and those that they shall."""


def patch_of(place: Place, segment: Segment, piece: Piece, change: SegmentChanges, part: slice) -> Patch:
    """Return the patch for a piece's share of a segment's changes; what it needs is moved to the tensor's device.

    Args:
        place: What the piece is a run of; changes outside of a window are left out.
        segment: The segment.
        piece: The piece.
        change: The segment's changes, checked.
        part: Which of them lie in the piece.
    """
    device, positions = place.device, change.positions[part]
    if isinstance(place, Window):
        inside, numbers = place.locate(positions.astype(np.int64) + (piece.start - piece.offset))
        chosen = [as_tensor(bits[part][inside], device) for bits in (change.old, change.new)]
        memory, at = memory_of(place.view), places_in(place.view, numbers)
        return _TorchPatch(segment.index, positions[inside], memory, at, *chosen)
    tensor = place
    if device.type == "cpu" and tensor.is_contiguous():
        run: Bits = as_integers(tensor).view(-1)[piece.start : piece.stop].numpy().view(segment.dtype.bits)
        places, old, new = (np.ascontiguousarray(each) for each in (positions, change.old[part], change.new[part]))
        return _HostPatch(segment.index, piece.offset, tensor, run, places, old, new)
    elements = as_tensor(positions, device).to(torch.int64) + (piece.start - piece.offset)
    before, after = (as_tensor(bits[part], device) for bits in (change.old, change.new))
    return _TorchPatch(segment.index, positions, memory_of(tensor), places_in(tensor, elements), before, after)


@torch.inference_mode()
def first_mismatch(patches: Iterable[Patch]) -> Mismatch | None:
    """Return an element that does not hold the bits that its change starts from, None when there is none."""
    by_device: dict[torch.device, list[_TorchPatch]] = {}
    for patch in patches:
        if isinstance(patch, _HostPatch):
            found = patch.mismatch()
            if found is not None:
                return found
        else:
            by_device.setdefault(patch.memory.device, []).append(patch)
    for group in by_device.values():
        # One wait for all answers, and not one for each.
        wrong = torch.stack([(patch.held() != patch.old).any() for patch in group])
        for patch, failed in zip(group, wrong.tolist(), strict=True):
            if failed:
                return patch.mismatch()
    return None


def write_all(patches: Sequence[Patch], *, back: bool = False) -> None:
    """Write the new bits, or `back` the old ones, and return when all are there."""
    # Inference mode, because tensors that were made in it can be written to in no other.
    with torch.inference_mode():
        for patch in patches:
            patch.write(back=back)
        # A copy to the host comes after all that was queued before.
        queued = (patch for patch in patches if isinstance(patch, _TorchPatch))
        for last in {patch.memory.device: patch for patch in queued}.values():
            last.new[:1].cpu()


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory between a tensor's first and last element as integers, in one dimension.

    The view is made outside of inference mode, so that writing to it tells autograd that the tensor has changed. Only
    one dimension can be written to at given places where torch is told to refuse what is not deterministic.
    """
    reach = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in reach) if tensor.numel() else 0
    return as_integers(tensor).as_strided((extent,), (1,))


def places_in(tensor: Tensor, elements: Tensor) -> Tensor:
    """Return where in `memory_of` a tensor its elements lie that are numbered row by row."""
    if tensor.is_contiguous():
        return elements
    places = torch.zeros_like(elements)
    for numbers, stride in zip(torch.unravel_index(elements, tensor.shape), tensor.stride(), strict=True):
        places += numbers * stride
    return places
