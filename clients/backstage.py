"""What runs behind a publisher: an event loop in a thread, with the sender, retention and the transport on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import PublishError
from deltabus.bus.leases import read_leases
from deltabus.bus.retention import Retention
from deltabus.bus.retry import Retry
from deltabus.bus.transport import Transport

from .bridge import LoopThread
from .pruning import BackgroundPruner
from .sender import Sender

__all__ = ["Backstage", "ReaderLag"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ReaderLag:
    """How far a reader with a lease has come.

    Attributes:
        reader: Its name: its host and process, unless it says otherwise.
        version: The version of this writer that it holds; 0 is none yet.
        behind: How many versions the log is further.
    """

    reader: str
    version: int
    behind: int


class Backstage:
    """Opens a log and runs what belongs to it until it is shut down; its methods are called from other threads.

    Args:
        transport: The topic, not opened yet.
        log: The writer's log, not opened yet.
        send: Makes the sender, once the log is open.
        retention: What of the topic to keep; None removes nothing.
        timeout: Limit in seconds for opening, closing, and whatever says none of its own.

    Attributes:
        sender: Sends what was captured.
        fatal_told: Whether what ended the sender for good was raised.

    Raises:
        TransportError: If the topic cannot be reached.
        MessageFormatError: If what lies under the URL is not a topic.
        SignatureError: If the log's messages and the keys do not fit.
        UsageError: If the group's generation is not greater than the log's.
        WaitTimeoutError: If opening takes too long.
    """

    def __init__(
        self,
        transport: Transport,
        log: LogWriter,
        send: Callable[[], Sender],
        *,
        retention: Retention | None,
        timeout: float,
    ) -> None:
        self._transport, self._log, self._timeout = transport, log, timeout
        self.fatal_told = False
        self._loop = LoopThread(f"deltabus publisher of {transport.url}")
        try:
            self.sender, self._sending, self._pruning = self.run(
                self._open(send, retention), what=f"opening {transport.url}"
            )
        except BaseException:
            self._loop.stop()
            raise

    async def _open(
        self, send: Callable[[], Sender], retention: Retention | None
    ) -> tuple[Sender, asyncio.Task[None], asyncio.Task[None] | None]:
        await self._transport.__aenter__()
        try:
            await self._log.open()
            sender = send()
            pruning = None if retention is None else BackgroundPruner(self._transport, self._log, retention).run()
        except BaseException:
            await self._transport.close()
            raise
        return sender, asyncio.create_task(sender.run()), None if pruning is None else asyncio.create_task(pruning)

    def run(self, work: Coroutine[Any, Any, _T], *, what: str, timeout: float | None = None) -> _T:
        """Run a coroutine on the loop, and wait for what it returns.

        Raises:
            WaitTimeoutError: If the limit is reached.
            BaseException: What it raises.
        """
        return self._loop.run(work, timeout=self._timeout if timeout is None else timeout, what=what)

    def raise_failure(self) -> None:
        """Raise what keeps the sender from going on, or kept it from storing a step; nothing when all is well.

        Raises:
            PublishError: If a step could not be stored, once for each.
            FencedError: If another process took the log over.
            SignatureError: If somebody without an accepted key wrote to the log.
        """
        if self.sender.fatal is not None:
            self.fatal_told = True
            raise self.sender.fatal
        if self._sending.done():
            self._sending.result()
        failure, self.sender.failure = self.sender.failure, None
        if failure is not None:
            raise PublishError(
                f"an earlier step could not be stored in {self._transport.url}: {failure} Nothing is lost yet: publish "
                "again and its changes travel with the next step."
            ) from failure

    def drain(self, *, skips: bool, timeout: float | None) -> None:
        """Wait until everything captured is durable, and raise what is not; arguments as for `Sender.drain` and `run`.

        Raises:
            WaitTimeoutError: If the limit is reached.
            PublishError: As `raise_failure` does, and its other errors.
        """
        self.run(
            self.sender.drain(skips=skips), timeout=timeout, what=f"storing what was published to {self._transport.url}"
        )
        self.raise_failure()

    def readers(self) -> list[ReaderLag]:
        """Return how far the readers of this writer are that hold a lease now, the furthest behind first.

        Raises:
            TransportError: If the leases cannot be read.
            WaitTimeoutError: If that takes too long.
        """
        return self.run(self._read_leases(), what=f"reading the leases of {self._transport.url}")

    async def _read_leases(self) -> list[ReaderLag]:
        newest = self._log.next_version - 1
        leases = await read_leases(self._transport, retry=Retry(), now=self._log.clock())
        live = [lease for lease in leases if lease.holds is not None and lease.is_live(self._log.clock())]
        told = [(lease.reader, lease.version_of(self._log.writer)) for lease in live]
        held = [(reader, version) for reader, version in told if version is not None]
        return [ReaderLag(reader, v, max(newest - v, 0)) for reader, v in sorted(held, key=lambda pair: pair[1])]

    def shut_down(self) -> None:
        """End what runs, close the transport, and tell whoever still waits for a step that it was in vain.

        Raises:
            WaitTimeoutError: If that takes too long.
        """
        try:
            self.run(self._close(), what=f"closing {self._transport.url}")
        finally:
            self._loop.stop()
            self.sender.give_up()

    async def _close(self) -> None:
        # The task puts back what it was about to send; only then all handles can be told.
        tasks = [task for task in (self._sending, self._pruning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sender.aclose()
        await self._transport.close()
