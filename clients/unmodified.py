"""Which tensors cannot have changed since they were last captured, as far as torch counts their changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary  # by identity: tensors compare element by element

from deltabus.codecs.state import State

__all__ = ["Look", "Marks", "watch_optimizers"]


class _Mark(NamedTuple):
    tensor: weakref.ref[Tensor]
    stamp: tuple[object, ...]


class Look(NamedTuple):
    """The tensors of a state, as they were marked before they were compared.

    Attributes:
        marks: One for each tensor; None where changes cannot be seen.
        unmoved: Numbers of the tensors that are as they were captured last.
    """

    marks: Sequence[_Mark | None]
    unmoved: AbstractSet[int]


class Marks:
    """Remembers each tensor of the last captured state: the object, where its memory lies, and torch's counter.

    torch counts changes made in place by its own operations (`Tensor._version`). Fused optimizers are not among them
    (torch 2.13); what an optimizer may have stepped over is told by `touch`, see `watch_optimizers`.
    """

    def __init__(self) -> None:
        self._kept: Sequence[_Mark | None] = ()
        self._touched: MutableMapping[Tensor, int] = WeakIdKeyDictionary()

    def look(self, state: State) -> Look:
        """Mark the tensors of a state that is about to be compared with the last captured one, of equal schema."""
        marks = [self._mark(tensor) for tensor in state.tensors]
        same = range(min(len(marks), len(self._kept)))
        return Look(marks, {at for at in same if _unmoved(self._kept[at], marks[at], state.tensors[at])})

    def keep(self, look: Look, *, besides: AbstractSet[int] = frozenset()) -> None:
        """Remember the marks of a state that was captured; without the tensors of which something was held back."""
        self._kept = [None if at in besides else mark for at, mark in enumerate(look.marks)]

    def touch(self, tensors: Iterable[Tensor]) -> None:
        """Say that tensors may have changed without being counted."""
        for tensor in tensors:
            self._touched[tensor] = self._touched.get(tensor, 0) + 1

    def _mark(self, tensor: Tensor) -> _Mark | None:
        if tensor.is_inference():  # not counted at all
            return None
        stamp = (tensor.data_ptr(), tensor.stride(), tensor._version, self._touched.get(tensor, 0))
        return _Mark(weakref.ref(tensor), stamp)


def _unmoved(kept: _Mark | None, mark: _Mark | None, tensor: Tensor) -> bool:
    return kept is not None and mark is not None and kept.tensor() is tensor and kept.stamp == mark.stamp


def watch_optimizers(marks: Marks) -> Callable[[], None]:
    """Touch what any optimizer of this process steps over, and return what ends this; it keeps no marks alive.

    Touched before the step too, because an optimizer's own hooks, which may publish, run before those of all.
    """
    held = weakref.ref(marks)

    def touch(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = held()
        if found is not None:
            found.touch(each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)

    handles = (register_optimizer_step_pre_hook(touch), register_optimizer_step_post_hook(touch))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
