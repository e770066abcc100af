"""The inference side: `Subscriber`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from torch import Tensor, nn

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import ClosedError, ProtocolError, RetentionGapError, WaitTimeoutError
from deltabus.bus.message import Message
from deltabus.bus.planner import plan
from deltabus.bus.sequencer import Cut, Sequencer
from deltabus.codecs.apply import Target
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.schema import Schema
from deltabus.transports import open_transport

from .bridge import LoopThread
from .holdings import Holdings
from .mapped import allocator
from .stager import Stager, in_thread
from .update import Staged, Update
from .workers import usable_cores

__all__ = ["Subscriber"]

_log = logging.getLogger("deltabus.subscriber")
_AHEAD = 2
"""Updates that are decoded before they are asked for, when every version is delivered."""


class Subscriber:
    """Follows a topic: `async with` it, and `async for` over its updates.

    The next updates are downloaded, decoded and verified while the current one is in use. A subscriber keeps one copy
    of the weights besides the model's own: deltas are decoded against it.

    Args:
        url: The topic, such as `file:///data/run-7`.
        have: What this reader holds already: a model, a mapping of tensors, or the path of a safetensors checkpoint. If
            it is one of the topic's states, recognised by its digest, the first update leads on from there; if not, the
            first update carries the whole state.
        latest: Whether each update leads to the newest state, with everything that has piled up folded into one;
            otherwise every version is delivered, one by one, from the first that can be.
        idle_timeout: Limit in seconds for the wait for an update; None waits for ever, as a follower does.
        shadow: Where the copy of the weights lies: None or `"ram"` for memory, or a directory on a local disk for a
            file that is mapped into memory.
        workers: Threads that decode; None is the number of usable cores, at most 8.

    Raises:
        UsageError: If the URL is wrong, or `shadow` cannot be written to.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        have: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        latest: bool = True,
        idle_timeout: float | None = None,
        shadow: str | os.PathLike[str] | None = None,
        workers: int | None = None,
    ) -> None:
        self._have = have
        self._latest = latest
        self._idle_timeout = idle_timeout
        self._workers = workers or usable_cores()
        self._allocate = allocator(shadow)
        self._transport = open_transport(url)
        self.url = self._transport.url
        self._holdings = Holdings()
        self._sequencer = Sequencer(topic=self.url)
        self._ready: deque[Staged] = deque()
        self._handover = asyncio.Condition()
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: BaseException | None = None
        self._current: Update | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        """Open the topic and start to follow it.

        Raises:
            TransportError: If the topic cannot be reached.
            MessageFormatError: If what lies under the URL is not a topic.
            ConflictError: If its history contradicts itself.
            ClosedError: If the subscriber was closed.
        """
        if self._closed or self._pool is not None:
            raise ClosedError(f"the subscriber of {self.url} was opened before; make a new one")
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="deltabus-decode")
        try:
            await self._transport.__aenter__()
            self._reader = TopicReader(self._transport)
            self._stager = Stager(self._reader, self._pool, allocate=self._allocate)
            self._enter(await self._reader.load())
        except BaseException:
            await self.aclose()
            raise
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._follow, self._produce)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        """Return the next update, waiting for it if need be.

        Raises:
            StopAsyncIteration: If the subscriber was closed.
            WaitTimeoutError: If `idle_timeout` is reached; the subscriber goes on.
            CorruptPayloadError: If a payload is damaged.
            StorageFullError: If there is no room for the copy of the weights.
            RetentionGapError: If the topic no longer has what leads on from here.
            ConflictError: If the topic's history contradicts itself.
            TransportError: If the backend fails for good.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._pool is None:
            raise ClosedError(f"open the subscriber of {self.url} first: `async with Subscriber(...) as subscriber:`")
        try:
            async with asyncio.timeout(self._idle_timeout), self._handover:
                await self._handover.wait_for(lambda: self._ready or self._failure or self._closed)
        except TimeoutError as error:
            raise WaitTimeoutError(f"{self.url} brought no update within {self._idle_timeout} s") from error
        # From here on nothing waits: a cancelled call takes nothing away.
        if not self._ready:
            if self._failure is not None:
                raise self._failure
            raise StopAsyncIteration
        staged = self._ready.popleft()
        self._taken.set()
        skipped = self._current.retire() if self._current else None
        if skipped is not None:
            staged = skipped.followed_by(staged)
        self._current = Update(staged, self._holdings)
        return self._current

    async def aclose(self) -> None:
        """Stop following; may be called more than once."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._stager.forget()
        async with self._handover:
            while self._ready:
                self._ready.popleft().release()
            self._handover.notify_all()
        await self._transport.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def sync(self) -> Iterator[Update]:
        """Yield updates to synchronous code; leaving the loop closes the subscriber.

        Raises:
            ClosedError: If the subscriber was opened before.
            DeltabusError: As `__anext__` does.
        """
        if self._closed or self._pool is not None:
            raise ClosedError(f"the subscriber of {self.url} was opened before; make a new one")
        loop = LoopThread(f"deltabus subscriber of {self.url}")
        try:
            loop.run(self.__aenter__())
            while True:
                try:
                    yield loop.run(self.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            try:
                loop.run(self.aclose())
            finally:
                loop.stop()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Hand an error of a background task to whoever waits for updates."""
        try:
            await work()
        except Exception as error:
            async with self._handover:
                self._failure = self._failure or error
                self._handover.notify_all()

    async def _follow(self) -> None:
        async for message in self._reader.follow():
            self._enter([message])
            self._news.set()

    def _enter(self, messages: list[Message]) -> None:
        for writer, start in self._reader.starts.items():
            self._sequencer.begin(writer, start)
        for message in messages:
            self._sequencer.feed(message)

    async def _produce(self) -> None:
        if self._have is not None:
            await self._adopt(self._have)
        while True:
            self._news.clear()
            path = self._next_path()
            if path is None:
                await self._news.wait()
                continue
            await self._hand_over(await self._stager.stage(path))

    async def _adopt(self, have: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]) -> None:
        """Start from what the reader holds, if that is one of the topic's states."""
        while not self._sequencer.messages:
            self._news.clear()
            await self._news.wait()
        local = isinstance(have, str | os.PathLike)
        source = await asyncio.to_thread(load_checkpoint, have) if isinstance(have, str | os.PathLike) else have

        def bind(schema: Schema) -> Target:
            return Target.bind(source, schema)

        target = await self._stager.adopt(bind, self._sequencer.messages)
        if target is None:
            _log.warning("%s: what `have` holds is none of the topic's states; the whole state is fetched", self.url)
        elif not local and self._stager.state is not None:
            self._holdings.record(target, self._stager.state)
        self._have = None

    def _next_path(self) -> tuple[Message, ...] | None:
        """Return the messages to stage next; None when there is nothing newer."""
        here = self._stager.state
        if not self._latest and here is not None:
            cut = self._sequencer.next_cut(here)
            try:
                return None if cut is None else self._path(cut)
            except RetentionGapError as error:
                _log.warning("%s: %s Going on from the newest state.", self.url, error)
        cut = self._sequencer.newest_cut(here)
        return None if cut is None else self._path(cut)

    def _path(self, cut: Cut) -> tuple[Message, ...]:
        if len(cut.state) != 1:
            raise ProtocolError(
                f"{self.url} is written by {len(cut.state)} writers ({cut.state}); this version follows one writer",
                topic=self.url,
            )
        return plan(self._sequencer.messages, have=self._stager.state, target=cut.state).messages

    async def _hand_over(self, staged: Staged) -> None:
        while True:
            waiting = self._ready[-1] if self._latest and self._ready else None
            # Folding takes long where much has changed, and `waiting` may be taken meanwhile.
            folds = waiting is not None and staged.base is not None
            update = await in_thread(waiting.followed_by, staged) if waiting is not None and folds else staged
            async with self._handover:
                if waiting is None:
                    self._ready.append(update)
                elif self._ready and self._ready[-1] is waiting:
                    self._ready[-1] = update if folds else waiting.followed_by(staged)
                else:
                    continue
                self._handover.notify_all()
                break
        while not self._latest and len(self._ready) >= _AHEAD:
            self._taken.clear()
            await self._taken.wait()
