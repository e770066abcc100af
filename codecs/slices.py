"""Slices: the part of a tensor that one writer owns, and where it lies in the whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import UNSET
from torch import Tensor, nn

from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError

from .schema import Box, TensorSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["Place", "TensorSlice", "Window", "is_distributed", "local_parts", "overlapping_slices", "place_of"]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a larger tensor, to be published in its place.

    Attributes:
        tensor: The part: a box of the whole.
        start: Its first index along each dimension of the whole.
        whole: The shape of the whole tensor.

    Raises:
        SchemaMismatchError: If the part does not lie in the whole.

    Examples:
        The second half of a matrix's rows:

        >>> import torch
        >>> TensorSlice(torch.zeros(2, 3), start=(2, 0), whole=(4, 3)).box
        Box(start=(2, 0), whole=(4, 3))
    """

    tensor: Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        object.__setattr__(self, "start", tuple(map(int, self.start)))
        object.__setattr__(self, "whole", tuple(map(int, self.whole)))
        fits = len(shape) == len(self.start) == len(self.whole) and all(
            0 <= start <= start + size <= end for start, size, end in zip(self.start, shape, self.whole, strict=True)
        )
        if not fits:
            raise SchemaMismatchError(f"a slice of {shape} at {self.start} does not lie in a tensor of {self.whole}")

    @property
    def box(self) -> Box | None:
        """Where it lies; None when it is the whole tensor."""
        whole = tuple(self.tensor.shape) == self.whole
        return None if whole else Box(start=self.start, whole=self.whole)


@dataclass(frozen=True, slots=True)
class Window:
    """What a tensor holds of a schema's entry: a box inside the entry, since the two are cut differently.

    Attributes:
        view: The tensor's elements that the entry has too.
        start: Where they begin in the entry, along each dimension.
        entry: The entry's shape.
    """

    view: Tensor
    start: tuple[int, ...]
    entry: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the elements lie."""
        return self.view.device

    def locate(self, elements: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], Tensor]:
        """Return which elements of the entry, numbered row by row, are inside, and their numbers in the view."""
        indices = np.unravel_index(elements, self.entry)
        places = [index - start for index, start in zip(indices, self.start, strict=True)]
        inside = np.ones(elements.size, np.bool_)
        for place, size in zip(places, self.view.shape, strict=True):
            inside &= (place >= 0) & (place < size)
        numbers = np.ravel_multi_index([place[inside] for place in places], tuple(self.view.shape))
        return inside, torch.from_numpy(numbers.astype(np.int64)).to(self.device)


Place = Tensor | Window
"""Where bits of a schema's entry go: a tensor with all its elements, or a part of one with some of them."""


def place_of(part: Tensor | TensorSlice, spec: TensorSpec) -> Place | None:
    """Return where the elements of a schema's entry lie in a tensor, or a slice of one; None when none does.

    Those of an entry without elements lie anywhere.
    """
    tensor, held = (part.tensor, part.start) if isinstance(part, TensorSlice) else (part, (0,) * part.dim())
    if spec.slice is UNSET and tuple(tensor.shape) == spec.shape:
        return tensor
    if not spec.size:
        return tensor.new_empty(spec.shape)
    starts = [max(a, b) for a, b in zip(spec.start, held, strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(spec.start, spec.shape, held, tensor.shape, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    view = tensor.detach()
    for dimension, (start, end, at) in enumerate(zip(starts, ends, held, strict=True)):
        view = view.narrow(dimension, start - at, end - start)
    if tuple(view.shape) == spec.shape:
        return view
    return Window(view, tuple(a - b for a, b in zip(starts, spec.start, strict=True)), spec.shape)


def overlapping_slices(specs: Sequence[TensorSpec]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of entries about one tensor, by their place, that have elements in common.

    Time grows little faster than the number of entries where these are cut along one dimension.
    """
    dimensions = range(min((len(spec.whole) for spec in specs), default=0))
    # Swept along the dimension that they are cut along, those that are open at a time are few.
    along = max(dimensions, key=lambda d: len({spec.start[d] for spec in specs}), default=None)
    opened: list[int] = []
    for place in sorted(range(len(specs)), key=lambda p: specs[p].start[along] if along is not None else 0):
        spec = specs[place]
        if along is not None:
            at = spec.start[along]
            opened = [p for p in opened if specs[p].start[along] + specs[p].shape[along] > at]
        yield from ((min(p, place), max(p, place)) for p in opened if specs[p].overlaps(spec))
        opened.append(place)


def local_parts(source: nn.Module | Mapping[str, Any], *, every_replica: bool = False) -> Mapping[str, Any]:
    """Return the entries of a module or mapping, with what a process holds of distributed tensors in their place.

    A `DTensor` that is sharded becomes the slice that lies here. Of one that is replicated along a dimension of its
    mesh, one replica publishes, chosen by the name, so that the work is divided; what others publish, and parts without
    elements, are left out. The other tensors of a module that has distributed ones are replicated over the same mesh.

    Args:
        source: The module or mapping.
        every_replica: Whether to leave nothing out, since everything is to be written to.

    Raises:
        UnsupportedTensorError: If a distributed tensor is placed in a way that makes no boxes.
    """
    entries = source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else source
    distributed = [entry for entry in entries.values() if is_distributed(entry)]
    if not distributed:
        return entries
    mesh = max((entry.device_mesh for entry in distributed), key=lambda mesh: mesh.size())
    parts: dict[str, Any] = {}
    for name, entry in entries.items():
        if is_distributed(entry):
            part = _local_part(name, entry, every_replica=every_replica)
        elif every_replica or not isinstance(source, nn.Module) or _is_chosen(name, mesh, range(mesh.ndim)):
            part = entry
        else:
            part = None
        if part is not None:
            parts[name] = part
    return parts


def is_distributed(entry: object) -> bool:
    """Return whether an entry is a `DTensor`."""
    # By name, since what makes them takes a second to import, and most processes never do.
    return type(entry).__name__ == "DTensor"


def _local_part(name: str, value: DTensor, *, every_replica: bool) -> TensorSlice | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements
    if not all(placement.is_shard() or placement.is_replicate() for placement in placements):
        raise UnsupportedTensorError(
            f"tensor {name!r} is a DTensor placed as {placements}; redistribute it to shards or replicas, or pass "
            "`full_tensor()`",
            tensor=name,
        )
    replicated = [dimension for dimension, placement in enumerate(placements) if placement.is_replicate()]
    if not every_replica and not _is_chosen(name, mesh, replicated):
        return None
    with torch.no_grad():  # or it would be another tensor each time
        local = value.to_local()
    if local.numel() == 0 and value.numel() > 0 and not every_replica:
        return None
    shape, start = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    if tuple(shape) != tuple(local.shape):
        raise UnsupportedTensorError(
            f"tensor {name!r} has a local part of {tuple(local.shape)} where {tuple(shape)} was expected; pass "
            "`full_tensor()`",
            tensor=name,
        )
    return TensorSlice(local, tuple(start), tuple(value.shape))


def _is_chosen(name: str, mesh: DeviceMesh, dimensions: Iterable[int]) -> bool:
    """Return whether of the replicas along some dimensions of a mesh the one here publishes a tensor."""
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return False
    choice = zlib.crc32(name.encode())
    for dimension in dimensions:
        if choice % mesh.shape[dimension] != coordinates[dimension]:
            return False
        choice //= mesh.shape[dimension]
    return True
