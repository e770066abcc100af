"""The publisher's background: encodes drafts, stores them, and appends the messages that make them durable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import (
    ClosedError,
    CodecError,
    DeltabusError,
    FencedError,
    OvertakenError,
    PublishError,
    RetentionGapError,
    SignatureError,
)
from deltabus.bus.message import Blob, Kind, Message, Stats
from deltabus.bus.planner import Fingerprint, plan
from deltabus.bus.policy import AnchorPolicy, SinceAnchor
from deltabus.bus.skips import SkipPolicy
from deltabus.codecs.changes import Changes
from deltabus.codecs.container import Part, encode_anchor, encode_delta
from deltabus.codecs.digest import advanced, digest_delta
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.schema import Schema
from deltabus.codecs.scratch import Scratch
from deltabus.codecs.shadow import Snapshot
from deltabus.codecs.warming import warm_up

from .events import Event, EventKind, Listener
from .outbox import Draft, Outbox
from .payload import Payload, store_payload
from .publication import Published
from .skips import SkipSender

__all__ = ["Sender", "newest_state", "since_anchor"]

_log = logging.getLogger("deltabus.publisher")


class Sender:
    """Sends what waits in an outbox, one message at a time, and anchors beside them.

    Args:
        writer: The log's end, opened.
        outbox: Where drafts wait.
        policy: When to publish an anchor besides.
        skips: When to publish several deltas composed into one.
        encoding: The encoding of every delta; None lets each segment take its smallest.
        pool: Where encoding runs in parallel.
        tell: Told of what becomes durable, and of what fails.
        topic: Named in what is told.

    Attributes:
        failure: The error that stopped the last draft or anchor, until somebody takes it.
        fatal: The error after which nothing can be published any more.
    """

    def __init__(
        self,
        writer: LogWriter,
        outbox: Outbox,
        *,
        policy: AnchorPolicy,
        skips: SkipPolicy,
        encoding: str | None,
        pool: ThreadPoolExecutor,
        tell: Listener,
        topic: str,
    ) -> None:
        self._tell_event, self._topic = tell, topic
        self.failure: BaseException | None = None
        self.fatal: DeltabusError | None = None
        self._writer = writer
        self._outbox = outbox
        self._policy = policy
        self._encoding = encoding
        self._needs_base = encoding is None or ENCODINGS[encoding].needs_base
        self._pool = pool
        self._durable = newest_state(writer.history)
        self._since = since_anchor(writer.history)
        self._schemas: dict[bytes, Blob] = {}
        self._anchoring: asyncio.Task[None] | None = None
        self._anchor_owed = False
        self._arrived = asyncio.Event()
        self._progress = asyncio.Condition()
        self._busy = False
        self._stalled = False
        self._overtaken = False
        self._skips = SkipSender(
            writer,
            policy=skips,
            encoding=encoding,
            schema=self._schema,
            fatal=self._end,
            overtaken=self._note_overtaken,
            done=self._tell,
        )
        outbox.wake(asyncio.get_running_loop(), self._arrived)

    @property
    def durable(self) -> Message | None:
        """The message of the newest durable state."""
        return self._durable

    def readable(self, message: Message) -> bool:
        """Return whether a reader that holds nothing can reach the state of a message of this log."""
        try:
            plan(self._writer.history, have=None, target=message.state)
        except RetentionGapError:
            return False
        return True

    @property
    def idle(self) -> bool:
        """Whether everything captured is durable, or has failed."""
        sending = self._busy or not (self._outbox.empty or self._stalled)
        return not sending and self._anchoring is None

    async def run(self) -> None:
        """Send drafts as they arrive, until cancelled."""
        while True:
            if self._outbox.empty or self._stalled:
                await self._arrived.wait()
                self._arrived.clear()
                self._stalled = False
                continue
            self._busy = True
            self._skips.hush(True)
            await self._send_next()
            self._busy = False
            self._skips.hush(False)
            await self._tell()

    async def drain(self, *, skips: bool) -> None:
        """Wait until everything captured so far is durable, or has failed; what failed before is tried once more.

        Args:
            skips: Whether to wait for skip deltas too, so that nothing is done in the background any more.
        """
        if self._stalled:
            self._stalled = False
            self._arrived.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self.idle and (self._skips.idle or not skips))

    async def aclose(self) -> None:
        """Stop what is on its way beside the deltas, if anything, and tell whoever still waits that it was in vain."""
        await self._skips.aclose()
        if self._anchoring is not None:
            self._anchoring.cancel()
            await asyncio.gather(self._anchoring, return_exceptions=True)
        self.give_up()

    def give_up(self) -> None:
        """Tell whoever still waits that it was in vain; when nothing runs any more."""
        taken = self._outbox.take(snapshot=False)
        if taken is not None:
            left, view, _ = taken
            if view is not None:
                view.release()
            self._fail(left, ClosedError(f"the publisher was closed before step {left.step} was durable"))

    async def _tell(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    async def _send_next(self) -> None:
        due = self._anchor_due()
        taken = self._outbox.take(snapshot=due or self._needs_base or self._skips.on)
        if taken is None:
            return
        draft, view, schema = taken
        if self.fatal is not None:
            if view is not None:
                view.release()
            self._fail(draft, self.fatal)
            return
        if self._overtaken and self._fell_behind():
            # A delta from the old base would leave out the version that was found, and whoever follows it.
            if view is not None:
                view.release()
            self._outbox.put_back(draft, whole=True)
            return
        try:
            await self._send(draft, view, schema, anchor=due or draft.anchor)
        except asyncio.CancelledError:
            self._outbox.put_back(draft)
            raise
        except (FencedError, SignatureError) as error:
            self._end(error)
            self._fail(draft, error)
        except Exception as error:
            # Or what goes on beside was overtaken meanwhile, so that this draft's version is no longer the next.
            if self._overtaken or isinstance(error, OvertakenError):
                _log.warning("%s", error)
                self._outbox.put_back(draft, whole=self._fell_behind())
                return
            self._fail(draft, error)
            self._outbox.put_back(replace(draft, waiting=()))
            # What was published meanwhile carries these changes too, and deserves an attempt of its own.
            self._stalled = not self._outbox.awaited

    def _note_overtaken(self) -> None:
        self._overtaken = True

    def _fell_behind(self) -> bool:
        """Take the newest state of the log as the durable one, and return whether it is another than before.

        What was found may lead to the very state that is the base here: a skip delta or an anchor of it.
        """
        self._overtaken = False
        before, self._durable = self._durable, newest_state(self._writer.history)
        return not _same_state(before, self._durable)

    def _anchor_due(self) -> bool:
        if self._anchoring is not None:
            return False
        try:
            return self._anchor_owed or self._policy.due(self._since)
        except Exception as error:  # a user's own policy: steps go on without an anchor
            self.failure = error
            _log.error("the anchor policy %r failed: %s", self._policy, error)
            return False

    def _end(self, error: DeltabusError) -> None:
        self.fatal = self.failure = error

    def _fail(self, draft: Draft, error: Exception) -> None:
        self.failure = error
        _log.error("step %d of writer %s was not published: %s", draft.step, self._writer.writer, error)
        self._tell_event(
            Event(
                kind=EventKind.FAILED,
                topic=self._topic,
                writer=self._writer.writer,
                step=draft.step,
                detail=str(error),
                metadata=draft.metadata,
            )
        )
        told = error
        if not isinstance(error, FencedError | SignatureError | ClosedError):
            told = PublishError(f"step {draft.step} could not be stored; its changes travel with the next one: {error}")
            told.__cause__ = error
        for waiting in draft.waiting:
            waiting.publication.fail(told)

    async def _send(self, draft: Draft, view: Snapshot | None, schema: Schema, *, anchor: bool) -> None:
        """Make a draft durable; start an anchor beside it where one is due."""
        anchor = anchor and self._anchoring is None
        base = self._durable
        try:
            if draft.changes is None or base is None:
                if view is None:
                    raise CodecError("a whole state is to be published, but no snapshot of it was taken")
                message, payload = await self._commit_anchor(draft, view, schema, version=self._writer.next_version)
                self._anchor_owed = False
                self._skips.restart()
            else:
                message, payload = await self._commit_delta(draft, base, view, keep=anchor or self._skips.on)
                if view is not None and anchor:
                    beside = self._anchor_beside(draft, view.again(), schema, message)
                    self._anchoring, self._anchor_owed = asyncio.create_task(beside), False
                elif draft.anchor:
                    self._anchor_owed = True
                if view is not None and self._skips.on:
                    self._skips.add(message, draft.changes, view, anchor=self._since.anchor)
                    view = None
        finally:
            if view is not None:
                view.release()
        self._durable = message
        now = time.monotonic()
        steps = tuple(waiting.publication.step for waiting in draft.waiting)
        seconds = {"encode": payload.encode, "upload": payload.upload}
        for waiting in draft.waiting:
            seconds = {
                "blocked": waiting.blocked,
                "encode": payload.encode,
                "upload": payload.upload,
                "total": now - waiting.called,
            }
            waiting.publication.succeed(Published(message, steps, seconds))
        self._note_published(message, seconds)

    def _note_published(self, message: Message, seconds: Mapping[str, float]) -> None:
        self._tell_event(
            Event(
                kind=EventKind.PUBLISHED,
                topic=self._topic,
                writer=message.writer,
                step=message.step,
                version=message.version,
                nbytes=message.nbytes,
                changed=message.stats.changed,
                total=message.stats.total,
                whole=message.kind is Kind.ANCHOR,
                seconds=seconds,
                metadata=message.metadata,
            )
        )

    async def _commit_delta(
        self, draft: Draft, base: Message, view: Snapshot | None, *, keep: bool
    ) -> tuple[Message, Payload]:
        assert draft.changes is not None
        schema = draft.changes.schema
        version = self._writer.next_version
        payload = await store_payload(
            self._writer, self._encoded(draft.changes, view, keep=keep), name=f"{version:012d}-delta"
        )
        change = await asyncio.to_thread(digest_delta, draft.changes)
        message = await self._writer.commit(
            kind=Kind.DELTA,
            step=draft.step,
            version=version,
            base={**draft.after, self._writer.writer: base.version},
            schema=await self._schema(schema),
            digest_before=base.digest_after,
            digest_after=advanced(base.digest_after, change),
            blobs=payload.blobs,
            stats=Stats(
                changed=draft.changes.count,
                total=schema.total,
                encodings=dict(payload.encodings),
                held=draft.held,
            ),
            metadata=draft.metadata,
        )
        self._since = self._since.after_delta(message.nbytes)
        return message, payload

    def _encoded(self, changes: Changes, view: Snapshot | None, *, keep: bool) -> Iterator[Part]:
        """Yield the parts of a delta; give the view of the state that it leads to back behind the last, or keep it."""
        if view is None:
            yield from encode_delta(changes, encoding=self._encoding, pool=self._pool)
            return
        scratch = Scratch()
        try:
            yield from encode_delta(
                changes,
                base=lambda index: view.read_before(index, changes.segments[index], scratch),
                encoding=self._encoding,
                pool=self._pool,
            )
        finally:
            # Not only after the upload, because the view holds on to whatever changes meanwhile.
            if not keep:
                view.release()

    async def _commit_anchor(
        self, draft: Draft, view: Snapshot, schema: Schema, *, version: int, expected: int | None = None
    ) -> tuple[Message, Payload]:
        digest = await asyncio.to_thread(view.digest, self._pool)
        if expected is not None and digest != expected:
            raise CodecError(
                f"the publisher's copy of version {version} has digest {digest:016x}, its deltas lead to "
                f"{expected:016x}; this machine's memory cannot be trusted: restart the trainer elsewhere"
            )
        # Beside the upload. What fails here will fail again, and be told, where it is needed.
        self._pool.submit(warm_up, schema)
        read = partial(view.read, scratch=Scratch())
        payload = await store_payload(
            self._writer, encode_anchor(schema, read, pool=self._pool), name=f"{version:012d}-anchor"
        )
        message = await self._writer.commit(
            kind=Kind.ANCHOR,
            step=draft.step,
            version=version,
            base=draft.after,
            schema=await self._schema(schema),
            digest_before=None,
            digest_after=digest,
            blobs=payload.blobs,
            stats=Stats(changed=schema.total, total=schema.total, encodings=dict(payload.encodings), held=draft.held),
            metadata=draft.metadata,
        )
        self._since = self._since.after_anchor(message.nbytes)
        return message, payload

    async def _anchor_beside(self, draft: Draft, view: Snapshot, schema: Schema, delta: Message) -> None:
        """Publish the state of a delta as an anchor too, while later deltas go on."""
        try:
            message, payload = await self._commit_anchor(
                draft, view, schema, version=delta.version, expected=delta.digest_after
            )
            self._note_published(message, {"encode": payload.encode, "upload": payload.upload})
        except (FencedError, SignatureError) as error:
            self._end(error)
        except Exception as error:
            if isinstance(error, OvertakenError):
                self._note_overtaken()
            self.failure = error
            self._anchor_owed = True
            _log.error("the anchor of version %d was not published: %s", delta.version, error)
        finally:
            view.release()
            self._anchoring = None
            await self._tell()

    async def _schema(self, schema: Schema) -> Blob:
        if schema.checksum not in self._schemas:
            self._schemas[schema.checksum] = await self._writer.store_schema(schema.encode())
        return self._schemas[schema.checksum]


def newest_state(history: Iterable[Message]) -> Message | None:
    """Return the message that leads to the newest version of a log; None for an empty log."""
    return max(history, key=lambda message: (message.version, message.position), default=None)


def _same_state(one: Message | None, other: Message | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.version == other.version
        and Fingerprint.after(one) == Fingerprint.after(other)
    )


def since_anchor(history: list[Message]) -> SinceAnchor:
    """Return what was published since the last anchor of a log."""
    since, newest = SinceAnchor(), 0
    for message in history:
        if message.kind is Kind.ANCHOR:
            since = since.after_anchor(message.nbytes)
        elif message.version > newest:  # and no skip delta
            since = since.after_delta(message.nbytes)
        newest = max(newest, message.version)
    return since
