"""What is measured: the bits of whole states, and pairs of consecutive ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from deltabus.codecs import dtypes
from deltabus.codecs.changes import Bits, check_same_schema
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Shadow
from deltabus.codecs.state import State

__all__ = ["Pair", "Weights", "chunks"]

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Weights:
    """The bits of a whole state; the arrays are its own, and may be written to.

    Attributes:
        schema: The table of tensors.
        lines: The bits of all elements, one flat array for each dtype in the order in which the table first names them;
            in it, tensor after tensor.
    """

    schema: Schema
    lines: tuple[Bits, ...]

    @classmethod
    def empty(cls, schema: Schema) -> Self:
        """Return weights whose bits are whatever the memory holds."""
        sizes: dict[str, int] = {}
        for spec in schema.tensors:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.size
        return cls(schema, tuple(np.empty(size, dtypes.by_name(name).bits) for name, size in sizes.items()))

    @classmethod
    def of(cls, state: State) -> Self:
        """Return a copy of a state's bits, rounded as its schema says."""
        weights = cls.empty(state.schema)
        for segment, bits in zip(state.schema.segments, weights.segments(), strict=True):
            state.read(segment.index, bits)
        return weights

    @property
    def size(self) -> int:
        """Elements."""
        return self.schema.total

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.schema.nbytes

    def copy(self) -> Weights:
        """Return the same bits in other arrays."""
        return Weights(self.schema, tuple(line.copy() for line in self.lines))

    def take(self, other: Weights) -> None:
        """Copy the other's bits into these, by one thread."""
        for line, theirs in zip(self.lines, other.lines, strict=True):
            np.copyto(line, theirs)

    def same_as(self, other: Weights) -> bool:
        """Return whether all bits are equal."""
        both = zip(self.lines, other.lines, strict=True)
        return all(np.array_equal(a[place], b[place]) for a, b in both for place in chunks(a.size))

    def arrays(self) -> Iterator[Bits]:
        """Yield the tensors' bits in the table's order, in their shapes, as views."""
        lines = dict(zip(dict.fromkeys(spec.dtype for spec in self.schema.tensors), self.lines, strict=True))
        starts = dict.fromkeys(lines, 0)
        for spec in self.schema.tensors:
            start = starts[spec.dtype]
            starts[spec.dtype] += spec.size
            yield lines[spec.dtype][start : start + spec.size].reshape(spec.shape)

    def tensors(self, *, aliases: bool = True) -> dict[str, Tensor]:
        """Return the tensors by name; they share the arrays' memory.

        Args:
            aliases: Whether a tied tensor stands under all of its names, or under the first alone.
        """
        found: dict[str, Tensor] = {}
        for spec, bits in zip(self.schema.tensors, self.arrays(), strict=True):
            signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
            tensor = torch.from_numpy(signed).view(dtypes.by_name(spec.dtype).torch)
            found |= dict.fromkeys((spec.name, *(spec.aliases if aliases else ())), tensor)
        return found

    def shadow(self) -> Shadow:
        """Return a shadow that shares the arrays' memory."""
        return Shadow(self.schema, list(self.segments()))

    def segments(self) -> Iterator[Bits]:
        """Yield the segments' bits, as views; they follow each other in the lines."""
        lines = iter(self.lines)
        line, start = np.empty(0, np.uint8), 0
        for segment in self.schema.segments:
            if start == line.size:
                # Lines without elements have no segment.
                line, start = next(each for each in lines if each.size), 0
            yield line[start : start + segment.size]
            start += segment.size


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive states.

    Attributes:
        label: What it is called in tables.
        old: The earlier one.
        new: The later one, of the same schema.

    Raises:
        SchemaMismatchError: If the schemas differ.
    """

    label: str
    old: Weights
    new: Weights

    def __post_init__(self) -> None:
        check_same_schema(self.old.schema, self.new.schema)

    @property
    def schema(self) -> Schema:
        """The table of tensors of both."""
        return self.old.schema

    @property
    def changed(self) -> int:
        """Elements that differ."""
        both = zip(self.old.lines, self.new.lines, strict=True)
        return sum(int(np.count_nonzero(a[place] != b[place])) for a, b in both for place in chunks(a.size))


def chunks(size: int) -> Iterator[slice]:
    """Yield slices that cover `size` elements, small enough that no copy of a model is ever made."""
    for start in range(0, size, _CHUNK):
        yield slice(start, min(size, start + _CHUNK))
