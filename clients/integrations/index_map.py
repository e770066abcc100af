"""Where each element of a checkpoint lies in an engine's weights, learned from the engine's own loader.

Theory of operation. Engines keep weights otherwise than checkpoints: projections are fused, each rank holds its slice,
tied tensors are one. What they know of it is in `model.load_weights`. `IndexMap.trace` feeds tensors on torch's meta
device, which have shapes and no memory, through that function, under a mode that sees each operation before torch runs
it. A copy from a view of such a tensor into a view of a weight is recorded and not run. Both views are offsets, sizes
and strides, so a record is an affine map from positions in the checkpoint's tensor to places in the weight's memory.
Nothing of the model's size is allocated, and no weight is touched. What is no plain copy is refused. Weights that the
engine lays out anew after loading are mapped on by what `Relayout` knows of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltabus.bus.errors import UnsupportedTensorError
from deltabus.codecs import dtypes
from deltabus.codecs.overlap import overlapping
from deltabus.codecs.schema import TensorSpec

from .relayout import Relay, Relayout

__all__ = ["Copy", "IndexMap", "Load", "Places"]

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Loads weights by the names that checkpoints have for them; an engine's `model.load_weights`."""

_Indices = npt.NDArray[np.int64]
_CONSTANT = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default})
_MOST_REPEATS = 64
"""The most places that one element may be copied to by one operation."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy that a loader makes: a box of a checkpoint's tensor into a box of a weight's memory.

    Attributes:
        weight: The name of the weight in the engine's model.
        sizes: Of the box, along each of its dimensions; the strides in the source fall.
        source: Where it begins in the tensor, and its strides there, in elements.
        target: Where it begins in the weight's memory, and its strides there.
    """

    weight: str
    sizes: tuple[int, ...]
    source: tuple[int, tuple[int, ...]]
    target: tuple[int, tuple[int, ...]]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def places_of(self, positions: _Indices) -> Places:
        """Return which of some positions are copied, and where to."""
        (begin, source), (start, target) = self.source, self.target
        rest = positions - begin
        places = np.full_like(positions, start)
        inside = rest >= 0
        for size, step, stride in zip(self.sizes, source, target, strict=True):
            index, rest = np.divmod(rest, step) if step > 1 else (rest, np.zeros_like(rest))
            inside &= index < size
            places += index * stride
        inside &= rest == 0
        return Places(self.weight, inside, places[inside])


@dataclass(frozen=True, slots=True)
class Places:
    """Where some elements of a tensor lie in one weight.

    Attributes:
        weight: The name of the weight.
        chosen: Which of the elements lie there.
        places: Where these lie in the weight's memory, in elements from its beginning.
    """

    weight: str
    chosen: npt.NDArray[np.bool_]
    places: _Indices


class IndexMap:
    """Maps elements of a checkpoint's tensors to places in an engine's weights.

    Args:
        copies: For each tensor, by its name, what the loader copies of it; nothing for one that is not used.
        weights: The engine's weights by name.
        relays: What the engine does to weights after loading, by their names.

    Raises:
        UnsupportedTensorError: If something else is done to one than to move elements within its blocks.
    """

    def __init__(
        self,
        copies: Mapping[str, Sequence[Copy]],
        weights: Mapping[str, Tensor],
        *,
        relays: Mapping[str, Relay] | None = None,
    ) -> None:
        self.copies = copies
        self.weights = weights
        self._relayout = Relayout(relays or {}, weights)

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        specs: Iterable[TensorSpec],
        *,
        load: Load | None = None,
        relays: Mapping[str, Relay] | None = None,
    ) -> IndexMap:
        """Learn the map from a model's loader; no weight is touched.

        Args:
            model: The engine's model.
            specs: The tensors of the checkpoint; one with aliases is given to the loader under each name.
            load: The loader; None is the model's own `load_weights`.
            relays: What the engine does to weights after loading, by their names.

        Raises:
            UnsupportedTensorError: If the loader does anything with a tensor but copy parts of it, or the engine
                anything with a weight then but move elements within its blocks.
        """
        specs = list(specs)
        fed: list[tuple[str, Tensor]] = []
        names: dict[int, str] = {}
        for spec in specs:
            for name in (spec.name, *spec.aliases):
                tensor = torch.empty(spec.whole, dtype=dtypes.by_name(spec.dtype).torch, device="meta")
                fed.append((name, tensor))
                names[_memory(tensor)] = spec.name
        weights = _weights_of(model)
        held = {name: weight.data for name, weight in weights.items()}
        recorder = _Recorder(names, {_memory(weight): name for name, weight in reversed(weights.items())})
        loading = _load_of(model) if load is None else load
        try:
            with torch.no_grad(), recorder:
                loading(iter(fed))
        except UnsupportedTensorError:
            raise
        except Exception as error:
            raise UnsupportedTensorError(
                f"the engine's loader cannot be followed, because it looks into what it is to copy ({error!r}); "
                "deltabus cannot write into this model in place"
            ) from error
        finally:
            replaced = [name for name, weight in weights.items() if weight.data_ptr() != held[name].data_ptr()]
            for name in replaced:
                weights[name].data = held[name]
        if replaced:
            raise _refusal(replaced[0], "is exchanged by the engine's loader, and not written to")
        copies: dict[str, list[Copy]] = {spec.name: [] for spec in specs}
        for name, copy in recorder.copies:
            if copy not in copies[name]:
                copies[name].append(copy)
        return cls(copies, weights, relays=relays)

    def places_of(self, name: str, positions: _Indices) -> Iterator[Places]:
        """Yield where elements of a tensor lie, weight by weight; none for a tensor that is not used here."""
        for copy in self.copies[name]:
            loaded = copy.places_of(positions)
            yield replace(loaded, places=self.kept_at(loaded.weight, loaded.places))

    def kept_at(self, weight: str, places: _Indices) -> _Indices:
        """Return where the engine keeps what its loader puts to some places of a weight."""
        return self._relayout.places_of(weight, places)

    def unwritten(self) -> list[str]:
        """Return the weights that the loader writes nothing of: what they hold was made from others, or is constant."""
        written = {_memory(self.weights[copy.weight]) for copies in self.copies.values() for copy in copies}
        return [name for name, weight in self.weights.items() if weight.numel() and _memory(weight) not in written]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from tensors that were fed into weights, and refuses what else would write to weights."""

    def __init__(self, fed: Mapping[int, str], weights: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fed = fed
        self._weights = weights
        self._kept: list[Tensor] = []
        self._targets: dict[str, list[Tensor]] = {}
        self.copies: list[tuple[str, Copy]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self._fed.get(_memory(source))
            weight = self._weights.get(_memory(target))
            if name is not None and weight is not None:
                self.copies.extend((name, copy) for copy in _copies(weight, source.expand(target.shape), target))
                self._targets.setdefault(weight, []).append(target)
                return target
            if name is not None and not target.is_meta:
                raise _refusal(name, "is copied by the engine's loader to where no weight lies")
            if source.is_meta and weight is not None:
                raise _refusal(weight, "is computed by the engine's loader, and not copied")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                weight = self._weights.get(_memory(value))
                if weight is not None and func in _CONSTANT and not self._is_written(weight, value):
                    return value  # padding, which holds the constant already
                if weight is not None:
                    raise _refusal(weight, f"is computed by the engine's loader ({func})")
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, Tensor) and each.is_meta:
                self._kept.append(each)  # memory that was given back would be taken for another tensor's
        return result

    def _is_written(self, weight: str, view: Tensor) -> bool:
        """Return whether a copy was recorded into what a view shows."""
        return any(overlapping([view, target]) is not None for target in self._targets.get(weight, []))


def _copies(weight: str, source: Tensor, target: Tensor) -> Iterator[Copy]:
    """Yield a copy from one view to another as boxes; of a source that is repeated, one for each time.

    Raises:
        UnsupportedTensorError: If the source's view overlaps itself, or repeats elements too often.
    """
    dims = [each for each in zip(source.shape, source.stride(), target.stride(), strict=True) if each[0] != 1]
    if not math.prod(source.shape):
        return
    repeated = [(size, stride) for size, step, stride in dims if step == 0]
    if math.prod(size for size, _ in repeated) > _MOST_REPEATS:
        raise _refusal(weight, "is filled by the engine's loader with single elements")
    merged: list[tuple[int, int, int]] = []
    for size, step, stride in sorted((each for each in dims if each[1]), key=lambda each: -each[1]):
        if merged and merged[-1][1] == step * size and merged[-1][2] == stride * size:
            merged[-1] = (merged[-1][0] * size, step, stride)
        else:
            merged.append((size, step, stride))
    if any(step < inner * size for (_, step, _), (size, inner, _) in pairwise(merged)):
        raise _refusal(weight, "is copied by the engine's loader from a view that overlaps itself")
    sizes, steps, strides = (tuple(each[at] for each in merged) for at in range(3))
    for indices in product(*(range(size) for size, _ in repeated)):
        moved = sum(index * stride for index, (_, stride) in zip(indices, repeated, strict=True))
        start = int(target.storage_offset()) + moved
        yield Copy(weight, sizes, (int(source.storage_offset()), steps), (start, strides))


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: weight for name, weight in named if weight.numel()}


def _load_of(model: nn.Module) -> Load:
    load = getattr(model, "load_weights", None)
    if load is None:
        raise UnsupportedTensorError(
            f"{type(model).__name__} has no load_weights, by which its layout could be learned"
        )
    return load  # type: ignore[no-any-return]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _refusal(name: str, what: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(f"{name!r} {what}; deltabus cannot write it in place", tensor=name)
