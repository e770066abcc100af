"""The subscriber's copy of the topic's bits: turns messages into verified updates, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import CorruptPayloadError, DivergedError
from deltabus.bus.message import Blob, Kind, Message
from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import Changes, SegmentChanges, changes_in_segment
from deltabus.codecs.container import decode_anchor, decode_delta
from deltabus.codecs.digest import digest_delta
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Allocate, Shadow, in_memory

from .update import Staged

__all__ = ["Stager", "in_thread"]

_T = TypeVar("_T")
_DOWNLOADS = 4
_MASK = (1 << 64) - 1


class Stager:
    """Holds the bits of the last staged state, and stages messages that lead on from it.

    Args:
        reader: Where blobs are fetched.
        pool: Where decoding runs in parallel.
        allocate: Makes the arrays of the shadow.

    Attributes:
        state: The version vector of the bits held; None for nothing.
    """

    def __init__(self, reader: TopicReader, pool: ThreadPoolExecutor, *, allocate: Allocate = in_memory) -> None:
        self.state: VersionVector | None = None
        self._reader = reader
        self._pool = pool
        self._allocate = allocate
        self._shadow: Shadow | None = None
        self._digest = 0
        self._schemas: dict[bytes, Schema] = {}

    @property
    def shadow(self) -> Shadow | None:
        """The bits held."""
        return self._shadow

    async def schema(self, blob: Blob) -> Schema:
        """Return the schema that a blob holds.

        Raises:
            MessageFormatError: If it cannot be read.
            CorruptPayloadError: If it is not what its checksum says.
            TransportError: If it cannot be fetched.
        """
        if blob.checksum not in self._schemas:
            self._schemas[blob.checksum] = Schema.decode(await self._reader.schema(blob))
        return self._schemas[blob.checksum]

    async def adopt(self, bind: Callable[[Schema], Target], messages: Sequence[Message]) -> Target | None:
        """Start from a model that holds one of the topic's states; return its target, or None if it holds none of them.

        Args:
            bind: Finds the model's tensors for a schema.
            messages: The topic's messages.

        Raises:
            SchemaMismatchError: If the model cannot hold the newest message's tensors.
            TransportError: If the schema cannot be fetched.
        """
        newest = max(messages, key=lambda message: (message.epoch, message.position))
        schema = await self.schema(newest.schema)
        target = await in_thread(bind, schema)
        digest = await in_thread(target.digest, self._pool)
        known = [m for m in messages if m.digest_after == digest and m.schema.checksum == newest.schema.checksum]
        if not known:
            return None
        shadow = await in_thread(self._empty, schema)
        for segment in schema.segments:
            shadow.load(segment.index, await in_thread(target.read, segment.index))
        if await in_thread(shadow.digest, self._pool) != digest:
            raise DivergedError(
                "the model given as `have` changed while it was read; leave it alone until the first update"
            )
        self._shadow, self._digest = shadow, digest
        self.state = max(known, key=lambda message: message.version).state
        return target

    async def stage(self, messages: Sequence[Message]) -> Staged:
        """Fetch, decode and verify messages that lead on from the state held, and hold the state they lead to.

        Raises:
            CorruptPayloadError: If a payload is damaged, or does not lead to the digest that its message says.
            DivergedError: If a message does not start from the state held.
            TransportError: If a blob cannot be fetched.
        """
        staged = await self._stage_one(messages[0])
        for message in messages[1:]:
            later = await self._stage_one(message)
            staged = await in_thread(staged.followed_by, later)
        return staged

    async def _stage_one(self, message: Message) -> Staged:
        started = time.perf_counter()
        schema = await self.schema(message.schema)
        download = [0.0]
        known = self._shadow if self._shadow is not None and self._shadow.schema == schema else None
        fresh: Shadow | None = None
        changes: Changes | None = None
        if message.kind is Kind.DELTA:
            shadow = self._check_base(message, known)
            changes = await self._decode(
                message, download, lambda parts: decode_delta(parts, schema, shadow.read, pool=self._pool)
            )
        elif known is not None:
            changes = await self._decode(message, download, lambda parts: self._compare(parts, known))
        else:
            fresh = await self._decode(message, download, lambda parts: self._build(parts, schema))

        base, base_digest = self.state, self._digest
        if fresh is not None:
            digest = await in_thread(fresh.digest, self._pool)
        else:
            assert changes is not None
            digest = (self._digest + await in_thread(digest_delta, changes)) & _MASK
        if digest != message.digest_after:
            raise CorruptPayloadError(
                f"{_name(message)} leads to digest {digest:016x}, but says {message.digest_after:016x}; nothing was "
                "written: fetch it again, or let the trainer publish an anchor"
            )
        if fresh is not None:
            self._shadow = fresh
        elif self._shadow is not None and changes is not None:
            await in_thread(self._shadow.advance, changes)
        assert self._shadow is not None
        self.state, self._digest = message.state, digest
        return Staged(
            schema=schema,
            base=None if fresh is not None else base,
            base_digest=None if fresh is not None else base_digest,
            state=message.state,
            snapshot=self._shadow.snapshot() if fresh is not None else None,
            changes=changes,
            messages=(message,),
            downloaded=message.nbytes,
            seconds={"download": download[0], "decode": time.perf_counter() - started - download[0]},
        )

    def _check_base(self, message: Message, known: Shadow | None) -> Shadow:
        if known is None or self.state is None or message.digest_before != self._digest:
            raise DivergedError(
                f"{_name(message)} starts from digest {message.digest_before or 0:016x}, but the state held here "
                f"({self.state or 'nothing'}) has digest {self._digest:016x}; the topic's history was changed by hand"
            )
        return known

    def _compare(self, parts: Iterable[bytes], shadow: Shadow) -> Changes:
        found: dict[int, SegmentChanges] = {}
        for index, bits in decode_anchor(parts, shadow.schema, pool=self._pool):
            changed = changes_in_segment(shadow.read(index), bits)
            if changed is not None:
                found[index] = changed
        return Changes(shadow.schema, found)

    def _build(self, parts: Iterable[bytes], schema: Schema) -> Shadow:
        shadow = self._empty(schema)
        for index, bits in decode_anchor(parts, schema, pool=self._pool):
            shadow.load(index, bits)
        return shadow

    def _empty(self, schema: Schema) -> Shadow:
        return Shadow.empty(schema, allocate=self._allocate)

    def forget(self) -> None:
        """Give the bits held back; when nothing is staged any more."""
        self._shadow, self.state = None, None

    async def _decode(self, message: Message, download: list[float], decode: Callable[[Iterator[bytes]], _T]) -> _T:
        """Run a decoder in a thread, over parts that are fetched ahead of it."""
        loop = asyncio.get_running_loop()
        parts = self._fetch_all(message.blobs)
        coming: asyncio.Task[bytes | None] | None = None
        stopped = False

        async def following() -> bytes | None:
            nonlocal coming
            if stopped:
                return None
            coming = asyncio.current_task()
            return await anext(parts, None)

        def taken() -> Iterator[bytes]:
            while not stopped:
                before = time.perf_counter()
                part = asyncio.run_coroutine_threadsafe(following(), loop).result()
                download[0] += time.perf_counter() - before
                if part is None:
                    return
                yield part

        def stop() -> None:
            # On the loop, where `following` begins: either it sees this, or it is called off.
            nonlocal stopped
            stopped = True
            if coming is not None:
                coming.cancel()

        # A thread of its own: it waits for downloads, which need the loop's common threads themselves.
        with ThreadPoolExecutor(1, thread_name_prefix="deltabus-stage") as thread:
            try:
                return await in_thread(decode, taken(), on_cancel=stop, executor=thread)
            finally:
                await parts.aclose()

    async def _fetch_all(self, blobs: Sequence[Blob]) -> AsyncGenerator[bytes, None]:
        """Yield blobs in order, a few of them on their way at once."""
        waiting = deque(blobs)
        coming: deque[asyncio.Task[bytes]] = deque()
        try:
            while waiting or coming:
                while waiting and len(coming) < _DOWNLOADS:
                    coming.append(asyncio.create_task(self._reader.fetch(waiting.popleft())))
                part = await coming[0]
                coming.popleft()
                yield part
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)


async def in_thread(
    function: Callable[..., _T],
    *arguments: object,
    on_cancel: Callable[[], object] = lambda: None,
    executor: Executor | None = None,
) -> _T:
    """Run a function in a thread; when cancelled, wait until it has ended, so that nothing goes on unseen.

    Args:
        function: What to run.
        arguments: Its arguments.
        on_cancel: Called first on cancellation, to bring the function to an end soon.
        executor: Where; None is the loop's own threads, which transports use too: for work that waits for no transport.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        on_cancel()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        _ = running.cancelled() or running.exception()  # nobody else asks, and asyncio would report it as forgotten
        raise


def _name(message: Message) -> str:
    return f"{message.kind} {message.position} of writer {message.writer} (version {message.version})"
