"""States: the tensors of a model or mapping under canonical names, and their bits segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import UNSET
from torch import Tensor, nn

from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError, UsageError

from . import dtypes
from .casts import Dtypes, Transform, dtype_chooser, matching, transformed
from .changes import Bits
from .dtypes import DType
from .schema import SEGMENT_ELEMENTS, Box, Piece, Schema, TensorSpec
from .slices import TensorSlice, local_parts

__all__ = [
    "Parts",
    "Select",
    "Source",
    "State",
    "as_integers",
    "bits_of",
    "canonical_name",
    "check_supported",
    "collect",
    "memory_key",
    "named_parts",
    "run_of",
    "settle",
]

Source = nn.Module | Mapping[str, Tensor]
"""Where tensors come from."""

Parts = nn.Module | Mapping[str, Tensor | TensorSlice] | Mapping[str, Tensor]
"""What is published: whole tensors, and slices of larger ones."""

Select = Callable[[str], bool] | Sequence[str]
"""Which canonical names: a predicate, or shell patterns of which one must match."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return a tensor's name without the parts that wrappers add.

    The components of `torch.compile`, FSDP and activation checkpointing go wherever they stand; `module`, which data
    parallel wrappers add, goes only where it leads the name, so that a submodule of that name deeper down keeps it. The
    last component is the tensor's own and always stays.

    >>> canonical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    >>> canonical_name("encoder.module.weight")
    'encoder.module.weight'
    """
    *path, last = name.split(".")
    path = [part for part in path if part not in _WRAPPERS]
    while path and path[0] == "module":
        del path[0]
    return ".".join((*path, last))


def settle(tensors: Iterable[Tensor]) -> None:
    """Wait for what the calling thread has queued on accelerators, before other threads read the tensors there."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what two strided tensors have in common when they are the same memory seen in the same way."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def check_supported(name: str, tensor: Tensor) -> None:
    """Check that a tensor's bits can be read where they lie.

    Raises:
        UnsupportedTensorError: If it has no bits of its own (meta, fake, lazy), or none in a dense strided layout
            (sparse, quantized, DTensor and other wrapper classes, lazily conjugated), or a dtype that cannot be
            published.
    """
    problem = ""
    if hasattr(tensor, "__tensor_flatten__"):
        problem = (
            "a wrapper around other tensors; pass the tensor that it holds, such as `to_local()` or `full_tensor()`"
        )
    elif nn.parameter.is_lazy(tensor):
        problem = "not initialised yet; run the model once"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        problem = "sparse or quantized; pass `to_dense()` or `dequantize()`"
    elif tensor.is_meta or tensor.untyped_storage().device.type == "meta":
        problem = "without memory (meta device); load the model first"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "lazily conjugated; pass `resolve_conj().resolve_neg()`"
    if problem:
        text = f"tensor {name!r} ({type(tensor).__name__}, {tensor.dtype}) is {problem}"
        raise UnsupportedTensorError(text, tensor=name)
    dtypes.of_torch(tensor.dtype, name)


def named_parts(source: Parts, *, every_replica: bool = False) -> dict[str, Tensor | TensorSlice]:
    """Return the tensors, and slices of tensors, of a module or mapping by canonical name, in sorted order.

    A module gives its `state_dict`: parameters and persistent buffers. What modules keep in `_extra_state` is left
    out: it is no weight, and a tensor made for it on request could not be written to. Of distributed tensors the local
    parts are given, as `local_parts` says.

    Args:
        source: The module or mapping.
        every_replica: Whether replicas that others publish are given too.

    Raises:
        SchemaMismatchError: If two different tensors have the same canonical name.
        UnsupportedTensorError: If a value is not a tensor, nor a slice of one.
        UsageError: If the source is neither a module nor a mapping of names.
    """
    if not isinstance(source, nn.Module | Mapping):
        raise UsageError(f"expected a torch module or a mapping of tensors by name, got {type(source).__name__}")
    found: dict[str, tuple[str, Tensor | TensorSlice]] = {}
    for name, part in local_parts(source, every_replica=every_replica).items():
        if not isinstance(name, str):
            raise UsageError(f"names of tensors are text, got {name!r}")
        if name.rpartition(".")[2] == "_extra_state":
            continue
        if not isinstance(part, Tensor | TensorSlice):
            text = f"{name!r} is no tensor but {type(part).__name__}; leave it out of the mapping"
            raise UnsupportedTensorError(text, tensor=name)
        canonical = canonical_name(name)
        first, other = found.setdefault(canonical, (name, part))
        if other is not part:
            check_supported(name, _tensor_of(part))
            check_supported(first, _tensor_of(other))
            if memory_key(_tensor_of(other)) != memory_key(_tensor_of(part)):
                text = f"{first!r} and {name!r} are different tensors, but both are {canonical!r} without wrappers"
                raise SchemaMismatchError(text, tensor=canonical)
    return {name: found[name][1] for name in sorted(found)}


def _tensor_of(part: Tensor | TensorSlice) -> Tensor:
    return part.tensor if isinstance(part, TensorSlice) else part


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's memory seen as integers of the same width, detached; it supports every strided layout."""
    return tensor.detach().view(dtypes.INTEGERS[tensor.element_size()])


def bits_of(tensor: Tensor, dtype: DType, start: int, stop: int) -> Bits:
    """Return the bits of the elements `start` to `stop`, row-major, of a tensor rounded to `dtype`.

    Contiguous tensors in host memory that need no rounding are not copied: the array is their memory, and not to be
    written to. Of others this run alone is copied.
    """
    array: Bits = run_of(tensor, dtype, start, stop).cpu().numpy().view(dtype.bits)
    return array


def run_of(tensor: Tensor, dtype: DType, start: int, stop: int) -> Tensor:
    """Return the bits of a run of elements as integers, on the tensor's device; see `bits_of`."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        run = tensor.view(-1)[start:stop]
    else:
        run = as_integers(tensor).take(torch.arange(start, stop, device=tensor.device)).view(tensor.dtype)
    return as_integers(run.to(dtype.torch))


@dataclass(frozen=True, slots=True)
class State:
    """The tensors of a model as they are published; it holds the live tensors, not their bits.

    Attributes:
        schema: The table of tensors; a tensor of another floating dtype than its entry says is rounded when read.
        tensors: The tensors in the schema's order.
    """

    schema: Schema
    tensors: tuple[Tensor, ...]

    def piece(self, piece: Piece) -> Bits:
        """Return the bits of a run of one tensor's elements; see `bits_of`."""
        dtype = dtypes.by_name(self.schema.tensors[piece.tensor].dtype)
        return bits_of(self.tensors[piece.tensor], dtype, piece.start, piece.stop)

    def piece_on(self, device: torch.device, piece: Piece) -> Tensor:
        """Return the bits of a run of one tensor's elements in a tensor, as integers; maybe its own memory."""
        dtype = dtypes.by_name(self.schema.tensors[piece.tensor].dtype)
        return run_of(self.tensors[piece.tensor], dtype, piece.start, piece.stop).to(device)

    def device(self, index: int) -> torch.device:
        """Return the device that most of a segment's elements lie on."""
        sizes: dict[torch.device, int] = {}
        for piece in self.schema.segments[index].pieces:
            device = self.tensors[piece.tensor].device
            sizes[device] = sizes.get(device, 0) + piece.stop - piece.start
        return max(sizes, key=lambda device: sizes[device])

    def read(self, index: int, out: Bits | None = None) -> Bits:
        """Return the bits of a segment.

        Args:
            index: Which segment.
            out: Filled and returned if given. Otherwise the array may be a tensor's own memory: not to be written to.
        """
        segment = self.schema.segments[index]
        if out is None:
            if len(segment.pieces) == 1:
                return self.piece(segment.pieces[0])
            out = np.empty(segment.size, segment.dtype.bits)
        for piece in segment.pieces:
            out[piece.offset : piece.offset + piece.stop - piece.start] = self.piece(piece)
        return out

    def read_on(self, device: torch.device, index: int) -> Tensor:
        """Return the bits of a segment in a tensor, as integers; maybe a tensor's own memory, not to be written to."""
        runs = [self.piece_on(device, piece) for piece in self.schema.segments[index].pieces]
        whole = runs[0] if len(runs) == 1 else torch.cat(runs)
        settle((whole,))  # another thread may use it, in a stream of its own
        return whole


def _selector(select: Select | None) -> Callable[[str], bool]:
    if select is None:
        return lambda name: True
    if callable(select):
        return select
    if isinstance(select, str):
        raise UsageError(f"`select` is a function or a list of patterns; write [{select!r}]")
    return lambda name: matching(select, name) is not None


def collect(
    source: Parts,
    *,
    select: Select | None = None,
    dtype: Dtypes | None = None,
    transform: Transform | None = None,
    segment_elements: int = SEGMENT_ELEMENTS,
) -> State:
    """Return the state of a module or a mapping of tensors, or the part of one that is held here.

    Of distributed tensors (`DTensor`) the local parts are taken, as `local_parts` says. Tensors that are one memory
    seen in the same way (tied) become one, named by the first name in sorted order; the others are its aliases.

    >>> weight = torch.zeros(2, 3)
    >>> [(spec.name, spec.aliases) for spec in collect({"module.head": weight, "embed": weight}).schema.tensors]
    [('embed', ('head',))]

    Args:
        source: A module, with its persistent buffers, or tensors and slices by name.
        select: Which canonical names to take: a predicate, or shell patterns (`fnmatch`) of which one must match.
        dtype: The floating dtype in which floating tensors are published, rounded as `tensor.to(dtype)` does; one for
            all, or by name. Integers, booleans and complex numbers stay as they are. Of tied tensors the first name
            in sorted order counts.
        transform: What functions make of tensors before they are published; `dtype` leaves that as it is.
        segment_elements: Elements of a segment.

    Raises:
        SchemaMismatchError: If two different tensors have the same canonical name.
        UnsupportedTensorError: If a tensor is of a kind that cannot be published, or a value is no tensor.
        UsageError: If the source is of a wrong kind, nothing is selected, `dtype` is not a floating one, or a function
            of `transform` returns no tensors.
    """
    dtype_of = dtype_chooser(dtype)
    selected = _selector(select)
    found = {name: part for name, part in named_parts(source).items() if selected(name)}
    if not found and select is not None:
        raise UsageError(f"`select` matches no tensor; {type(source).__name__} has names such as {_some_names(source)}")
    found, made = transformed(found, transform)
    groups: dict[tuple[object, ...], tuple[Tensor, Box | None, list[str]]] = {}
    for name, part in sorted(found.items()):
        tensor, box = (part.tensor, part.box) if isinstance(part, TensorSlice) else (part, None)
        check_supported(name, tensor)
        groups.setdefault((*memory_key(tensor), box), (tensor, box, []))[2].append(name)
    specs, tensors = [], []
    for tensor, box, (name, *aliases) in groups.values():
        wanted = dtype_of(name) if tensor.is_floating_point() and name not in made else None
        kind = dtypes.of_torch(wanted or tensor.dtype, name)
        spec = TensorSpec(
            name=name, dtype=kind.name, shape=tuple(tensor.shape), aliases=tuple(aliases), slice=box or UNSET
        )
        specs.append(spec)
        tensors.append(tensor)
    settle(tensors)
    # The groups are in the order of their first names, which is the schema's order.
    return State(Schema.of(specs, segment_elements=segment_elements), tuple(tensors))


def _some_names(source: Parts) -> str:
    return ", ".join(list(named_parts(source))[:3]) or "none at all"
