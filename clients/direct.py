"""Following a topic without a copy of the weights: updates are decoded against the model itself.

    async with DirectSubscriber("http://relay:8700/run-7.overwrite", model) as subscriber:
        async for update in subscriber:
            await update.apply()

`Subscriber` holds a copy of the weights, decodes ahead of the model, and leaves the short write to `apply`. Where there
is no memory for that, this takes none but for what changed. The price: `apply` decodes too, which is short where the
deltas are encoded as `overwrite` (as `deltabus transcode` makes them) and reads every weight where they are not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from torch import Tensor, nn

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import (
    ClosedError,
    DivergedError,
    RetentionGapError,
    UsageError,
    WaitTimeoutError,
)
from deltabus.bus.logs import parse_seen, seen_text
from deltabus.bus.message import Kind, Message, check_writer_name
from deltabus.bus.version import VersionVector
from deltabus.transports import open_transport

from .direct_model import DirectModel, leads_to_same
from .direct_update import DirectUpdate
from .events import Event, EventKind, Events, Listener
from .fetching import Fetcher
from .gaps import GapWatch
from .keys import Key, verify_keys
from .lanes import UNAVAILABLE
from .navigator import Navigator
from .route import Route
from .workers import usable_cores

__all__ = ["DirectSubscriber"]

_AHEAD = 256 << 20
"""Payload bytes of deltas that are fetched before an update is handed out."""


class DirectSubscriber:
    """Follows the topic of one writer, and writes each update into a model without a copy of its weights.

    Payloads are fetched ahead; they are decoded by `DirectUpdate.apply`. At each step it shows, in O(changed), that the
    elements which the update touches held the bits that the publisher had: their old bits are read from the model, and
    only then the digest comes out right. What no update touched is covered by `verify`.

    Args:
        url: The topic, such as `http://relay:8700/run-7.overwrite`.
        model: What is written into: a model, or a mapping of names to tensors; it may have more tensors than the topic.
            If it holds one of the topic's states, recognised by its digest, the first update leads on from there; if
            not, or if it has copies of a tied tensor that differ, that writes the whole state. All of the topic's
            elements must be in it.
        writer: Whose weights to follow, where the topic has several writers that are independent of each other.
        keys: Whose messages are believed, as `Subscriber` takes them.
        seen: Where the topic's logs stood, as `Subscriber` takes it.
        idle_timeout: Limit in seconds for the wait for news of an update, not for its download; None waits for ever.
        gap_timeout: Limit in seconds for the wait for an anchor when nothing that is there leads on.
        on_event: Told of each update that was applied, of detours and waits.
        workers: Threads that decode; None is the number of usable cores, at most 8.

    Raises:
        UsageError: If the URL, a key or another option is wrong.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        model: nn.Module | Mapping[str, Tensor],
        *,
        writer: str | None = None,
        keys: Key | Sequence[Key] | None = None,
        seen: str | None = None,
        idle_timeout: float | None = None,
        gap_timeout: float = 300.0,
        on_event: Listener | Iterable[Listener] | None = None,
        workers: int | None = None,
    ) -> None:
        only = None if writer is None else frozenset([check_writer_name(writer)])
        ring, known = verify_keys(keys), parse_seen(seen or "")
        self._idle_timeout = idle_timeout
        self._transport = open_transport(url)
        self.url = self._transport.url
        self._reader = TopicReader(self._transport, keys=ring, seen=known, only=only)
        self._fetcher = Fetcher(self._reader)
        self._model = DirectModel(model, self._reader, self._fetcher, topic=self.url)
        self._events = Events(on_event)
        tell = self._events.tell
        gaps = GapWatch(self.url, limit=gap_timeout, tell=tell)
        self._navigator = Navigator(self._reader, topic=self.url, writers=only, latest=True, gaps=gaps, tell=tell)
        self._workers = workers or usable_cores()
        self._pool: ThreadPoolExecutor | None = None
        self._writers: set[str] = set()
        self._current: DirectUpdate | None = None
        self._seeking: asyncio.Task[DirectUpdate | None] | None = None
        self._failure: Exception | None = None
        self._following: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        """Open the topic, recognise what the model holds, and start to follow.

        Raises:
            TransportError: If the topic cannot be reached.
            MessageFormatError: If what lies under the URL is not a topic.
            SignatureError: If there are keys, and a message does not show that it belongs where it stands.
            ConflictError: If its history contradicts itself.
            SchemaMismatchError: If the model cannot hold the topic's tensors.
            ClosedError: If it was opened before.
        """
        if self._closed or self._pool is not None:
            raise ClosedError(f"the subscriber of {self.url} was opened before; make a new one")
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="deltabus-decode")
        self._model.pool = self._pool
        try:
            await self._transport.__aenter__()
            self._enter(await self._reader.load())
            await self._model.recognise(self._messages)
        except BaseException:
            await self.aclose()
            raise
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DirectUpdate:
        """Return what leads from what the model holds to the newest state, waiting for one if need be.

        An update that was not applied is not lost: the next one leads on from where the model is. A call that is
        cancelled loses nothing either: what it was fetching is fetched on, for the next call.

        Raises:
            StopAsyncIteration: If the subscriber was closed.
            WaitTimeoutError: If `idle_timeout` is reached; the subscriber goes on.
            UsageError: If the topic has several writers.
            SignatureError: If there are keys, and a message does not show that it belongs where it stands.
            SchemaMismatchError: If it is to be found out what the model holds, and it cannot hold the topic's tensors.
            RetentionGapError: If nothing leads on, and no anchor came within `gap_timeout`.
            TransportError: If the backend fails for good.
        """
        if self._pool is None:
            raise ClosedError(f"open the subscriber of {self.url} first: `async with DirectSubscriber(...)`")
        if self._current is not None:
            self._current.retire()
        left = self._idle_timeout
        while True:
            gap: RetentionGapError | None = None
            try:
                found = await self._sought()
            except RetentionGapError as error:
                found, gap = None, error
            if found is not None:
                self._current = found
                return found
            left = await self._wait(gap, left)

    @property
    def version(self) -> int:
        """The version that the model holds; 0 when that is not known."""
        held = self._model.held
        return held.version if held is not None else 0

    @property
    def seen(self) -> str:
        """Where the topic's logs stand, as far as they were read and checked; for a later subscriber's `seen`."""
        return seen_text(self._reader.seen)

    async def verify(self) -> None:
        """Compare the whole model with the state that it should hold: every element, by its digest.

        Raises:
            DivergedError: If it holds another, or none is known that it should hold.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
        """
        try:
            await self._model.verify()
        except DivergedError:
            await self._call_off()  # it would lead on from a state that the model does not hold
            self._navigator.news.set()
            raise

    async def aclose(self) -> None:
        """Stop following; may be called more than once."""
        self._closed = True
        self._navigator.news.set()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._call_off()
        await self._transport.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    async def _follow(self) -> None:
        try:
            async for message in self._reader.follow():
                self._enter([message])
                if message.kind is Kind.ANCHOR:
                    self._navigator.router.forget(self._here, message.writer)
                self._navigator.news.set()
        except Exception as error:
            self._failure = error
            self._navigator.news.set()

    def _enter(self, messages: Sequence[Message]) -> None:
        self._writers.update(*((message.writer, *message.members) for message in messages))
        if len(self._writers) > 1:
            raise UsageError(
                f"{self.url} has the writers {', '.join(sorted(self._writers)[:8])}; of one that is independent "
                "give the name as `writer`, and follow a group with `Subscriber`"
            )
        self._navigator.enter(messages)

    @property
    def _messages(self) -> Sequence[Message]:
        return self._navigator.sequencer.messages_of(next(iter(self._writers), ""))

    async def _sought(self) -> DirectUpdate | None:
        """Return the next update, fetched; None when there is nothing newer. When cancelled, the search goes on."""
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            task = self._seeking = self._seeking or asyncio.create_task(self._seek())
            await asyncio.wait((task,))
            if self._seeking is task:  # and was not called off
                self._seeking = None
                return task.result()

    async def _seek(self) -> DirectUpdate | None:
        while True:
            self._navigator.news.clear()
            if not self._model.recognised:
                await self._model.recognise(self._messages)
            route = self._navigator.find(self._here)
            if route is None:
                return None
            self._navigator.set_out(route)
            found = await self._fetched(route)
            if found is not None:
                return found

    async def _call_off(self) -> None:
        """Give up the search that is under way, and what it found."""
        seeking, self._seeking = self._seeking, None
        if seeking is not None:
            seeking.cancel()
            await asyncio.gather(seeking, return_exceptions=True)

    async def _wait(self, gap: RetentionGapError | None, left: float | None) -> float | None:
        """Wait for news, at most the seconds left of the limit, and return what is left of it then."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(left):
                await (self._navigator.hear(None) if gap is None else self._navigator.wait_for_a_way(gap))
        except TimeoutError as error:
            raise WaitTimeoutError(f"{self.url} brought no update within {self._idle_timeout} s") from error
        return None if left is None else max(left - (clock() - began), 0.0)

    @property
    def _here(self) -> VersionVector | None:
        held = self._model.held
        return None if held is None else VersionVector(dict.fromkeys(self._writers, held.version))

    async def _fetched(self, route: Route) -> DirectUpdate | None:
        """Fetch the deltas of a route ahead, as far as they are few bytes."""
        started, ahead, room = time.perf_counter(), dict[int, list[bytes]](), _AHEAD
        at = self._model.held
        for message in route.messages:
            same, at = leads_to_same(message, at), message
            if same or message.kind is Kind.ANCHOR or message.nbytes > room:
                continue
            room -= message.nbytes
            try:
                await self._model.schema(message)
                ahead[message.position] = await self._fetcher.fetch(message.blobs)
            except UNAVAILABLE as error:
                self._navigator.note_unavailable(message, error)
                return None
        seconds = {"download": time.perf_counter() - started}
        return DirectUpdate(route.messages, ahead, seconds, write=self._apply, tell=self._note_applied)

    async def _apply(self, message: Message, parts: list[bytes] | None) -> int:
        """Write one message into the model, and return how many elements."""
        try:
            changed = await self._model.write(message, parts)
        except UNAVAILABLE as error:
            self._navigator.note_unavailable(message, error)
            raise
        self._navigator.gaps.over()
        return changed

    def _note_applied(self, update: DirectUpdate, changed: int) -> None:
        newest = self._navigator.sequencer.newest_cut(self._here)
        self._events.tell(
            Event(
                kind=EventKind.APPLIED,
                topic=self.url,
                writer=update.messages[-1].writer,
                step=update.step,
                version=update.version,
                nbytes=update.nbytes,
                changed=changed,
                total=update.messages[-1].stats.total,
                whole=update.whole,
                behind=0 if newest is None else max(sum(newest.state.values()) - update.version, 0),
                seconds=update.seconds,
                metadata=update.metadata,
            )
        )
