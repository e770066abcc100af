"""SGLang takes updates by its hook for custom weight loaders, in O(changed): all tensor-parallel ranks, or none.

Start the server with `--custom-weight-loader deltabus.integrations.sglang.load_patches`. Where the engine is at hand:

    for update in Subscriber(url, have=model_path).sync():
        engine.begin_weight_update()
        done, why = engine.update_weights_from_tensor(named_patches(update), load_format=LOAD_FORMAT)
        engine.end_weight_update()
        if not done:
            raise RuntimeError(why)
        update.mark_applied()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltabus.bus.errors import CorruptPayloadError, EngineError, UsageError
from deltabus.codecs.on_device import as_array, as_tensor
from deltabus.codecs.schema import TensorSpec
from deltabus.patches import TensorPatch
from deltabus.update import Update

from .live_weights import LiveWeights, StagedWrite

__all__ = ["LOAD_FORMAT", "load_patches", "load_together", "named_patches"]

LOAD_FORMAT = "deltabus.integrations.sglang.load_patches"
"""What `update_weights_from_tensor` is told as `load_format`."""

_SPECS = "deltabus.specs"
_HOST = torch.device("cpu")
_T = TypeVar("_T")

_known: MutableMapping[nn.Module, LiveWeights] = WeakKeyDictionary()


def named_patches(update: Update) -> list[tuple[str, Tensor]]:
    """Return an update as named tensors, which SGLang hands on to `load_patches` in each worker.

    Raises:
        UsageError: If it carries the whole state.
    """
    if update.whole:
        raise UsageError(
            "this update carries the whole state; open the subscriber with `have=` the checkpoint that the server was "
            "started from, or load the state with update_weights_from_disk"
        )
    specs = [spec for schema in update.schemas for spec in schema.tensors]
    number = {id(spec): at for at, spec in enumerate(specs)}
    named = [(_SPECS, torch.frombuffer(bytearray(msgspec.json.encode(specs)), dtype=torch.uint8))]
    for at, patch in enumerate(update.patches()):
        assert patch.old is not None
        name = f"{at}.{number[id(patch.spec)]}"
        named += [
            (f"{name}.positions", torch.from_numpy(patch.positions)),
            (f"{name}.old", as_tensor(patch.old, _HOST)),
            (f"{name}.new", as_tensor(patch.new, _HOST)),
        ]
    return named


def load_patches(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write an update into a worker's model: all of it in all tensor-parallel ranks, or on any error nothing in any.

    The layout is learned from the model's `load_weights` at the first call. That it is the true one, and that the
    weights are those that the update starts from, is seen at each element that is touched, before the first write.

    Args:
        model: The worker's model.
        named_tensors: What `named_patches` returned.

    Raises:
        CorruptPayloadError: If they are something else.
        UnsupportedTensorError: If the layout cannot be learned, or weights are derived from others.
        SchemaMismatchError: If the topic's tensors changed since the layout was learned.
        DivergedError: If an element does not hold the bits that the update starts from.
        EngineError: If another rank could not take the update, it says why; or if one is lost.
    """
    load_together(model, named_tensors, _tensor_parallel_ranks())


def load_together(
    model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]], ranks: dist.ProcessGroup | None
) -> None:
    """Write an update as `load_patches` does, in ranks that all call this with the same update.

    They hear from each other twice: whether each could take it, before the first write, and whether each wrote it. How
    long they wait for each other is the limit of their group.

    Args:
        model: The rank's model.
        named_tensors: What `named_patches` returned.
        ranks: Those that take it together, over a backend for host memory; None is this one alone.

    Raises:
        CorruptPayloadError: If the tensors are something else.
        UnsupportedTensorError: If the layout cannot be learned, or weights are derived from others.
        SchemaMismatchError: If the topic's tensors changed since the layout was learned.
        DivergedError: If an element does not hold the bits that the update starts from.
        EngineError: If another rank could not take the update, it says why; or if one is lost.
    """
    weights = _known.get(model)
    if weights is None:
        weights = LiveWeights(model)
    staged = _in_step(lambda: _staged(weights, dict(named_tensors)), ranks)
    _in_step(staged.write, ranks, undo=staged.revert)
    _known[model] = weights


def _staged(weights: LiveWeights, tensors: dict[str, Tensor]) -> StagedWrite:
    try:
        specs = msgspec.json.decode(tensors.pop(_SPECS).cpu().numpy().tobytes(), type=list[TensorSpec])
        patches = list(_patches(specs, tensors))
    except (KeyError, ValueError, IndexError, msgspec.DecodeError) as error:
        raise CorruptPayloadError(
            f"these tensors are no update of deltabus ({error!r}); send what named_patches returns"
        ) from error
    weights.learn(specs)
    return weights.stage(patches)


def _in_step(
    work: Callable[[], _T], ranks: dist.ProcessGroup | None, *, undo: Callable[[], object] = lambda: None
) -> _T:
    """Do something in every rank; where it fails in one, or one is lost, undo it in the others, and raise in all."""
    try:
        done = work()
    except Exception as error:
        _told(f"{type(error).__name__}: {error}", ranks)
        raise
    try:
        told = _told("", ranks)
    except BaseException:
        undo()
        raise
    failures = {rank: text for rank, text in enumerate(told) if text}
    if failures:
        undo()
        rank, text = next(iter(failures.items()))
        raise EngineError(f"rank {rank} of the engine could not take the update, so that no rank did: {text}")
    return done


def _told(failure: str, ranks: dist.ProcessGroup | None) -> list[str]:
    """Tell the ranks what failed here, nothing if all went well, and return what each of them told.

    Raises:
        EngineError: If they cannot be heard.
    """
    if ranks is None:
        return [failure]
    told = [""] * dist.get_world_size(ranks)
    try:
        dist.all_gather_object(told, failure, group=ranks)
    except RuntimeError as error:
        raise EngineError(
            f"the ranks of the engine could not tell each other whether they took the update ({error}), so that this "
            f"one did not{'; here it failed: ' if failure else ''}{failure}; start the engine anew"
        ) from error
    return told


def _tensor_parallel_ranks() -> dist.ProcessGroup | None:
    """Return the ranks that SGLang divides a model among, all of which take each update; None outside of SGLang."""
    state = sys.modules.get("sglang.srt.distributed.parallel_state")
    ranks: dist.ProcessGroup | None = None if state is None else state.get_tp_group().cpu_group
    return ranks


def _patches(specs: list[TensorSpec], tensors: dict[str, Tensor]) -> Iterator[TensorPatch]:
    for name in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        positions, old, new = (tensors[f"{name}.{part}"] for part in ("positions", "old", "new"))
        if not positions.shape == old.shape == new.shape:
            raise ValueError(f"parts of {name} differ in length")
        spec = specs[int(name.partition(".")[2])]
        yield TensorPatch(spec, positions.cpu().numpy(), as_array(old), as_array(new))
