"""The topics that are open, each on its backend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import msgspec

from deltabus.bus.errors import DeltabusError, KeyNotFoundError, TransientTransportError, UsageError
from deltabus.bus.leases import FOLDER as LEASES
from deltabus.bus.leases import Lease
from deltabus.bus.transport import Buffer, Record, Transport

from ..names import LOGS
from ..registry import open_transport
from .cache import Cache, CacheFullError, Draft, place_of
from .feeds import Feed
from .flights import Content, DirectContent, Flight, FlightContent, KeptContent
from .ledger import Ledger
from .metrics import Metrics
from .transcode import Transcoders
from .wire import is_topic

__all__ = ["GapError", "Topic", "Topics", "below", "normal_url", "topics_in"]

_log = logging.getLogger("deltabus.http")
_MAX_TOPICS = 1024
_DEPTH = 4
_REST_SECONDS = 30.0
_IDLE_SECONDS = 600.0
_UNUSED_SECONDS = 3600.0
"""After which nobody makes a topic that was begun on request."""

_MAX_SCHEMA = 64 << 20
_CATCH_UP = 256
_PROBE = "deltabus-probe"
"""A topic that nobody uses, to ask a backend for something."""

_NAMED = re.compile(r"blobs/.*-([0-9a-f]{16})|schemas/([0-9a-f]{64})\.json")
_decode_lease = msgspec.msgpack.Decoder(Lease).decode


def below(url: str, topic: str) -> str:
    """Return the URL of a topic below another URL.

    >>> below("s3://bucket/runs?region=eu-west-1", "run-7")
    's3://bucket/runs/run-7?region=eu-west-1'
    """
    place, mark, options = url.partition("?")
    return f"{place.rstrip('/')}/{topic}{mark}{options}"


def normal_url(url: str) -> str:
    """Return a URL as it is, and a local path as one.

    >>> normal_url("/data")
    'file:///data'
    """
    return url if "://" in url else Path(url).expanduser().absolute().as_uri()


def topics_in(directory: Path) -> list[str]:
    """Return the topics that lie in a directory, at most so many as are served at a time."""
    found: list[str] = []
    for place, folders, _ in os.walk(directory):
        here = Path(place).relative_to(directory)
        if LOGS in folders and here.parts:
            found.append(here.as_posix())
        folders[:] = [name for name in folders if is_topic((here / name).as_posix()) and len(here.parts) < _DEPTH]
        if len(found) >= _MAX_TOPICS:
            break
    return sorted(found)


class GapError(UsageError):
    """A record is to be appended behind a position that is empty."""


class Topic:
    """One topic, with what is shared by all who use it.

    Args:
        name: Its name here.
        transport: It on its backend.
        cache: Where blobs are kept; None keeps none.
        metrics: What is counted.
        changed: Is called when there is something new to show.

    Attributes:
        ledger: What is known of it.
        used: When it was last used, in seconds of a clock that never goes back.
        users: How many use it now.
        found: Whether the backend told of it.
        made: Whether the service makes it of another one.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        cache: Cache | None,
        metrics: Metrics,
        changed: Callable[[str], None],
        made: bool = False,
    ) -> None:
        self.name = name
        self.transport = transport
        self.ledger = Ledger(changed=lambda: changed(name))
        self.used = time.monotonic()
        self.users = 0
        self.found = False
        self.made = made
        self._cache = cache
        self._metrics = metrics
        self._feeds: dict[str, Feed] = {}
        self._flights: dict[str, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._catching_up = asyncio.Lock()

    # Logs

    def feed(self, log: str) -> Feed:
        """Return what is new in a log."""
        if log not in self._feeds:
            self._feeds[log] = Feed(self.transport, log, seen=self.ledger.see, renewed=self.made)
        return self._feeds[log]

    async def append(self, log: str, position: int, record: bytes) -> None:
        """Append on the backend, and tell those who follow."""
        try:
            await self.transport.append(log, position, record)
        except UsageError as error:  # all else that it stands for was checked before
            raise GapError(str(error)) from error
        appended = Record(position, record)
        self.ledger.see(log, appended)
        feed = self._feeds.get(log)
        if feed is not None:
            feed.tell(appended)

    async def read(self, log: str, after: int, limit: int) -> list[Record]:
        """Read from the backend."""
        records = await self.transport.read(log, after, limit)
        for record in records:
            self.ledger.see(log, record)
        return records

    async def catch_up(self) -> None:
        """Read what did not pass by itself, so that people see all of it; what fails is left out."""
        async with self._catching_up:
            with contextlib.suppress(DeltabusError):
                for log in await self.transport.logs():
                    at = self.ledger.last_position(log)
                    while records := await self.read(log, at, _CATCH_UP):
                        at = records[-1].position
                for key in self.ledger.schemas():
                    self.ledger.learn_schema(key, await self.transport.get(key, 0, _MAX_SCHEMA))

    # Blobs

    async def open(self, key: str, span: tuple[int, int] | None = None) -> Content:
        """Return a blob's content; the backend is asked when it is read, unless the cache has it.

        Args:
            key: Which blob.
            span: What part of it is wanted, first byte and end; None is all.
        """
        named = self.ledger.blob(key)
        size = None if named is None else named.size
        digest = self._digest(key)
        if self._cache is None or not digest:
            return DirectContent(self._fetch(key), size, span=span)
        place = place_of(self.name, key)
        if place not in self._flights:
            found = await self._kept(self._cache, place)
            if found is not None:
                self._metrics.cache_hits.inc()
                return KeptContent(*found)
        if place in self._flights:
            self._metrics.cache_shared.inc()
            return FlightContent(self._flights[place])
        self._metrics.cache_misses.inc()
        try:
            draft = self._cache.draft()
        except CacheFullError as error:
            _log.warning("the cache cannot be written; blobs are streamed instead: %s", error)
            return DirectContent(self._fetch(key), size, span=span)
        flight = Flight(self._fetch(key), draft, place=place, size=size, digest=digest)
        content = FlightContent(flight)
        self._flights[place] = flight
        self._start(self._fly(place, flight))
        return content

    async def exists(self, key: str) -> int | None:
        """Return the size of a blob, None if that is not known.

        Raises:
            KeyNotFoundError: If there is none.
        """
        named = self.ledger.blob(key)
        await self.transport.get(key, 0, 0)
        return None if named is None else named.size

    async def put(self, key: str, data: Buffer, draft: Draft | None) -> None:
        """Store a blob on the backend, and keep the draft that holds it if it is what its key says."""
        await self.transport.put(key, data)
        if key.startswith(f"{LEASES}/"):
            self._see_lease(data)
        digest = self._digest(key)
        if draft is not None and digest and draft.digest.startswith(digest):
            draft.keep(place_of(self.name, key))
        elif draft is not None:
            draft.drop()

    async def delete(self, keys: list[str]) -> None:
        """Remove blobs, here and on the backend."""
        await self.transport.delete(keys)
        if self._cache is not None:
            for key in keys:
                self._cache.remove(place_of(self.name, key))

    def is_named_by_content(self, key: str) -> bool:
        """Whether a blob's bytes can be told from its key, or a message."""
        return bool(self._digest(key))

    # Life

    async def stop_following(self) -> None:
        """End the lines of all who follow."""
        for feed in self._feeds.values():
            await feed.close()

    async def rest(self) -> None:
        """Stop to tail logs that nobody follows."""
        for log, feed in list(self._feeds.items()):
            if not feed.followers:
                await feed.rest()
                if not feed.followers:
                    self._feeds.pop(log, None)

    async def close(self) -> None:
        """End all that goes on, and close the backend."""
        await self.stop_following()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.transport.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fly(self, place: str, flight: Flight) -> None:
        try:
            await flight.run()
        finally:
            del self._flights[place]

    @staticmethod
    async def _kept(cache: Cache, place: str) -> tuple[BinaryIO, int] | None:
        if cache.is_believed(place):
            return cache.open(place)
        return await asyncio.to_thread(cache.open, place)

    def _fetch(self, key: str) -> Callable[[int, int], Awaitable[bytes]]:
        async def fetch(start: int, stop: int) -> bytes:
            data = await self.transport.get(key, start, stop)
            if not self.made:
                self._metrics.upstream_bytes.inc(len(data))
            return data

        return fetch

    def _digest(self, key: str) -> str:
        """Return what the SHA-256 of a blob begins with, in hexadecimal; nothing where that is not known."""
        named = self.ledger.blob(key)
        if named is not None:
            return named.checksum.hex()
        match = _NAMED.fullmatch(key)
        return (match[1] or match[2]) if match else ""

    def _see_lease(self, data: Buffer) -> None:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            lease = _decode_lease(data)
            self.ledger.heard(lease.reader[:100], holds=lease.holds)


class Topics:
    """All topics below one URL, opened when they are first used.

    Args:
        upstream: The URL that they lie below.
        cache: Where blobs are kept; None keeps none.
        metrics: What is counted.
        changed: Is called with the name of a topic that has something new to show.
        transcoders: What makes topics of others; None makes none.
    """

    def __init__(
        self,
        upstream: str,
        *,
        cache: Cache | None,
        metrics: Metrics,
        changed: Callable[[str], None],
        transcoders: Transcoders | None = None,
    ) -> None:
        self._transcoders = transcoders
        self._upstream = normal_url(upstream)
        self._cache = cache
        self._metrics = metrics
        self._changed = changed
        self._topics: dict[str, Topic] = {}
        self._closing = False
        self.url = open_transport(below(self._upstream, _PROBE)).url.replace(f"/{_PROBE}", "")

    def __iter__(self) -> Iterator[Topic]:
        return iter([self._topics[name] for name in sorted(self._topics)])

    @contextlib.asynccontextmanager
    async def use(self, name: str, *, counts: bool = True) -> AsyncIterator[Topic]:
        """Give a topic, opened.

        Args:
            name: Which.
            counts: Whether somebody wants it; else it goes on to be unused.

        Raises:
            TransientTransportError: If too many are in use.
        """
        if counts:
            await self._make(name)
        topic = self._topics.get(name)
        if topic is None:
            if self._closing:
                raise TransientTransportError("the service is being stopped; connect again")
            await self._make_room()
            topic = self._topics.get(name)  # somebody may have opened it meanwhile
        if topic is None:
            topic = self._topics[name] = self._opened(name)
        topic.users += 1
        try:
            yield topic
        finally:
            topic.users -= 1
            if counts:
                topic.used = time.monotonic()
                self._ask(name)

    def source_of(self, name: str) -> str | None:
        """Return the topic that one is made of; None for one that the backend has."""
        return None if self._transcoders is None else self._transcoders.source_of(name)

    def transcoder_of(self, name: str) -> dict[str, Any] | None:
        """Return what people are shown of who makes a topic; None where nobody does."""
        source = self.source_of(name)
        if source is None or self._transcoders is None:
            return None
        known = self._topics.get(source)
        return self._transcoders.as_json(name, {} if known is None else known.ledger.versions())

    def _ask(self, name: str) -> None:
        """Take note that somebody wants a topic that may be one that is made."""
        if self._transcoders is not None:
            self._transcoders.ask(name)

    async def _make(self, name: str) -> None:
        """Begin to make a topic of another one, if it is to be, and that has been published to."""
        source = self.source_of(name)
        if source is None or self._transcoders is None or not self._transcoders.ask(name):
            return
        async with self.use(source) as topic:
            logs = await topic.transport.logs()
        if logs:  # or else anybody could have as many made as there are names
            self._transcoders.start(source)

    def _opened(self, name: str) -> Topic:
        source, transcoders = self.source_of(name), self._transcoders
        if source is None or transcoders is None:
            transport, cache = open_transport(below(self._upstream, name)), self._cache
            return Topic(name, transport, cache=cache, metrics=self._metrics, changed=self._changed)
        transport = open_transport(transcoders.url_of(source))  # on this machine, and needs no cache
        return Topic(name, transport, cache=None, metrics=self._metrics, changed=self._changed, made=True)

    async def find(self) -> None:
        """Open the topics that a directory holds already; other backends do not tell of theirs."""
        parts = urlsplit(self._upstream)
        if parts.scheme == "file":
            for name in await asyncio.to_thread(topics_in, Path(unquote(parts.path))):
                async with self.use(name) as topic:
                    topic.found = True

    async def stop_following(self) -> None:
        """End the lines of all who follow, and open no more topics."""
        self._closing = True
        for topic in list(self._topics.values()):
            await topic.stop_following()

    async def check(self) -> None:
        """Ask the backend something.

        Raises:
            DeltabusError: If it does not answer.
        """
        there = [topic for topic in self._topics.values() if not topic.made]  # others are on this machine
        used = max(there, key=lambda topic: topic.used, default=None)
        async with self.use(used.name if used else _PROBE, counts=False) as topic:
            with contextlib.suppress(KeyNotFoundError):
                await topic.transport.get("ready", 0, 1)

    async def run(self) -> None:
        """Let what nobody uses rest, for ever."""
        while True:
            await asyncio.sleep(_REST_SECONDS)
            for topic in list(self._topics.values()):
                await topic.rest()
                if topic.users:
                    self._ask(topic.name)
                idle = time.monotonic() - topic.used > _IDLE_SECONDS
                if idle and topic.ledger.empty and not (topic.users or topic.found):
                    await self._close(topic)
            if self._transcoders is not None:
                await self._transcoders.rest(_UNUSED_SECONDS)

    async def close(self) -> None:
        """Close all topics."""
        self._closing = True
        for topic in list(self._topics.values()):
            await self._close(topic)

    async def _make_room(self) -> None:
        while len(self._topics) >= _MAX_TOPICS:
            idle = [topic for topic in self._topics.values() if not topic.users]
            if not idle:
                raise TransientTransportError(f"all {_MAX_TOPICS} topics that are served at a time are in use")
            await self._close(min(idle, key=lambda topic: topic.used))

    async def _close(self, topic: Topic) -> None:
        if self._topics.get(topic.name) is topic:
            del self._topics[topic.name]
        with contextlib.suppress(DeltabusError):
            await topic.close()
