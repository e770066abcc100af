"""The inference side: `Subscriber`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import ClosedError
from deltabus.bus.logs import parse_seen, seen_text
from deltabus.bus.message import check_writer_name
from deltabus.bus.version import VersionVector
from deltabus.transports import open_transport

from .bindings import Bindings
from .bridge import LoopThread
from .events import Events, Listener
from .gaps import GapWatch
from .handover import Handover
from .holdings import Holdings
from .intake import Intake
from .keys import Key, verify_keys
from .mapped import allocator
from .stragglers import StragglerWatch
from .telling import applied
from .update import Update
from .verification import OnDrift, Verification, Verify
from .workers import usable_cores

__all__ = ["Subscriber"]


class Subscriber:
    """Follows a topic: `async with` it, and `async for` over its updates.

    The next updates are downloaded, decoded and verified while the current one is in use. A subscriber keeps one copy
    of the weights besides the model's own: deltas are decoded against it.

    Args:
        url: The topic, such as `file:///data/run-7`.
        have: What this reader holds already: a model, a mapping of tensors, or the path of a safetensors checkpoint. If
            it is one of the topic's states, recognised by its digest, the first update leads on from there; if not, the
            first update carries the whole state.
        writers: Whose weights to follow, where a topic has several writers that are independent of each other; of a
            group all members. None is all.
        latest: Whether each update leads to the newest state, with everything that has piled up folded into one;
            otherwise every version is delivered, one by one, from the first that can be.
        idle_timeout: Limit in seconds for the wait for an update; None waits for ever, as a follower does.
        shadow: Where the copy of the weights lies: None or `"ram"` for the host's memory, or a directory on a local
            disk for a file that is mapped into it. A `torch.device` is the memory of that device, which takes as much
            again as the weights and up to 150 MiB for each worker; deltas are then decoded against it there.
        keys: Whose messages are believed: texts of keys, or paths of their files. Then every message must be signed by
            one of them and follow on the one before it, which is checked before anything it says is used. None takes
            those in the environment variable `DELTABUS_VERIFY_KEYS`; without that, everybody is believed.
        seen: Where the topic's logs stood when an earlier subscriber last looked, as its `seen` said. The topic must
            go on there: one that was cut off, put back to an older state or exchanged for another, with messages that
            were signed once, is refused. Needs keys.
        lease: Seconds for which retention is asked, again and again, to leave what this reader still needs; None asks
            for nothing, and writes nothing. A reader that dies holds it back for so long at most.
        gap_timeout: Limit in seconds for the wait for an anchor when nothing that is there leads on: because it was
            removed, or is damaged.
        straggler_timeout: Limit in seconds for the wait for the rest of a group, once some of its writers have
            published a step, and for what a step rests on (`publish(after=)`); None waits for ever. Who is awaited is
            logged long before.
        on_drift: What `apply` does where a model does not hold the bits that an update starts from, because somebody
            else wrote to it: `"refuse"` raises `DivergedError`, `"repair"` brings it to the update's state, from the
            copy of the weights kept here, and says so in `update.repaired` and the log.
        verify: None compares what an update touches, and the whole of a model that is new here. `"full"` compares the
            whole model, by its digest, before an update is written; that reads every weight once.
        verify_every: With `verify="full"`, how many updates are applied from one such comparison to the next.
        on_event: Told of each update that was received or applied, of detours and waits: `LoggingListener()`,
            `PrometheusListener()`, or any callable that takes an `Event`; one or several.
        workers: Threads that decode; None is the number of usable cores, at most 8.

    Raises:
        UsageError: If the URL, a key, `seen`, a time or another option is wrong, or `shadow` cannot be written to or is
            no device.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        have: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        writers: Sequence[str] | None = None,
        latest: bool = True,
        idle_timeout: float | None = None,
        shadow: str | os.PathLike[str] | torch.device | None = None,
        keys: Key | Sequence[Key] | None = None,
        seen: str | None = None,
        lease: float | None = None,
        gap_timeout: float = 300.0,
        straggler_timeout: float | None = 600.0,
        on_drift: OnDrift = "refuse",
        verify: Verify | None = None,
        verify_every: int = 1,
        on_event: Listener | Iterable[Listener] | None = None,
        workers: int | None = None,
    ) -> None:
        self._verification = Verification(on_drift=on_drift, verify=verify, every=verify_every)
        ring, known = verify_keys(keys), parse_seen(seen or "")
        self._idle_timeout = idle_timeout
        self._workers = workers or usable_cores()
        self._allocate = allocator(shadow, of_model=False)
        self._transport = open_transport(url)
        self.url = self._transport.url
        only = None if writers is None else frozenset(map(check_writer_name, writers))
        self._reader = TopicReader(self._transport, keys=ring, seen=known, only=only)
        self._events = Events(on_event)
        self._holdings = Holdings()
        self._bindings = Bindings()
        self._handover = Handover(topic=self.url, latest=latest)
        self._intake = Intake(
            self._transport,
            self._reader,
            self._handover,
            have=have,
            writers=only,
            latest=latest,
            lease=lease,
            stragglers=StragglerWatch(self.url, limit=straggler_timeout, tell=self._events.tell),
            gaps=GapWatch(self.url, limit=gap_timeout, tell=self._events.tell),
            holdings=self._holdings,
            tell=self._events.tell,
        )
        self._step: int | None = None
        self._current: Update | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        """Open the topic and start to follow it.

        Raises:
            TransportError: If the topic cannot be reached.
            MessageFormatError: If what lies under the URL is not a topic.
            SignatureError: If there are keys, and a message does not show that it belongs where it stands.
            ConflictError: If its history contradicts itself.
            ClosedError: If the subscriber was closed.
        """
        if self._closed or self._pool is not None:
            raise ClosedError(f"the subscriber of {self.url} was opened before; make a new one")
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="deltabus-decode")
        try:
            await self._transport.__aenter__()
            works = await self._intake.open(self._pool, self._allocate)
        except BaseException:
            await self.aclose()
            raise
        self._tasks = [asyncio.create_task(self._guard(work)) for work in works]
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
            SignatureError: If there are keys, and a message does not show that it belongs where it stands.
            CorruptPayloadError: If a payload is damaged, and no other way was found within `gap_timeout`.
            StorageFullError: If there is no room for the copy of the weights.
            RetentionGapError: If the topic no longer has what leads on from here, and no anchor came within
                `gap_timeout`.
            StragglerError: If writers of a group did not publish a step that others have, or somebody did not publish
                what a step rests on, within `straggler_timeout`.
            ConflictError: If the topic's history contradicts itself, or two writers hold the same elements.
            TransportError: If the backend fails for good.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._pool is None:
            raise ClosedError(f"open the subscriber of {self.url} first: `async with Subscriber(...) as subscriber:`")
        staged = await self._handover.take(self._current, limit=self._idle_timeout)
        if staged is None:
            raise StopAsyncIteration
        known = (self._holdings, self._bindings, self._verification)
        self._current = Update(staged, *known, before=self._step, tell=self._note_applied)
        self._step = self._current.step
        return self._current

    @property
    def recognised(self) -> VersionVector | None:
        """The topic's state that `have` turned out to hold; None when it holds none, or nothing was given."""
        return self._intake.recognised

    @property
    def seen(self) -> str:
        """Where the topic's logs stand, as far as they were read and checked; for a later subscriber's `seen`."""
        return seen_text(self._reader.seen)

    async def aclose(self) -> None:
        """Stop following; may be called more than once."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._intake.forget()
        await self._handover.close()
        await self._intake.close()
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
            await self._handover.fail(error)

    def _note_applied(self, update: Update) -> None:
        self._events.tell(applied(update, topic=self.url, behind=self._intake.versions_behind(update.state)))
