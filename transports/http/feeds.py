"""One tail of each log for all who follow it.

A feed tails the log on the backend, and keeps the newest records for a while. Who follows takes what it lacks from
there; who is further behind reads the log until it has caught up. A record that was appended through this process is
told at once, however seldom the backend is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

from deltabus.bus.errors import DeltabusError, TransientTransportError
from deltabus.bus.transport import Record, Transport

from .wire import GoneError, encode_event

__all__ = ["Feed"]

_log = logging.getLogger("deltabus.http")
_PAGE = 64
_KEPT = 256
_KEPT_BYTES = 4 << 20
_FIRST_PAUSE = 0.1
_LAST_PAUSE = 5.0


class Feed:
    """What is new in a log.

    Args:
        transport: The topic on its backend.
        log: Which log.
        seen: Is told each record that passes.
        renewed: Whether the log may be begun anew while somebody follows it.
    """

    def __init__(
        self, transport: Transport, log: str, *, seen: Callable[[str, Record], None], renewed: bool = False
    ) -> None:
        self._transport = transport
        self._log = log
        self._seen = seen
        self._renewed = renewed
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._low = self._last = -1
        self._task: asyncio.Task[None] | None = None
        self._failure: DeltabusError | None = None
        self._news: asyncio.Future[None] | None = None
        self._closed = False
        self.followers = 0

    async def follow(self, after: int, *, beat: float) -> AsyncGenerator[list[bytes], None]:
        """Yield the events behind a position as they come, encoded.

        An empty list says that all so far were given, and again each time that nothing came for `beat` seconds.

        Raises:
            GoneError: If the log was begun anew, and does not reach the position.
            DeltabusError: If the backend fails for good, or cannot be read.
        """
        await self._check_reached(after)
        if self._task is not None and self._task.done():
            self._task = self._failure = None  # it failed, and may succeed now
        self.followers += 1
        try:
            while True:
                if self._task is not None and after >= self._low:
                    if self._failure is not None:
                        raise self._failure
                    found = [event for position, event in self._kept if position > after]
                    if found:
                        after = self._last
                        yield found
                        continue
                    yield []
                    try:
                        async with asyncio.timeout(beat):
                            await self._wait(after)
                    except TimeoutError:
                        await self._check_reached(after)
                    continue
                if self._closed:
                    raise TransientTransportError(f"{self._transport.url} is being closed", url=self._transport.url)
                records = await self._transport.read(self._log, after, _PAGE)
                for record in records:
                    self._seen(self._log, record)
                if records:
                    after = records[-1].position
                    yield [encode_event(record) for record in records]
                else:
                    self._begin(after)
        finally:
            self.followers -= 1

    def tell(self, record: Record) -> None:
        """Hand on a record that was appended here."""
        if self._task is not None and record.position == self._last + 1:
            self._add(record)

    @property
    def busy(self) -> bool:
        """Whether the backend is being tailed."""
        return self._task is not None

    async def rest(self) -> None:
        """Stop to tail while nobody follows."""
        task = self._task
        if task is not None and not self.followers:
            self._task = None
            task.cancel()
            await asyncio.wait((task,))

    async def close(self) -> None:
        """Stop to tail, for good."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._wake()

    async def _check_reached(self, after: int) -> None:
        """Check that a log that may be begun anew still has what was read of it: its follower would wait for ever."""
        if self._renewed and after >= 0 and not await self._transport.read(self._log, after - 1, 1):
            raise GoneError(
                f"log {self._log!r} was begun anew, because what this service had made of it was removed, and does not "
                f"reach position {after}, which was read before: begin anew too, with a new subscriber",
                url=self._transport.url,
            )

    async def _wait(self, after: int) -> None:
        """Wait until there is something behind a position, or the tail has failed."""
        while self._task is not None and self._failure is None and self._last <= after:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    def _begin(self, after: int) -> None:
        """Tail from behind a position on: that of who came first, or of who is nearer to the beginning."""
        if self._task is not None:
            self._task.cancel()
        self._kept.clear()
        self._kept_bytes = 0
        self._failure = None
        self._low = self._last = after
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                async with contextlib.aclosing(self._transport.tail(self._log, self._last)) as tail:  # type: ignore[type-var]
                    async for record in tail:
                        pause = _FIRST_PAUSE
                        if record.position > self._last:
                            self._add(record)
            except TransientTransportError as error:
                _log.info("following %s of %s goes on in %.1f s: %s", self._log, self._transport.url, pause, error)
            except DeltabusError as error:
                self._failure = error
                self._wake()
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _add(self, record: Record) -> None:
        event = encode_event(record)
        self._last = record.position
        self._kept.append((record.position, event))
        self._kept_bytes += len(event)
        while len(self._kept) > _KEPT or (self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1):
            self._low, gone = self._kept.popleft()
            self._kept_bytes -= len(gone)
        self._seen(self._log, record)
        self._wake()
