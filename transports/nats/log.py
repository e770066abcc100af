"""Records: who may append, and where they are.

A record's message says its position in a header, because the numbers of a stream are shared by all logs and go on when
first records are removed. The server stores a record only if the one before it is the last of its log: that is the
fence. What is read is what the stream's leader has, so that whoever appended finds it.
"""

from __future__ import annotations

import hashlib
import time
from typing import NamedTuple

import msgspec

from deltabus.bus.errors import (
    AppendUnknownError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Record

from .chunks import MANIFEST, Chunks, PartsGoneError, read_manifest
from .faults import IN_PROCESS, WRONG_LAST, ApiError, translate
from .jetstream import JetStream, Stored
from .session import UnansweredError
from .streams import Streams, make_attempt

__all__ = ["Log", "position_of"]

_POSITION = "Deltabus-Position"
_MESSAGE_ID = "Nats-Msg-Id"
_FEW = 4
_BATCH_BYTES = 8 << 20
_ATTEMPTS = 3


class _End(NamedTuple):
    """Where a log ends: its last record's position and number; -1 and 0 for an empty log."""

    position: int
    seq: int


def position_of(stored: Stored, *, url: str) -> int:
    """Return the position of a record.

    Raises:
        TransportError: If the message is none.
    """
    text = stored.headers.get(_POSITION, "")
    if not text.isdecimal():
        raise TransportError(
            f"{url}: message {stored.seq} on {stored.subject} is no record of deltabus; nothing else may be sent there",
            url=url,
        )
    return int(text)


class Log:
    """The records of a topic, of all its logs.

    Args:
        jetstream: To the servers.
        streams: Where the records are.
        chunks: Stores and fetches the parts of records that are too large for a message.
        url: The topic's URL, for errors.
    """

    def __init__(self, jetstream: JetStream, streams: Streams, chunks: Chunks, *, url: str) -> None:
        self._jetstream = jetstream
        self._streams = streams
        self._chunks = chunks
        self._url = url
        self._ends: dict[str, _End] = {}
        self._places: dict[str, _End] = {}

    async def append(self, log: str, position: int, view: memoryview) -> None:
        """Append a record; see `Transport.append` for its errors."""
        await self._streams.ensure()
        what = f"append to log {log!r} at position {position}"
        try:
            for _ in range(_ATTEMPTS):
                end = self._ends.pop(log, None)
                if end is None or end.position != position - 1:
                    end = await self._find_end(log)
                if position <= end.position:
                    await self._compare(log, position, view, end)
                    return
                if position > end.position + 1:
                    raise UsageError(
                        f"position {position - 1} of log {log!r} in {self._url} is empty; append there first"
                    )
                if await self._publish(log, position, view, end):
                    return
        except ApiError as error:
            self._streams.forget()
            raise translate(error, what, url=self._url) from error
        except (TransientTransportError, AppendUnknownError):
            self._streams.forget()
            raise
        raise TransientTransportError(f"cannot {what} in {self._url}: its end changes all the time", url=self._url)

    async def read(self, log: str, after: int, limit: int) -> tuple[list[Record], int]:
        """Return records as `Transport.read` does, and the number of the log's last message, 0 for an empty log.

        Raises:
            TransportError: If parts of the first record are missing though it was not trimmed, or as `Transport.read`.
        """
        stream, subject = self._streams.records, self._streams.record_subject(log)
        try:
            last = await self._jetstream.last(stream, subject)
            if last is None:
                return [], 0
            end = position_of(last, url=self._url)
            if end <= after:
                return [], last.seq
            place = self._places.get(log)
            if end == after + 1:
                first: Stored = last
            elif place is not None and place.position == after:
                first = await self._jetstream.following(stream, subject, place.seq + 1) or last
            else:
                first = await self._seek(log, after + 1, last)
            messages = await self._collect(log, first, last, limit)
            records: list[Record] = []
            for position, stored in messages:
                try:
                    records.append(Record(position, await self.body(log, stored)))
                except PartsGoneError:
                    if records:
                        break  # the next look begins with it
                    await self._check_trimmed(log, position, stored)
                    # Removed while they were read; what comes behind is found by the next look.
                    return [], 0
        except ApiError as error:
            raise translate(error, f"read log {log!r}", url=self._url) from error
        if records:
            self._places[log] = _End(records[-1].position, messages[len(records) - 1][1].seq)
        return records, last.seq

    async def _check_trimmed(self, log: str, position: int, stored: Stored) -> None:
        """Check that a record whose parts are gone was removed as a whole; trimming takes both in one step.

        Raises:
            TransportError: If it is still there, and so damaged.
        """
        there = await self._jetstream.following(self._streams.records, self._streams.record_subject(log), stored.seq)
        if there is not None and there.seq == stored.seq:
            raise TransportError(
                f"{self._url}: the record at position {position} of log {log!r} is damaged: parts of it are missing, "
                "which deltabus never removes alone; restore the stream from a backup, or begin with a new topic",
                url=self._url,
            )

    async def trim(self, log: str, before: int) -> None:
        """Remove first records; see `Transport.trim` for its errors."""
        stream = self._streams.records
        try:
            last = await self._jetstream.last(stream, self._streams.record_subject(log))
            if last is None:
                return
            before = min(before, position_of(last, url=self._url))
            if before < 1:
                return
            gone = await self._seek(log, before - 1, last)
            if position_of(gone, url=self._url) == before - 1:
                # The parts of a record come before it, and behind the record in front of it.
                await self._jetstream.purge(stream, self._streams.record_parts_subject(log, "*"), before=gone.seq + 1)
        except ApiError as error:
            raise translate(error, f"trim log {log!r} before {before}", url=self._url) from error

    async def logs(self) -> list[str]:
        """Return the names of the logs that hold at least one record, sorted."""
        pattern = self._streams.record_subject()
        try:
            subjects = await self._jetstream.subjects(self._streams.records, pattern)
        except ApiError as error:
            raise translate(error, "list the logs", url=self._url) from error
        return sorted(self._streams.log_of(subject) for subject in subjects)

    async def body(self, log: str, stored: Stored) -> bytes:
        """Return a record's bytes.

        Raises:
            PartsGoneError: If parts of it were removed.
            TransportError: If they cannot be fetched, or are too many.
        """
        manifest = read_manifest(stored, url=self._url)
        if manifest is None:
            return stored.data
        if manifest.size > MAX_RECORD_BYTES:
            raise TransportError(f"{self._url}: a record of {manifest.size} bytes in log {log!r}", url=self._url)
        parts = self._streams.record_parts_subject(log, manifest.attempt)
        return await self._chunks.fetch(self._streams.records, parts, manifest)

    async def sequence_of(self, log: str, position: int) -> int | None:
        """Return the number of the message that is the record at a position; None if there is none."""
        last = await self._jetstream.last(self._streams.records, self._streams.record_subject(log))
        if last is None or position_of(last, url=self._url) < position:
            return None
        found = await self._seek(log, position, last)
        return found.seq if position_of(found, url=self._url) == position else None

    async def _find_end(self, log: str) -> _End:
        last = await self._jetstream.last(self._streams.records, self._streams.record_subject(log))
        return _End(-1, 0) if last is None else _End(position_of(last, url=self._url), last.seq)

    async def _publish(self, log: str, position: int, view: memoryview, end: _End) -> bool:
        """Store a record behind a log's end; return False if the log has another end by now."""
        headers = {_POSITION: str(position)}
        payload = bytes(view)
        if len(payload) > self._chunks.largest:
            attempt = make_attempt(time.time())
            manifest = await self._chunks.store(self._streams.record_parts_subject(log, attempt), attempt, view)
            headers[MANIFEST] = "1"
            payload = msgspec.msgpack.encode(manifest)
        headers[_MESSAGE_ID] = f"{log}:{position}:{hashlib.sha256(view).hexdigest()[:32]}"
        try:
            ack = await self._jetstream.publish(
                self._streams.record_subject(log), payload, headers=headers, expected=end.seq
            )
        except (ApiError, UnansweredError) as error:
            # "In process" is an earlier attempt at this very record that still waits for the other servers.
            number = error.number if isinstance(error, ApiError) else IN_PROCESS
            if number in WRONG_LAST:
                return False
            if number != IN_PROCESS:
                raise
            raise AppendUnknownError(
                f"{self._url} lost the answer when told to append to log {log!r} at position {position}: {error}; "
                "read it to learn who won",
                url=self._url,
            ) from error
        if ack.duplicate and await self.sequence_of(log, position) is None:
            raise TransientTransportError(
                f"{self._url} takes the record at position {position} of log {log!r} for one that was removed in "
                "the last two minutes; wait, then try again",
                url=self._url,
            )
        self._ends[log] = _End(position, ack.seq)
        return True

    async def _compare(self, log: str, position: int, view: memoryview, end: _End) -> None:
        """Return if the record at a position is this one.

        Raises:
            PositionTakenError: If it is, or was, another.
        """
        seq = end.seq if position == end.position else await self.sequence_of(log, position)
        stored = (
            None
            if seq is None
            else await self._jetstream.following(self._streams.records, self._streams.record_subject(log), seq)
        )
        if stored is not None and position_of(stored, url=self._url) == position:
            try:
                if await self.body(log, stored) == bytes(view):
                    if position == end.position:
                        self._ends[log] = end
                    return
            except PartsGoneError:
                pass  # removed by retention
        raise PositionTakenError(
            f"another record is, or was, at position {position} of log {log!r} in {self._url}", url=self._url
        )

    async def _seek(self, log: str, position: int, last: Stored) -> Stored:
        """Return the record with the least position from `position` on; `last` is one of them."""
        stream, subject = self._streams.records, self._streams.record_subject(log)
        best = last
        low, high = 1, last.seq - 1
        # Where a topic has one log and nothing was removed, the first guess is right.
        guess = last.seq - (position_of(last, url=self._url) - position)
        while low <= high:
            guess = min(max(guess, low), high)
            found = await self._jetstream.following(stream, subject, guess)
            if found is None:
                break  # all were removed meanwhile
            there = position_of(found, url=self._url)
            if there >= position:
                best, high = found, guess - 1
                if there == position:
                    break
            else:
                low = found.seq + 1
            guess = (low + high) // 2
        return best

    async def _collect(self, log: str, first: Stored, last: Stored, limit: int) -> list[tuple[int, Stored]]:
        """Return records from `first` to `last`, at most `limit`, without a hole between them."""
        stream, subject = self._streams.records, self._streams.record_subject(log)
        found = [(position_of(first, url=self._url), first)]
        while len(found) < limit and found[-1][1].seq < last.seq:
            position, at = found[-1]
            wanted = min(limit - len(found), position_of(last, url=self._url) - position)
            page: list[Stored] = []
            if wanted > _FEW:
                page = await self._jetstream.batch(stream, subject, at.seq + 1, wanted, max_bytes=_BATCH_BYTES)
            if not page:
                # One at a time from the leader: few are wanted, or the replica lags behind.
                following = await self._jetstream.following(stream, subject, at.seq + 1)
                page = [] if following is None else [following]
            for stored in page:
                position += 1
                if position_of(stored, url=self._url) != position or stored.seq > last.seq:
                    return found
                found.append((position, stored))
            if not page:
                break
        return found
