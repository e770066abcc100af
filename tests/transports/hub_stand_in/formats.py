"""The binary formats of Xet, as far as a server must read them; see https://huggingface.co/docs/xet.

A xorb is a run of chunks, each with a header of 8 bytes: version (1 byte), packed length (3, little endian), scheme
(1), unpacked length (3). A footer that begins with `XETBLOB` may follow. A shard says which chunks make up a file, in
records of 48 bytes behind a header of 48.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import lz4.frame

__all__ = ["ProtocolError", "Term", "decode_chunks", "parse_shard", "scan_xorb"]

_CHUNK_HEADER = 8
_RECORD = 48
_FOOTER = b"XETBLOB"
_SHARD_TAG = b"HFRepoMetaData\x00\x55\x69\x67\x45\x6a\x7b\x81\x57\x83\xa5\xbd\xd9\x5c\xcd\xd1\x4a\xa9"
_LAST_FILE = b"\xff" * 32
_WITH_VERIFICATION = 1 << 31
_WITH_METADATA = 1 << 30
_LZ4, _GROUPED_LZ4 = 1, 2


class ProtocolError(ValueError):
    """The client sent bytes that are no valid xorb or shard."""


@dataclass(frozen=True, slots=True)
class Term:
    """Chunks `start` to `end` (exclusive) of one xorb, which give `length` bytes of a file."""

    xorb: str
    start: int
    end: int
    length: int


def scan_xorb(data: bytes) -> tuple[list[int], list[int]]:
    """Return where each chunk begins in the xorb, and in its content; both end with the total."""
    at, unpacked, places, content = 0, 0, [0], [0]
    while at < len(data) and data[at : at + len(_FOOTER)] != _FOOTER:
        if at + _CHUNK_HEADER > len(data) or data[at] != 0:
            raise ProtocolError(f"no chunk header at byte {at}")
        unpacked += int.from_bytes(data[at + 5 : at + 8], "little")
        at += _CHUNK_HEADER + int.from_bytes(data[at + 1 : at + 4], "little")
        if at > len(data):
            raise ProtocolError("the last chunk is cut short")
        places.append(at)
        content.append(unpacked)
    return places, content


def decode_chunks(data: bytes) -> bytes:
    """Return the content of consecutive chunks."""
    parts, at = [], 0
    while at < len(data):
        packed = int.from_bytes(data[at + 1 : at + 4], "little")
        scheme, body = data[at + 4], data[at + _CHUNK_HEADER : at + _CHUNK_HEADER + packed]
        if scheme in (_LZ4, _GROUPED_LZ4):
            body = lz4.frame.decompress(body)
        if scheme == _GROUPED_LZ4:
            body = _ungroup(body)
        parts.append(body)
        at += _CHUNK_HEADER + packed
    return b"".join(parts)


def _ungroup(body: bytes) -> bytes:
    """Undo the grouping of bytes by their position modulo 4."""
    merged, at = bytearray(len(body)), 0
    for lane in range(4):
        size = len(range(lane, len(body), 4))
        merged[lane::4] = body[at : at + size]
        at += size
    return bytes(merged)


def parse_shard(data: bytes) -> dict[str, list[Term]]:
    """Return the terms of each file in a shard; what else it holds serves only deduplication."""
    if data[: len(_SHARD_TAG)] != _SHARD_TAG:
        raise ProtocolError("a shard begins with another tag")
    files: dict[str, list[Term]] = {}
    at = _RECORD
    try:
        while True:
            raw, flags, count = struct.unpack_from("<32sII", data, at)
            at += _RECORD
            if raw == _LAST_FILE:
                return files
            terms = []
            for _ in range(count):
                xorb, _, length, start, end = struct.unpack_from("<32sIIII", data, at)
                terms.append(Term(_hash_text(xorb), start, end, length))
                at += _RECORD
            at += _RECORD * (count * bool(flags & _WITH_VERIFICATION) + bool(flags & _WITH_METADATA))
            files[_hash_text(raw)] = terms
    except struct.error:
        raise ProtocolError("the shard is cut short") from None


def _hash_text(raw: bytes) -> str:
    """Return a Xet hash as text: four little-endian numbers of 64 bits, each as 16 hexadecimal digits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))
