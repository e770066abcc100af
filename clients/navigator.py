"""What a follower knows of its topic: the history in order, the way that leads on, and the waits where none does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import RetentionGapError
from deltabus.bus.message import Message
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.version import VersionVector

from .events import Event, EventKind, Listener
from .gaps import GapWatch
from .route import Route, Router

__all__ = ["Navigator"]

_log = logging.getLogger("deltabus.subscriber")


class Navigator:
    """Brings a topic's messages into order, and finds the way on from what is held.

    Args:
        reader: Reads the topic; whoever runs it hands on what it reads.
        topic: Named in what is told, and in errors.
        writers: Whose weights are followed; None is all.
        latest: Whether to go to the newest state at once, or through each.
        gaps: Watches the times in which nothing leads on.
        tell: Told of detours.

    Attributes:
        sequencer: The history.
        router: Finds ways through it.
        gaps: As given.
        news: Whoever looks for a way clears it before; whoever finds a reason to look again sets it.
    """

    def __init__(
        self,
        reader: TopicReader,
        *,
        topic: str,
        writers: frozenset[str] | None,
        latest: bool,
        gaps: GapWatch,
        tell: Listener,
    ) -> None:
        self._reader, self._topic, self._tell = reader, topic, tell
        self.sequencer = Sequencer(topic=topic, only=writers)
        self.router = Router(self.sequencer, topic=topic, latest=latest)
        self.gaps = gaps
        self.news = asyncio.Event()

    def enter(self, messages: Sequence[Message]) -> None:
        """Take messages that were read.

        Raises:
            ConflictError: If the history contradicts itself.
        """
        starts = self._reader.starts
        for writer in {message.writer: None for message in messages}:
            self.sequencer.begin(writer, starts[writer])
        for message in messages:
            self.sequencer.feed(message)

    def find(self, here: VersionVector | None) -> Route | None:
        """Return the way to take from a state; as `Router.next` does."""
        return self.router.next(here, starts=self._reader.starts)

    def set_out(self, route: Route) -> None:
        """Take note that a way is taken, and tell of it where it is a detour."""
        self.gaps.broken = None
        if route.detour:
            _log.warning("%s: %s", self._topic, route.detour)
            self._tell(Event(kind=EventKind.DETOUR, topic=self._topic, detail=route.detour))

    def note_unavailable(self, message: Message, error: Exception) -> None:
        """Take note that a message cannot be had, so that another way is looked for."""
        _log.warning("%s: %s Looking for another way.", self._topic, error)
        self.router.avoid(message, str(error))
        self.gaps.broken = error

    async def hear(self, within: float | None) -> None:
        """Wait for news, at most so many seconds; None is for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self.news.wait()

    async def wait_for_a_way(self, gap: RetentionGapError) -> None:
        """Wait for news when nothing leads on, and look again at what could not be had, until the limit is reached.

        Raises:
            CorruptPayloadError: If the limit is reached, and something was damaged.
            RetentionGapError: If the limit is reached.
        """
        clock = asyncio.get_running_loop().time
        await self.hear(self.gaps.look(gap, clock()))
        if self.gaps.looks_again(clock()):
            self.router.forgive()
