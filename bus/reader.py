"""The reading end of a topic: all its logs, now and as they grow, and the blobs that they name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import cast

from .errors import CorruptPayloadError, SignatureError, TransientTransportError, UsageError
from .logs import Entry, Link, admit, read_log
from .message import Blob, Message
from .retry import Retry
from .signing import KeyRing
from .transport import Record, Transport
from .writer import checksum

__all__ = ["TopicReader"]

_log = logging.getLogger("deltabus.reader")
_LOGS_AT_ONCE = 16
"""Logs that are read at a time when a topic is opened."""

_AHEAD = 256
"""Messages that are read before the consumer asks for them."""

_FIRST_LOOK = 0.05
"""Share of the longest pause after which a reader looks again first."""

_RARELY = 30
"""How many times as rare looks for logs become where none is missing: listing costs, and newcomers are announced by
the group that messages name."""


class _CutOffError(TransientTransportError):
    """A log is shorter than it was."""


class TopicReader:
    """Reads a topic that need not exist yet.

    Args:
        transport: The topic, opened.
        retry: How long to try what may pass.
        discovery: Most seconds between looks for logs while following, when none is known or one is missing that a
            message names in its group. Once all are known, looks become rare.
        keys: Those whose holders are believed; None believes everybody.
        seen: Where logs stood when somebody who is trusted last looked, as `seen` said then; they must go on there.
        only: The writers whose logs are read; None is all.

    Raises:
        UsageError: If `seen` is given without keys.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        retry: Retry | None = None,
        discovery: float = 1.0,
        keys: KeyRing | None = None,
        seen: Mapping[str, Link] | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        if seen and keys is None:
            raise UsageError("what was seen of a topic can be held against signed messages alone; give keys too")
        self._known = dict(seen or {})
        self._transport = transport
        self._retry = retry or Retry()
        self._discovery = discovery
        self._keys = keys
        self._only = only
        self._warned = False
        self._seen: dict[str, Link] = {}
        self._starts: dict[str, int] = {}
        self._expected: set[str] = set()
        self._members: dict[str, frozenset[str]] = {}
        self._missing = asyncio.Event()
        self._following = False

    @property
    def starts(self) -> Mapping[str, int]:
        """The first position of each log; what stood before it was removed by retention, as far as is known here.

        Tell a sequencer with `begin` before it is fed a message of that log.
        """
        return MappingProxyType(self._starts)

    @property
    def seen(self) -> Mapping[str, Link]:
        """Where each log stands behind the messages handed over; before any, where it was said to stand."""
        return MappingProxyType(self._known | self._seen)

    async def load(self) -> list[Message]:
        """Return the messages of all logs to their current ends, log by log, in order; an empty list for a new topic.

        `follow` goes on behind them. Called again, it returns what `follow` did not yield yet.

        Raises:
            UsageError: If `follow` runs.
            MessageFormatError: If a record cannot be read.
            SignatureError: If keys are given, and a record does not show that it belongs where it stands; or if a log
                stays shorter than it was when it was last seen, until the limit is reached.
            TransportError: If the topic cannot be reached.
        """
        if self._following:
            raise UsageError(f"load was called while {self._transport.url} is followed; what comes is yielded there")
        try:
            loaded = await self._retry.call(f"reading {self._transport.url}", self._load, on=(_CutOffError,))
        except TransientTransportError as error:
            if isinstance(error.__cause__, _CutOffError):
                raise SignatureError(
                    f"{error.__cause__}; its end was removed, or an old copy was put in its place: restore it",
                    topic=self._transport.url,
                ) from None
            raise
        return [self._noted(entry) for entry in loaded]

    async def _load(self) -> list[Entry]:
        slots = asyncio.Semaphore(_LOGS_AT_ONCE)

        async def read(log: str) -> list[Entry]:
            async with slots:
                return await self._read(log, self._seen.get(log))

        reading = [asyncio.create_task(read(log)) for log in await self._find_logs()]
        try:
            loaded = [entry for entries in await asyncio.gather(*reading) for entry in entries]
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        ends = self._seen | {entry.message.writer: entry.link for entry in loaded}
        for log, known in self._known.items():
            end = _place(ends.get(log))
            if end < known.position and self._follows(log):
                # A backend may lag behind what was seen elsewhere, so that this may pass.
                raise _CutOffError(
                    f"log {log!r} of {self._transport.url} ends at position {end}, but was seen up to {known.position}",
                    url=self._transport.url,
                )
        return loaded

    async def follow(self) -> AsyncGenerator[Message, None]:
        """Yield every message that comes behind those loaded, of all logs, as they come, for ever.

        A log's messages come in order, each once. New logs are found. Interrupted connections are taken up again, and
        silence is no fault. Close it (`aclose`) to stop; it may be called again then, and goes on behind what it
        yielded.

        Raises:
            UsageError: If it runs already.
            MessageFormatError: If a record cannot be read.
            SignatureError: If keys are given, and a record does not show that it belongs where it stands.
            TransientTransportError: If the topic could not be reached again until the limit was reached.
            TransportError: If the backend fails for good.
        """
        if self._following:
            raise UsageError(f"{self._transport.url} is followed already; use one loop, or a reader for each")
        self._following = True
        arrived: asyncio.Queue[Entry | Exception] = asyncio.Queue(_AHEAD)
        tasks: dict[str, asyncio.Task[None]] = {}

        async def guard(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except Exception as error:
                await arrived.put(error)

        async def discover() -> None:
            pause = _FIRST_LOOK * self._discovery
            while True:
                self._missing.clear()
                for log in await self._find_logs():
                    if log not in tasks:
                        tasks[log] = asyncio.create_task(guard(partial(self._tail, log, arrived)))
                        pause = self._discovery
                whole = self._expected and self._expected <= tasks.keys()
                pause = min(pause, self._discovery * (_RARELY if whole else 1))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._missing.wait()
                    pause = _FIRST_LOOK * self._discovery
                pause *= 2

        discovering = asyncio.create_task(guard(discover))
        try:
            while True:
                news = await arrived.get()
                if isinstance(news, Exception):
                    raise news
                yield self._noted(news)
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
        names = await self._retry.call(f"listing the logs of {self._transport.url}", self._transport.logs)
        return [name for name in names if self._follows(name)]

    def _follows(self, log: str) -> bool:
        return self._only is None or log in self._only

    async def _read(self, log: str, after: Link | None) -> list[Entry]:
        return await read_log(
            self._transport, log, after=after, retry=self._retry, keys=self._keys, seen=self._known.get(log)
        )

    def _admit(self, log: str, record: Record, after: Link | None) -> Entry:
        known, url = self._known.get(log), self._transport.url
        return admit(record, topic=url, writer=log, keys=self._keys, after=after, seen=known)

    def _noted(self, entry: Entry) -> Message:
        """Return a message that is handed over now."""
        message = entry.message
        log, seen = message.writer, self._seen.get(message.writer)
        if message.position != (seen.position if seen is not None else -1) + 1:
            self._starts[log] = message.position
        self._starts.setdefault(log, 0)
        self._seen[log] = entry.link
        if message.members is not self._members.get(log):
            self._members[log] = message.members
            if self._only is not None and not message.members <= frozenset(self._only):
                left = ", ".join(sorted(message.members - frozenset(self._only))[:8])
                raise UsageError(
                    f"writer {log!r} of {self._transport.url} is in a group with {left}, whose parts belong to its "
                    "steps; name all of them, or none"
                )
            if not self._expected.issuperset(message.members):
                self._expected.update(message.members)
                self._missing.set()
        if message.signature is not None and self._keys is None and not self._warned:
            self._warned = True
            _log.warning(
                "messages of %s are signed, but no keys are given here, so that nobody checks them", self._transport.url
            )
        return message

    async def _tail(self, log: str, arrived: asyncio.Queue[Entry | Exception]) -> None:
        """Put a log's messages into the queue as they come."""
        link = self._seen.get(log)

        async def listen() -> None:
            nonlocal link
            started, before = self._retry.clock(), link
            # The contract says that the iterator can be closed, which its type does not.
            records = cast("AsyncGenerator[Record]", self._transport.tail(log, _place(link)))
            try:
                async with aclosing(records):
                    async for record in records:
                        due = _place(link) + 1
                        if record.position > due:
                            return
                        if record.position == due:
                            entry = self._admit(log, record, link)
                            await arrived.put(entry)
                            link = entry.link
                fault = TransientTransportError(f"the end of log {log!r} was lost", url=self._transport.url)
            except TransientTransportError as error:
                fault = error
            # A connection that worked for a while is a success: faults that are far apart do not add up over the days.
            if link == before and self._retry.clock() - started < self._retry.longest:
                raise fault

        while True:
            await self._retry.call(f"following log {log!r} of {self._transport.url}", listen)
            for entry in await self._read(log, link):
                await arrived.put(entry)
                link = entry.link


def _place(link: Link | None) -> int:
    return link.position if link is not None else -1
