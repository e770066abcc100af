"""Where a topic's messages are, and what its two streams must be like.

    deltabus_<topic>_records    deltabus.<topic>.log.<log>.record       a record, or what names its parts
                                deltabus.<topic>.log.<log>.<attempt>    parts of a record too large for a message
    deltabus_<topic>_blobs      deltabus.<topic>.blob.<key>.head        a small blob, or what names its parts
                                deltabus.<topic>.blob.<key>.<attempt>   parts of a blob

Records have a stream of their own because they are small and must outlive the blobs: a limit in bytes or age holds for
blobs alone, so that it never takes a record away, and a log whose writer sleeps for long never begins anew.
In subjects the topic's `/` is `=`, and a key's `.` is `%`: both are free there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from deltabus.bus.errors import TransportError, UsageError

from .faults import NAME_TAKEN, ApiError, translate
from .jetstream import JetStream
from .settings import Limits

__all__ = ["Streams", "make_attempt"]

_DUPLICATES = 120
_NANO = 1_000_000_000
_RECORD = "record"
_HEAD = "head"


class Streams:
    """The streams of a topic; they are made when something is first written.

    Args:
        jetstream: To the servers.
        topic: The topic's name.
        limits: What they shall be like.
        url: The topic's URL, for errors.
    """

    def __init__(self, jetstream: JetStream, topic: str, limits: Limits, *, url: str) -> None:
        name = topic.replace("/", "=")
        self.records = f"deltabus_{name}_records"
        self.blobs = f"deltabus_{name}_blobs"
        self._subjects = f"deltabus.{name}"
        self._jetstream = jetstream
        self._limits = limits
        self._url = url
        self._ready = False
        self._turn = asyncio.Lock()
        self.max_age = 0.0

    def record_subject(self, log: str = "*") -> str:
        """Return the subject of a log's records, or the pattern of all logs' records."""
        return f"{self._subjects}.log.{log}.{_RECORD}"

    def record_parts_subject(self, log: str, attempt: str) -> str:
        """Return the subject of the parts of a record."""
        return f"{self._subjects}.log.{log}.{attempt}"

    def log_of(self, subject: str) -> str:
        """Return the log whose records have a subject."""
        return subject.split(".")[-2]

    def blob_subject(self, key: str) -> str:
        """Return the subject of a blob, or of what names its parts."""
        return f"{self._subjects}.blob.{key.replace('.', '%')}.{_HEAD}"

    def key_of(self, subject: str) -> str:
        """Return the key of the blob that has a subject."""
        return subject.split(".")[-2].replace("%", ".")

    def head_of(self, parts: str) -> str:
        """Return the subject of the blob whose parts have a subject."""
        return f"{parts.rpartition('.')[0]}.{_HEAD}"

    def abandoned_parts(self, subjects: Mapping[str, float], before: float) -> list[str]:
        """Return the subjects of parts of blobs that were never finished, and to which nothing came since a time.

        Args:
            subjects: All subjects of blobs and their parts, with the time of the last message on each.
            before: The time, in seconds since 1970 on the same clock: the server's, as those of writers may be wrong.
        """
        return [
            subject
            for subject, stored in subjects.items()
            if stored < before
            and subject.rpartition(".")[2].partition("-")[0].isdecimal()
            and self.head_of(subject) not in subjects
        ]

    def blob_parts_subject(self, key: str, attempt: str) -> str:
        """Return the subject of the parts of a blob, `*` for those of all attempts and the blob itself."""
        return f"{self._subjects}.blob.{key.replace('.', '%')}.{attempt}"

    def forget(self) -> None:
        """Look again before the next write whether the streams are there."""
        self._ready = False

    async def ensure(self) -> None:
        """Make the streams if they are not there, and check what they are like.

        Raises:
            UsageError: If they are not as the options say.
            StorageFullError: If the server has no room for them.
            AccessDeniedError: If they are missing and may not be made here.
            TransportError: If they cannot be made, or would lose records.
        """
        if self._ready:
            return
        async with self._turn:
            if not self._ready:
                await self._ensure(self.records, f"{self._subjects}.log.*.*", {})
                limits: dict[str, Any] = {}
                if self._limits.max_bytes is not None:
                    limits["max_bytes"] = self._limits.max_bytes
                if self._limits.max_age is not None:
                    limits["max_age"] = round(self._limits.max_age * _NANO)
                found = await self._ensure(self.blobs, f"{self._subjects}.blob.*.*", limits)
                self.max_age = int(found.get("max_age") or 0) / _NANO
                self._ready = True

    async def _ensure(self, name: str, subject: str, limits: dict[str, Any]) -> dict[str, Any]:
        if self._limits.replicas is not None:
            limits["num_replicas"] = self._limits.replicas
        if self._limits.storage is not None:
            limits["storage"] = self._limits.storage
        try:
            info = await self._jetstream.info(name)
            if info is None:
                config = {
                    "name": name,
                    "subjects": [subject],
                    "description": f"deltabus topic {self._url.partition('?')[0]}",
                    "retention": "limits",
                    "discard": "new",
                    "storage": "file",
                    "num_replicas": 1,
                    "max_consumers": -1,
                    "max_msgs": -1,
                    "max_msgs_per_subject": -1,
                    "max_msg_size": -1,
                    "max_bytes": -1,
                    "max_age": 0,
                    "duplicate_window": _duplicate_window(limits),
                    "allow_direct": True,
                    "metadata": {"deltabus": "1"},
                }
                try:
                    info = await self._jetstream.call(f"STREAM.CREATE.{name}", config | limits)
                except ApiError as error:
                    if error.number != NAME_TAKEN:
                        raise
                    info = await self._jetstream.info(name)  # somebody else was faster
        except ApiError as error:
            raise translate(error, f"find or make stream {name}", url=self._url) from error
        found: dict[str, Any] = (info or {}).get("config") or {}
        self._check(name, subject, found, limits)
        return found

    def _check(self, name: str, subject: str, found: dict[str, Any], limits: dict[str, Any]) -> None:
        for option, wanted in limits.items():
            there = found.get(option)
            if there != wanted:
                unit = _NANO if option == "max_age" else None
                said = (there or 0) / unit if unit else there
                raise UsageError(
                    f"stream {name} of {self._url} has {option.removeprefix('num_')}={said}, the URL says "
                    f"{wanted / unit if unit else wanted}; leave the option out to take the stream as it is, or change "
                    f"it with: nats stream edit {name}"
                )
        loses = (
            found.get("retention") != "limits"
            or found.get("discard") != "new"
            or (found.get("max_msgs_per_subject") or -1) > 0
            or (name == self.records and (found.get("max_age") or 0) > 0)
        )
        if loses or subject not in (found.get("subjects") or ()) or found.get("sealed"):
            raise TransportError(
                f"stream {name} of {self._url} is not one of deltabus: it must take {subject}, keep by limits, refuse "
                "new messages when it is full, and drop none by subject, nor records by age; rename or delete it",
                url=self._url,
            )


def make_attempt(now: float) -> str:
    """Return the last word of the subject of parts that are begun at a time in seconds since 1970."""
    return f"{int(now)}-{secrets.token_hex(8)}"


def _duplicate_window(limits: dict[str, Any]) -> int:
    """Return the time in ns in which a message id is recognised; the server wants it no longer than the age."""
    age = limits.get("max_age") or 0
    return min(_DUPLICATES * _NANO, age) if age else _DUPLICATES * _NANO
