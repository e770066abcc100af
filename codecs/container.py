"""Containers: payload parts, each a safetensors file by itself.

A part holds some segments of one delta or one anchor, each as a tensor of dtype U8 and one dimension that is named
`segment.<index, at least 6 digits>.<encoding>`. `docs/format.md` gives every byte. A part is verified by itself: the
CRC-32 of each segment's name and bytes stands in the metadata, and one of the metadata stands beside them.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from deltabus.bus.errors import CorruptPayloadError, SchemaMismatchError, UsageError

from .ahead import in_order
from .changes import Bits, Changes, SegmentChanges
from .encodings import ENCODINGS, FULL, choose, decode_full, encode_full
from .header import ANCHOR, DELTA, MAX_SEGMENTS, Header, StoredSegment, parse, segment_name
from .held import Held
from .schema import Schema, Segment

__all__ = [
    "Buffer",
    "Part",
    "PartReader",
    "decode_anchor",
    "decode_delta",
    "encode_anchor",
    "encode_delta",
    "open_part",
    "part_bytes_of",
]

_LEAST_PART, _MOST_PART = 8 << 20, 32 << 20
_IN_FLIGHT = 128
"""A part is a 128th of a state, within limits, because several are in memory at once, on both sides."""

_PARTS = 4096
"""At most about so many parts, so that a record can name them all; from 128 GiB on parts become larger."""

Buffer = bytes | bytearray | memoryview

_CHANGES_AHEAD, _STATES_AHEAD = 32, 4
"""Segments encoded ahead, and whole ones decoded: whole states are large (8 MiB in bf16), changes small."""

_DECODED_AHEAD = 8
"""Segments of changes that are decoded ahead; each may hold its part in memory."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a payload.

    Attributes:
        data: Its bytes.
        encodings: How many of them each encoding takes, headers not counted.
    """

    data: bytes
    encodings: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PartReader:
    """A part whose header has been read and checked; its segments are checked as they are decoded.

    Attributes:
        kind: `delta` or `anchor`.
        schema_checksum: The SHA-256 that names the schema.
        number: The part's place in its payload, from 0.
        segments: What it holds, by rising index.
        data: The whole file.
    """

    kind: str
    schema_checksum: bytes
    number: int
    segments: tuple[StoredSegment, ...]
    data: memoryview

    def verify(self) -> None:
        """Check every segment's bytes against their checksums, without decoding them.

        Raises:
            CorruptPayloadError: If some differ.
        """
        for stored in self.segments:
            self._content(stored)

    def decode_changes(self, schema: Schema, stored: StoredSegment, base: Callable[[int], Held]) -> SegmentChanges:
        """Return the changes of a segment of a delta's part that was found to fit.

        Args:
            schema: The schema of both states.
            stored: One of its segments.
            base: Returns the reader's bits of a whole segment.

        Raises:
            CorruptPayloadError: If the segment is damaged.
            DivergedError: If the base is not the state that the delta starts from, where that shows.
        """
        encoding = ENCODINGS[stored.encoding]
        return encoding.decode(schema.segments[stored.index], self._content(stored), base(stored.index))

    def decode_state(self, schema: Schema, stored: StoredSegment, into: Callable[[int], Bits | None] | None) -> Bits:
        """Return all bits of a segment of an anchor's part that was found to fit.

        Args:
            schema: The schema of the state.
            stored: One of its segments.
            into: Returns the array to decode a segment into; where it gives None, a new one is made.

        Raises:
            CorruptPayloadError: If the segment is damaged.
        """
        content, out = self._content(stored), None if into is None else into(stored.index)
        return decode_full(schema.segments[stored.index], content, out=out)

    def check(self, schema: Schema, kind: str) -> None:
        """Check that it is of this schema and kind, and that all segments in it can be decoded here.

        Raises:
            CorruptPayloadError: If it is of another kind, holds a segment that does not exist, or one in an unknown
                encoding.
            SchemaMismatchError: If it is of another schema.
        """
        if self.schema_checksum != schema.checksum:
            raise SchemaMismatchError(
                f"part {self.number} belongs to schema {self.schema_checksum.hex()[:16]}, not to "
                f"{schema.checksum.hex()[:16]}; read the schema that its message names"
            )
        if self.kind != kind:
            raise CorruptPayloadError(f"part {self.number} is of kind {self.kind!r} where {kind!r} was expected")
        known = ENCODINGS if kind == DELTA else (FULL,)
        for stored in self.segments:
            if stored.index >= len(schema.segments):
                raise CorruptPayloadError(
                    f"part {self.number} holds segment {stored.index}, but the schema has {len(schema.segments)}; "
                    "fetch the payload again, or publish an anchor"
                )
            if stored.encoding not in known:
                raise CorruptPayloadError(
                    f"segment {stored.index} of part {self.number} is encoded as {stored.encoding!r}, which is not "
                    f"one of {', '.join(known)}; upgrade deltabus here"
                )

    def _content(self, stored: StoredSegment) -> memoryview:
        content = self.data[stored.start : stored.start + stored.size]
        if _checksum(stored.index, stored.encoding, content) != stored.checksum:
            raise CorruptPayloadError(
                f"segment {stored.index} of part {self.number} is damaged: its checksum does not match; fetch the "
                "payload again, or publish an anchor"
            )
        return content


def part_bytes_of(nbytes: int) -> int:
    """Return the size up to which segments share a part, in bytes, for a state of so many; a larger one has its own."""
    return max(min(max(nbytes // _IN_FLIGHT, _LEAST_PART), _MOST_PART), nbytes // _PARTS)


def encode_delta(
    changes: Changes,
    *,
    base: Callable[[int], Held] | None = None,
    encoding: str | None = None,
    part_bytes: int | None = None,
    pool: Executor | None = None,
) -> Iterator[Part]:
    """Return an iterator over the parts of a delta, none for no changes; a bounded number of segments is encoded ahead.

    Args:
        changes: What the delta holds.
        base: Returns the bits of a whole segment before the changes; called once for each changed segment, in the
            pool's threads. Without it, encodings that need these bits are left out of the choice.
        encoding: Used for all segments; by default each has the one that is smallest for it.
        part_bytes: The size up to which segments share a part; by default `part_bytes_of` the state.
        pool: Works on several segments at once.

    Raises:
        UsageError: If the encoding is unknown or needs `base`, `part_bytes` is not positive, or a segment is not of the
            schema, at once; or if its changes do not fit it or its base, when the iterator comes to it.
        SchemaMismatchError: If `base` returns bits of another size or dtype, when the iterator comes to them.
    """
    if encoding is not None and encoding not in ENCODINGS:
        raise UsageError(f"encoding {encoding!r} is not one of {', '.join(ENCODINGS)}")
    if encoding is not None and base is None and ENCODINGS[encoding].needs_base:
        raise UsageError(f"encoding {encoding!r} needs the state before the changes; pass `base`, or use another")
    segments = changes.schema.segments
    strange = [index for index in changes.segments if not 0 <= index < len(segments)]
    if strange:
        raise UsageError(f"changes of segment {strange[0]} do not fit a schema of {len(segments)} segments")

    def encode(index: int) -> tuple[int, str, bytes]:
        segment, changed = segments[index], changes.segments[index]
        forced = None if encoding is None else ENCODINGS[encoding]
        held = base(index) if base is not None and (forced is None or forced.needs_base) else None
        way = forced or choose(segment, changed, held)
        return index, way.name, way.encode(segment, changed, held)

    work = in_order(encode, sorted(changes.segments), pool=pool, ahead=_CHANGES_AHEAD)
    return _parts(DELTA, changes.schema, work, part_bytes)


def encode_anchor(
    schema: Schema, read: Callable[[int], Held], *, part_bytes: int | None = None, pool: Executor | None = None
) -> Iterator[Part]:
    """Return an iterator over the parts of an anchor, at least one; a few segments are encoded ahead.

    Args:
        schema: The schema of the state.
        read: Returns the bits of a whole segment; called in the pool's threads.
        part_bytes: The size up to which segments share a part; by default `part_bytes_of` the state.
        pool: Works on several segments at once.

    Raises:
        UsageError: If `part_bytes` is not positive, at once.
        SchemaMismatchError: If `read` returns bits of another size or dtype, when the iterator comes to them.
    """

    def encode(segment: Segment) -> tuple[int, str, bytes]:
        return segment.index, FULL, encode_full(segment, read(segment.index))

    work = in_order(encode, schema.segments, pool=pool, ahead=_STATES_AHEAD)
    return _parts(ANCHOR, schema, work, part_bytes)


def open_part(data: Buffer, *, expect_schema: bytes | None = None) -> PartReader:
    """Return a reader of the part; its header is checked in full before any memory is taken for what it describes.

    Args:
        data: The whole file, from outside.
        expect_schema: The checksum of the schema that the part must belong to, where known.

    Raises:
        CorruptPayloadError: If it is not a part, is truncated or damaged, or is of a format that is unknown here.
        SchemaMismatchError: If it belongs to another schema.
    """
    view = memoryview(data).cast("B").toreadonly()
    header, segments = parse(view)
    checksum = bytes.fromhex(header.schema)
    if expect_schema is not None and checksum != expect_schema:
        raise SchemaMismatchError(
            f"the part belongs to schema {checksum.hex()[:16]}, not to {expect_schema.hex()[:16]}; "
            "is it of this message?"
        )
    return PartReader(header.kind, checksum, header.part, segments, view)


def decode_delta(
    parts: Iterable[Buffer], schema: Schema, base: Callable[[int], Held], *, pool: Executor | None = None
) -> Changes:
    """Return the changes that all parts of one delta hold together.

    Args:
        parts: The parts, in order; taken one at a time.
        schema: The schema of both states.
        base: Returns the reader's bits of a whole segment; called in the pool's threads.
        pool: Works on several segments at once.

    Raises:
        CorruptPayloadError: If a part is damaged, out of order, of an anchor, or holds a segment of another part.
        DivergedError: If the base is not the state that the delta starts from, where that shows.
        SchemaMismatchError: If a part is of another schema.
    """

    def decode(where: tuple[PartReader, StoredSegment]) -> tuple[int, SegmentChanges]:
        reader, stored = where
        return stored.index, reader.decode_changes(schema, stored, base)

    found = in_order(decode, _in_sequence(parts, schema, DELTA), pool=pool, ahead=_DECODED_AHEAD)
    return Changes(schema, dict(found))


def decode_anchor(
    parts: Iterable[Buffer],
    schema: Schema,
    *,
    into: Callable[[int], Bits | None] | None = None,
    pool: Executor | None = None,
) -> Iterator[tuple[int, Bits]]:
    """Yield the index and all bits of each segment of an anchor, in order, a few decoded ahead.

    The state is whole only when the iterator has ended without an error.

    Args:
        parts: The parts, in order; taken one at a time.
        schema: The schema of the state.
        into: Returns the array to decode a segment into; where it gives None, a new one is made. After an error these
            arrays hold anything.
        pool: Works on several segments at once.

    Raises:
        CorruptPayloadError: If a part is damaged, out of order, of a delta, or a segment is missing or there twice.
        SchemaMismatchError: If a part is of another schema.
    """

    def decode(where: tuple[PartReader, StoredSegment]) -> tuple[int, Bits]:
        reader, stored = where
        return stored.index, reader.decode_state(schema, stored, into)

    count = 0
    for found in in_order(decode, _in_sequence(parts, schema, ANCHOR), pool=pool, ahead=_STATES_AHEAD):
        yield found
        count += 1
    if count != len(schema.segments):
        raise CorruptPayloadError(
            f"the anchor holds {count} of {len(schema.segments)} segments; a part of it is missing, fetch it again"
        )


def _in_sequence(parts: Iterable[Buffer], schema: Schema, kind: str) -> Iterator[tuple[PartReader, StoredSegment]]:
    """Yield each segment and its part, and make sure that numbers and segments rise from one part to the next."""
    last = -1
    for number, data in enumerate(parts):
        reader = open_part(data)
        if reader.number != number:
            raise CorruptPayloadError(f"part {reader.number} stands where part {number} belongs; read them in order")
        if reader.segments:
            if reader.segments[0].index <= last:
                raise CorruptPayloadError(
                    f"part {number} begins with segment {reader.segments[0].index}, but the part before ends with "
                    f"segment {last}; fetch the payload again, or publish an anchor"
                )
            last = reader.segments[-1].index
        reader.check(schema, kind)
        for stored in reader.segments:
            yield reader, stored
        del data, reader  # or else the part stays while the next one is waited for


def _parts(
    kind: str, schema: Schema, encoded: Iterator[tuple[int, str, bytes]], part_bytes: int | None
) -> Iterator[Part]:
    if part_bytes is None:
        part_bytes = part_bytes_of(schema.nbytes)
    if part_bytes <= 0:
        raise UsageError(f"`part_bytes` is {part_bytes}; it must be positive")
    return _filled(kind, schema.checksum.hex(), encoded, part_bytes)


def _filled(kind: str, schema: str, encoded: Iterator[tuple[int, str, bytes]], part_bytes: int) -> Iterator[Part]:
    """Yield parts filled up to `part_bytes`; an anchor has one in any case."""
    number = size = 0
    held: list[tuple[int, str, bytes]] = []
    for entry in encoded:
        if held and (size + len(entry[2]) > part_bytes or len(held) == MAX_SEGMENTS):
            yield _part(Header(kind=kind, schema=schema, part=number), held)
            number, size = number + 1, 0
        held.append(entry)
        size += len(entry[2])
    if held or (kind == ANCHOR and not number):
        yield _part(Header(kind=kind, schema=schema, part=number), held)


def _part(header: Header, held: list[tuple[int, str, bytes]]) -> Part:
    """Return the part that holds these segments; the list is empty then, as each is let go when it was copied."""
    encodings: dict[str, int] = {}
    for _, encoding, data in held:
        encodings[encoding] = encodings.get(encoding, 0) + len(data)
    stored: list[StoredSegment] = []
    start = 0
    for index, encoding, data in held:
        stored.append(StoredSegment(index, encoding, len(data), start, _checksum(index, encoding, data)))
        start += len(data)
    head = header.build(stored)
    content = io.BytesIO(bytes(len(head) + start))
    content.write(head)
    held.reverse()
    while held:
        content.write(held.pop()[2])
    return Part(content.getvalue(), encodings)


def _checksum(index: int, encoding: str, data: Buffer) -> int:
    return zlib.crc32(data, zlib.crc32(segment_name(index, encoding).encode()))
