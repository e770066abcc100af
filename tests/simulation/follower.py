"""Readers of the simulation: what `Subscriber` does, around the real reader, sequencer, router and leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import CorruptPayloadError, KeyNotFoundError, RetentionGapError, TransportError
from deltabus.bus.leases import LeaseKeeper
from deltabus.bus.message import Kind, Message
from deltabus.bus.retry import Retry
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.version import VersionVector
from deltabus.route import Route, Router

from .oracle import Oracle, ViolationError
from .process import Process
from .state import State, apply, digest
from .store import SimulatedTransport

__all__ = ["Follower", "may_end"]

_LOOK_AGAIN = 30.0
_GAP = 200.0
_NOTHING = VersionVector()


class Follower:
    """One incarnation of a reader.

    Args:
        process: What it dies with.
        transport: The topic.
        oracle: Is shown each state that it holds.
        retry: How long it tries.
        latest: Whether it goes to the newest state at once.
        lease: Seconds of its lease; None takes none.
        have: What it holds of each writer when it starts.
        busy: Tells for how many seconds it is busy before it takes what is next.
        counts: Counts what happened to it.

    Attributes:
        delivered: What it handed over last, or holds since it began: the version of each writer.
        states: The bits that it holds of each writer.
    """

    def __init__(
        self,
        process: Process,
        transport: SimulatedTransport,
        *,
        oracle: Oracle,
        retry: Retry,
        latest: bool,
        lease: float | None,
        have: Mapping[str, State],
        busy: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self.delivered = _NOTHING
        self.states: dict[str, State] = dict(have)
        self._versions: dict[str, int] = {}
        self._have = bool(have)
        self._name = process.name
        self._process = process
        self._oracle = oracle
        self._busy = busy
        self._counts = counts
        self._reader = TopicReader(transport, retry=retry)
        self._sequencer = Sequencer(topic=transport.url)
        self._router = Router(self._sequencer, topic=transport.url, latest=latest)
        self._first: tuple[Message, ...] = ()
        self._news = asyncio.Event()
        self._gap_began: float | None = None
        self._looked = 0.0
        self._lease = None
        if lease is not None:
            self._lease = LeaseKeeper(
                transport, reader=process.name, seconds=lease, holds=self._holds, retry=retry, draw=process.draw
            )

    @property
    def _here(self) -> VersionVector | None:
        return VersionVector(self._versions) or None

    async def run(self) -> None:
        """Follow for ever."""
        self._enter(await self._reader.load())
        if self._lease is not None:
            await self._lease.renew()
        works = [self._follow(), self._produce(), *([self._lease.run()] if self._lease is not None else [])]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._reader.follow()) as messages:
            async for message in messages:
                self._enter([message])
                if message.kind is Kind.ANCHOR and not self._have:
                    self._router.forget(self._here, message.writer)
                self._news.set()

    def _enter(self, messages: list[Message]) -> None:
        starts = self._reader.starts
        for writer in {message.writer: None for message in messages}:
            self._sequencer.begin(writer, starts.get(writer, 0))
        for message in messages:
            self._sequencer.feed(message)

    async def _produce(self) -> None:
        if self._have:
            await self._adopt()
        while True:
            self._news.clear()
            try:
                route = self._router.next(self._here, starts=self._reader.starts)
            except RetentionGapError as gap:
                await self._wait_for_a_way(gap)
                continue
            if route is None:
                await self._news.wait()
            else:
                if seconds := self._busy():
                    await asyncio.sleep(seconds)
                await self._take(route)

    async def _adopt(self) -> None:
        while not self._sequencer.messages:
            self._news.clear()
            await self._news.wait()
        newest = self._sequencer.newest_cut()
        writers = {message.writer for message in self._sequencer.messages} if newest is None else newest.state
        before, self.states = self.states, {}
        for writer in sorted(set(writers) & before.keys()):
            same = [m for m in self._sequencer.messages_of(writer) if m.digest_after == digest(before[writer])]
            if same:
                self._counts["recognised"] += 1
                self._versions[writer] = max(message.version for message in same)
                self.states[writer] = before[writer]
        self._have = False
        held = VersionVector(self._versions)
        self.delivered = held if self._sequencer.is_cut(held) else _NOTHING
        if self._lease is not None:
            self._lease.renew_soon()

    async def _take(self, route: Route) -> None:
        self._counts["detours"] += bool(route.detour)
        self._first = route.messages
        before = self._here
        missing: set[str] = set()
        for message in route.messages:
            if message.writer in missing:
                continue
            try:
                await self._stage(message)
            except (KeyNotFoundError, CorruptPayloadError) as error:
                self._counts["missing"] += 1
                self._router.avoid(message, str(error))
                missing.add(message.writer)
        self._first = ()
        state = VersionVector({w: v for w, v in self._versions.items() if route.target.of(w)})
        if self._here == before or self._process.dead or not (self._sequencer.is_cut(state) and self._is_onward(state)):
            return
        for writer in [writer for writer in self._versions if writer not in state]:
            del self._versions[writer], self.states[writer]
        self._gap_began = None
        self._oracle.delivered(state, before=self.delivered, reader=self._name)
        self.delivered = state
        if before is None and self._lease is not None:
            self._lease.renew_soon()

    def _is_onward(self, state: VersionVector) -> bool:
        """Return whether a state is newer than the one before: a way round over an older one may have broken off."""
        kept = {writer: version for writer, version in self.delivered.items() if writer in state}
        return state.covers(kept) and state != self.delivered

    async def _stage(self, message: Message) -> None:
        writer = message.writer
        base = self.states.get(writer)
        if base is None or digest(base) != message.digest_after:
            parts = [await self._reader.fetch(blob) for blob in message.blobs]
            if message.kind is Kind.ANCHOR:
                base = None
            elif base is None or digest(base) != message.digest_before:
                raise ViolationError(f"{self._name} holds {self._here}, and {message.version} leads on from another")
            base = apply(parts, base=base)
        if digest(base) != message.digest_after:
            raise ViolationError(f"{self._name}: what leads to version {message.version} leads to something else")
        self._oracle.holds(writer, message.version, base, reader=self._name)
        self.states[writer], self._versions[writer] = base, message.version

    async def _wait_for_a_way(self, gap: RetentionGapError) -> None:
        clock = asyncio.get_running_loop().time
        if self._gap_began is None:
            self._counts["gaps"] += 1
            self._gap_began = self._looked = clock()
        end = self._gap_began + _GAP
        if self._looked >= end:
            raise gap
        due = min(self._looked + _LOOK_AGAIN, end)
        if clock() < due:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - clock()):
                    await self._news.wait()
        if (now := clock()) >= due:
            self._looked = now
            self._router.forgive()

    def _holds(self) -> Mapping[str, int]:
        if self._here is not None or self._have:
            return self._here or {}
        first = self._first
        if not first:
            try:
                route = self._router.next(None, starts=self._reader.starts)
            except RetentionGapError:
                return {}
            first = route.messages if route is not None else ()
        return {message.writer: message.version - 1 for message in reversed(first)}


def may_end(error: BaseException | None) -> bool:
    """Return whether faults alone may end a process like this."""
    return error is None or isinstance(error, TransportError | RetentionGapError)
