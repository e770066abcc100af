"""`deltabus inspect`: what one file of a topic says, and whether it is whole."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from deltabus.bus.errors import CodecError, CorruptPayloadError, MessageFormatError, UsageError
from deltabus.bus.message import MAX_BLOB_BYTES, MAX_RECORD_BYTES, decode_message
from deltabus.codecs.container import PartReader, open_part
from deltabus.codecs.header import StoredSegment
from deltabus.codecs.schema import MAX_SCHEMA_BYTES, Schema

from .output import count_text, plain_text, print_table, share_text, size_text

__all__ = ["inspect_file", "print_inspection"]

_RECORD_START = b"DBM"
_SCHEMA_START = b"{"
_HEADER_START = b"{"
_SAFETENSORS_LENGTH = 8


def inspect_file(path: Path) -> dict[str, Any]:
    """Return what a payload part, a record or a schema holds, ready for JSON; `valid` says whether it is whole.

    Which of the three it is shows in its first bytes.

    Args:
        path: The file.

    Raises:
        UsageError: If it cannot be read, is too large, or is none of the three.
        MessageFormatError: If it is a record or schema that cannot be read.
        CorruptPayloadError: If it is a safetensors file that is no payload part, or whose header is damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_SAFETENSORS_LENGTH + 1)
            if start.startswith(_RECORD_START):
                limit, look = MAX_RECORD_BYTES, _record
            elif start[_SAFETENSORS_LENGTH:] == _HEADER_START:
                limit, look = MAX_BLOB_BYTES, _part
            elif start.startswith(_SCHEMA_START):
                limit, look = MAX_SCHEMA_BYTES, _schema
            else:
                raise UsageError(
                    f"{path} is no payload part, no record and no schema; blobs and logs of a topic hold those"
                )
            size = os.fstat(file.fileno()).st_size
            data = start if size > limit else start + file.read(limit + 1 - len(start))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if max(size, len(data)) > limit:
        raise UsageError(f"{path} has more than {limit} bytes, the most that such a file of a topic has")
    return {"file": path, "bytes": len(data), **look(data, path)}


def _record(data: bytes, path: Path) -> dict[str, Any]:
    from .log import row_of

    message = decode_message(data, topic=str(path))
    said = row_of(message, now=message.created)
    del said["age"]  # a file has none
    said["signed"] = message.signature is not None
    said["blobs"] = [{"key": b.key, "bytes": b.size, "sha256": b.checksum.hex()} for b in message.blobs]
    said["schema"] = {"key": message.schema.key, "bytes": message.schema.size, "sha256": message.schema.checksum.hex()}
    return {"type": "record", "valid": True, "message": said}


def _schema(data: bytes, path: Path) -> dict[str, Any]:
    try:
        schema = Schema.decode(data)
    except MessageFormatError as error:
        raise MessageFormatError(f"{path}: {error}") from error
    tensors = [
        {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "aliases": list(t.aliases)} for t in schema.tensors
    ]
    return {
        "type": "schema",
        "valid": True,
        "sha256": schema.checksum.hex(),
        "elements": schema.total,
        "state_bytes": schema.nbytes,
        "segment_elements": schema.segment_elements,
        "segments": len(schema.segments),
        "tensors": tensors,
    }


def _part(data: bytes, path: Path) -> dict[str, Any]:
    try:
        part = open_part(data)
    except CodecError as error:
        raise CorruptPayloadError(f"{path}: {error}") from error
    segments = [
        {
            "index": stored.index,
            "encoding": stored.encoding,
            "bytes": stored.size,
            "start": stored.start,
            "crc32": f"{stored.checksum:08x}",
            "valid": _is_whole(part, stored),
        }
        for stored in part.segments
    ]
    encodings: dict[str, int] = {}
    for stored in part.segments:
        encodings[stored.encoding] = encodings.get(stored.encoding, 0) + stored.size
    return {
        "type": "part",
        "valid": all(segment["valid"] for segment in segments),
        "kind": part.kind,
        "part": part.number,
        "schema": part.schema_checksum.hex(),
        "encodings": encodings,
        "segments": segments,
    }


def _is_whole(part: PartReader, stored: StoredSegment) -> bool:
    try:
        dataclasses.replace(part, segments=(stored,)).verify()
    except CorruptPayloadError:
        return False
    return True


def print_inspection(found: dict[str, Any]) -> None:
    """Print what `inspect_file` returned, for people."""
    print(plain_text(f"{found['file']}: {found['type']}, {size_text(found['bytes'])}"))
    if found["type"] == "part":
        print(f"{found['kind']}, part {found['part']}, schema {found['schema']}")
        rows = [
            [
                str(segment["index"]),
                segment["encoding"],
                size_text(segment["bytes"]),
                str(segment["start"]),
                segment["crc32"],
                "yes" if segment["valid"] else "NO",
            ]
            for segment in found["segments"]
        ]
        print_table(("segment", "encoding", "size", "start", "crc32", "whole"), rows, left=("encoding",))
        print("whole" if found["valid"] else "DAMAGED: fetch it again, or publish an anchor")
    elif found["type"] == "schema":
        print(
            f"sha256 {found['sha256']}, {count_text(found['elements'], 'element')}, {size_text(found['state_bytes'])}, "
            f"{count_text(found['segments'], 'segment')}"
        )
        rows = [
            [
                tensor["name"],
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "scalar",
                ", ".join(tensor["aliases"]),
            ]
            for tensor in found["tensors"]
        ]
        print_table(("tensor", "dtype", "shape", "aliases"), rows, left=("tensor", "dtype", "shape", "aliases"))
    else:
        _print_message(found["message"])


def _group(message: dict[str, Any]) -> str:
    names = f"of {message['ranks']} ranks" if message["ranks"] else ", ".join(message["group"])
    return f"{names}, generation {message['generation']}" if message["generation"] else names


def _print_message(message: dict[str, Any]) -> None:
    base = " ".join(f"{writer}@{version}" for writer, version in message["base"].items()) or "nothing"
    rows = [
        ["writer", f"{message['writer']}, epoch {message['epoch']}, group {_group(message)}"],
        ["position", str(message["position"])],
        ["kind", message["kind"]],
        ["step", str(message["step"])],
        ["version", f"{message['version']}, from {base}"],
        ["digest", f"{message['digest_before'] or 'nothing'} -> {message['digest_after']}"],
        ["changed", f"{message['changed']} of {message['total']} elements, {share_text(message['density'])}"],
        ["payload", f"{size_text(message['bytes'])} in {count_text(len(message['blobs']), 'part')}"],
        ["signed", f"by key {message['key']}, not checked" if message["signed"] else "no"],
        *(["part", f"{blob['key']}, {blob['bytes']} bytes, sha256 {blob['sha256']}"] for blob in message["blobs"]),
        ["schema", f"{message['schema']['key']}, {message['schema']['bytes']} bytes"],
        *(["metadata", f"{key}={value}"] for key, value in sorted(message["metadata"].items())),
    ]
    print_table(("field", "value"), rows, left=("field", "value"))
