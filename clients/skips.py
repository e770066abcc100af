"""The publisher's further background: composes deltas that are durable into skip deltas, and publishes those that pay.

It runs beside the sender and behind it: what it does can only be late, or left undone. Nothing that a reader needs
depends on it, so that whatever fails here is logged, forgotten, and begun anew from the next delta.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import CodecError, DeltabusError, FencedError, OvertakenError, SignatureError
from deltabus.bus.message import Blob, Kind, Message, Stats
from deltabus.bus.skips import Ladder, SkipPolicy, Span, join
from deltabus.codecs.changes import Changes
from deltabus.codecs.container import encode_delta
from deltabus.codecs.digest import advanced
from deltabus.codecs.runs import Kept, Run
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Snapshot

from .payload import store_payload

__all__ = ["SkipSender"]

_log = logging.getLogger("deltabus.publisher")

_BEHIND = 4
"""Deltas that may wait here, each with its changes and a snapshot; where more come, skips begin anew."""

_PLAIN = 2
"""Up to this part of the memory allowed, a block is kept as it is, which saves the time to encode it."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A delta that became durable.

    Attributes:
        message: The delta.
        changes: What it holds.
        view: The state that it leads to.
        anchor: Payload bytes of the last anchor; None when there is none.
    """

    message: Message
    changes: Changes
    view: Snapshot
    anchor: int | None


class SkipSender:
    """Composes and publishes skip deltas, one job at a time; its methods are called on the event loop.

    Memory: at most the policy's share of the model for what waits to be joined, a few segments for what is being
    joined, and the changes of the last few deltas.

    Args:
        writer: The log's end, opened.
        policy: Which skips to publish.
        encoding: The encoding of every delta; None lets each segment take its smallest.
        schema: Returns the stored schema.
        fatal: Told of the error after which nothing can be published any more.
        overtaken: Called when the log was found to have gone on, maybe to a state that the sender does not know.
        done: Awaited whenever there is nothing left to do.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        policy: SkipPolicy,
        encoding: str | None,
        schema: Callable[[Schema], Awaitable[Blob]],
        fatal: Callable[[DeltabusError], None],
        overtaken: Callable[[], None],
        done: Callable[[], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._policy = policy
        self._encoding = encoding
        self._schema = schema
        self._fatal = fatal
        self._overtaken = overtaken
        self._done = done
        self._ladder = Ladder(policy.levels)
        # By the version that it starts from: a block that waits, and the digest there.
        self._kept: dict[int, tuple[Kept, int]] = {}
        self._jobs: deque[_Job] = deque()
        self._working: _Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._broken = False
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def on(self) -> bool:
        """Whether skips are published at all."""
        return self._policy.levels > 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._task is None

    def hush(self, busy: bool) -> None:
        """Say whether the sender is at work; composing begins while it is not, unless deltas pile up."""
        if busy:
            self._quiet.clear()
        else:
            self._quiet.set()

    def add(self, message: Message, changes: Changes, view: Snapshot, *, anchor: int | None) -> None:
        """Take a delta that is durable, and its snapshot, which is released here."""
        if len(self._jobs) >= _BEHIND:
            _log.info("composing skip deltas fell behind at version %d; they begin anew", message.version)
            self.restart()
        self._jobs.append(_Job(message, changes, view, anchor))
        if len(self._jobs) >= _BEHIND // 2:
            self._quiet.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work())

    def restart(self) -> None:
        """Begin anew: the next delta does not lead on from those before, or there is no time for them."""
        for job in self._jobs:
            job.view.release()
        self._jobs.clear()
        if self._working is not None:
            # Encoding ends at its next segment. An append that has begun may still come to be, and is right.
            self._working.view.release()
            self._broken = True
        else:
            self._forget()

    async def aclose(self) -> None:
        """Stop; what was not published is left out."""
        for job in self._jobs:
            job.view.release()
        self._jobs.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._forget()

    def _forget(self) -> None:
        self._ladder.clear()
        self._kept.clear()

    async def _work(self) -> None:
        try:
            while self._jobs:
                await self._quiet.wait()
                if not self._jobs:
                    break
                self._working = job = self._jobs.popleft()
                try:
                    await self._climb(job)
                except (FencedError, SignatureError) as error:
                    self._fatal(error)
                    self._broken = True
                except Exception as error:
                    if isinstance(error, OvertakenError):
                        self._overtaken()
                    if not self._broken:
                        _log.warning("no skip delta to version %d: %s", job.message.version, error)
                    self._broken = True
                finally:
                    job.view.release()
                    self._working = None
                    if self._broken:
                        self._forget()
                        self._broken = False
        finally:
            self._task = None
        await self._done()

    async def _climb(self, job: _Job) -> None:
        """Join the blocks that a delta completes, publish those that pay, and keep the last for later."""
        message = job.message
        assert message.digest_before is not None
        block = Span(message.base[message.writer], message.version, message.nbytes, 1, message.stats.changed)
        before = message.digest_before
        run = Run(job.view, job.changes)
        if block.steps != 1:
            # A version was left out, as after an append whose fate was not known at first.
            self._ladder.clear()
        else:
            while (left := self._ladder.enter(block)) is not None:
                kept, before = self._kept.pop(left.base)
                run, block = Run(job.view, run, kept), join(left, block)
                changed = await asyncio.to_thread(run.measure)
                if self._broken or not self._policy.fits(block, changed, anchor=job.anchor):
                    self._ladder.clear()
                    break
                if self._policy.pays(block, changed):
                    block = block.published(await self._publish(job, block, run, before), changed)
        await self._keep(block, run, before)

    async def _publish(self, job: _Job, block: Span, run: Run, before: int) -> int:
        """Publish a run as one message, and return its payload bytes."""
        after, stats = job.message.digest_after, job.message.stats
        if advanced(before, run.digest_delta) != after:
            raise CodecError(
                f"the changes composed from version {block.base} to {block.version} lead to another digest than the "
                "deltas themselves; this machine's memory cannot be trusted"
            )
        parts = encode_delta(run.changes, base=run.before, encoding=self._encoding)
        payload = await store_payload(self._writer, parts, name=f"{block.version:012d}-skip")
        message = await self._writer.commit(
            kind=Kind.DELTA,
            step=job.message.step,
            version=block.version,
            base={self._writer.writer: block.base},
            schema=await self._schema(run.schema),
            digest_before=before,
            digest_after=after,
            blobs=payload.blobs,
            stats=Stats(changed=run.count, total=stats.total, encodings=dict(payload.encodings), held=stats.held),
            metadata=job.message.metadata,
        )
        return message.nbytes

    async def _keep(self, block: Span, run: Run, before: int) -> None:
        """Keep a block's changes if it waits for the one behind it, as far as memory allows."""
        if block in self._ladder.waiting:
            room = int(self._policy.memory * run.schema.nbytes)
            self._kept[block.base] = await asyncio.to_thread(run.kept, plain=room // _PLAIN), before
            while self._kept and sum(kept.nbytes for kept, _ in self._kept.values()) > room:
                del self._kept[self._ladder.waiting[0].base]
                self._ladder.drop_longest()
        waiting = {span.base for span in self._ladder.waiting}
        for gone in self._kept.keys() - waiting:
            del self._kept[gone]
