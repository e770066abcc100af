"""Schemas: what tensors a state has, and how they are cut into segments.

A schema is an ordered table of tensors. Its bytes are JSON, and their SHA-256 names it. All tensors of one dtype, in
the order of the table, row-major, form one line of elements; the line is cut every `segment_elements` elements. A
segment is the unit that is scanned, encoded, stored and decoded by itself, so that memory is bounded by segments in
flight. Small tensors share a segment; a large one spans several.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from deltabus.bus.errors import CodecError, MessageFormatError, SchemaMismatchError

from . import dtypes
from .dtypes import DType

__all__ = ["FORMAT", "MAX_SCHEMA_BYTES", "SEGMENT_ELEMENTS", "Box", "Piece", "Schema", "Segment", "TensorSpec"]

FORMAT = 1
"""The version of the table's format that this code writes and reads."""

SEGMENT_ELEMENTS = 1 << 22
"""Elements of a segment, unless a schema says otherwise."""

MAX_SCHEMA_BYTES = 256 << 20
"""The largest schema that is read: about a million tensors."""

_MAX_SEGMENTS = 1 << 20
"""What keeps a few bytes from promising a state whose mere table of segments fills the memory."""

_MAX_DIMENSIONS = 64

_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Box(Struct, frozen=True, kw_only=True):
    """Where a slice lies in the tensor that it is a part of.

    Attributes:
        start: Its first index along each dimension.
        whole: The shape of the whole tensor.
    """

    start: tuple[_Size, ...]
    whole: tuple[_Size, ...]


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One tensor of a schema, or the slice of it that a writer owns.

    Attributes:
        name: Its canonical name.
        dtype: Its safetensors dtype name, such as `BF16`.
        shape: Its shape; of a slice, the slice's own.
        aliases: Other canonical names of the same storage (tied tensors).
        slice: Where the slice lies; unset when it is the whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[_Size, ...]
    aliases: tuple[str, ...] = ()
    slice: Box | UnsetType = UNSET

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.shape if self.slice is UNSET else self.slice.whole

    @property
    def start(self) -> tuple[int, ...]:
        """The first index along each dimension of the whole tensor."""
        return (0,) * len(self.shape) if self.slice is UNSET else self.slice.start

    def overlaps(self, other: TensorSpec) -> bool:
        """Return whether two slices of one tensor have elements in common; those of other shapes count as if."""
        if self.whole != other.whole:
            return True
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        return self.size > 0 and other.size > 0 and all(a < b + m and b < a + n for a, n, b, m in ends)

    @property
    def seed(self) -> int:
        """Where this tensor's positions begin in the digest: 64 bits of a hash of name, dtype, shape and slice."""
        numbers = [self.shape, *(() if self.slice is UNSET else (self.slice.start, self.slice.whole))]
        text = "\0".join((self.name, self.dtype, *(",".join(map(str, sizes)) for sizes in numbers)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's elements inside a segment.

    Attributes:
        tensor: Index of the tensor in the schema.
        start: First element, counted row-major in the tensor.
        stop: One past the last element.
        offset: Where the run begins in the segment.
    """

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of elements of one dtype that is coded by itself.

    Attributes:
        index: Its number in the schema.
        dtype: The type of all its elements.
        size: Number of elements, at least 1.
        pieces: The tensors' runs that it consists of, in order, without gaps.
    """

    index: int
    dtype: DType
    size: int
    pieces: tuple[Piece, ...]


class Schema(Struct, frozen=True, kw_only=True, dict=True):
    """The ordered table of a state's tensors.

    Attributes:
        tensors: Each tensor once, sorted by name.
        segment_elements: Elements of a segment.
        format: The version of this table's format.
    """

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=1 << 20)]
    segment_elements: Annotated[int, Meta(ge=1, le=1 << 28)] = SEGMENT_ELEMENTS
    format: int = FORMAT

    def __post_init__(self) -> None:
        names = [name for tensor in self.tensors for name in (tensor.name, *tensor.aliases)]
        if len(set(names)) != len(names):
            raise ValueError("a tensor is named twice")
        if [tensor.name for tensor in self.tensors] != sorted(tensor.name for tensor in self.tensors):
            raise ValueError("tensors are not sorted by name")
        "".join(names).encode()  # it fails for what is no text, such as half of a surrogate pair
        if any(len(tensor.shape) > _MAX_DIMENSIONS for tensor in self.tensors):
            raise ValueError(f"a tensor has more than {_MAX_DIMENSIONS} dimensions")
        for tensor in self.tensors:
            ends = [start + size for start, size in zip(tensor.start, tensor.shape, strict=False)]
            if not len(tensor.shape) == len(tensor.start) == len(tensor.whole):
                raise ValueError("a slice has other dimensions than its tensor")
            if any(end > size for end, size in zip(ends, tensor.whole, strict=True)):
                raise ValueError("a slice reaches beyond its tensor")
            if math.prod(tensor.whole) >= 1 << 63:
                raise ValueError("a tensor has more than 2^63 elements")
        if self.total >= 1 << 63:
            raise ValueError("more than 2^63 elements")
        by_dtype: dict[str, int] = {}
        for tensor in self.tensors:
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.size
        if sum(-(-size // self.segment_elements) for size in by_dtype.values()) > _MAX_SEGMENTS:
            raise ValueError(f"more than {_MAX_SEGMENTS} segments of {self.segment_elements} elements")

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], *, segment_elements: int = SEGMENT_ELEMENTS) -> Schema:
        """Return the schema of these tensors, in canonical order.

        Raises:
            SchemaMismatchError: If a name occurs twice or is no text, or there is too much of something.
        """
        try:
            return cls(tensors=tuple(sorted(tensors, key=lambda t: t.name)), segment_elements=segment_elements)
        except ValueError as error:
            raise SchemaMismatchError(f"these tensors make no schema: {error}") from error

    @classmethod
    def decode(cls, data: bytes) -> Schema:
        """Return the schema that these bytes hold, checked.

        Raises:
            MessageFormatError: If they hold none, or one of another format.
        """
        if len(data) > MAX_SCHEMA_BYTES:
            raise MessageFormatError(f"a schema of {len(data)} bytes is over the limit of {MAX_SCHEMA_BYTES}")
        try:
            schema = msgspec.json.decode(data, type=cls)
            for tensor in schema.tensors:
                dtypes.by_name(tensor.dtype)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, CodecError) as error:
            raise MessageFormatError(f"the schema cannot be read: {error}") from error
        if schema.format != FORMAT:
            raise MessageFormatError(f"the schema has format {schema.format}, this reader knows {FORMAT}; upgrade here")
        # Its name is the hash of these very bytes, which another writer may order or space otherwise than `encode`.
        schema.__dict__["checksum"] = hashlib.sha256(data).digest()
        return schema

    def encode(self) -> bytes:
        """Return the schema's bytes, the same for equal schemas."""
        return msgspec.json.encode(self, order="deterministic")

    @cached_property
    def checksum(self) -> bytes:
        """The SHA-256 of the schema's bytes, as they were decoded or else as `encode` returns them, which names it."""
        return hashlib.sha256(self.encode()).digest()

    @cached_property
    def total(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each tensor; see `TensorSpec.seed`."""
        return tuple(tensor.seed for tensor in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of all tensors, uncompressed."""
        return sum(tensor.size * dtypes.by_name(tensor.dtype).size for tensor in self.tensors)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, dtype by dtype in the order in which the table first names them."""
        segments: list[Segment] = []
        for dtype in map(dtypes.by_name, dict.fromkeys(tensor.dtype for tensor in self.tensors)):
            pieces: list[Piece] = []
            filled = 0
            for index, tensor in enumerate(self.tensors):
                start = 0
                while tensor.dtype == dtype.name and start < tensor.size:
                    stop = min(tensor.size, start + self.segment_elements - filled)
                    pieces.append(Piece(index, start, stop, filled))
                    filled, start = filled + stop - start, stop
                    if filled == self.segment_elements:
                        segments.append(Segment(len(segments), dtype, filled, tuple(pieces)))
                        pieces, filled = [], 0
            if pieces:
                segments.append(Segment(len(segments), dtype, filled, tuple(pieces)))
        return tuple(segments)
