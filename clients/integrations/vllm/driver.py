"""`deltabus drive vllm`: tells servers when to pause, write what their workers have ready, and go on.

Theory of operation. Workers follow the topic by themselves; the driver reads its records alone, to know which states
there are. Each server has a task of its own, which goes to the newest state again and again, so that none waits for
another. A server's workers get ready while it serves; only when all of them are, it is paused. What a worker wrote can
be taken back until the update is finished, so that all workers of a server go on, or none. Every request has a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import EngineError, UsageError, WaitTimeoutError
from deltabus.bus.message import Message
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.signing import KeyRing
from deltabus.bus.version import Ordering, VersionVector
from deltabus.transports import open_transport

from .server import VllmServer

__all__ = ["PAUSE_MODES", "DriveSettings", "Driven", "drive"]

_T = TypeVar("_T")

PAUSE_MODES = ("keep", "wait", "abort")
"""What a pause does to requests that run: they go on later, are waited for, or are ended."""

_SOON, _LATE = 0.05, 1.0
"""Seconds between looks whether a server's workers are ready: at first, and at most."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds after which a server that failed is tried again: at first, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSettings:
    """How servers are driven.

    Attributes:
        topic: The topic.
        init: What each worker is told besides its URL: `keys`, `shadow`, `constants`.
        engine_topic: The topic's URL as servers see it; None is the same.
        keys: Whose messages the driver believes; None believes everybody.
        mode: One of `PAUSE_MODES`.
        timeout: Limit in seconds for a request, and for getting ready.
        once: Whether to end when each server has the state that was the newest at the beginning, or failed.

    Raises:
        UsageError: If the mode is none of these, or the limit not positive.
    """

    topic: str
    init: Mapping[str, Any] = field(default_factory=dict)
    engine_topic: str | None = None
    keys: KeyRing | None = None
    mode: str = "keep"
    timeout: float = 60.0
    once: bool = False

    def __post_init__(self) -> None:
        if self.mode not in PAUSE_MODES:
            raise UsageError(f"mode {self.mode!r} is not one of {', '.join(PAUSE_MODES)}")
        if self.timeout <= 0:
            raise UsageError(f"timeout={self.timeout} leaves no time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What became of one server's way to a state.

    Attributes:
        server: Its URL.
        step: The step of the state that it has, or was to have.
        version: The version of that state.
        behind: Versions that the topic is ahead of what it has.
        changed: Elements written, in all of its workers.
        ready_seconds: How long it took until all workers were ready.
        paused_seconds: How long no request went on.
        failure: Why it does not have it; empty when it does.
    """

    server: str
    step: int
    version: int
    behind: int = 0
    changed: int = 0
    ready_seconds: float = 0.0
    paused_seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Goal:
    """A state that servers are to have."""

    step: int
    state: VersionVector

    @property
    def version(self) -> int:
        return sum(self.state.values())


class _Topic:
    """The newest state of a topic, as its records come."""

    def __init__(self, settings: DriveSettings) -> None:
        self._settings = settings
        self._sequencer = Sequencer(topic=settings.topic)
        self._changed = asyncio.Condition()
        self.newest: _Goal | None = None

    async def follow(self) -> None:
        """Read the topic, for ever, or until its end where servers are driven once."""
        async with open_transport(self._settings.topic) as transport:
            reader = TopicReader(transport, keys=self._settings.keys)
            await self._enter(reader, await reader.load())
            if self._settings.once and self.newest is not None:
                return
            async with aclosing(reader.follow()) as messages:
                async for message in messages:
                    await self._enter(reader, [message])
                    if self._settings.once and self.newest is not None:
                        return

    async def after(self, state: VersionVector | None, *, timeout: float | None) -> _Goal:
        """Wait for a state that is not this one, and return the newest.

        Raises:
            WaitTimeoutError: If none comes within the limit.
        """
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: self.newest is not None and self.newest.state != state)
        except TimeoutError as error:
            raise WaitTimeoutError(f"{self._settings.topic} brought no state within {timeout:g} s") from error
        assert self.newest is not None
        return self.newest

    async def _enter(self, reader: TopicReader, messages: Sequence[Message]) -> None:
        starts = reader.starts
        for message in messages:
            self._sequencer.begin(message.writer, starts[message.writer])
            self._sequencer.feed(message)
        cut = self._sequencer.newest_cut()
        if cut is not None:
            async with self._changed:
                self.newest = _Goal(cut.step, cut.state)
                self._changed.notify_all()


async def drive(urls: Sequence[str], settings: DriveSettings, *, tell: Callable[[Driven], None]) -> bool:
    """Keep servers at a topic's newest state.

    Args:
        urls: The servers.
        settings: How.
        tell: Told of each update of each server, and of each failure.

    Returns:
        Whether all servers have it, where they are driven once; otherwise it goes on until it is cancelled.

    Raises:
        UsageError: If no server is named, one is named twice, or the topic's URL is wrong.
        DeltabusError: If the topic cannot be read.
    """
    if not urls or len(set(urls)) < len(urls):
        raise UsageError("name each server once, and at least one")
    topic = _Topic(settings)
    # A connection for each request: a server closes that on which it failed, and the next request would be lost.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        replicas = [_Replica(VllmServer(session, url, timeout=settings.timeout), settings, topic, tell) for url in urls]
        following = asyncio.create_task(topic.follow())
        serving = [asyncio.create_task(replica.run()) for replica in replicas]
        try:
            # The topic's end is no end, but its failure is.
            everything: asyncio.Future[list[bool]] = asyncio.gather(*serving)
            ends: set[asyncio.Future[Any]] = {following, everything}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if following.done() and not everything.done():
                following.result()
            return all(await everything)
        finally:
            for task in (following, *serving):
                task.cancel()
            await asyncio.gather(following, *serving, return_exceptions=True)


class _Replica:
    """One server on its way after the topic."""

    def __init__(
        self, server: VllmServer, settings: DriveSettings, topic: _Topic, tell: Callable[[Driven], None]
    ) -> None:
        self._server = server
        self._settings = settings
        self._topic = topic
        self._tell = tell
        self._held: VersionVector | None = None
        self._attached = False

    async def run(self) -> bool:
        """Go to the newest state, again and again; where servers are driven once, say whether that went well."""
        pause, failures = _FIRST_PAUSE, 0
        limit = self._settings.timeout if self._settings.once else None
        while True:
            goal = await self._topic.after(self._held, timeout=limit)
            try:
                if not self._attached:
                    await self._attach()
                done = await self._bring(goal)
            except EngineError as error:
                self._attached = False
                self._tell(self._failed(goal, error))
                failures += 1
                if self._settings.once and failures > 1:
                    return False
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause, failures = _FIRST_PAUSE, 0
            self._tell(done)
            if self._settings.once:
                return True

    def _failed(self, goal: _Goal, error: EngineError) -> Driven:
        held = 0 if self._held is None else sum(self._held.values())
        return Driven(
            server=self._server.url,
            step=goal.step,
            version=goal.version,
            behind=goal.version - held,
            failure=str(error),
        )

    async def _attach(self) -> None:
        """Bring a server into a known state, whatever an earlier driver left, and let it follow the topic."""
        await self._take_back()
        url = self._settings.engine_topic or self._settings.topic
        await self._server.open({**self._settings.init, "url": url})
        self._attached = True

    async def _bring(self, goal: _Goal) -> Driven:
        """Bring a server to a state, or to a later one if its workers cannot stop there."""
        started = time.monotonic()
        goal, said = await self._get_ready(goal, end=started + self._settings.timeout)
        ready = time.monotonic() - started
        paused = 0.0
        if all(_state(each, "held") == goal.state for each in said):
            await self._server.set_version(str(goal.version))
        else:
            # Also when cancelled: a server that is left paused serves nobody. Each request has a limit.
            paused = await _to_its_end(self._write(goal))
        self._held = goal.state
        newest = self._topic.newest or goal
        return Driven(
            server=self._server.url,
            step=goal.step,
            version=goal.version,
            behind=max(0, newest.version - goal.version),
            changed=sum(each.get("changed") or 0 for each in said) if paused else 0,
            ready_seconds=ready,
            paused_seconds=paused,
        )

    async def _get_ready(self, goal: _Goal, *, end: float) -> tuple[_Goal, list[dict[str, Any]]]:
        pause = _SOON
        while True:
            said = await self._server.command({"do": "prepare", "state": dict(goal.state)})
            states = [(_state(each, "held"), _state(each, "ready")) for each in said]
            if all(goal.state in pair for pair in states):
                return goal, said
            errors = [each["error"] for each in said if each.get("error")]
            if errors:
                raise EngineError(f"{self._server.url}: {errors[0]}", url=self._server.url)
            if any(_is_beyond(state, goal.state) for pair in states for state in pair):
                goal = self._topic.newest or goal  # a newcomer begins with the newest state that it finds
            if time.monotonic() >= end:
                raise EngineError(
                    f"{self._server.url}: its workers did not get step {goal.step} ready within "
                    f"{self._settings.timeout:g} s; they hold {[str(held) for held, _ in states]}, and have "
                    f"{[str(ready) for _, ready in states]} ready",
                    url=self._server.url,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LATE)

    async def _write(self, goal: _Goal) -> float:
        """Pause the server, write, and let it go on, whatever happens; return how long it was paused."""
        began = time.monotonic()
        try:
            await self._server.pause(self._settings.mode)
            await self._server.start()
            await self._server.update({"state": dict(goal.state), "timeout": 1.0})
            await self._server.reset_prefix_cache()
            await self._server.finish(str(goal.version))
        except BaseException:
            with suppress(EngineError):
                await self._take_back()
            raise
        await self._server.resume()
        return time.monotonic() - began

    async def _take_back(self) -> None:
        """Have workers take back what was not finished, end the update, and let requests go on."""
        said = await self._server.command({"do": "revert"})
        for each in said:
            if each.get("written"):
                raise EngineError(f"{self._server.url}: {each.get('error')}", url=self._server.url)
        if any(each.get("active") for each in said):
            with suppress(EngineError):
                await self._server.finish(None)  # refused by those workers that have ended theirs
        await self._server.resume()


async def _to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Wait until work has ended, however often this is cancelled meanwhile."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at, so that nobody is told that it was lost
        raise cancelled
    return task.result()


def _state(said: Mapping[str, Any], key: str) -> VersionVector | None:
    state = said.get(key)
    return VersionVector(state) if isinstance(state, dict) else None


def _is_beyond(state: VersionVector | None, other: VersionVector) -> bool:
    return state is not None and state.compare(other) is Ordering.AFTER
