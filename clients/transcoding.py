"""Transcoding: a topic that is published again with payloads of another encoding, for engines that keep no shadow.

What comes out is the same history: the same writer, versions, steps, digests, schemas and metadata. Only payloads,
positions, epochs and signatures are others, and versions may be left out. So a state can be held against the source's,
and a process that takes over finds by itself where to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from deltabus.bus.core import LogWriter, TopicReader
from deltabus.bus.errors import CodecError, ConflictError, RetentionGapError, UsageError
from deltabus.bus.message import Blob, Kind, Message, Stats, check_step_and_metadata, check_writer_name
from deltabus.bus.planner import plan
from deltabus.bus.policy import AnchorPolicy, SinceAnchor, parse_policy
from deltabus.bus.retention import Retention, parse_retention
from deltabus.bus.signing import KeyRing, SigningKey
from deltabus.bus.transport import Transport
from deltabus.codecs.changes import Changes
from deltabus.codecs.container import Part, encode_anchor, encode_delta
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.shadow import Allocate, Snapshot
from deltabus.transports import open_transport

from .events import Event, EventKind, Events, Listener
from .keys import Key, signing_key, verify_keys
from .lanes import UNAVAILABLE
from .mapped import allocator
from .payload import Payload, store_payload
from .pruning import BackgroundPruner
from .sender import newest_state, since_anchor
from .staged import Staged
from .stager import HeldState, Stager
from .subscriber import Subscriber
from .workers import usable_cores

__all__ = ["Transcoded", "transcode"]

_log = logging.getLogger("deltabus.transcoding")
_KEPT_ANCHORS = 2
_MOST = 0.5
"""The share of changed elements from which on a whole state is published in place of a delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcoded:
    """A version that is durable in the target.

    Attributes:
        writer: Whose it is.
        step: The training step.
        version: The version, in the source as in the target.
        kind: `anchor` or `delta`, of the message in the target; `held` for the one that it has already, from which it
            goes on.
        received: Payload bytes that were fetched from the source for it.
        sent: Payload bytes of the message in the target.
        changed: Elements that changed.
        total: Elements of the state.
        seconds: Duration of each stage: `download`, `decode`, `encode`, `upload`; and `since`, from when the source's
            message was made, by this machine's clock.
    """

    writer: str
    step: int
    version: int
    kind: str
    received: int
    sent: int
    changed: int
    total: int
    seconds: Mapping[str, float]


async def transcode(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    writer: str | None = None,
    encoding: str = "overwrite",
    anchor: str | int | AnchorPolicy = "adaptive",
    retention: str | int | Retention | None = _KEPT_ANCHORS,
    keys: Key | Sequence[Key] | None = None,
    key: Key | None = None,
    accepted: Key | Sequence[Key] | None = None,
    shadow: str | os.PathLike[str] | None = None,
    on_event: Listener | Sequence[Listener] | None = None,
    tell: Callable[[Transcoded], object] = lambda done: None,
    workers: int | None = None,
) -> None:
    """Follow a topic and publish it again in another encoding, until cancelled.

    Every state has the digest that it has in the source, and is checked against it before it is published. A process
    that was killed goes on from what the target holds: it is rebuilt from there, and deltas go on. What piled up
    meanwhile is published as one.

    Args:
        source: The topic that is followed: of one writer.
        target: The topic that is written, by nobody else.
        writer: Whose weights to follow, where the source has several writers that are independent of each other.
        encoding: The encoding of every delta.
        anchor: When to publish whole states besides, as `Publisher` takes it.
        retention: What of the target to keep, as `Publisher` takes it; None removes nothing.
        keys: Whose messages are believed in the source, as `Subscriber` takes them.
        key: Signs the target, as `Publisher` takes it; the source's signatures are not of these messages.
        accepted: Whose messages are accepted in the target besides; after a rotation, the old key.
        shadow: Where the copy of the weights lies, as `Subscriber` takes it.
        on_event: Told of what was received and published.
        tell: Called with each version that is durable in the target; first with the one that is gone on from.
        workers: Threads that decode and encode; None is the number of usable cores, at most 8.

    Raises:
        UsageError: If an argument is wrong, the source's writers publish each step together, or it has several.
        ConflictError: If the target holds another history than the source.
        FencedError: If another process writes to the target.
        SignatureError: If a message does not show that it belongs where it stands.
        TransportError: If a backend fails for good.
        DeltabusError: As `Subscriber` raises it.
    """
    if encoding not in ENCODINGS:
        raise UsageError(f"encoding={encoding!r} is not one of {', '.join(ENCODINGS)}")
    events = Events(on_event)
    signer = signing_key(key)
    ring = None if accepted is None else verify_keys(accepted)
    allocate = allocator(shadow, of_model=False)
    only = None if writer is None else [check_writer_name(writer)]
    workers = workers or usable_cores()
    with ThreadPoolExecutor(workers, thread_name_prefix="deltabus-transcode") as pool:
        async with contextlib.AsyncExitStack() as stack:
            transport = await stack.enter_async_context(open_transport(target))
            made = _Target(
                transport,
                pool,
                encoding=encoding,
                policy=parse_policy(anchor),
                retention=None if retention is None else parse_retention(retention),
                key=signer,
                keys=ring,
            )
            stack.push_async_callback(made.close)
            held = await made.rebuild(allocate)
            if held is not None:
                tell(_held(held.message))
            following = _Source(source, writers=only, keys=keys, shadow=shadow, on_event=on_event, workers=workers)
            if held is not None:
                following.start_from(held)
            del held  # or it would keep these bits beside the newer ones
            subscriber = await stack.enter_async_context(following)
            async for update in subscriber:
                part = _only(update.parts, subscriber.url)
                message, done = await made.publish(part, subscriber)
                update.mark_applied()
                events.tell(_event(done, message, transport.url))
                tell(done)


class _Source(Subscriber):
    """Gives the bytes of schemas too."""

    def start_from(self, held: HeldState) -> None:
        """Go on from bits that were rebuilt from the target, and take them over without a copy."""
        self._intake.start_from(held)

    async def schema_bytes(self, message: Message) -> bytes:
        """Return the very bytes of a message's schema: another implementation may write them otherwise."""
        return await self._reader.schema(message.schema)


class _Target:
    """The log that is written.

    Args:
        transport: Its topic, opened.
        pool: Where decoding and encoding run in parallel.
        encoding: The encoding of every delta.
        policy: When to publish a whole state besides.
        retention: What to keep; None removes nothing.
        key: Signs messages; None signs none.
        keys: Whose messages are accepted besides.
    """

    def __init__(
        self,
        transport: Transport,
        pool: ThreadPoolExecutor,
        *,
        encoding: str,
        policy: AnchorPolicy,
        retention: Retention | None,
        key: SigningKey | None,
        keys: KeyRing | None,
    ) -> None:
        self._transport, self._pool = transport, pool
        self._encoding, self._policy, self._retention = encoding, policy, retention
        self._make_log = partial(LogWriter, transport, key=key, keys=keys)
        self._log: LogWriter | None = None
        self._durable: Message | None = None
        self._since = SinceAnchor()
        self._schemas: dict[bytes, Blob] = {}
        self._beside: asyncio.Task[None] | None = None
        self._pruning: asyncio.Task[None] | None = None

    async def rebuild(self, allocate: Allocate) -> HeldState | None:
        """Return the state that the target's newest version holds; None where it has none that can be read.

        Raises:
            UsageError: If it has several logs.
        """
        logs = await self._transport.logs()
        if not logs:
            return None
        if len(logs) > 1:
            raise UsageError(
                f"{self._transport.url} has the logs {', '.join(sorted(logs)[:8])}; what is transcoded goes into a "
                "topic of its own"
            )
        log = await self._open(logs[0])
        newest = self._durable
        if newest is None:
            return None
        reader = TopicReader(self._transport, keys=log.keys)
        stager = Stager(reader, self._pool, allocate=allocate)
        try:
            for message in plan(log.history, have=None, target=newest.state).messages:
                (await stager.stage(message)).release()
        except (RetentionGapError, CodecError, *UNAVAILABLE) as error:
            _log.warning("%s cannot be gone on from, and the whole state is fetched: %s", self._transport.url, error)
            return None
        return None if stager.shadow is None else HeldState(stager.shadow, newest)

    async def publish(self, part: Staged, source: _Source) -> tuple[Message, Transcoded]:
        """Make a state durable in the target; an anchor beside it where one is due.

        Args:
            part: The way to it, with its bits.
            source: Where it came from.

        Raises:
            ConflictError: If the target holds another history.
        """
        log = self._log or await self._open(part.writer)
        if self._beside is not None and self._beside.done():
            self._beside.result()
            self._beside = None
        before = self._durable
        self._check_history(log, part, source.url)
        if part.schema.checksum not in self._schemas:
            data = await source.schema_bytes(part.messages[-1])
            self._schemas[part.schema.checksum] = await log.store_schema(data)
        if before is not None and _leads_on(before, part):
            message, payload = await self._delta(log, before, part)
            if self._beside is None and self._policy.due(self._since):
                self._beside = asyncio.create_task(self._anchor_beside(log, part, _bits(part).again()))
        else:
            message, payload = await self._anchor(log, part, _bits(part))
        self._durable = message
        since = max(0.0, time.time() - part.messages[-1].created)
        seconds = {**part.seconds, "encode": payload.encode, "upload": payload.upload, "since": since}
        return message, Transcoded(
            writer=message.writer,
            step=message.step,
            version=message.version,
            kind=str(message.kind),
            received=part.downloaded,
            sent=message.nbytes,
            changed=message.stats.changed,
            total=message.stats.total,
            seconds=seconds,
        )

    async def close(self) -> None:
        """End what goes on beside."""
        tasks = [task for task in (self._beside, self._pruning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, writer: str) -> LogWriter:
        log = self._make_log(writer)
        await log.open()
        self._log, self._durable, self._since = log, newest_state(log.history), since_anchor(log.history)
        if self._retention is not None:
            self._pruning = asyncio.create_task(BackgroundPruner(self._transport, log, self._retention).run())
        return log

    def _check_history(self, log: LogWriter, part: Staged, url: str) -> None:
        """Check that a state does not contradict what the target holds."""
        before = self._durable
        behind = before is not None and part.version <= before.version
        same = before is not None and (part.version, part.digest) == (before.version, before.digest_after)
        if part.writer == log.writer and (same or not behind):
            return
        held = f"version {before.version}" if before is not None else "a log"
        raise ConflictError(
            f"{self._transport.url} holds {held} of writer {log.writer}, which is not in the history of {url}, now "
            f"at version {part.version} of writer {part.writer}; remove that topic, or name another target",
            topic=self._transport.url,
            writer=part.writer,
        )

    async def _delta(self, log: LogWriter, before: Message, part: Staged) -> tuple[Message, Payload]:
        parts = iter(()) if part.changes is None else self._encoded(part.changes, part)
        payload = await store_payload(log, parts, name=f"{part.version:012d}-delta")
        message = await log.commit(
            kind=Kind.DELTA,
            base={part.writer: before.version},
            digest_before=before.digest_after,
            blobs=payload.blobs,
            stats=_stats(part, 0 if part.changes is None else part.changes.count, payload),
            **self._said(part),
        )
        self._since = self._since.after_delta(message.nbytes)
        return message, payload

    def _encoded(self, changes: Changes, part: Staged) -> Iterator[Part]:
        base = part.read_before if ENCODINGS[self._encoding].needs_base else None
        return encode_delta(changes, base=base, encoding=self._encoding, pool=self._pool)

    async def _anchor(self, log: LogWriter, part: Staged, view: Snapshot) -> tuple[Message, Payload]:
        whole = encode_anchor(part.schema, view.read, pool=self._pool)
        payload = await store_payload(log, whole, name=f"{part.version:012d}-anchor")
        message = await log.commit(
            kind=Kind.ANCHOR,
            base={},
            digest_before=None,
            blobs=payload.blobs,
            stats=_stats(part, part.schema.total, payload),
            **self._said(part),
        )
        self._since = self._since.after_anchor(message.nbytes)
        return message, payload

    async def _anchor_beside(self, log: LogWriter, part: Staged, view: Snapshot) -> None:
        """Publish a state as an anchor too, while deltas go on."""
        try:
            await self._anchor(log, part, view)
        finally:
            view.release()

    def _said(self, part: Staged) -> _Said:
        """Return what a message says as the source's does."""
        return {
            "step": part.messages[-1].step,
            "version": part.version,
            "schema": self._schemas[part.schema.checksum],
            "digest_after": part.digest,
            "metadata": _metadata(part.messages),
        }


class _Said(TypedDict):
    step: int
    version: int
    schema: Blob
    digest_after: int
    metadata: Mapping[str, str]


def _only(parts: Sequence[Staged], url: str) -> Staged:
    """Return the part of the only writer.

    Raises:
        UsageError: If there are several, or it is one of a group.
    """
    members = {name for part in parts for message in part.messages for name in message.members}
    if any(len(message.members) > 1 for part in parts for message in part.messages):
        raise UsageError(
            f"{url} has a group of writers that publish each step together ({', '.join(sorted(members)[:8])}); only "
            "topics of a writer that is alone are transcoded: let engines follow it as it is"
        )
    if len(parts) > 1:
        raise UsageError(
            f"{url} has the writers {', '.join(sorted(members)[:8])}, which are independent of each other; one is "
            "transcoded: name it (`deltabus transcode --writer`)"
        )
    return parts[0]


def _leads_on(before: Message, part: Staged) -> bool:
    """Return whether a delta leads on from what is durable, and is worth it."""
    if part.base is None or part.base_digest != before.digest_after or part.version <= before.version:
        return False
    schemas = {part.schema.checksum, before.schema.checksum}
    if part.changes is not None:
        schemas.add(part.changes.schema.checksum)
    few = part.changes is None or part.changes.count <= _MOST * part.schema.total
    return len(schemas) == 1 and few


def _bits(part: Staged) -> Snapshot:
    assert part.snapshot is not None  # it goes when the next update is asked for
    return part.snapshot


def _stats(part: Staged, changed: int, payload: Payload) -> Stats:
    held = part.messages[-1].stats.held
    return Stats(changed=changed, total=part.schema.total, encodings=dict(payload.encodings), held=held)


def _metadata(messages: Sequence[Message]) -> Mapping[str, str]:
    """Return the users' pairs of messages that become one; the newer value of a key counts."""
    newest = messages[-1]
    together = {name: value for message in messages for name, value in message.metadata.items()}
    try:
        check_step_and_metadata(newest.step, together)
    except UsageError:  # together they are too much for one message
        return newest.metadata
    return together


def _held(message: Message) -> Transcoded:
    return Transcoded(
        writer=message.writer,
        step=message.step,
        version=message.version,
        kind="held",
        received=0,
        sent=0,
        changed=0,
        total=message.stats.total,
        seconds={},
    )


def _event(done: Transcoded, message: Message, url: str) -> Event:
    return Event(
        kind=EventKind.PUBLISHED,
        topic=url,
        writer=done.writer,
        step=done.step,
        version=done.version,
        nbytes=done.sent,
        changed=done.changed,
        total=done.total,
        whole=message.kind is Kind.ANCHOR,
        seconds=done.seconds,
        metadata=message.metadata,
    )
