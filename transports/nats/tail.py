"""Records as they come: a consumer on the server that is asked for the next ones and answers when they are there.

The consumer is a hint, not a source of truth: whatever happens to it, to the line or to the server, the log is read
again from the last record seen, and another consumer is made behind the log's end.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator

from deltabus.bus.transport import Record

from .chunks import PartsGoneError
from .faults import ApiError, translate
from .jetstream import JetStream, Stored, lift
from .log import Log, position_of
from .session import UnansweredError
from .streams import Streams

__all__ = ["follow"]

_NANO = 1_000_000_000
_BATCH = 16
_EXPIRES = 60
_HEARTBEAT = 2  # a consumer whose server died is missed after two and a half
_KEPT = 90
_SILENCE = 2.5 * _HEARTBEAT
_PAGE = 128
_FIRST_PAUSE = 0.05
_LAST_PAUSE = 1.0


async def follow(
    log: str, after: int, *, records: Log, jetstream: JetStream, streams: Streams, url: str
) -> AsyncIterator[Record]:
    """Yield the records behind a position, as `Transport.tail` does."""
    pause = _FIRST_PAUSE
    while True:
        found, end = await records.read(log, after, _PAGE)
        for record in found:
            yield record
            after = record.position
        if found:
            pause = _FIRST_PAUSE
            continue
        begun = time.monotonic()
        consumer = _Consumer(jetstream, streams.records, streams.record_subject(log), end + 1, url=url)
        try:
            while (stored := await consumer.next()) is not None:
                position = position_of(stored, url=url)
                if position > after + 1:
                    break
                if position == after + 1:
                    try:
                        data = await records.body(log, stored)
                    except PartsGoneError:
                        break
                    yield Record(position, data)
                    after = position
        finally:
            await consumer.close()
        if time.monotonic() - begun > _LAST_PAUSE:
            pause = _FIRST_PAUSE
        # Nothing to ask on the server yet, or it was lost: look again, more and more slowly while nothing changes.
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)


class _Consumer:
    """Asks for the messages on a subject from a number on.

    At most `_BATCH` are under way, however slow the reader is.
    """

    def __init__(self, jetstream: JetStream, stream: str, subject: str, seq: int, *, url: str) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._subject = subject
        self._seq = seq
        self._url = url
        self._name = f"deltabus-{secrets.token_hex(8)}"
        self._messages: AsyncGenerator[Stored, None] | None = None

    async def next(self) -> Stored | None:
        """Return the next message, once it comes; None when the stream is missing or the consumer was lost.

        Raises:
            AccessDeniedError: If it may not be made.
            TransientTransportError: If the server does not answer.
        """
        if self._messages is None:
            if not await self._make():
                return None
            self._messages = self._ask()
        return await anext(self._messages, None)

    async def close(self) -> None:
        """Say that it is no longer needed; the server forgets it by itself where that does not arrive."""
        if self._messages is None:
            return
        await self._messages.aclose()
        connection = self._jetstream.connection
        if connection.alive:
            session = await connection.session()
            await session.send(self._jetstream.subject(f"CONSUMER.DELETE.{self._stream}.{self._name}"), b"")

    async def _make(self) -> bool:
        config = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._seq,
            "filter_subject": self._subject,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _KEPT * _NANO,
        }
        action = f"CONSUMER.CREATE.{self._stream}.{self._name}.{self._subject}"
        try:
            await self._jetstream.call(action, {"stream_name": self._stream, "config": config})
        except ApiError as error:
            if error.missing:
                return False
            raise translate(error, f"follow {self._subject}", url=self._url) from error
        return True

    async def _ask(self) -> AsyncGenerator[Stored, None]:
        subject = self._jetstream.subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}")
        body = json.dumps({"batch": _BATCH, "expires": _EXPIRES * _NANO, "idle_heartbeat": _HEARTBEAT * _NANO}).encode()
        connection = self._jetstream.connection
        async with connection.inbox(subject, own=True) as (session, reply, arrived):
            while True:
                await session.send(subject, body, reply=reply)
                left = _BATCH
                while left:
                    try:
                        message = await connection.next_of(arrived, what=subject, limit=_SILENCE)
                    except UnansweredError:
                        return
                    status = (message.headers or {}).get("Status")
                    if status == "100":
                        continue
                    if status == "408":
                        break  # nothing came in the whole time: ask anew
                    if status is not None:
                        return  # deleted, or its leader went
                    yield lift(message)
                    left -= 1
