"""Records and the messages in them, read as docs/protocol.md says in section 2, and the MessagePack that they are."""

import math
import re
import struct
import zlib
from dataclasses import dataclass

from .schema import ALL_64, RefusedError, require, whole_number

WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", re.ASCII)
KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._=-]*(/[A-Za-z0-9_-][A-Za-z0-9._=-]*)*", re.ASCII)
RANK = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.ASCII)
NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
DEEPEST = 32
MOST = 4096


class MessagePack:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        require(self.at + count <= len(self.data), "a body ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def size(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def value(self, depth: int = 0):
        require(depth < DEEPEST, "a body is nested too deep")
        first = self.take(1)[0]
        if first <= 0x7F or first >= 0xE0:
            return first if first <= 0x7F else first - 256
        if first <= 0x8F or first in (0xDE, 0xDF):
            return self.map(first & 15 if first <= 0x8F else self.size(2 * (first - 0xDD)), depth)
        if first <= 0x9F or first in (0xDC, 0xDD):
            count = first & 15 if first <= 0x9F else self.size(2 * (first - 0xDB))
            return [self.value(depth + 1) for _ in range(count)]
        if first <= 0xBF or first in (0xD9, 0xDA, 0xDB):
            try:
                return self.take(first & 31 if first <= 0xBF else self.size(1 << (first - 0xD9))).decode("utf-8")
            except UnicodeDecodeError as error:
                raise RefusedError("a text is no UTF-8") from error
        if first in (0xC4, 0xC5, 0xC6):
            return self.take(self.size(1 << (first - 0xC4)))
        if first in NUMBERS:
            return struct.unpack(NUMBERS[first], self.take(struct.calcsize(NUMBERS[first])))[0]
        require(first in CONSTANTS, f"MessagePack of the kind {first}")
        return CONSTANTS[first]

    def map(self, count: int, depth: int) -> dict:
        found = {}
        for _ in range(count):
            key = self.value(depth + 1)
            require(isinstance(key, str) and key not in found, "a name of a map is no text, or occurs twice")
            found[key] = self.value(depth + 1)
        return found


@dataclass(frozen=True)
class Blob:
    key: str
    size: int
    checksum: bytes


@dataclass(frozen=True)
class Message:
    writer: str
    position: int
    epoch: int
    kind: str
    step: int
    base: dict[str, int]
    version: int
    members: frozenset[str]
    generation: int
    schema: Blob
    digest_before: int | None
    digest_after: int
    blobs: tuple[Blob, ...]
    metadata: dict[str, str]

    @property
    def cost(self) -> int:
        return (16 << 10) + sum(blob.size for blob in self.blobs)

    @property
    def after(self):
        """The state that the message leads to; versions that have the same are one."""
        return self.digest_after, self.schema.checksum

    @property
    def before(self):
        return None if self.kind == "anchor" else (self.digest_before, self.schema.checksum)


def body_of(record: bytes) -> bytes:
    require(len(record) <= 1 << 20 and record[:4] == b"DBM1", "no record")
    require(zlib.crc32(record[8:]) == int.from_bytes(record[4:8], "little"), "a record is damaged")
    return record[8:]


def message_of(body: bytes, writer: str, position: int) -> Message:
    reader = MessagePack(body)
    fields = reader.value()
    require(reader.at == len(body) and isinstance(fields, dict), "a body is not one map")
    require(whole_number(fields.get("protocol", 1), 1, 1), "an unknown protocol")
    require((fields.get("writer"), fields.get("position")) == (writer, position), "a record of another place")
    kind, base = fields.get("kind"), fields.get("base")
    require(kind in ("anchor", "delta"), "an unknown kind")
    require(whole_number(fields.get("epoch"), 1) and whole_number(fields.get("version"), 1), "a number is too low")
    require(whole_number(fields.get("step"), 1 - (1 << 63)), "a step is no number")
    require(isinstance(base, dict) and all(whole_number(v) for v in base.values()), "a base is no version vector")
    require(len(base) <= MOST and all(map(WRITER.fullmatch, base)), "a base of what are no writers, or too many")
    own = base.get(writer)
    require(own is None if kind == "anchor" else own and own < fields["version"], "a base that cannot be")
    blobs, digests = fields.get("blobs"), [fields.get("digest_after")]
    require(isinstance(blobs, list) and len(blobs) <= 8192 and (kind == "delta" or blobs), "no payload")
    if kind == "delta":
        digests.append(fields.get("digest_before"))
    require(all(whole_number(digest, 0, ALL_64) for digest in digests), "a digest is no number of 64 bits")
    require(kind == "delta" or fields.get("digest_before", 0) is None, "an anchor starts from nothing")
    metadata = fields.get("metadata", {})
    require(isinstance(metadata, dict) and len(metadata) <= 256, "no metadata")
    require(all(isinstance(v, str) for v in metadata.values()), "no metadata")
    created = fields.get("created")
    require(type(created) in (int, float) and math.isfinite(created), "no time")
    stats = fields.get("stats")
    require(isinstance(stats, dict) and all(map(whole_number, [stats.get("changed"), stats.get("total")])), "no stats")
    require(whole_number(stats.get("held", 0)) and isinstance(stats.get("encodings", {}), dict), "no stats")
    require(all(map(whole_number, stats.get("encodings", {}).values())), "no stats")
    require(isinstance(fields.get("signature"), bytes | None), "no signature")
    members, generation = members_of(fields, writer)
    return Message(
        writer, position, fields["epoch"], kind, fields["step"], base, fields["version"], members, generation,
        blob_of(fields.get("schema")), digests[1] if kind == "delta" else None, digests[0],
        tuple(map(blob_of, blobs)), metadata,
    )  # fmt: skip


def members_of(fields: dict, writer: str) -> tuple[frozenset[str], int]:
    group, cohort = fields.get("group"), fields.get("cohort", {"generation": 0})
    require(isinstance(group, list) and len(group) <= MOST, "no group")
    require(all(isinstance(m, str) and WRITER.fullmatch(m) for m in group), "no group")
    require(isinstance(cohort, dict), "no cohort")
    generation, ranks = cohort.get("generation"), cohort.get("ranks", 0)
    require(whole_number(generation, 1 if "cohort" in fields else 0) and whole_number(ranks, 0, MOST), "no cohort")
    if ranks:
        match = RANK.fullmatch(writer)
        require(not group and match and int(match[2]) < ranks, "a writer that is none of its group's ranks")
        return frozenset(f"{match[1]}-{rank}" for rank in range(ranks)), generation
    require(len(set(group)) == len(group) and writer in group, "a group without its writer")
    return frozenset(group), generation


def blob_of(fields) -> Blob:
    require(isinstance(fields, dict), "no blob")
    key, size, checksum = (fields.get(name) for name in ("key", "size", "checksum"))
    require(isinstance(key, str) and len(key) <= 512 and KEY.fullmatch(key), "no key of a blob")
    require(whole_number(size, 0, 1 << 30), "no size of a blob")
    require(isinstance(checksum, bytes) and len(checksum) == 32, "no checksum of a blob")
    return Blob(key, size, checksum)
