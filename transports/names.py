"""What may name a blob or a log, and stand at a position: the same rules for every backend."""

from __future__ import annotations

import re
from collections.abc import Iterable

from deltabus.bus.errors import UsageError
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Buffer

__all__ = [
    "LOGS",
    "byte_view",
    "check_after",
    "check_key",
    "check_keys",
    "check_log",
    "check_position",
    "check_range",
    "check_record",
    "is_log",
]

LOGS = "logs"
"""The first part of the names under which backends keep records; no key may begin with it."""

_MAX_KEY = 512
_MAX_PART = 255  # NAME_MAX of every common file system
_MAX_POSITION = (1 << 63) - 1
_PART = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._=-]{{0,{_MAX_PART - 1}}}")
_LOG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def check_key(key: str) -> str:
    """Return the key if it may name a blob.

    Raises:
        UsageError: If it is not 1-512 characters of parts joined by `/`, each of 1-255 letters, digits, `.`, `_`, `=`
            or `-` and not beginning with `.` or `=`; or if its first part is `logs`.
    """
    parts = key.split("/")
    if len(key) > _MAX_KEY or not all(_PART.fullmatch(part) for part in parts):
        raise UsageError(
            f"key {key[:80]!r} is not 1-{_MAX_KEY} characters of parts joined by '/', each of 1-{_MAX_PART} letters, "
            "digits, '.', '_', '=' or '-' and not beginning with '.' or '='; choose another key"
        )
    if parts[0] == LOGS:
        raise UsageError(f"key {key[:80]!r} begins with '{LOGS}', where records are kept; choose another key")
    return key


def check_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list if each may name a blob.

    Raises:
        UsageError: If one is malformed, or a single string was given.
    """
    if isinstance(keys, str):
        raise UsageError(f"keys is the string {keys[:80]!r}; give a list of keys")
    return [check_key(key) for key in keys]


def check_log(log: str) -> str:
    """Return the name if it may name a log.

    Raises:
        UsageError: If it is not 1-63 letters, digits, `_` or `-`, beginning with a letter or digit.
    """
    if not is_log(log):
        raise UsageError(f"log {log[:80]!r} is not 1-63 letters, digits, '_' or '-' that begin with a letter or digit")
    return log


def is_log(name: str) -> bool:
    """Return whether this may name a log."""
    return _LOG.fullmatch(name) is not None


def check_position(position: int) -> int:
    """Return the position if a record may stand there.

    Raises:
        UsageError: If it is negative, or above 2^63 - 1.
    """
    if not 0 <= position <= _MAX_POSITION:
        raise UsageError(f"position {position} is not one of 0 to 2^63 - 1")
    return position


def check_after(after: int, limit: int = 1) -> None:
    """Check what a read or tail starts behind, and how many records it may give.

    Raises:
        UsageError: If `after` is below -1 or `limit` below 1.
    """
    if after < -1 or limit < 1:
        raise UsageError(
            f"after={after} and limit={limit} name no records; after is -1 or a position, limit at least 1"
        )


def check_range(start: int, stop: int | None) -> None:
    """Check a range of bytes.

    Raises:
        UsageError: If a bound is negative.
    """
    if start < 0 or (stop is not None and stop < 0):
        raise UsageError(f"the range {start}:{stop} counts from the end; bounds are 0 or more")


def check_record(record: Buffer) -> memoryview:
    """Return a record's bytes as a flat view if it is small enough.

    Raises:
        UsageError: If it is larger than `MAX_RECORD_BYTES`.
    """
    view = byte_view(record)
    if view.nbytes > MAX_RECORD_BYTES:
        raise UsageError(f"a record of {view.nbytes} bytes is over the limit of {MAX_RECORD_BYTES}; put it in a blob")
    return view


def byte_view(data: Buffer) -> memoryview:
    """Return a flat view of a buffer's bytes, without a copy where the buffer is contiguous.

    >>> byte_view(bytearray(b"ab")).tolist()
    [97, 98]
    """
    view = memoryview(data)
    if view.nbytes and view.c_contiguous:
        return view.cast("B")
    return memoryview(view.tobytes())
