"""The reading end of a topic: all its logs, now and as they grow, and the blobs that they name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import cast

from .errors import CorruptPayloadError, TransientTransportError, UsageError
from .logs import read_log
from .message import Blob, Message, decode_message
from .retry import Retry
from .transport import Record, Transport
from .writer import checksum

__all__ = ["TopicReader"]

_AHEAD = 256
"""Messages that are read before the consumer asks for them."""


class TopicReader:
    """Reads a topic that need not exist yet.

    Args:
        transport: The topic, opened.
        retry: How long to try what may pass.
        discovery: Seconds between looks for new logs, while following.
    """

    def __init__(self, transport: Transport, *, retry: Retry | None = None, discovery: float = 1.0) -> None:
        self._transport = transport
        self._retry = retry or Retry()
        self._discovery = discovery
        self._seen: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._following = False

    @property
    def starts(self) -> Mapping[str, int]:
        """The first position of each log; what stood before it was removed by retention, as far as is known here.

        Tell a sequencer with `begin` before it is fed a message of that log.
        """
        return MappingProxyType(self._starts)

    async def load(self) -> list[Message]:
        """Return the messages of all logs to their current ends, log by log, in order; an empty list for a new topic.

        `follow` goes on behind them. Called again, it returns what `follow` did not yield yet.

        Raises:
            UsageError: If `follow` runs.
            MessageFormatError: If a record cannot be read.
            TransportError: If the topic cannot be reached.
        """
        if self._following:
            raise UsageError(f"load was called while {self._transport.url} is followed; what comes is yielded there")
        loaded: list[Message] = []
        for log in await self._find_logs():
            loaded += await read_log(self._transport, log, after=self._seen.get(log, -1), retry=self._retry)
        for message in loaded:
            self._note(message)
        return loaded

    async def follow(self) -> AsyncGenerator[Message, None]:
        """Yield every message that comes behind those loaded, of all logs, as they come, for ever.

        A log's messages come in order, each once. New logs are found. Interrupted connections are taken up again, and
        silence is no fault. Close it (`aclose`) to stop; it may be called again then, and goes on behind what it
        yielded.

        Raises:
            UsageError: If it runs already.
            MessageFormatError: If a record cannot be read.
            TransientTransportError: If the topic could not be reached again until the limit was reached.
            TransportError: If the backend fails for good.
        """
        if self._following:
            raise UsageError(f"{self._transport.url} is followed already; use one loop, or a reader for each")
        self._following = True
        arrived: asyncio.Queue[Message | Exception] = asyncio.Queue(_AHEAD)
        tasks: dict[str, asyncio.Task[None]] = {}

        async def guard(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except Exception as error:
                await arrived.put(error)

        async def discover() -> None:
            while True:
                for log in await self._find_logs():
                    if log not in tasks:
                        tasks[log] = asyncio.create_task(guard(partial(self._tail, log, arrived)))
                await asyncio.sleep(self._discovery)

        discovering = asyncio.create_task(guard(discover))
        try:
            while True:
                news = await arrived.get()
                if isinstance(news, Exception):
                    raise news
                self._note(news)
                yield news
        finally:
            self._following = False
            running = [discovering, *tasks.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def fetch(self, blob: Blob) -> bytes:
        """Return a blob's bytes, checked.

        Raises:
            KeyNotFoundError: If it is not there; retention may have removed it.
            CorruptPayloadError: If its size or checksum is not what the message says, twice.
            TransportError: If it cannot be fetched.
        """
        data = b""
        for _ in range(2):  # a second look heals a fault on the way, not one at rest
            data = await self._get(blob)
            if len(data) == blob.size and await checksum(data) == blob.checksum:
                return data
        found = f"more than {blob.size}" if len(data) > blob.size else str(len(data))
        raise CorruptPayloadError(
            f"blob {blob.key} of {self._transport.url} is damaged: it has {found} of {blob.size} bytes, or another "
            "checksum than its message says; restore it from a copy, or let the publisher publish an anchor"
        )

    async def schema(self, blob: Blob) -> bytes:
        """Return a schema's bytes, checked; as `fetch` does.

        Raises:
            KeyNotFoundError: If it is not there.
            CorruptPayloadError: If its size or checksum is not what the message says, twice.
            TransportError: If it cannot be fetched.
        """
        return await self.fetch(blob)

    async def _get(self, blob: Blob) -> bytes:
        # One byte more than there should be tells a longer blob without reading all of it.
        what = f"fetching {blob.key} from {self._transport.url}"
        return await self._retry.call(what, lambda: self._transport.get(blob.key, 0, blob.size + 1))

    async def _find_logs(self) -> list[str]:
        return await self._retry.call(f"listing the logs of {self._transport.url}", self._transport.logs)

    def _note(self, message: Message) -> None:
        """Count a message as handed over."""
        log, position = message.writer, message.position
        if position != self._seen.get(log, -1) + 1:
            self._starts[log] = position
        self._starts.setdefault(log, 0)
        self._seen[log] = position

    async def _tail(self, log: str, arrived: asyncio.Queue[Message | Exception]) -> None:
        """Put a log's messages into the queue as they come."""
        at = self._seen.get(log, -1)

        async def listen() -> None:
            nonlocal at
            started, before = self._retry.clock(), at
            # The contract says that the iterator can be closed, which its type does not.
            records = cast("AsyncGenerator[Record]", self._transport.tail(log, at))
            try:
                async with aclosing(records):
                    async for record in records:
                        if record.position > at + 1:
                            return
                        if record.position == at + 1:
                            await arrived.put(
                                decode_message(
                                    record.data, topic=self._transport.url, writer=log, position=record.position
                                )
                            )
                            at = record.position
                fault = TransientTransportError(f"the end of log {log!r} was lost", url=self._transport.url)
            except TransientTransportError as error:
                fault = error
            # A connection that worked for a while is a success: faults that are far apart do not add up over the days.
            if at == before and self._retry.clock() - started < self._retry.longest:
                raise fault

        while True:
            await self._retry.call(f"following log {log!r} of {self._transport.url}", listen)
            for message in await read_log(self._transport, log, after=at, retry=self._retry):
                await arrived.put(message)
                at = message.position
