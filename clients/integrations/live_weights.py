"""An engine's weights, as updates are written into them: checked first, all or nothing, taken back on request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError, UnsupportedTensorError
from deltabus.codecs import dtypes
from deltabus.codecs.changes import Bits
from deltabus.codecs.held import Held, first_not_holding, scatter, take
from deltabus.codecs.on_device import as_array, as_tensor
from deltabus.codecs.schema import TensorSpec
from deltabus.codecs.state import memory_key
from deltabus.patches import TensorPatch

from .index_map import Copy, IndexMap, Load
from .relayout import Relay

__all__ = ["LiveWeights", "StagedWrite"]

_SAMPLES = 256
"""Elements of each copy that are compared with the checkpoint."""

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Run:
    """What one patch writes into one weight.

    Attributes:
        spec: The tensor of the topic.
        weight: The name of the weight.
        elements: The tensor's elements, counted row-major.
        places: Where they lie in the weight's memory.
        old: The bits that lie there.
        new: The bits that shall.
    """

    spec: TensorSpec
    weight: str
    elements: npt.NDArray[np.int64]
    places: npt.NDArray[np.uint32]
    old: Bits
    new: Bits


class LiveWeights:
    """The weights of an engine's model, which keeps them otherwise than the topic's tensors.

    One thread at a time uses it. Nothing else writes to the weights; the engine may read them but while `write` runs.

    Args:
        model: The engine's model.
        load: Loads weights by their names in checkpoints; None is the model's own `load_weights`.
        constants: Shell patterns of weights that hold no trained values, though no checkpoint has them: they stay as
            they are.
        relays: What the engine did to weights after loading, by their names, where that moved elements.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        load: Load | None = None,
        constants: Sequence[str] = (),
        relays: Mapping[str, Relay] | None = None,
    ) -> None:
        self._model = model
        self._load = load
        self._constants = constants
        self._relays = relays
        self._map: IndexMap | None = None
        self._specs: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._layout: dict[str, tuple[object, ...]] = {}

    def learn(self, specs: Iterable[TensorSpec], *, reference: Mapping[str, Tensor] | None = None) -> None:
        """Learn where the tensors of a topic lie; does nothing where that is known already.

        Args:
            specs: The topic's tensors.
            reference: The checkpoint that the engine's weights were loaded from, and still equal. A sample of each
                tensor is compared with it, which finds weights that were laid out anew after loading. None leaves that
                out: then deltas, which name the old bits, must show it.

        Raises:
            UnsupportedTensorError: If the layout cannot be learned, weights are derived from others, or the sample
                shows that weights lie otherwise than the loader put them.
            SchemaMismatchError: If tensors were added or changed their shape since the layout was learned, or the
                checkpoint lacks one.
        """
        specs = list({spec.name: spec for spec in specs}.values())
        wanted = {spec.name: (spec.dtype, spec.whole) for spec in specs}
        if self._map is not None:
            changed = sorted(name for name, kind in wanted.items() if self._specs.get(name) != kind)
            if changed:
                raise SchemaMismatchError(
                    f"the topic has tensor {changed[0]!r} in another shape or dtype than when this engine learned its "
                    "layout, or it is new; restart the engine from a newer checkpoint",
                    tensor=changed[0],
                )
            return
        found = IndexMap.trace(self._model, specs, load=self._load, relays=self._relays)
        self._check_derived(found)
        layout = {name: _layout_of(weight) for name, weight in found.weights.items()}
        if reference is not None:
            _check_sample(found, specs, reference)
        self._map, self._specs, self._layout = found, wanted, layout

    def stage(self, patches: Iterable[TensorPatch]) -> StagedWrite:
        """Find what patches write here; the engine may go on meanwhile.

        Where the whole state is written, what differs from it is found here, which takes 8 bytes of host memory and
        more for each element that does.

        Raises:
            SchemaMismatchError: If a patch is of another tensor than those learned.
            CorruptPayloadError: If positions do not increase, or lie outside of the tensor.
            UnsupportedTensorError: If the engine laid its weights out anew since.
            DivergedError: If an element does not hold the bits that its patch starts from.
        """
        learned = self._learned()
        runs: list[_Run] = []
        for patch in patches:
            spec = patch.spec
            if self._specs.get(spec.name) != (spec.dtype, spec.whole):
                raise SchemaMismatchError(f"tensor {spec.name!r} is not among those learned", tensor=spec.name)
            _check_positions(patch)
            for found in learned.places_of(spec.name, patch.positions):
                if found.places.size:
                    weight = learned.weights[found.weight]
                    places = _narrow(found.weight, found.places)
                    new = _bits_in(weight, patch.new[found.chosen], spec)
                    elements = patch.positions[found.chosen]
                    if patch.old is None:
                        old = take(_memory_of(weight), places)
                        differs = old != new
                        places, old, new, elements = places[differs], old[differs], new[differs], elements[differs]
                    else:
                        old = _bits_in(weight, patch.old[found.chosen], spec)
                    if places.size:
                        runs.append(_Run(spec, found.weight, elements, places, old, new))
        staged = StagedWrite(self, runs)
        staged.check()
        return staged

    def memory(self, name: str) -> Held:
        """Return the memory of a weight as integers.

        Raises:
            UnsupportedTensorError: If the engine laid the weight out anew since its layout was learned.
        """
        weight = self._learned().weights[name]
        if _layout_of(weight) != self._layout[name]:
            raise UnsupportedTensorError(
                f"the engine laid {name!r} out anew since deltabus learned its layout; restart the engine", tensor=name
            )
        return _memory_of(weight)

    def _learned(self) -> IndexMap:
        if self._map is None:
            raise SchemaMismatchError("the layout of the engine's weights was not learned yet; call `learn` first")
        return self._map

    def _check_derived(self, found: IndexMap) -> None:
        state = self._model.state_dict(keep_vars=True)  # without buffers that are made anew whenever a model is
        suspects = [name for name in found.unwritten() if name in state and found.weights[name].numel() > 1]
        suspects += _loose_tensors(self._model, found)
        derived = [name for name in suspects if not any(fnmatchcase(name, pattern) for pattern in self._constants)]
        if derived:
            raise UnsupportedTensorError(
                f"{len(derived)} of the engine's tensors come from none of the topic's, {derived[0]!r} among them: "
                "derived from weights they would be stale after an update; if constant, name them in `constants`",
                tensor=derived[0],
            )


class StagedWrite:
    """An update that lies ready: what is left is to compare the touched elements and to write them."""

    def __init__(self, weights: LiveWeights, runs: Sequence[_Run]) -> None:
        """Use `LiveWeights.stage`."""
        self._weights = weights
        self._runs = runs

    @property
    def count(self) -> int:
        """Elements that are written."""
        return sum(run.places.size for run in self._runs)

    def check(self) -> None:
        """Check that every touched element holds its old bits, and write nothing.

        Raises:
            DivergedError: If one does not; the error names the tensor.
            UnsupportedTensorError: If the engine laid its weights out anew since.
        """
        self._check([run.old for run in self._runs])

    def write(self) -> None:
        """Check that every touched element holds its old bits, then write the new ones: all or nothing.

        Raises:
            DivergedError: If one does not; nothing was written. Or if writing failed, and taking it back too.
            UnsupportedTensorError: If the engine laid its weights out anew since; nothing was written.
        """
        self.check()
        self._exchange([run.new for run in self._runs], [run.old for run in self._runs])

    def revert(self) -> None:
        """Write the old bits back, where `write` has written the new ones: all or nothing.

        Raises:
            DivergedError: As `write` does.
            UnsupportedTensorError: As `write` does.
        """
        self._check([run.new for run in self._runs])
        self._exchange([run.old for run in self._runs], [run.new for run in self._runs])

    def _check(self, expected: Sequence[Bits]) -> None:
        for run, bits in zip(self._runs, expected, strict=True):
            held = self._weights.memory(run.weight)
            wrong = first_not_holding(held, run.places, bits)
            if wrong >= 0:
                there = int(take(held, run.places[wrong : wrong + 1])[0])
                width = 2 + 2 * bits.itemsize
                raise DivergedError(
                    f"{run.weight!r} holds {there:#0{width}x} where element {run.elements[wrong]} of {run.spec.name!r} "
                    f"lies, and the update starts from {int(bits[wrong]):#0{width}x}; nothing was written. Either the "
                    "engine holds other weights than the topic had, or it laid them out anew after loading",
                    tensor=run.spec.name,
                )

    def _exchange(self, after: Sequence[Bits], before: Sequence[Bits]) -> None:
        try:
            self._put(after)
        except BaseException as error:
            try:
                self._put(before)
            except BaseException as second:
                raise DivergedError(
                    f"writing an update failed ({error!r}), and taking it back failed too; the engine holds a mixture "
                    "of two states: restart it"
                ) from second
            raise

    def _put(self, bits: Sequence[Bits]) -> None:
        for run, values in zip(self._runs, bits, strict=True):
            scatter(self._weights.memory(run.weight), run.places, values)


def _memory_of(weight: Tensor) -> Held:
    """Return all of the memory that a weight lies in, as integers of its elements' width."""
    storage = weight.untyped_storage()
    size = storage.nbytes() // weight.element_size()
    flat = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(storage, 0, (size,), (1,))
    integers = flat.view(dtypes.INTEGERS[weight.element_size()])
    return as_array(integers) if integers.device == _HOST else integers


def _bits_in(weight: Tensor, bits: Bits, spec: TensorSpec) -> Bits:
    """Return bits of a topic's tensor as a weight holds them, rounded as the loader's copy rounds."""
    dtype = dtypes.by_name(spec.dtype)
    if weight.dtype == dtype.torch:
        return bits
    values = as_tensor(bits, _HOST).view(dtype.torch).to(weight.dtype)
    return as_array(values.view(dtypes.INTEGERS[weight.element_size()]))


def _check_positions(patch: TensorPatch) -> None:
    positions, size = patch.positions, math.prod(patch.spec.whole)
    if positions.size and not (positions[0] >= 0 and positions[-1] < size and np.all(positions[1:] > positions[:-1])):
        raise CorruptPayloadError(
            f"positions in {patch.spec.name!r} do not increase within its {size} elements", tensor=patch.spec.name
        )


def _narrow(weight: str, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    if int(places.max()) >= 1 << 32:
        raise UnsupportedTensorError(f"{weight!r} has more than 2^32 elements on one device", tensor=weight)
    return places.astype(np.uint32)


def _layout_of(weight: Tensor) -> tuple[object, ...]:
    return (*memory_key(weight), weight.untyped_storage().nbytes())


def _check_sample(found: IndexMap, specs: Sequence[TensorSpec], reference: Mapping[str, Tensor]) -> None:
    generator = np.random.default_rng(0)
    judged: dict[str, bool] = {}
    for spec in specs:
        copies = found.copies[spec.name]
        loaded = next((reference[name] for name in (spec.name, *spec.aliases) if name in reference), None)
        if not copies:
            continue
        if loaded is None:
            raise SchemaMismatchError(
                f"the checkpoint that the engine was loaded from lacks {spec.name!r}, so it cannot be told whether the "
                "engine keeps it where its loader put it",
                tensor=spec.name,
            )
        kind = _as_loaded(spec, loaded)
        for copy in copies:
            weight = found.weights[copy.weight]
            positions, places = _sampled(copy, generator)
            places = found.kept_at(copy.weight, places)
            bits = _bits_in(weight, _elements(loaded, positions), kind)
            if first_not_holding(_memory_of(weight), _narrow(copy.weight, places), bits) >= 0:
                raise UnsupportedTensorError(
                    f"the engine does not hold {spec.name!r} where its loader put it, in {copy.weight!r}: it was laid "
                    "out anew after loading (kernels' own layouts of experts, prepacking, quantisation), or changed "
                    "since. deltabus does not write into such weights; nothing was written",
                    tensor=spec.name,
                )
            judged[copy.weight] = judged.get(copy.weight, False) or weight.dim() < 2 or bool(np.any(bits != bits[0]))
    unjudged = [name for name, known in judged.items() if not known]
    if unjudged:
        raise UnsupportedTensorError(
            f"all elements of {unjudged[0]!r} that were looked at are equal, so it cannot be told how the engine laid "
            "them out; start the engine from a later checkpoint",
            tensor=unjudged[0],
        )


def _sampled(copy: Copy, generator: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return some of the elements that are copied: their positions in the tensor, and their places in the weight."""
    numbers = np.unique(generator.integers(0, copy.size, _SAMPLES))
    indices = np.unravel_index(numbers, copy.sizes) if copy.sizes else ()
    positions, places = (
        begin + sum((index * stride for index, stride in zip(indices, strides, strict=True)), np.zeros_like(numbers))
        for begin, strides in (copy.source, copy.target)
    )
    return positions, places


def _elements(tensor: Tensor, positions: npt.NDArray[np.int64]) -> Bits:
    integers = tensor.view(dtypes.INTEGERS[tensor.element_size()])
    return as_array(integers.reshape(-1)[torch.from_numpy(positions)])


def _as_loaded(spec: TensorSpec, loaded: Tensor) -> TensorSpec:
    """Return what a checkpoint has of a tensor, maybe in another dtype.

    Raises:
        SchemaMismatchError: If it has another shape.
    """
    if tuple(loaded.shape) != spec.whole:
        raise SchemaMismatchError(
            f"the engine's checkpoint has {spec.name!r} as {tuple(loaded.shape)}, the topic as {spec.whole}",
            tensor=spec.name,
        )
    return TensorSpec(name=spec.name, dtype=dtypes.of_torch(loaded.dtype, spec.name).name, shape=spec.whole)


def _loose_tensors(model: nn.Module, found: IndexMap) -> Iterator[str]:
    """Yield matrices that modules hold beside their parameters and buffers, in memory of their own."""
    known = {weight.untyped_storage().data_ptr() for weight in found.weights.values()}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if not isinstance(value, Tensor) or name == "kv_cache":
                continue
            if value.dim() > 1 and value.is_floating_point() and value.untyped_storage().data_ptr() not in known:
                yield f"{prefix}.{name}" if prefix else name
