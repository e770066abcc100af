"""Messages: the records of a log, and their bytes.

A record is `b"DBM1"`, the CRC-32 of the body (4 bytes, little endian), and the body: one MessagePack map of the fields
of `Message`, by name. Readers ignore fields that they do not know; a `protocol` that they do not know is an error.
"""

from __future__ import annotations

import enum
import math
import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from .errors import MessageFormatError, UsageError
from .version import VersionVector

__all__ = [
    "MAX_BLOB_BYTES",
    "MAX_RANKS",
    "MAX_RECORD_BYTES",
    "PROTOCOL",
    "Blob",
    "Cohort",
    "Kind",
    "Message",
    "Stats",
    "check_step_and_metadata",
    "check_writer_name",
    "decode_message",
    "encode_message",
    "rank_writer",
    "unframe",
]

PROTOCOL = 1
"""The version of the protocol that this code speaks."""

MAX_RECORD_BYTES = 1 << 20
"""The largest record that is written or read, in bytes."""

MAX_BLOB_BYTES = 1 << 30
"""The largest blob that a message may name, in bytes."""

MAX_RANKS = 4096
"""The most ranks that a group may have."""

_MAGIC = b"DBM1"
_CRC_BYTES = 4
_MAX_METADATA_BYTES = 64 << 10
_MAX = (1 << 63) - 1
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z"
_KEY = r"^[A-Za-z0-9_-][A-Za-z0-9._=-]*(/[A-Za-z0-9_-][A-Za-z0-9._=-]*)*\Z"

_Count = Annotated[int, Meta(ge=0, le=_MAX)]
_Step = Annotated[int, Meta(ge=-_MAX, le=_MAX)]
_Metadata = Annotated[dict[str, str], Meta(max_length=256)]
_Writer = Annotated[str, Meta(pattern=_NAME)]
_Digest = Annotated[int, Meta(ge=0)]


class Kind(enum.StrEnum):
    """What a message holds."""

    ANCHOR = "anchor"
    """A writer's whole state."""
    DELTA = "delta"
    """What changed from `base` to `version`."""


class Blob(Struct, frozen=True, kw_only=True):
    """One immutable stored object that a message names.

    Attributes:
        key: Where it lies in the topic.
        size: Its length in bytes.
        checksum: The SHA-256 of its bytes.
    """

    key: Annotated[str, Meta(pattern=_KEY, max_length=512)]
    size: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
    checksum: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Stats(Struct, frozen=True, kw_only=True):
    """Figures of a message, for people and planners; decoding does not depend on them.

    Attributes:
        changed: Elements that the message changes; for an anchor, all.
        total: Elements of the state.
        encodings: Encoded bytes by name of encoding.
        held: Elements that differ from the trainer's still, because they were held back.
    """

    changed: _Count
    total: _Count
    encodings: Annotated[dict[str, _Count], Meta(max_length=64)] = {}
    held: _Count = 0

    @property
    def density(self) -> float:
        """Changed elements over all elements; 0 for an empty state."""
        return self.changed / self.total if self.total else 0.0


class Cohort(Struct, frozen=True, kw_only=True):
    """An incarnation of a group of writers.

    Attributes:
        generation: Its number; a restarted group has a higher one.
        ranks: How many writers it has that are named alike: `<stem>-0`, `<stem>-1`, ...; 0 when the message names them.
    """

    generation: Annotated[int, Meta(ge=1, le=_MAX)]
    ranks: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0


class Message(Struct, frozen=True, kw_only=True):
    """One immutable log record.

    Attributes:
        writer: Whose log it stands in.
        position: Its place in that log, from 0, with no holes.
        epoch: The incarnation of the writer process; a restart has a higher one.
        kind: Anchor or delta.
        step: The training step that the state belongs to; may go back after a restart.
        base: The version vector that a delta starts from. What it says of other writers is what this one had applied
            of theirs: the message comes after that. An anchor says nothing of its own writer here.
        version: The writer's state counter after this message.
        group: The names of the writers that make a cut; empty when `cohort` says how many ranks they are.
        schema: The blob that holds the schema; its checksum names the schema.
        cohort: Which incarnation of the group this is; unset for a writer that is alone.
        digest_before: The state's digest that a delta starts from; None for an anchor.
        digest_after: The state's digest after this message.
        blobs: The payload's parts, in order; a delta that changes nothing has none.
        stats: Figures.
        created: When it was written, in seconds since 1970; for people, never for decisions.
        metadata: The user's own key-value pairs.
        protocol: The version of the protocol.
        signature: The seal of `deltabus.bus.signing`; None when the writer has no key. It ends the record.
    """

    writer: _Writer
    position: _Count
    epoch: Annotated[int, Meta(ge=1, le=_MAX)]
    kind: Kind
    step: _Step
    base: Annotated[dict[_Writer, _Count], Meta(max_length=4096)]
    version: Annotated[int, Meta(ge=1, le=_MAX)]
    group: Annotated[tuple[_Writer, ...], Meta(max_length=4096)]
    cohort: Cohort | UnsetType = UNSET
    schema: Blob
    digest_before: _Digest | None
    digest_after: _Digest
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=8192)]
    stats: Stats
    created: float
    metadata: _Metadata = {}
    protocol: int = PROTOCOL
    signature: bytes | None = None

    def __post_init__(self) -> None:
        if self.ranks:
            stem, _, rank = self.writer.rpartition("-")
            if self.group or not rank.isdecimal() or rank_writer(stem, int(rank)) != self.writer:
                raise ValueError("a group of ranks has no other names, and its writers are called <stem>-<rank>")
            if int(rank) >= self.ranks:
                raise ValueError(f"rank {rank} is none of {self.ranks}")
        elif self.writer not in self.group or len(set(self.group)) != len(self.group):
            raise ValueError("`group` must name each writer once, the message's own among them")
        if max(self.digest_after, self.digest_before or 0) >= 1 << 64:
            raise ValueError("digests are 64 bits")
        if not math.isfinite(self.created):
            raise ValueError("`created` is not a time")  # and a NaN would make a message differ from itself
        if self.kind is Kind.ANCHOR:
            if self.writer in self.base or self.digest_before is not None or not self.blobs:
                raise ValueError("an anchor has no base of its own, no `digest_before` and at least one blob")
        elif self.digest_before is None or not 0 < self.base.get(self.writer, 0) < self.version:
            raise ValueError("a delta leads from an earlier version of its own writer and says the digest there")

    @property
    def state(self) -> VersionVector:
        """The version vector of this writer alone, after this message."""
        return VersionVector({self.writer: self.version})

    @property
    def generation(self) -> int:
        """The incarnation of the group; 0 for a writer that is alone."""
        return 0 if self.cohort is UNSET else self.cohort.generation

    @property
    def ranks(self) -> int:
        """How many ranks the group has; 0 when it is named otherwise."""
        return 0 if self.cohort is UNSET else self.cohort.ranks

    @property
    def members(self) -> frozenset[str]:
        """The names of the writers that make a cut."""
        return _ranks_of(self.writer.rpartition("-")[0], self.ranks) if self.ranks else _named(self.group)

    @property
    def needs(self) -> VersionVector:
        """What this writer had applied of others."""
        others = {writer: version for writer, version in self.base.items() if writer != self.writer}
        return VersionVector(others) if others else _NOTHING

    @property
    def nbytes(self) -> int:
        """The payload's size in bytes, without the record itself."""
        return sum(blob.size for blob in self.blobs)


_NOTHING = VersionVector()

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Message)


class _Protocol(Struct):
    protocol: int = PROTOCOL


def encode_message(message: Message) -> bytes:
    """Return the record's bytes.

    Raises:
        UsageError: If a field is out of range, or the record would exceed `MAX_RECORD_BYTES`.
    """
    try:
        body = _encoder.encode(message)
        if len(body) <= MAX_RECORD_BYTES:
            _decoder.decode(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"a message of writer {message.writer!r} has a field out of range: {error}") from error
    if len(body) > MAX_RECORD_BYTES - len(_MAGIC) - _CRC_BYTES:
        raise UsageError(f"a message of {len(body)} bytes is over the limit of {MAX_RECORD_BYTES}; use less metadata")
    return _MAGIC + zlib.crc32(body).to_bytes(_CRC_BYTES, "little") + body


def unframe(record: bytes, *, topic: str = "", writer: str = "", position: int | None = None) -> bytes:
    """Return a record's body, once its frame and checksum are right; arguments as for `decode_message`.

    Raises:
        MessageFormatError: If the record is no message, truncated, damaged or too large.
    """
    head = len(_MAGIC) + _CRC_BYTES
    if len(record) < head or len(record) > MAX_RECORD_BYTES or record[: len(_MAGIC)] != _MAGIC:
        raise _wrong("is not a deltabus message; is the URL that of a topic?", topic, writer, position)
    body = record[head:]
    if zlib.crc32(body) != int.from_bytes(record[len(_MAGIC) : head], "little"):
        what = "is damaged: its checksum does not match; restore it from a copy, or publish an anchor"
        raise _wrong(what, topic, writer, position)
    return body


def decode_message(record: bytes, *, topic: str = "", writer: str = "", position: int | None = None) -> Message:
    """Return the message that a record holds, checked.

    Args:
        record: The bytes as they stood in the log.
        topic: Named in errors.
        writer: The log that it was read from, if it was; the message must say the same.
        position: The place that it was read from, if it was; the message must say the same.

    Raises:
        MessageFormatError: If the record is truncated, damaged, of another protocol, out of range, or misplaced.
    """

    def wrong(what: str) -> MessageFormatError:
        return _wrong(what, topic, writer, position)

    body = unframe(record, topic=topic, writer=writer, position=position)
    try:
        spoken = msgspec.msgpack.decode(body, type=_Protocol).protocol
        if spoken != PROTOCOL:
            raise wrong(f"speaks protocol {spoken}, this reader {PROTOCOL}; upgrade deltabus here")
        message = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(f"cannot be read: {error}") from error
    if writer and message.writer != writer:
        raise wrong(f"says that it belongs to the log of {message.writer!r}; the log was tampered with or miscopied")
    if position is not None and message.position != position:
        raise wrong(f"says that it stands at position {message.position}; the log was tampered with or miscopied")
    return message


def _wrong(what: str, topic: str, writer: str, position: int | None) -> MessageFormatError:
    place = f"record {position if position is not None else '?'} of log {writer or '?'} in {topic or 'this topic'}"
    return MessageFormatError(f"{place} {what}", topic=topic, writer=writer)


def check_step_and_metadata(step: int, metadata: Mapping[str, str]) -> None:
    """Check what users say of a state before it becomes part of a message.

    Raises:
        UsageError: If the step is no whole number of 64 bits, or the metadata are not pairs of text, at most 256 and of
            64 KiB together.
    """
    try:
        msgspec.convert(step, _Step)
        size = len(_encoder.encode(msgspec.convert(dict(metadata), _Metadata)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"step {step!r} or its metadata cannot be part of a message: {error}") from error
    if size > _MAX_METADATA_BYTES:
        raise UsageError(f"metadata of {size} bytes are over the limit of {_MAX_METADATA_BYTES}; say less with a step")


def rank_writer(stem: str, rank: int) -> str:
    """Return the name of the writer of one rank.

    >>> rank_writer("trainer", 3)
    'trainer-3'
    """
    return f"{stem}-{rank}"


@lru_cache(maxsize=64)
def _ranks_of(stem: str, count: int) -> frozenset[str]:
    return frozenset(rank_writer(stem, rank) for rank in range(count))


_named = lru_cache(maxsize=64)(frozenset[str])


def check_writer_name(name: str) -> str:
    """Return the name if it may name a writer.

    Raises:
        UsageError: If it is not 1-63 letters, digits, `_` or `-`, beginning with a letter or digit.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(f"writer {name!r} is not 1-63 letters, digits, '_' or '-' that begin with a letter or digit")
    return name
