"""What each live model is known to hold, so that an update meets the very state it starts from."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
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

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        others = tensors[1:]
        return (
            len(others) == len(self.others)
            and all(held() is tensor for held, tensor in zip(self.others, others, strict=True))
            and self.writes == _writes(tensors)
        )


class Holdings:
    """Remembers models by the identity of their tensors, without keeping them alive.

    A model of which any tensor was exchanged for another, or written to by somebody else, is a model not seen before.
    Writes through `.data` leave no trace in torch's version counters, and are not noticed here. Of models that share
    a tensor, the last one may be the only one that is remembered.
    """

    def __init__(self) -> None:
        self._held: MutableMapping[Tensor, _Holding] = WeakIdKeyDictionary()

    def of(self, targets: Sequence[Target]) -> VersionVector | None:
        """Return the state that the model holds whose tensors these are; None when that is not known."""
        tensors = _tensors(targets)
        holding = self._held.get(tensors[0]) if tensors else None
        return holding.state if holding is not None and holding.is_of(tensors) else None

    def record(self, targets: Sequence[Target], state: VersionVector) -> None:
        """Remember that the model now holds this state."""
        tensors = _tensors(targets)
        if tensors:
            first, *others = tensors
            self._held[first] = _Holding(state, tuple(map(weakref.ref, others)), _writes(tensors))

    def forget(self, targets: Sequence[Target]) -> None:
        """Forget what the model holds, before something that may leave it between two states."""
        tensors = _tensors(targets)
        if tensors:
            self._held.pop(tensors[0], None)


def _tensors(targets: Sequence[Target]) -> list[Tensor]:
    """Return the model's tensors, each once, in an order that does not depend on who writes which of them."""
    # By number, since several writers may own slices of one, and share them out anew when they restart.
    found = {id(tensor): tensor for target in targets for tensor in target.tensors}
    return [found[number] for number in sorted(found)]


def _writes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return how often each tensor was written to; tensors of inference mode do not count that."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
