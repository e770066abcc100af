"""The writing end of a log: blobs first, then the record that names them, one at a time, behind a fence."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence

from .errors import (
    AppendUnknownError,
    FencedError,
    OvertakenError,
    PositionTakenError,
    TransientTransportError,
    UsageError,
)
from .logs import read_log
from .message import (
    MAX_BLOB_BYTES,
    Blob,
    Kind,
    Message,
    Stats,
    check_writer_name,
    encode_message,
)
from .retry import Retry
from .transport import Buffer, Transport

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
        group: The names of the writers that make a cut; None is this one alone.
        clock: Tells the time of day in seconds since 1970, for `Message.created`.
        retry: How long to try what may pass.

    Attributes:
        writer: The name of the writer and of its log.

    Raises:
        UsageError: If a name is malformed, or the group lacks the writer or names one twice.
    """

    def __init__(
        self,
        transport: Transport,
        writer: str,
        *,
        group: Sequence[str] | None = None,
        clock: Callable[[], float] = time.time,
        retry: Retry | None = None,
    ) -> None:
        self.writer = check_writer_name(writer)
        self._group = tuple(map(check_writer_name, group or (writer,)))
        if writer not in self._group or len(set(self._group)) != len(self._group):
            raise UsageError(f"the group {', '.join(self._group)} must name each writer once, {writer!r} among them")
        self._transport = transport
        self._clock = clock
        self._retry = retry or Retry()
        self._turn = asyncio.Lock()
        self._epoch = 0
        self._position = 0
        self._version = 0
        self._last: Message | None = None
        self._history: list[Message] = []
        self._digests: dict[int, int] = {}
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
            UsageError: If it is open already.
            MessageFormatError: If the log holds something else than this writer's messages.
            TransportError: If it cannot be read.
        """
        async with self._turn:
            if self._epoch:
                raise UsageError(f"the log of writer {self.writer!r} is open already; make a new `LogWriter` instead")
            messages = await read_log(self._transport, self.writer, retry=self._retry)
            for message in messages:
                self._take_in(message)
            self._epoch = max((message.epoch for message in messages), default=0) + 1

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
        one that the log has, with the same digest: the anchor of an earlier step. One call runs at a time.

        Raises:
            UsageError: If a field is out of range or contradicts the log, or the writer is not open; nothing was
                written.
            FencedError: If another process took the log over; every later call raises it too.
            OvertakenError: If an earlier incarnation wrote once more after this one had read the log, or an earlier
                commit of this one succeeded although it was reported as failed. Nothing was written, and `history` has
                what was found: go on with an anchor of `next_version`.
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
                    base=dict(base),
                    version=version,
                    group=self._group,
                    schema=schema,
                    digest_before=digest_before,
                    digest_after=digest_after,
                    blobs=tuple(blobs),
                    stats=stats,
                    created=self._clock(),
                    metadata=dict(metadata or {}),
                )
            except ValueError as error:
                raise UsageError(f"these fields make no message of writer {self.writer!r}: {error}") from error
            self._check_fits(message)
            record = encode_message(message)
            await self._append(record)
            self._take_in(message)
            return message

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
        found = await read_log(self._transport, self.writer, after=self._position - 1, retry=self._retry)
        if not found:
            raise TransientTransportError(
                f"position {self._position} of log {self.writer!r} is taken, but cannot be read yet", url=taken.url
            ) from taken
        own = there is not None and hashlib.sha256(there).digest() in self._uncertain
        rival = max((message.epoch for message in found[own:]), default=0)
        if rival >= self._epoch:
            self._fence = (
                f"writer {self.writer!r} of {self._transport.url} was taken over: position {self._position} is epoch "
                f"{rival}'s, this process is epoch {self._epoch}; stop it, or give it a writer name of its own"
            )
            raise self._fenced() from taken
        for message in found:
            self._take_in(message)
        who = "an append whose answer was lost" if own else f"an earlier incarnation (epoch {rival})"
        raise OvertakenError(
            f"log {self.writer!r} of {self._transport.url} went on to position {self._position - 1} by {who}; "
            f"go on behind it with an anchor of version {self.next_version}",
            topic=self._transport.url,
            writer=self.writer,
        ) from taken

    def _fenced(self) -> FencedError:
        return FencedError(self._fence, topic=self._transport.url, writer=self.writer)

    def _take_in(self, message: Message) -> None:
        """Count a message that is in the log."""
        self._last = message
        self._position = message.position + 1
        self._version = max(self._version, message.version)
        self._digests[message.version] = message.digest_after
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
        if message.version <= self._version and self._digests.get(message.version) != message.digest_after:
            raise UsageError(
                f"{where}: the log is at version {self._version}; a new state is version {self.next_version}, an "
                "earlier one must have the digest that the log says"
            )
        base = message.base.get(self.writer, 0)
        if base and self._digests.get(base) != message.digest_before:
            raise UsageError(f"{where}: it must start from a version that the log has, with that version's digest")


async def checksum(data: Buffer) -> bytes:
    """Return the SHA-256 of bytes, without holding up the event loop."""
    if memoryview(data).nbytes <= _SMALL:
        return hashlib.sha256(data).digest()
    return (await asyncio.to_thread(hashlib.sha256, data)).digest()
