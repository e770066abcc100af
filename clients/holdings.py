"""What each live model is known to hold, so that an update meets the very state it starts from."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary  # by identity: tensors compare element by element

from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Target

__all__ = ["Holdings"]


class Holdings:
    """Remembers models by the identity of their first tensor, without keeping them alive.

    A model whose tensors were exchanged for others is a model not seen before.
    """

    def __init__(self) -> None:
        self._held: MutableMapping[Tensor, VersionVector] = WeakIdKeyDictionary()

    def of(self, target: Target) -> VersionVector | None:
        """Return the state that the model holds; None when that is not known."""
        key = target.key
        return None if key is None else self._held.get(key)

    def record(self, target: Target, state: VersionVector) -> None:
        """Remember that the model now holds this state."""
        if target.key is not None:
            self._held[target.key] = state

    def forget(self, target: Target) -> None:
        """Forget what the model holds, before something that may leave it between two states."""
        if target.key is not None:
            self._held.pop(target.key, None)
