"""Verified ways from one state to another, in memory: of one writer, and of all that make a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from deltabus.bus.message import Message
from deltabus.bus.version import VersionVector
from deltabus.codecs.changes import Changes, compose, parts_of
from deltabus.codecs.held import Held
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.shadow import Snapshot

__all__ = ["Staged", "StagedState"]


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified way from one state of a writer to another.

    Attributes:
        writer: Whose state it is.
        schema: Of the state it leads to.
        base: The version it starts from; None when it starts from nothing.
        base_digest: The digest of that state; None when it starts from nothing.
        version: The version it leads to.
        digest: The digest of that state.
        snapshot: The bits of that state; None when they were given back.
        changes: What to write, when it starts from a state; None is nothing.
        messages: What it was made from, in order; none when the writer did not move on.
        downloaded: Bytes fetched for it.
        seconds: Duration of each stage.
    """

    writer: str
    schema: Schema
    base: int | None
    base_digest: int | None
    version: int
    digest: int
    snapshot: Snapshot | None = None
    changes: Changes | None = None
    messages: tuple[Message, ...] = ()
    downloaded: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    def followed_by(self, later: Staged) -> Staged:
        """Return one way that leads through this one and the later one."""
        if later.base is None:
            self.release()
            return later
        if self.base is None:
            changes = None  # the snapshot has them
        elif self.changes is None or later.changes is None:
            changes = self.changes or later.changes
        else:
            changes = compose(self.changes, later.changes)
        return replace(
            self,
            schema=later.schema,
            version=later.version,
            digest=later.digest,
            snapshot=later.snapshot,
            changes=changes,
            messages=self.messages + later.messages,
            downloaded=self.downloaded + later.downloaded,
            seconds=_added(self.seconds, later.seconds),
        )

    def read(self, index: int) -> Held:
        """Return the bits of one segment of the state it leads to, while there is a snapshot; not to be written to."""
        assert self.snapshot is not None
        return self.snapshot.read(index)

    def read_before(self, index: int) -> Held:
        """Return the bits of one segment of the state it starts from, while there is a snapshot."""
        assert self.snapshot is not None
        change = None if self.changes is None else self.changes.segments.get(index)
        return self.snapshot.read(index) if change is None else self.snapshot.read_before(index, change)

    def release(self) -> None:
        """Let go of the snapshot, if there is one."""
        if self.snapshot is not None:
            self.snapshot.release()


@dataclass(frozen=True)
class StagedState:
    """A verified way from one state of a topic to another: every writer's part.

    Attributes:
        parts: Of each writer that the state is made of; either all start from nothing, or none does. Where two write
            the same elements, the one that comes later in history stands behind the other.
        detours: Why it came by other ways than the usual one, if it did.
    """

    parts: tuple[Staged, ...]
    detours: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it starts from nothing."""
        return any(part.base is None for part in self.parts)

    @property
    def readable(self) -> bool:
        """Whether its bits are still there, and not only its changes."""
        return all(part.snapshot is not None for part in self.parts)

    @cached_property
    def base(self) -> VersionVector | None:
        """The state it starts from; None when it starts from nothing."""
        return None if self.whole else VersionVector({part.writer: part.base or 0 for part in self.parts})

    @cached_property
    def state(self) -> VersionVector:
        """The state it leads to."""
        return VersionVector({part.writer: part.version for part in self.parts})

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """What it was made from, writer by writer, each in order."""
        return tuple(message for part in self.parts for message in part.messages)

    @property
    def touched(self) -> frozenset[str]:
        """The tensors that it writes to; all when it starts from nothing."""
        found: set[str] = set()
        for part in self.parts:
            specs: Iterable[TensorSpec] = part.schema.tensors if self.whole else ()
            if part.changes is not None and not self.whole:
                segments = part.changes.segments.items()
                pieces = (piece for index, at in segments for piece, _ in parts_of(part.schema.segments[index], at))
                specs = (part.schema.tensors[piece.tensor] for piece in pieces)
            found.update(name for spec in specs for name in (spec.name, *spec.aliases))
        return frozenset(found)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Duration of each stage, added up over the writers."""
        seconds: Mapping[str, float] = {}
        for part in self.parts:
            seconds = _added(seconds, part.seconds)
        return seconds

    def followed_by(self, later: StagedState) -> StagedState:
        """Return one way that leads through this one and the later one."""
        detours = self.detours + later.detours
        if later.whole:
            self.release()
            return replace(later, detours=detours)
        mine = {part.writer: part for part in self.parts}
        return StagedState(tuple(mine[part.writer].followed_by(part) for part in later.parts), detours)

    def without_bits(self) -> StagedState:
        """Return the same way without snapshots; what has them keeps them."""
        return replace(self, parts=tuple(replace(part, snapshot=None) for part in self.parts))

    def release(self) -> None:
        """Let go of the snapshots."""
        for part in self.parts:
            part.release()


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {stage: one.get(stage, 0.0) + other.get(stage, 0.0) for stage in dict.fromkeys([*one, *other])}
