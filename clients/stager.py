"""The subscriber's copy of one writer's bits: turns its messages into verified steps, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import CorruptPayloadError, DivergedError
from deltabus.bus.message import Blob, Kind, Message
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import decode_anchor, decode_delta
from deltabus.codecs.digest import advanced, digest_delta
from deltabus.codecs.held import changes_from
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Allocate, Shadow, in_memory
from deltabus.codecs.warming import warm_up

from .fetching import Fetcher, in_thread
from .staged import Staged

__all__ = ["HeldState", "Stager"]


@dataclass(frozen=True, slots=True)
class HeldState:
    """Bits that are known to be a state, to be gone on from elsewhere without a copy.

    Attributes:
        shadow: The bits.
        message: What led to that state; it tells writer, digest and schema.
    """

    shadow: Shadow
    message: Message


class Stager:
    """Holds the bits of the last staged state of a writer, and stages messages that lead on from it.

    Args:
        reader: Where blobs are fetched.
        pool: Where decoding runs in parallel.
        allocate: Makes the memory of the shadow.

    Attributes:
        version: The version of the bits held; 0 for nothing.
    """

    def __init__(self, reader: TopicReader, pool: ThreadPoolExecutor, *, allocate: Allocate = in_memory) -> None:
        self.version = 0
        self._reader = reader
        self._fetcher = Fetcher(reader)
        self._pool = pool
        self._allocate = allocate
        self._shadow: Shadow | None = None
        self._digest = 0
        self._schemas: dict[bytes, Schema] = {}

    @property
    def shadow(self) -> Shadow | None:
        """The bits held."""
        return self._shadow

    @property
    def schema_held(self) -> Schema:
        """The schema of the bits held; only when there are any."""
        assert self._shadow is not None
        return self._shadow.schema

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
        """Start from a model that holds one of the writer's states; return its target, None if it holds none of them.

        Args:
            bind: Finds the model's tensors for a schema.
            messages: The writer's messages.

        Raises:
            SchemaMismatchError: If the model cannot hold the newest message's tensors.
            TransportError: If the schema cannot be fetched.
        """
        newest = max(messages, key=lambda message: (message.epoch, message.position))
        schema = await self.schema(newest.schema)
        target = await in_thread(bind, schema)
        if not target.complete:
            return None  # of a part of the state there is no digest
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
        self.version = max(message.version for message in known)
        return target

    async def stage(self, message: Message) -> Staged:
        """Fetch, decode and verify a message that leads on from the state held, and hold the state it leads to.

        Where that is the very state held, by its digest, nothing is fetched.

        Raises:
            CorruptPayloadError: If a payload is damaged, or does not lead to the digest that its message says.
            DivergedError: If the message does not start from the state held.
            TransportError: If a blob cannot be fetched.
        """
        started = time.perf_counter()
        schema = await self.schema(message.schema)
        download = [0.0]
        known = self._shadow if self._shadow is not None and self._shadow.schema == schema else None
        fresh: Shadow | None = None
        changes: Changes | None = None
        same = known is not None and message.digest_after == self._digest
        if same:
            pass
        elif message.kind is Kind.DELTA:
            shadow = self._check_base(message, known)
            changes = await self._fetcher.decode(
                message.blobs, download, lambda parts: decode_delta(parts, schema, shadow.read, pool=self._pool)
            )
        elif known is not None:
            changes = await self._fetcher.decode(message.blobs, download, lambda parts: self._compare(parts, known))
        else:
            fresh = await self._fetcher.decode(message.blobs, download, lambda parts: self._build(parts, schema))

        base, base_digest = self.version, self._digest
        if fresh is not None:
            digest = await in_thread(fresh.digest, self._pool)
        elif changes is None:
            digest = self._digest
        else:
            digest = advanced(self._digest, await in_thread(digest_delta, changes))
        if digest != message.digest_after:
            raise CorruptPayloadError(
                f"{_name(message)} leads to digest {digest:016x}, but says {message.digest_after:016x}; nothing was "
                "written: fetch it again, or let the trainer publish an anchor"
            )
        if fresh is not None:
            self._shadow = fresh
        elif self._shadow is not None and changes is not None:
            await in_thread(partial(self._shadow.advance, pool=self._pool), changes)
        assert self._shadow is not None
        self.version, self._digest = message.version, digest
        return Staged(
            writer=message.writer,
            schema=schema,
            base=None if fresh is not None else base,
            base_digest=None if fresh is not None else base_digest,
            version=message.version,
            digest=digest,
            snapshot=self._shadow.snapshot(),
            changes=changes,
            messages=(message,),
            downloaded=0 if same else message.nbytes,
            seconds={"download": download[0], "decode": time.perf_counter() - started - download[0]},
        )

    def hold(self, shadow: Shadow, *, digest: int, version: int) -> None:
        """Start from bits that are known to be those of a version; they are advanced in place."""
        self._shadow, self._digest, self.version = shadow, digest, version

    def still(self, writer: str, *, whole: bool) -> Staged:
        """Return the way from the state held to itself, or from nothing to it."""
        assert self._shadow is not None
        return Staged(
            writer=writer,
            schema=self._shadow.schema,
            base=None if whole else self.version,
            base_digest=None if whole else self._digest,
            version=self.version,
            digest=self._digest,
            snapshot=self._shadow.snapshot(),
        )

    def _check_base(self, message: Message, known: Shadow | None) -> Shadow:
        if known is None or not self.version or message.digest_before != self._digest:
            raise DivergedError(
                f"{_name(message)} starts from digest {message.digest_before or 0:016x}, but the state held here "
                f"(version {self.version or 'none'}) has digest {self._digest:016x}; the topic's history was changed "
                "by hand"
            )
        return known

    def _compare(self, parts: Iterable[bytes], shadow: Shadow) -> Changes:
        found: dict[int, SegmentChanges] = {}
        for index, bits in decode_anchor(parts, shadow.schema, pool=self._pool):
            changed = changes_from(shadow.read(index), bits)
            if changed is not None:
                found[index] = changed
        return Changes(shadow.schema, found)

    def _build(self, parts: Iterable[bytes], schema: Schema) -> Shadow:
        shadow = self._empty(schema)
        # Beside the download. What fails here will fail again, and be told, where it is needed.
        self._pool.submit(warm_up, schema)
        for index, bits in decode_anchor(parts, schema, into=shadow.room, pool=self._pool):
            if bits is not shadow.read(index):
                shadow.load(index, bits)
        return shadow

    def _empty(self, schema: Schema) -> Shadow:
        return Shadow.empty(schema, allocate=self._allocate)

    def forget(self) -> None:
        """Give the bits held back; when nothing is staged any more."""
        self._shadow, self.version = None, 0


def _name(message: Message) -> str:
    return f"{message.kind} {message.position} of writer {message.writer} (version {message.version})"
