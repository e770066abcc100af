"""States: the tensors of a model or mapping under canonical names, and their bits segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError, UsageError

from . import dtypes
from .changes import Bits
from .dtypes import DType
from .schema import SEGMENT_ELEMENTS, Piece, Schema, TensorSpec

__all__ = [
    "Select",
    "Source",
    "State",
    "as_integers",
    "bits_of",
    "canonical_name",
    "check_supported",
    "collect",
    "memory_key",
    "named_tensors",
    "settle",
]

Source = nn.Module | Mapping[str, Tensor]
"""Where tensors come from."""

Select = Callable[[str], bool] | Sequence[str]
"""Which canonical names: a predicate, or shell patterns of which one must match."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def named_tensors(source: Source) -> dict[str, Tensor]:
    """Return the tensors of a module or mapping by canonical name, in sorted order.

    A module gives its `state_dict`: parameters and persistent buffers. What modules keep in `_extra_state` is left
    out: it is no weight, and a tensor made for it on request could not be written to.

    Raises:
        SchemaMismatchError: If two different tensors have the same canonical name.
        UnsupportedTensorError: If a value is not a tensor.
        UsageError: If the source is neither a module nor a mapping of names.
    """
    if isinstance(source, nn.Module):
        source = source.state_dict(keep_vars=True)
    if not isinstance(source, Mapping):
        raise UsageError(f"expected a torch module or a mapping of tensors by name, got {type(source).__name__}")
    entries: Mapping[Any, Any] = source
    found: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in entries.items():
        if not isinstance(name, str):
            raise UsageError(f"names of tensors are text, got {name!r}")
        if name.rpartition(".")[2] == "_extra_state":
            continue
        if not isinstance(tensor, Tensor):
            text = f"{name!r} is no tensor but {type(tensor).__name__}; leave it out of the mapping"
            raise UnsupportedTensorError(text, tensor=name)
        canonical = canonical_name(name)
        first, other = found.setdefault(canonical, (name, tensor))
        if other is not tensor:
            check_supported(name, tensor)
            check_supported(first, other)
            if memory_key(other) != memory_key(tensor):
                text = f"{first!r} and {name!r} are different tensors, but both are {canonical!r} without wrappers"
                raise SchemaMismatchError(text, tensor=canonical)
    return {name: found[name][1] for name in sorted(found)}


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's memory seen as integers of the same width, detached; it supports every strided layout."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def bits_of(tensor: Tensor, dtype: DType, start: int, stop: int) -> Bits:
    """Return the bits of the elements `start` to `stop`, row-major, of a tensor rounded to `dtype`.

    Contiguous tensors in host memory that need no rounding are not copied: the array is their memory, and not to be
    written to. Of others this run alone is copied.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        run = tensor.view(-1)[start:stop]
    else:
        run = as_integers(tensor).take(torch.arange(start, stop, device=tensor.device)).view(tensor.dtype)
    array: Bits = as_integers(run.to(dtype.torch)).cpu().numpy().view(dtype.bits)
    return array


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


def _selector(select: Select | None) -> Callable[[str], bool]:
    if select is None:
        return lambda name: True
    if callable(select):
        return select
    if isinstance(select, str):
        raise UsageError(f"`select` is a function or a list of patterns; write [{select!r}]")
    return lambda name: any(fnmatchcase(name, pattern) for pattern in select)


def collect(
    source: Source,
    *,
    select: Select | None = None,
    dtype: torch.dtype | None = None,
    segment_elements: int = SEGMENT_ELEMENTS,
) -> State:
    """Return the state of a module or a mapping of tensors.

    Tensors that are the same memory seen in the same way (tied) become one, named by the first name in sorted order;
    the others are its aliases.

    >>> weight = torch.zeros(2, 3)
    >>> collect({"module.head": weight, "embed": weight}).schema.tensors
    (TensorSpec(name='embed', dtype='F32', shape=(2, 3), aliases=('head',)),)

    Args:
        source: A module, with its persistent buffers, or tensors by name.
        select: Which canonical names to take: a predicate, or shell patterns (`fnmatch`) of which one must match.
        dtype: The floating dtype in which floating tensors are published, rounded as `tensor.to(dtype)` does. Integers,
            booleans and complex numbers stay as they are.
        segment_elements: Elements of a segment.

    Raises:
        SchemaMismatchError: If two different tensors have the same canonical name.
        UnsupportedTensorError: If a tensor is of a kind that cannot be published, or a value is no tensor.
        UsageError: If the source is of a wrong kind, nothing is selected, or `dtype` is not a floating one.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"weights can be published in a floating dtype such as torch.bfloat16, not in {dtype}")
    selected = _selector(select)
    found = {name: tensor for name, tensor in named_tensors(source).items() if selected(name)}
    if not found and select is not None:
        raise UsageError(f"`select` matches no tensor; {type(source).__name__} has names such as {_some_names(source)}")
    groups: dict[tuple[object, ...], tuple[Tensor, list[str]]] = {}
    for name, tensor in found.items():
        check_supported(name, tensor)
        groups.setdefault(memory_key(tensor), (tensor, []))[1].append(name)
    specs, tensors = [], []
    for tensor, (name, *aliases) in groups.values():
        kind = dtypes.of_torch(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, name)
        specs.append(TensorSpec(name=name, dtype=kind.name, shape=tuple(tensor.shape), aliases=tuple(aliases)))
        tensors.append(tensor)
    settle(tensors)
    # The groups are in the order of their first names, which is the schema's order.
    return State(Schema.of(specs, segment_elements=segment_elements), tuple(tensors))


def _some_names(source: Source) -> str:
    return ", ".join(list(named_tensors(source))[:3]) or "none at all"
