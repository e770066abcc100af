"""The header of a payload part: what a safetensors file says about itself, written and read with every bound checked.

A safetensors file is the length of its header (8 bytes, little endian), the header (a JSON object that maps names to
dtype, shape and byte range, and `__metadata__` to text by name), and the bytes of the tensors, one behind the other.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from deltabus.bus.errors import CorruptPayloadError

__all__ = [
    "ANCHOR",
    "DELTA",
    "FORMAT",
    "MAX_HEADER_BYTES",
    "MAX_SEGMENTS",
    "VERSION",
    "Header",
    "StoredSegment",
    "parse",
    "segment_name",
]

FORMAT = "deltabus"
VERSION = "1"
"""The version of the payload's format that this code writes and reads."""

DELTA = "delta"
ANCHOR = "anchor"

MAX_SEGMENTS = 1 << 13
"""Segments that one part may hold."""

MAX_HEADER_BYTES = 2 << 20
"""The largest header that is read: `MAX_SEGMENTS` at 120 bytes, and 1 MiB for the metadata of others."""

_NAME = re.compile(r"segment\.([0-9]{6,10})\.([a-z]{1,32})", re.ASCII)
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """One segment of a part.

    Attributes:
        index: Its number in the schema.
        encoding: The name of its encoding.
        size: Its length in bytes, at least 1.
        start: Where its bytes begin in the file; in a header that is being built, behind the header.
        checksum: The CRC-32 of its tensor's name and its bytes.
    """

    index: int
    encoding: str
    size: int
    start: int
    checksum: int


class _Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Literal["U8"]
    shape: tuple[_Offset]
    data_offsets: tuple[_Offset, _Offset]


class _Metadata(Struct, frozen=True):
    """What the metadata must hold; what else it holds is ignored."""

    kind: Literal["delta", "anchor"]
    schema: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    part: Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,8})\Z")]
    segments: Annotated[str, Meta(pattern=r"^([0-9a-f]{8})*\Z")]


class Header(Struct, frozen=True, kw_only=True):
    """What a part says about itself.

    Attributes:
        kind: `delta` or `anchor`.
        schema: The checksum of its schema, in hexadecimal.
        part: Its place in the payload, from 0.
    """

    kind: str
    schema: str
    part: int

    def build(self, segments: Sequence[StoredSegment]) -> bytes:
        """Return the file's bytes up to the first segment's, padded with spaces to a multiple of 8."""
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "schema": self.schema,
            "part": str(self.part),
            "segments": "".join(f"{segment.checksum:08x}" for segment in segments),
        }
        header: dict[str, Any] = {_METADATA: metadata | {"checksum": _checksum(metadata)}}
        for segment in segments:
            header[segment_name(segment.index, segment.encoding)] = {
                "dtype": "U8",
                "shape": [segment.size],
                "data_offsets": [segment.start, segment.start + segment.size],
            }
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def segment_name(index: int, encoding: str) -> str:
    """Return the name of a segment's tensor.

    >>> segment_name(12, "step")
    'segment.000012.step'
    """
    return f"segment.{index:06d}.{encoding}"


def parse(data: memoryview) -> tuple[Header, tuple[StoredSegment, ...]]:
    """Return what a part says about itself, checked: the segments cover the file exactly, in rising order.

    Raises:
        CorruptPayloadError: If this is not a part, is truncated or damaged, or is of a format that is unknown here.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or begin > len(data) or length > MAX_HEADER_BYTES:
        raise _corrupt(f"has {len(data)} bytes, but its header claims {length} (limit {MAX_HEADER_BYTES})")
    try:
        text = bytes(data[_LENGTH_BYTES:begin]).decode()
        entries = msgspec.convert(json.loads(text, object_pairs_hook=_without_duplicates), dict[str, Any])
        metadata = msgspec.convert(entries.pop(_METADATA), dict[str, str])
        _check_format(metadata)
        known = msgspec.convert(metadata, _Metadata)
        tensors = msgspec.convert(entries, Annotated[dict[str, _Tensor], Meta(max_length=MAX_SEGMENTS)])
        checksum = _checksum({key: metadata[key] for key in metadata if key != "checksum"})
    except CorruptPayloadError:
        raise
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise _corrupt(f"has a header that cannot be read: {error}") from error
    if metadata.get("checksum") != checksum:
        raise _corrupt("has metadata whose checksum does not match")
    if len(known.segments) != 8 * len(tensors):
        raise _corrupt(f"has {len(known.segments) // 8} checksums for {len(tensors)} segments")
    segments: list[StoredSegment] = []
    stop, last = 0, -1
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        match = _NAME.fullmatch(name)
        if not match or segment_name(int(match[1]), match[2]) != name or int(match[1]) <= last:
            raise _corrupt(f"has a tensor named {name[:64]!r} that is no segment, or out of order")
        last, start = int(match[1]), stop
        stop = tensor.data_offsets[1]
        if tensor.data_offsets[0] != start or stop <= start or tensor.shape[0] != stop - start:
            raise _corrupt(f"has segment {last} at bytes {tensor.data_offsets} where {start} was the next")
        crc = int(known.segments[8 * len(segments) : 8 * len(segments) + 8], 16)
        segments.append(StoredSegment(last, match[2], stop - start, begin + start, crc))
    if begin + stop != len(data):
        raise _corrupt(f"has {len(data)} bytes where its header describes {begin + stop}")
    return Header(kind=known.kind, schema=known.schema, part=int(known.part)), tuple(segments)


def _corrupt(what: str) -> CorruptPayloadError:
    return CorruptPayloadError(f"the payload part {what}; fetch it again, or publish an anchor")


def _check_format(metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise CorruptPayloadError("this safetensors file is not a deltabus payload part; is it a checkpoint?")
    if metadata.get("version") != VERSION:
        raise CorruptPayloadError(
            f"the payload part has format version {metadata.get('version', '')[:16]!r}, this reader knows {VERSION}; "
            "upgrade deltabus here"
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object, refusing names that occur twice: readers differ in which of the two they take."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _checksum(metadata: dict[str, str]) -> str:
    """Return the CRC-32, in hexadecimal, of all names and values, sorted by name, a zero byte behind each."""
    text = "".join(f"{key}\0{metadata[key]}\0" for key in sorted(metadata))
    return f"{zlib.crc32(text.encode()):08x}"
