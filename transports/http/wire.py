"""What both ends say to each other: paths, headers, errors, records on the line. `docs/http.md` describes it.

    /<topic>/-/blobs/<key>                    a blob
    /<topic>/-/blobs?folder=<folder>          the blobs below a folder
    /<topic>/-/delete                         removes blobs
    /<topic>/-/logs                           the names of the logs
    /<topic>/-/logs/<log>                     records that are there
    /<topic>/-/logs/<log>/<position>          where a record is appended
    /<topic>/-/logs/<log>/events              records as they come
    /<topic>/-/readers/<name>                 how far a reader says that it has come
    /<topic>/-/status                         what is known of the topic

All names are letters, digits and `.`, `_`, `=`, `-`, so that nothing in a path needs to be percent-encoded.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from deltabus.bus.errors import (
    AccessDeniedError,
    AppendUnknownError,
    DeltabusError,
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    StorageFullError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Record

from ..names import check_key

__all__ = [
    "BEAT",
    "ERROR_HEADER",
    "HEARTBEAT_HEADER",
    "KINDS",
    "MAX_DELETE",
    "READER_HEADER",
    "RECORDS",
    "Deletion",
    "Event",
    "Failure",
    "GoneError",
    "ListedBlob",
    "Listing",
    "Logs",
    "RecordParser",
    "check_own_key",
    "check_reader",
    "check_topic",
    "code_of",
    "encode_event",
    "encode_record",
    "is_own_key",
    "is_topic",
    "split_events",
]

RECORDS = "application/vnd.deltabus.records"
"""The media type of records, each as position (8 bytes), length (4 bytes), both big endian, and its bytes."""

READER_HEADER = "Deltabus-Reader"
"""Names who asks, for people; it proves nothing."""

HEARTBEAT_HEADER = "Deltabus-Heartbeat"
"""Seconds between two signs of life on a line of events."""

ERROR_HEADER = "Deltabus-Error"
"""The code of an error, also where an answer has no body."""

MAX_DELETE = 1000
"""Keys that one request may remove."""

BEAT = b": beat\n\n"
"""A sign of life."""

_HEAD = struct.Struct(">QI")
_TOPIC_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_TAKEN_PARTS = frozenset({"blobs", "leases", "logs", "marks", "schemas", "trims"})
_MAX_TOPIC = 200
_READER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")


class Event(NamedTuple):
    """What came on a line of events.

    Attributes:
        name: `record` or `error`.
        position: Of the record; -1 for an error.
        data: The record's bytes, or the error as JSON.
    """

    name: str
    position: int
    data: bytes


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an error.

    Attributes:
        error: Its code, one of `KINDS`.
        message: What happened, where, and what to do, for people.
    """

    error: str
    message: str


class ListedBlob(msgspec.Struct, frozen=True, kw_only=True):
    """A blob in a listing; as `StoredBlob`."""

    key: str
    size: int | None = None
    stored: float | None = None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs below a folder."""

    blobs: list[ListedBlob]


class Logs(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a topic's logs."""

    logs: list[str]


class GoneError(TransportError):
    """What a reader has read of a log is not its beginning any more: the log was begun anew."""


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs that are to be removed."""

    keys: list[str]


_KINDS: tuple[tuple[str, int, type[DeltabusError]], ...] = (
    # Of the classes that fit an error the first counts; codes of the service itself stand behind.
    ("key_not_found", 404, KeyNotFoundError),
    ("key_exists", 409, KeyExistsError),
    ("position_taken", 409, PositionTakenError),
    ("storage_full", 507, StorageFullError),
    ("access_denied", 403, AccessDeniedError),
    ("append_unknown", 504, AppendUnknownError),
    ("gone", 410, GoneError),
    ("transient", 503, TransientTransportError),
    ("transport", 502, TransportError),
    ("usage", 400, UsageError),
    ("bad_request", 400, UsageError),
    ("unauthorized", 401, AccessDeniedError),
    ("forbidden", 403, AccessDeniedError),
    ("not_found", 404, TransportError),
    ("method_not_allowed", 405, TransportError),
    ("slow", 408, TransientTransportError),
    ("gap", 409, UsageError),
    ("too_large", 413, UsageError),
    ("range", 416, UsageError),
    ("busy", 429, TransientTransportError),
    ("internal", 500, TransportError),
    ("stopping", 503, TransientTransportError),
)

KINDS = {code: (status, kind) for code, status, kind in _KINDS}
"""The status and our error of each code."""


def code_of(error: DeltabusError) -> str:
    """Return the code of an error.

    >>> code_of(KeyNotFoundError("blob 'a'"))
    'key_not_found'
    """
    return next((code for code, _, kind in _KINDS if isinstance(error, kind)), "internal")


def check_topic(topic: str) -> str:
    """Return a topic's name if it may be one.

    Raises:
        UsageError: If it is not 1-200 characters of parts joined by `/`, each of letters, digits, `.`, `_`, `=` or
            `-` that begins with a letter or digit, or a part is the name of what lies in a topic.
    """
    parts = topic.split("/")
    if len(topic) > _MAX_TOPIC or not all(_TOPIC_PART.fullmatch(part) for part in parts):
        raise UsageError(
            f"topic {topic[:80]!r} is not 1-{_MAX_TOPIC} characters of parts joined by '/', each of 1-100 letters, "
            "digits, '.', '_', '=' or '-' that begin with a letter or digit; choose another name, such as run-7"
        )
    # On backends with folders a topic below a topic would share these with it, and get around its fence.
    if taken := _TAKEN_PARTS.intersection(parts):
        raise UsageError(f"topic {topic[:80]!r} has a part {min(taken)!r}, which lies in topics; choose another name")
    return topic


def check_own_key(key: str) -> str:
    """Return the key if it may name a blob of a topic, and cannot lie in a topic below that one.

    Raises:
        UsageError: If it may not.
    """
    first, *others = check_key(key).split("/")
    # On backends with folders, `b/logs/x` of the topic `a` is `logs/x` of the topic `a/b`, whose tokens are others.
    if first not in _TAKEN_PARTS and (taken := _TAKEN_PARTS.intersection(others)):
        raise UsageError(
            f"key {key[:80]!r} has a part {min(taken)!r}, as if it lay in another topic; choose another key"
        )
    return key


def is_own_key(key: str) -> bool:
    """Return whether this may name a blob of a topic itself."""
    try:
        check_own_key(key)
    except UsageError:
        return False
    return True


def is_topic(name: str) -> bool:
    """Return whether this may be a topic's name."""
    try:
        check_topic(name)
    except UsageError:
        return False
    return True


def check_reader(name: str) -> str:
    """Return a reader's name if it may be one.

    Raises:
        UsageError: If it is not 1-100 letters, digits, `.`, `_`, `=` or `-` that begin with a letter or digit.
    """
    if not _READER.fullmatch(name):
        raise UsageError(
            f"reader {name[:80]!r} is not 1-100 letters, digits, '.', '_', '=' or '-' that begin with a letter or digit"
        )
    return name


def encode_record(record: Record) -> bytes:
    """Return a record as it stands among others."""
    return _HEAD.pack(record.position, len(record.data)) + record.data


class RecordParser:
    """Takes bytes as they come, and gives the records that are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def empty(self) -> bool:
        """Whether nothing is left of what was fed."""
        return not self._held

    def feed(self, data: bytes) -> list[Record]:
        """Return the records that these bytes complete.

        Raises:
            ValueError: If a record is over the limit.
        """
        held = self._held
        held += data
        found, at = [], 0
        while len(held) - at >= _HEAD.size:
            position, length = _HEAD.unpack_from(held, at)
            if length > MAX_RECORD_BYTES:
                raise ValueError(f"a record of {length} bytes is over the limit of {MAX_RECORD_BYTES}")
            end = at + _HEAD.size + length
            if len(held) < end:
                break
            found.append(Record(position, bytes(held[at + _HEAD.size : end])))
            at = end
        del held[:at]
        return found


def encode_event(record: Record) -> bytes:
    """Return a record as a server-sent event, whose id is its position."""
    return b"id: %d\nevent: record\ndata: %s\n\n" % (record.position, base64.b64encode(record.data))


def split_events(held: bytearray) -> Iterator[Event | None]:
    """Take the whole events out of what has come; None is a sign of life.

    Raises:
        ValueError: If one is malformed.
    """
    while (end := held.find(b"\n\n")) >= 0:
        block = bytes(held[:end])
        del held[: end + 2]
        fields: dict[bytes, bytes] = {}
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            fields[name] = value.removeprefix(b" ")
        kind, data = fields.get(b"event", b""), fields.get(b"data", b"")
        if kind == b"record":
            yield Event("record", int(fields[b"id"]), base64.b64decode(data, validate=True))
        else:
            yield Event("error", -1, data) if kind == b"error" else None
