"""The publisher's two hands: the training thread captures what changed, the sender takes it away.

Between them lie the shadow (the bits as last captured) and at most one waiting draft. When the sender is busy, later
captures are folded into the waiting draft, so that memory stays bounded by one state however slow the backend is. What
could not be stored is put back and folded into what waits: a draft always leads from the last durable state.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from deltabus.bus.errors import UsageError, WaitTimeoutError
from deltabus.bus.message import check_step_and_metadata
from deltabus.bus.version import VersionVector
from deltabus.codecs.changes import Changes, compose, parts_of
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.holdback import Limits, Split, estimate_bytes, split
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Allocate, Shadow, Snapshot, capture, in_memory
from deltabus.codecs.state import State

from .publication import Publication
from .unmodified import Marks

__all__ = ["Draft", "Outbox", "Waiting"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A publication that waits to be durable.

    Attributes:
        publication: The user's handle.
        called: When `publish` was called, by the monotonic clock, in seconds.
        blocked: How long `publish` took, in seconds.
    """

    publication: Publication
    called: float
    blocked: float


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next message has to carry.

    Attributes:
        step: The newest step in it.
        changes: From the last durable state to that step; None when only the whole state will do.
        anchor: Whether an anchor is asked for besides.
        metadata: The user's key-value pairs.
        waiting: The publications in it, oldest first.
        held: Elements that were held back at that step.
        size: About how many bytes the changes take; 0 where no budget asks.
        after: What the trainer had applied of other writers.
    """

    step: int
    changes: Changes | None
    anchor: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()
    held: int = 0
    size: int = 0
    after: VersionVector = field(default_factory=VersionVector)

    def followed_by(self, later: Draft) -> Draft:
        """Return one draft that does what this one and the later one do."""
        whole = self.changes is None or later.changes is None
        metadata = {**self.metadata, **later.metadata}
        try:
            check_step_and_metadata(later.step, metadata)
        except UsageError:  # together they are too much for one message
            metadata = dict(later.metadata)
        return Draft(
            step=later.step,
            changes=None if whole else compose(self.changes, later.changes),  # type: ignore[arg-type]
            anchor=self.anchor or later.anchor,
            metadata=metadata,
            waiting=self.waiting + later.waiting,
            held=later.held,
            size=self.size + later.size,
            after=self.after.merge(later.after),
        )


class Outbox:
    """The shadow, and the draft that waits for the sender.

    Its methods may be called from any thread.

    Args:
        pool: Where capturing runs in parallel.
        limits: What may be held back.
        encoding: The one that deltas will have; None is the smallest for each segment.
        allocate: Makes the memory of the shadow.
        marks: Tells which tensors need no comparing; None compares all.

    Raises:
        UsageError: If there is no such encoding.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        *,
        limits: Limits | None = None,
        encoding: str | None = None,
        allocate: Allocate = in_memory,
        marks: Marks | None = None,
    ) -> None:
        if encoding is not None and encoding not in ENCODINGS:
            raise UsageError(f"encoding={encoding!r} is not one of {', '.join(ENCODINGS)}")
        self._pool = pool
        self._limits = limits or Limits()
        self._encoding = encoding
        self._allocate = allocate
        self._marks = marks
        self._waited = 0
        self._changed = threading.Condition()
        self._shadow: Shadow | None = None
        self._draft: Draft | None = None
        self._owed: Draft | None = None
        self._torn = False
        self._arrived: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def shadow(self) -> Shadow | None:
        """The bits as last captured."""
        return self._shadow

    @property
    def empty(self) -> bool:
        """Whether no draft waits."""
        return self._draft is None

    def wake(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> None:
        """Set this event on this loop whenever a draft arrives."""
        self._arrived = (loop, arrived)

    def start_from(self, shadow: Shadow, *, by: Draft | None = None, at_once: bool = True) -> None:
        """Take a state as the one that the next draft leads from.

        Args:
            shadow: The state.
            by: What leads there from the last durable state; None when that is the state.
            at_once: Whether to send that by itself, and not with what is captured first.
        """
        with self._changed:
            self._shadow = shadow
            self._draft, self._owed = (by, None) if at_once else (None, by)
        self._announce()

    @property
    def awaited(self) -> bool:
        """Whether a draft waits that somebody has a handle of."""
        draft = self._draft
        return draft is not None and bool(draft.waiting)

    def wait_until_free(self, timeout: float, *, unless: Callable[[], bool]) -> None:
        """Wait until no draft waits.

        Args:
            timeout: Limit in seconds.
            unless: Tells that waiting makes no sense any more; looked at when a draft is taken or put back.

        Raises:
            WaitTimeoutError: If the limit is reached.
        """
        self._announce()  # what was put back after a failure waits for somebody to ask for it
        with self._changed:
            if not self._changed.wait_for(lambda: self._draft is None or unless(), timeout):
                raise WaitTimeoutError(
                    f"the publication before this one was not taken up within {timeout} s; the backend is too slow: "
                    "raise `timeout`, publish less often, or use on_busy='coalesce'"
                )

    def capture(
        self,
        step: int,
        state: State,
        *,
        metadata: Mapping[str, str],
        anchor: bool,
        called: float,
        everything: bool = False,
        after: VersionVector | None = None,
    ) -> Publication:
        """Take what changed since the last capture into the waiting draft, and return its handle.

        When it returns, the caller may change the tensors. When it raises, nothing was captured; if interrupted,
        the next call captures the whole state.

        Args:
            step: The step that the state belongs to.
            state: What there is now.
            metadata: The user's key-value pairs.
            anchor: Whether an anchor is asked for besides.
            called: When `publish` was called, by the monotonic clock, in seconds.
            everything: Whether to hold nothing back this time.
            after: What the trainer had applied of other writers.

        Raises:
            UnsupportedTensorError: If a tensor cannot be read.
            StorageFullError: If there is no room for the shadow.
        """
        # Marked before anything is compared: what changes meanwhile has another mark the next time.
        look = self._marks.look(state) if self._marks is not None else None
        found: Split | None = None
        changes: Changes | None = None
        if not self._torn and self._shadow is not None and self._shadow.schema == state.schema:
            shadow = self._shadow
            changes = capture(state, shadow, pool=self._pool, skip=look.unmoved if look is not None else frozenset())
            if self._limits and not everything:
                found = self._split(changes, shadow)
                changes = found.sent
        else:
            shadow = Shadow.of(state, pool=self._pool, allocate=self._allocate)
        size = self._estimate(changes, shadow) if changes is not None and self._limits.budget is not None else 0
        publication = Publication(step)
        with self._changed:
            held = found.held.count if found else 0
            draft = Draft(step, changes, anchor, metadata, held=held, size=size, after=after or VersionVector())
            before = self._draft or self._owed
            if before is not None:
                draft = before.followed_by(draft)
            # An interrupt (Ctrl-C) before the draft is in its place must leave no shadow that is ahead of the drafts.
            self._torn = True
            if changes is not None:
                shadow.advance(changes, pool=self._pool)
            self._shadow = shadow
            waiting = Waiting(publication, called, time.monotonic() - called)
            self._draft = replace(draft, waiting=(*draft.waiting, waiting))
            self._owed = None
            self._torn = False
        self._waited = self._waited + 1 if found and found.small else 0
        if self._marks is not None and look is not None:
            self._marks.keep(look, besides=_tensors_in(found.held) if found else frozenset())
        self._announce()
        return publication

    def _split(self, changes: Changes, shadow: Shadow) -> Split:
        """Decide what is held back; what a waiting draft takes already is no longer free."""
        limits, waiting = self._limits, self._draft
        free = limits.budget
        if free is not None and waiting is not None:
            free = max(free - waiting.size, 1)
        return split(
            changes,
            threshold=0 if self._waited >= limits.patience - 1 else limits.threshold,
            budget=free,
            estimate=partial(self._estimate, shadow=shadow),
        )

    def _estimate(self, changes: Changes, shadow: Shadow) -> int:
        return estimate_bytes(changes, base=shadow.read, encoding=self._encoding, pool=self._pool)

    def take(self, *, snapshot: bool) -> tuple[Draft, Snapshot | None, Schema] | None:
        """Take the waiting draft away; None when there is none.

        Args:
            snapshot: Whether to take a snapshot of the state after the draft too; done anyway for a whole state.
        """
        with self._changed:
            draft, self._draft = self._draft, None
            if draft is None or self._shadow is None:
                return None
            self._changed.notify_all()
            if self._torn:
                draft = replace(draft, changes=None)
            view = self._shadow.snapshot() if snapshot or draft.anchor or draft.changes is None else None
            return draft, view, self._shadow.schema

    def put_back(self, draft: Draft, *, whole: bool = False) -> None:
        """Let a draft that could not be stored wait again, before what came later.

        Args:
            draft: As it was taken; publications that were told of the failure left out.
            whole: Whether now only the whole state will do.
        """
        with self._changed:
            if whole:
                draft = replace(draft, changes=None)
            later = self._draft
            # After a change of schema the later draft is whole by itself.
            self._draft = draft if later is None else draft.followed_by(later)
            self._changed.notify_all()

    def forget(self) -> None:
        """Give the shadow back; when nothing is captured or sent any more."""
        self._shadow = None

    def _announce(self) -> None:
        if self._arrived is not None:
            loop, arrived = self._arrived
            loop.call_soon_threadsafe(arrived.set)


def _tensors_in(changes: Changes) -> set[int]:
    """Return the numbers of the tensors that changes touch."""
    segments = changes.schema.segments
    return {piece.tensor for at, change in changes.segments.items() for piece, _ in parts_of(segments[at], change)}
