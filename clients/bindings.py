"""Which tensors of a model a topic's states go into, found once and not at each update."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary  # by identity: tensors compare element by element

from deltabus.codecs.apply import Target
from deltabus.codecs.schema import Schema
from deltabus.codecs.slices import TensorSlice, is_distributed
from deltabus.codecs.state import memory_key

__all__ = ["Bindings"]

_Entries = list[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class _Binding:
    """What a source held when it was bound.

    Attributes:
        schemas: What it was bound to.
        names: The names of its entries, in its order.
        held: Its tensors, weakly; None for an entry that is no tensor.
        memory: Where each tensor lay, and how.
        places: For each schema, and each tensor of it, the entries that are its copies.
    """

    schemas: Sequence[Schema]
    names: list[str]
    held: list[weakref.ref[Tensor] | None]
    memory: list[object]
    places: list[list[tuple[int, ...]]]

    @classmethod
    def of(cls, entries: _Entries, targets: Sequence[Target]) -> _Binding:
        held = [weakref.ref(entry) if isinstance(entry, Tensor) else None for _, entry in entries]
        place = {id(entry): at for at, (_, entry) in enumerate(entries)}
        places = [[tuple(place[id(tensor)] for tensor in copies) for copies in target.copies] for target in targets]
        return cls(
            [target.schema for target in targets],
            [name for name, _ in entries],
            held,
            list(_memory_of(entries)),
            places,
        )

    def is_of(self, entries: _Entries, schemas: Sequence[Schema]) -> bool:
        """Return whether the entries are still the same tensors, in the same memory, under the same names."""
        return (
            len(self.schemas) == len(schemas)
            and all(old is new for old, new in zip(self.schemas, schemas, strict=True))
            and len(self.names) == len(entries)
            and all(name == entry[0] for name, entry in zip(self.names, entries, strict=True))
            and all(
                not isinstance(entry, Tensor) if held is None else held() is entry
                for held, (_, entry) in zip(self.held, entries, strict=True)
            )
            and all(old == new for old, new in zip(self.memory, _memory_of(entries), strict=True))
        )


class Bindings:
    """Binds models to schemas, and remembers what was found without keeping models alive.

    A model of which a tensor was exchanged, added or removed, or has other memory, shape or dtype than before, is bound
    anew, with all checks. Of models that share their first tensor, the last one is remembered.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, _Binding] = WeakIdKeyDictionary()

    def bind(self, source: nn.Module | Mapping[str, Tensor], schemas: Sequence[Schema]) -> list[Target]:
        """Return the targets for a model's tensors; as `Target.bind_all` does, but faster the next time.

        Raises:
            SchemaMismatchError: If tensors are missing or have another shape or dtype, share memory with each other, or
                have elements that share memory.
            UnsupportedTensorError: If a tensor is of a kind that cannot be written, or a value is no tensor.
            UsageError: If the source is neither a module nor a mapping of names.
        """
        entries = _entries(source)
        if any(isinstance(entry, TensorSlice) or is_distributed(entry) for _, entry in entries):
            return Target.bind_all(source, schemas)
        first = next((entry for _, entry in entries if isinstance(entry, Tensor)), None)
        known = None if first is None else self._known.get(first)
        if known is not None and known.is_of(entries, schemas):
            return [
                Target(schema, [[_tensor(entries, at) for at in copies] for copies in places])
                for schema, places in zip(schemas, known.places, strict=True)
            ]
        targets = Target.bind_all(source, schemas)
        if first is not None:
            self._known[first] = _Binding.of(entries, targets)
        return targets


def _entries(source: nn.Module | Mapping[str, Tensor]) -> _Entries:
    """Return what a source holds by name, as `named_parts` sees it; nothing of what is neither module nor mapping."""
    if isinstance(source, nn.Module):
        return list(source.state_dict(keep_vars=True).items())
    return list(source.items()) if isinstance(source, Mapping) else []


def _tensor(entries: _Entries, at: int) -> Tensor:
    tensor = entries[at][1]
    assert isinstance(tensor, Tensor)
    return tensor


def _memory_of(entries: _Entries) -> Iterator[object]:
    # The shape stands beside it for tensors without elements, which have no memory.
    return ((memory_key(entry), entry.shape) for _, entry in entries if isinstance(entry, Tensor))
