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
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .errors import MessageFormatError, UsageError
from .version import VersionVector

__all__ = [
    "MAX_BLOB_BYTES",
    "MAX_RECORD_BYTES",
    "PROTOCOL",
    "Blob",
    "Kind",
    "Message",
    "Stats",
    "check_step_and_metadata",
    "check_writer_name",
    "decode_message",
    "encode_message",
]

PROTOCOL = 1
"""The version of the protocol that this code speaks."""

MAX_RECORD_BYTES = 1 << 20
"""The largest record that is written or read, in bytes."""

MAX_BLOB_BYTES = 1 << 30
"""The largest blob that a message may name, in bytes."""

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


class Message(Struct, frozen=True, kw_only=True):
    """One immutable log record.

    Attributes:
        writer: Whose log it stands in.
        position: Its place in that log, from 0, with no holes.
        epoch: The incarnation of the writer process; a restart has a higher one.
        kind: Anchor or delta.
        step: The training step that the state belongs to; may go back after a restart.
        base: The version vector that a delta starts from; empty for an anchor.
        version: The writer's state counter after this message.
        group: The names of the writers that make a cut.
        schema: The blob that holds the schema; its checksum names the schema.
        digest_before: The state's digest that a delta starts from; None for an anchor.
        digest_after: The state's digest after this message.
        blobs: The payload's parts, in order; a delta that changes nothing has none.
        stats: Figures.
        created: When it was written, in seconds since 1970; for people, never for decisions.
        metadata: The user's own key-value pairs.
        signature: Over all other fields; None when the writer has no key.
        protocol: The version of the protocol.
    """

    writer: _Writer
    position: _Count
    epoch: Annotated[int, Meta(ge=1, le=_MAX)]
    kind: Kind
    step: _Step
    base: Annotated[dict[_Writer, _Count], Meta(max_length=4096)]
    version: Annotated[int, Meta(ge=1, le=_MAX)]
    group: Annotated[tuple[_Writer, ...], Meta(min_length=1, max_length=4096)]
    schema: Blob
    digest_before: _Digest | None
    digest_after: _Digest
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=8192)]
    stats: Stats
    created: float
    metadata: _Metadata = {}
    signature: bytes | None = None
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        if self.writer not in self.group or len(set(self.group)) != len(self.group):
            raise ValueError("`group` must name each writer once, the message's own among them")
        if max(self.digest_after, self.digest_before or 0) >= 1 << 64:
            raise ValueError("digests are 64 bits")
        if not math.isfinite(self.created):
            raise ValueError("`created` is not a time")  # and a NaN would make a message differ from itself
        if self.kind is Kind.ANCHOR:
            if self.base or self.digest_before is not None or not self.blobs:
                raise ValueError("an anchor has no `base`, no `digest_before` and at least one blob")
        elif self.digest_before is None or not 0 < self.base.get(self.writer, 0) < self.version:
            raise ValueError("a delta leads from an earlier version of its own writer and says the digest there")

    @property
    def state(self) -> VersionVector:
        """The version vector after this message."""
        return VersionVector(self.base).merge({self.writer: self.version})

    @property
    def nbytes(self) -> int:
        """The payload's size in bytes, without the record itself."""
        return sum(blob.size for blob in self.blobs)


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
        place = f"record {position if position is not None else '?'} of log {writer or '?'} in {topic or 'this topic'}"
        return MessageFormatError(f"{place} {what}", topic=topic, writer=writer)

    head = len(_MAGIC) + _CRC_BYTES
    if len(record) < head or len(record) > MAX_RECORD_BYTES or record[: len(_MAGIC)] != _MAGIC:
        raise wrong("is not a deltabus message; is the URL that of a topic?")
    body = memoryview(record)[head:]
    if zlib.crc32(body) != int.from_bytes(record[len(_MAGIC) : head], "little"):
        raise wrong("is damaged: its checksum does not match; restore it from a copy, or publish an anchor")
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


def check_writer_name(name: str) -> str:
    """Return the name if it may name a writer.

    Raises:
        UsageError: If it is not 1-63 letters, digits, `_` or `-`, beginning with a letter or digit.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(f"writer {name!r} is not 1-63 letters, digits, '_' or '-' that begin with a letter or digit")
    return name
