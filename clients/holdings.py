"""What each live model is known to hold, so that an update meets the very state it starts from."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary  # by identity: tensors compare element by element

from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Target

__all__ = ["Holdings"]


@dataclass(frozen=True, slots=True)
class _Holding:
    state: VersionVector
    others: tuple[weakref.ref[Tensor], ...]
    writes: tuple[int, ...]

    def is_of(self, target: Target) -> bool:
        others = target.tensors[1:]
        return (
            len(others) == len(self.others)
            and all(held() is tensor for held, tensor in zip(self.others, others, strict=True))
            and self.writes == _writes(target)
        )


class Holdings:
    """Remembers models by the identity of their tensors, without keeping them alive.

    A model of which any tensor was exchanged for another, or written to by somebody else, is a model not seen before.
    Writes through `.data` leave no trace in torch's version counters, and are not noticed here. Of models that share
    their first tensor, the last one is remembered.
    """

    def __init__(self) -> None:
        self._held: MutableMapping[Tensor, _Holding] = WeakIdKeyDictionary()

    def of(self, target: Target) -> VersionVector | None:
        """Return the state that the model holds; None when that is not known."""
        holding = self._held.get(target.tensors[0]) if target.tensors else None
        return holding.state if holding is not None and holding.is_of(target) else None

    def record(self, target: Target, state: VersionVector) -> None:
        """Remember that the model now holds this state."""
        if target.tensors:
            first, *others = target.tensors
            self._held[first] = _Holding(state, tuple(map(weakref.ref, others)), _writes(target))

    def forget(self, target: Target) -> None:
        """Forget what the model holds, before something that may leave it between two states."""
        if target.tensors:
            self._held.pop(target.tensors[0], None)


def _writes(target: Target) -> tuple[int, ...]:
    """Return how often each tensor was written to; tensors of inference mode do not count that."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in target.tensors)
