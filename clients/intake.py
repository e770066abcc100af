"""What comes in of a topic: read, brought into order, staged by the way that costs least, and handed over."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor, nn

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import RetentionGapError
from deltabus.bus.leases import LeaseKeeper
from deltabus.bus.message import Kind, Message
from deltabus.bus.transport import Transport
from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Target
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Allocate

from .events import Listener
from .gaps import GapWatch
from .handover import Handover
from .holdings import Holdings
from .lanes import UNAVAILABLE, Lanes
from .navigator import Navigator
from .route import Route
from .staged import StagedState
from .stager import HeldState, Stager
from .stragglers import StragglerWatch
from .telling import received

__all__ = ["Have", "Intake"]

_log = logging.getLogger("deltabus.subscriber")

Have = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
"""What a reader holds already: a model, a mapping of tensors, or the path of a safetensors checkpoint."""


class Intake:
    """Follows a topic, and stages what comes until it is ready to be written.

    Args:
        transport: The topic; opened by whoever closes it.
        reader: Reads it.
        handover: Where staged states go.
        have: What is held already; None is nothing.
        writers: Whose weights are followed; None is all.
        latest: Whether to go to the newest state at once, or through each.
        lease: Seconds for which retention is asked to leave what is needed here; None asks for nothing.
        stragglers: Watches the steps that wait for writers.
        gaps: Watches the times in which nothing leads on.
        holdings: Is told what state the model given as `have` holds.
        tell: Told of what was received, and of detours.

    Attributes:
        recognised: The topic's state that `have` turned out to hold; None when it holds none, or nothing was given.

    Raises:
        UsageError: If the time of the lease is out of range.
    """

    def __init__(
        self,
        transport: Transport,
        reader: TopicReader,
        handover: Handover,
        *,
        have: Have | None,
        writers: frozenset[str] | None,
        latest: bool,
        lease: float | None,
        stragglers: StragglerWatch,
        gaps: GapWatch,
        holdings: Holdings,
        tell: Listener,
    ) -> None:
        self.recognised: VersionVector | None = None
        self._topic = transport.url
        self._reader = reader
        self._navigator = Navigator(reader, topic=self._topic, writers=writers, latest=latest, gaps=gaps, tell=tell)
        self._sequencer = self._navigator.sequencer
        self._handover = handover
        self._have: Have | HeldState | None = have
        self._stragglers = stragglers
        self._holdings = holdings
        self._tell = tell
        self._lease: LeaseKeeper | None = None
        if lease is not None:
            name = f"{platform.node()} {os.getpid()}"
            self._lease = LeaseKeeper(transport, reader=name, seconds=lease, holds=self._holds, writers=writers)
        self._first: tuple[Message, ...] = ()
        self._handed = VersionVector()

    async def open(self, pool: ThreadPoolExecutor, allocate: Allocate) -> list[Callable[[], Awaitable[None]]]:
        """Read what the topic has, and return what is to be run from now on until the intake is closed.

        Args:
            pool: Where decoding runs in parallel.
            allocate: Makes the memory of the copies of the weights.

        Raises:
            DeltabusError: As `TopicReader.load` and `Sequencer.feed` do.
        """
        self._lanes = Lanes(lambda: Stager(self._reader, pool, allocate=allocate), topic=self._topic)
        self._navigator.enter(await self._reader.load())
        if self._lease is None:
            return [self._follow, self._produce]
        await self._lease.renew()
        return [self._follow, self._produce, self._lease.run]

    def start_from(self, held: HeldState) -> None:
        """Take bits over that are known to be a state, in place of `have`; before the intake is opened."""
        self._have = held

    def forget(self) -> None:
        """Give the copies of the weights back; when nothing runs any more."""
        self._lanes.forget()

    async def close(self) -> None:
        """Give the lease up, if there is one."""
        if self._lease is not None:
            await self._lease.end()

    def versions_behind(self, state: VersionVector) -> int:
        """Return how many versions newer than a state are known."""
        newest = self._sequencer.newest_cut(state)
        return max(sum(newest.state.values()) - sum(state.values()), 0) if newest is not None else 0

    async def _follow(self) -> None:
        async for message in self._reader.follow():
            self._navigator.enter([message])
            if message.kind is Kind.ANCHOR and self._have is None:
                self._navigator.router.forget(self._lanes.state, message.writer)
            self._navigator.news.set()

    async def _produce(self) -> None:
        if self._have is not None:
            await self._adopt(self._have)
        while True:
            self._navigator.news.clear()
            try:
                route = self._navigator.find(self._lanes.state)
            except RetentionGapError as error:
                await self._navigator.wait_for_a_way(error)
                continue
            if route is None:
                await self._wait_for_news()
                continue
            await self._take(route)

    async def _take(self, route: Route) -> None:
        """Stage the messages of a route, as far as they can be had, and hand over what came of them."""
        self._navigator.set_out(route)
        began_empty = self._lanes.state is None
        self._first = route.messages
        await self._lanes.take(route.messages, self._navigator.note_unavailable)
        self._first = ()
        held = self._lanes.state or VersionVector()
        state = VersionVector({writer: version for writer, version in held.items() if route.target.of(writer)})
        if not self._lanes.moved or not self._sequencer.is_cut(state) or not self._leads_on(state):
            return
        self._handed = state
        staged = self._lanes.complete(state, comes_after=self._sequencer.comes_after)
        self._navigator.gaps.over()
        self._note_received(staged)
        if began_empty and self._lease is not None:
            self._lease.renew_soon()  # what was said before the first state was known holds back too much
        await self._handover.put(replace(staged, detours=(route.detour,) if route.detour else ()))

    def _leads_on(self, state: VersionVector) -> bool:
        """Return whether a state lies beyond the last: a way around what is missing may lead over an older one."""
        back = any(state.of(writer) < version for writer, version in self._handed.items() if writer in state)
        return state != self._handed and not back

    def _note_received(self, staged: StagedState) -> None:
        self._tell(received(staged, topic=self._topic, behind=self.versions_behind(staged.state)))

    async def _wait_for_news(self) -> None:
        """Wait for news; while a step waits for the rest of its group, or what it rests on, say who is awaited.

        Raises:
            StragglerError: If the limit for that is reached.
        """
        waiting = self._sequencer.waiting(self._lanes.state)
        await self._navigator.hear(self._stragglers.look(waiting, asyncio.get_running_loop().time()))

    def _holds(self) -> Mapping[str, int]:
        """Return the versions beyond which everything is needed here."""
        here = self._lanes.state
        if here is not None or self._have is not None:
            return here or {}
        first = self._first  # what is downloaded stays, even where a newer anchor would be the way by now
        if not first:
            try:
                route = self._navigator.find(None)
            except RetentionGapError:
                return {}
            first = route.messages if route is not None else ()
        return {message.writer: message.version - 1 for message in reversed(first)}

    async def _adopt(self, have: Have | HeldState) -> None:
        """Start from what the reader holds, if that is one of the topic's states."""
        while not self._sequencer.messages:
            self._navigator.news.clear()
            await self._navigator.news.wait()
        if isinstance(have, HeldState):
            self._take_over(have)
            return
        local = isinstance(have, str | os.PathLike)
        source = await asyncio.to_thread(load_checkpoint, have) if isinstance(have, str | os.PathLike) else have

        def bind(schema: Schema) -> Target:
            return Target.bind(source, schema)

        newest = self._sequencer.newest_cut()
        logs = {message.writer: message for message in self._sequencer.messages} if newest is None else newest.state
        try:
            targets = await self._lanes.adopt(bind, {writer: self._sequencer.messages_of(writer) for writer in logs})
        except UNAVAILABLE as error:
            _log.warning(
                "%s: %s What `have` holds cannot be recognised; the whole state is fetched.", self._topic, error
            )
            self._have = None
            return
        if targets is None:
            _log.warning("%s: what `have` holds is none of the topic's states; the whole state is fetched", self._topic)
        elif not local and self._lanes.state is not None:
            self._holdings.record(targets, self._lanes.state)
        self._handed = self._lanes.state or VersionVector()
        self._have = None
        self.recognised = self._lanes.state if targets is not None else None
        if self._lease is not None:
            self._lease.renew_soon()

    def _take_over(self, held: HeldState) -> None:
        """Start from bits that are known to be a state, if it is one of the topic's."""
        if self._lanes.hold(held, self._sequencer.messages_of(held.message.writer)):
            self.recognised = self._lanes.state
        else:
            _log.warning("%s: what is held is none of the topic's states; the whole state is fetched", self._topic)
        self._handed = self._lanes.state or VersionVector()
        self._have = None
