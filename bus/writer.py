"""The writing end of a log: blobs first, then the record that names them, one at a time, behind a fence."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from .errors import (
    AppendUnknownError,
    FencedError,
    OvertakenError,
    PositionTakenError,
    SignatureError,
    TransientTransportError,
    UsageError,
)
from .group import Group
from .logs import Entry, Link, read_log
from .message import (
    MAX_BLOB_BYTES,
    Blob,
    Kind,
    Message,
    Stats,
    check_writer_name,
    encode_message,
)
from .planner import Fingerprint
from .retry import Retry
from .signing import LOG_ID_BYTES, NO_RECORD, KeyRing, SigningKey, accepted, sign_message
from .transport import Buffer, Record, Transport
from .version import VersionVector

__all__ = ["LogWriter", "checksum"]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._=-]{0,199}")
_SMALL = 1 << 16
"""Bytes that are hashed faster than a thread is started."""


class LogWriter:
    """Appends to one writer's log, as one incarnation of that writer.

    The append is the fence: of two processes that write one log, the one with the lower epoch loses the race for a
    position, and stops. What a call leaves behind when it fails or is cancelled is a blob that no record names, or a
    record that came to be although its answer was lost; the next `commit` finds the latter, and says so.

    Args:
        transport: The topic, opened.
        writer: The name of the writer and of its log.
        group: The writers that make a cut together, and their generation; None is this one alone.
        clock: Tells the time of day in seconds since 1970, for `Message.created`.
        retry: How long to try what may pass.
        key: Signs every message; None signs none.
        keys: Whose messages are accepted in this log besides the key's own; after a rotation, the old key's.
        draw: Returns so many random bytes, for a new log's id.

    Attributes:
        writer: The name of the writer and of its log.
        clock: As given.

    Raises:
        UsageError: If the name is malformed, the group lacks the writer, or keys are given without a key to sign with.
    """

    def __init__(
        self,
        transport: Transport,
        writer: str,
        *,
        group: Group | None = None,
        clock: Callable[[], float] = time.time,
        retry: Retry | None = None,
        key: SigningKey | None = None,
        keys: KeyRing | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.writer = check_writer_name(writer)
        self._group = group or Group((writer,))
        if writer not in self._group.members:
            raise UsageError(f"the group {', '.join(self._group.members[:8])} has no member {writer!r}")
        if keys is not None and key is None:
            raise UsageError(
                f"writer {writer!r} has keys to check messages with, but none to sign its own, which no reader with "
                "keys would accept; give it a signing key"
            )
        self._key = key
        self._keys = accepted(key, keys)
        self._log_id = draw(LOG_ID_BYTES)
        self._link: Link | None = None
        self._transport = transport
        self.clock = clock
        self._retry = retry or Retry()
        self._turn = asyncio.Lock()
        self._epoch = 0
        self._position = 0
        self._version = 0
        self._last: Message | None = None
        self._needs = VersionVector()
        self._history: list[Message] = []
        self._states: dict[int, Fingerprint] = {}
        self._uncertain: set[bytes] = set()
        self._fence = ""

    @property
    def epoch(self) -> int:
        """This incarnation's number; 0 before `open`."""
        return self._epoch

    @property
    def last(self) -> Message | None:
        """The last message of the log, as far as it is known here; None when it is empty."""
        return self._last

    @property
    def keys(self) -> KeyRing | None:
        """Whose messages are accepted in this log; None accepts everybody's."""
        return self._keys

    @property
    def next_version(self) -> int:
        """The version that the next new state gets."""
        return self._version + 1

    @property
    def history(self) -> list[Message]:
        """The log's messages, as far as they are known here, from the state of its newest anchor on, by position."""
        return list(self._history)

    async def open(self) -> None:
        """Read the log, and become its next incarnation.

        Nobody learns of it before the first `commit`.

        Raises:
            UsageError: If it is open already, or the group's generation is not greater than the log's.
            MessageFormatError: If the log holds something else than this writer's messages.
            SignatureError: If there is a key, and the log holds what no accepted key signed; or none, and it is signed.
            TransportError: If it cannot be read.
        """
        async with self._turn:
            if self._epoch:
                raise UsageError(f"the log of writer {self.writer!r} is open already; make a new `LogWriter` instead")
            entries = await self._read(None)
            if self._key is None and entries and entries[-1].message.signature is not None:
                raise SignatureError(
                    f"log {self.writer!r} of {self._transport.url} is signed, and this publisher has no key, so that "
                    "no reader with keys would accept what it adds; give it the key, or publish to a new topic",
                    topic=self._transport.url,
                    writer=self.writer,
                )
            self._check_generation(entries[-1].message if entries else None)
            for entry in entries:
                self._take_in(entry)
            self._epoch = max((entry.message.epoch for entry in entries), default=0) + 1

    async def store(self, data: Buffer, *, name: str) -> Blob:
        """Store a blob and return what names it; when it returns, the blob is durable.

        The key ends in the content's hash, so that neither a repetition nor another process can collide with it.

        Args:
            data: At most `MAX_BLOB_BYTES` bytes; not to be changed before this returns.
            name: The blob's part of the key: letters, digits, `.`, `_`, `=`, `-`.

        Raises:
            UsageError: If the name is malformed, the blob too large, or the writer not open.
            FencedError: If another process took the log over.
            TransportError: If the blob cannot be stored.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"blob name {name!r} is not 1-200 letters, digits, '.', '_', '=', '-' without a first '.'")
        digest = await self._checked(data)
        return await self._put(f"blobs/{self.writer}/{name}-{digest.hex()[:16]}", data, digest)

    async def store_schema(self, data: Buffer) -> Blob:
        """Store a schema and return what names it; when it returns, the schema is durable.

        Raises:
            UsageError: If it is too large, or the writer not open.
            FencedError: If another process took the log over.
            TransportError: If the schema cannot be stored.
        """
        digest = await self._checked(data)
        return await self._put(f"schemas/{digest.hex()}.json", data, digest)

    async def commit(
        self,
        *,
        kind: Kind,
        step: int,
        version: int,
        base: Mapping[str, int],
        schema: Blob,
        digest_before: int | None,
        digest_after: int,
        blobs: Sequence[Blob],
        stats: Stats,
        metadata: Mapping[str, str] | None = None,
    ) -> Message:
        """Append a message at the log's end; when it returns, the message is durable, and readers may see it.

        Arguments are the fields of `Message`. Its blobs must have been stored before. The version is `next_version`, or
        one that the log has, with the same digest and schema: the anchor of an earlier step. What `base` says of other
        writers holds for all later messages too. One call runs at a time.

        Raises:
            UsageError: If a field is out of range or contradicts the log, or the writer is not open; nothing was
                written.
            FencedError: If another process took the log over; every later call raises it too.
            OvertakenError: If an earlier incarnation wrote once more after this one had read the log, or an earlier
                commit of this one succeeded although it was reported as failed. Nothing was written, and `history` has
                what was found: go on with an anchor of `next_version`.
            SignatureError: If there is a key, and somebody without an accepted one wrote to the log.
            AppendUnknownError: If answers were lost until the limit was reached: the message may or may not be there.
            TransientTransportError: If the backend did not answer until the limit was reached.
            TransportError: If the backend fails for good.
        """
        async with self._turn:
            self._check_open()
            try:
                message = Message(
                    writer=self.writer,
                    position=self._position,
                    epoch=self._epoch,
                    kind=kind,
                    step=step,
                    base=self._based_on(base),
                    version=version,
                    group=self._group.names,
                    cohort=self._group.cohort,
                    schema=schema,
                    digest_before=digest_before,
                    digest_after=digest_after,
                    blobs=tuple(blobs),
                    stats=stats,
                    created=self.clock(),
                    metadata=dict(metadata or {}),
                )
            except ValueError as error:
                raise UsageError(f"these fields make no message of writer {self.writer!r}: {error}") from error
            self._check_fits(message)
            message, record = self._encoded(message)
            await self._append(record)
            self._take_in(Entry(message, Link.behind(Record(self._position, record), self._log_id)))
            return message

    def _based_on(self, base: Mapping[str, int]) -> dict[str, int]:
        """Return a base with all that this log rests on of other writers."""
        others = {writer: version for writer, version in base.items() if writer != self.writer}
        own = {self.writer: base[self.writer]} if self.writer in base else {}
        return {**self._needs.merge(others), **own}

    def _check_generation(self, last: Message | None) -> None:
        """Check that the group is a new incarnation, so that no reader puts halves of two together."""
        before, now = last.generation if last is not None else 0, self._group.generation
        if before and now <= before:
            given = f"generation {now}" if now else "no group"
            raise UsageError(
                f"log {self.writer!r} of {self._transport.url} has generation {before} of its group, and {given} was "
                f"given: restart all members of the group, with a generation of {before + 1} or more"
            )

    async def _read(self, after: Link | None) -> list[Entry]:
        return await read_log(self._transport, self.writer, after=after, retry=self._retry, keys=self._keys)

    def _encoded(self, message: Message) -> tuple[Message, bytes]:
        """Return a message as it is written, and its record."""
        if self._key is None:
            return message, encode_message(message)
        previous = self._link.identity if self._link is not None else NO_RECORD
        return sign_message(message, self._key, log_id=self._log_id, previous=previous)

    async def _checked(self, data: Buffer) -> bytes:
        """Return the checksum of bytes that may be stored."""
        self._check_open()
        size = memoryview(data).nbytes
        if size > MAX_BLOB_BYTES:
            raise UsageError(f"a blob of {size} bytes is over the limit of {MAX_BLOB_BYTES}; split it into parts")
        return await checksum(data)

    async def _put(self, key: str, data: Buffer, digest: bytes) -> Blob:
        await self._retry.call(f"storing {key} in {self._transport.url}", lambda: self._transport.put(key, data))
        return Blob(key=key, size=memoryview(data).nbytes, checksum=digest)

    async def _append(self, record: bytes) -> None:
        identity = hashlib.sha256(record).digest()

        async def attempt() -> None:
            # From here on until the answer is known, also when cancelled, the record may come to be in the log.
            self._uncertain.add(identity)
            try:
                # When the answer is lost, the same bytes once more: seeing them there would not say that they last.
                await self._transport.append(self.writer, self._position, record)
            except PositionTakenError as error:
                there = await self._read_back()
                if there != record:
                    await self._yield_to_others(there, error)

        what = f"appending position {self._position} of log {self.writer!r} in {self._transport.url}"
        await self._retry.call(what, attempt, on=(TransientTransportError, AppendUnknownError))

    async def _read_back(self) -> bytes | None:
        """Return the record at the position that is to be written; None when it is empty."""
        found = await self._transport.read(self.writer, self._position - 1, 1)
        return found[0].data if found and found[0].position == self._position else None

    async def _yield_to_others(self, there: bytes | None, taken: PositionTakenError) -> None:
        """Find out who wrote at this writer's position, and raise what follows from it."""
        found = await self._read(self._link)
        if not found:
            raise TransientTransportError(
                f"position {self._position} of log {self.writer!r} is taken, but cannot be read yet", url=taken.url
            ) from taken
        own = there is not None and hashlib.sha256(there).digest() in self._uncertain
        rival = max((entry.message.epoch for entry in found[own:]), default=0)
        if rival >= self._epoch:
            self._fence = (
                f"writer {self.writer!r} of {self._transport.url} was taken over: position {self._position} is epoch "
                f"{rival}'s, this process is epoch {self._epoch}; stop it, or give it a writer name of its own"
            )
            raise self._fenced() from taken
        for entry in found:
            self._take_in(entry)
        who = "an append whose answer was lost" if own else f"an earlier incarnation (epoch {rival})"
        raise OvertakenError(
            f"log {self.writer!r} of {self._transport.url} went on to position {self._position - 1} by {who}; "
            f"go on behind it with an anchor of version {self.next_version}",
            topic=self._transport.url,
            writer=self.writer,
        ) from taken

    def _fenced(self) -> FencedError:
        return FencedError(self._fence, topic=self._transport.url, writer=self.writer)

    def _take_in(self, entry: Entry) -> None:
        """Count a message that is in the log."""
        message, self._link = entry
        self._log_id = self._link.log_id or self._log_id
        self._last = message
        self._needs = self._needs.merge(message.needs)
        self._position = message.position + 1
        self._version = max(self._version, message.version)
        self._states[message.version] = Fingerprint.after(message)
        if message.kind is Kind.ANCHOR:
            # What a newcomer needs: older states serve nobody here, and a log may grow for months.
            self._history = [earlier for earlier in self._history if earlier.version >= message.version]
        self._history.append(message)
        self._uncertain.clear()

    def _check_open(self) -> None:
        if not self._epoch:
            raise UsageError(f"open the log of writer {self.writer!r} first: `await writer.open()`")
        if self._fence:
            raise self._fenced()

    def _check_fits(self, message: Message) -> None:
        """Check a message against the log that it is to stand in."""
        where = f"{message.kind} of version {message.version} does not fit the log of writer {self.writer!r}"
        if message.version <= self._version and self._states.get(message.version) != Fingerprint.after(message):
            raise UsageError(
                f"{where}: the log is at version {self._version}; a new state is version {self.next_version}, an "
                "earlier one must have the digest and schema that the log says"
            )
        base = message.base.get(self.writer, 0)
        if base and self._states.get(base) != Fingerprint.before(message):
            raise UsageError(
                f"{where}: it must start from a version that the log has, with that version's digest and schema"
            )


async def checksum(data: Buffer) -> bytes:
    """Return the SHA-256 of bytes, without holding up the event loop."""
    if memoryview(data).nbytes <= _SMALL:
        return hashlib.sha256(data).digest()
    return (await asyncio.to_thread(hashlib.sha256, data)).digest()
