"""What a subscriber yields: `Update`, ready to be written into a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from deltabus.bus.errors import DivergedError, StaleUpdateError
from deltabus.bus.message import Message
from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Staged as StagedChanges
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import Bits, Changes, compose
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Snapshot

from .holdings import Holdings

__all__ = ["Staged", "Update"]


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified way from one state to another, in memory.

    Attributes:
        schema: Of the state it leads to.
        base: The state it starts from; None when it starts from nothing.
        base_digest: The digest of that state; None when it starts from nothing.
        state: The state it leads to.
        snapshot: The whole state that `changes` starts from, when it starts from nothing.
        changes: What to write, or to write over the snapshot; None is nothing.
        messages: What it was made from, in order.
        downloaded: Bytes fetched for it.
        seconds: Duration of each stage.
    """

    schema: Schema
    base: VersionVector | None
    base_digest: int | None
    state: VersionVector
    snapshot: Snapshot | None
    changes: Changes | None
    messages: tuple[Message, ...]
    downloaded: int
    seconds: Mapping[str, float] = field(default_factory=dict)

    def followed_by(self, later: Staged) -> Staged:
        """Return one way that leads through this one and the later one."""
        if later.base is None:
            self.release()
            return later
        changes = later.changes if self.changes is None else self.changes
        if self.changes is not None and later.changes is not None:
            changes = compose(self.changes, later.changes)
        stages = dict.fromkeys([*self.seconds, *later.seconds])
        return Staged(
            schema=later.schema,
            base=self.base,
            base_digest=self.base_digest,
            state=later.state,
            snapshot=self.snapshot,
            changes=changes,
            messages=self.messages + later.messages,
            downloaded=self.downloaded + later.downloaded,
            seconds={stage: self.seconds.get(stage, 0.0) + later.seconds.get(stage, 0.0) for stage in stages},
        )

    def read(self, index: int) -> Bits:
        """Return the bits of one segment of the state it leads to; only when it starts from nothing."""
        assert self.snapshot is not None
        bits = self.snapshot.read(index)
        segment = None if self.changes is None else self.changes.segments.get(index)
        if segment is not None:
            bits = bits.copy()
            bits[segment.positions] = segment.new
        return bits

    def release(self) -> None:
        """Let go of the snapshot, if there is one."""
        if self.snapshot is not None:
            self.snapshot.release()


class Update:
    """One state of the topic, on its way into a model.

    It is already downloaded, decoded, and checked against the publisher's digest; what is left is the short write. An
    update that was not applied when the next one is asked for is folded into that one, so that nothing is missed.
    """

    def __init__(self, staged: Staged, holdings: Holdings) -> None:
        self._staged = staged
        self._holdings = holdings
        self._stale = False
        self.applied = False
        """Whether a model has taken it."""
        self.seconds: dict[str, float] = dict(staged.seconds)
        """Duration of each stage: `download`, `decode`, and after `apply` also `apply`."""

    def __repr__(self) -> str:
        start = "nothing" if self.base is None else str(self.base)
        return f"<Update to step {self.step}: {start} -> {self.state}, {self.changed} of {self.total} elements>"

    @property
    def message(self) -> Message:
        """The newest message in it."""
        return self._staged.messages[-1]

    @property
    def messages(self) -> tuple[Message, ...]:
        """Every message that it was made from, in order."""
        return self._staged.messages

    @property
    def step(self) -> int:
        """The training step that the weights belong to."""
        return self.message.step

    @property
    def version(self) -> int:
        """The writer's state counter."""
        return self.message.version

    @property
    def state(self) -> VersionVector:
        """The version vector it leads to."""
        return self._staged.state

    @property
    def base(self) -> VersionVector | None:
        """The version vector it starts from; None when it carries the whole state."""
        return self._staged.base

    @property
    def whole(self) -> bool:
        """Whether it carries the whole state."""
        return self._staged.base is None

    @property
    def changed(self) -> int:
        """Elements that it writes."""
        if self.whole:
            return self.total
        return 0 if self._staged.changes is None else self._staged.changes.count

    @property
    def total(self) -> int:
        """Elements of the state."""
        return self._staged.schema.total

    @property
    def density(self) -> float:
        """Written elements over all elements."""
        return self.changed / self.total if self.total else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes downloaded for it."""
        return self._staged.downloaded

    @property
    def metadata(self) -> Mapping[str, str]:
        """The publisher's key-value pairs of the newest message."""
        return self.message.metadata

    def apply(self, model: nn.Module | MutableMapping[str, Tensor]) -> None:
        """Write the update into a model, in place: all of it, or on any error nothing.

        A whole state alone keeps no undo: when writing it fails midway the model holds a mixture. The error says so,
        and the same update, or the next one, makes it good.

        Every element that is touched must hold the bits that the publisher had. A model that this subscriber sees for
        the first time is compared whole, by its digest. Applying an update to a model that already holds its state does
        nothing.

        Args:
            model: The model, or a mapping of names to tensors; it may have more tensors than the topic.

        Raises:
            DivergedError: If the model does not hold the state that the update starts from; the tensor is named, unless
                the model was compared whole. Or if writing a whole state failed midway; the reason is chained.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
            UnsupportedTensorError: If a tensor cannot be written in place.
            StaleUpdateError: If a later update was asked for since.
        """
        started = time.perf_counter()
        if self._stale:
            raise StaleUpdateError(
                f"the update to step {self.step} was overtaken: apply the update that the subscriber gave last"
            )
        target = Target.bind(model, self._staged.schema)
        held = self._holdings.of(target)
        if held != self.state:
            changes = None if self._staged.changes is None or self.whole else target.stage(self._staged.changes)
            if not self.whole:
                self._check_base(target, held, changes)
            # Should the write fail and be impossible to take back, the model is one that nothing is known of.
            self._holdings.forget(target)
            if self.whole:
                target.load(self._staged.read)
            elif changes is not None:
                changes.write()
            self._holdings.record(target, self.state)
        self.applied = True
        self.seconds["apply"] = time.perf_counter() - started

    def mark_applied(self) -> None:
        """Say that the update was taken in some other way than `apply`, and need not be folded into the next."""
        self.applied = True

    def _check_base(self, target: Target, held: VersionVector | None, changes: StagedChanges | None) -> None:
        base = self._staged.base
        if held == base:
            return
        if held is not None:
            raise DivergedError(
                f"the model holds {held}, and this update leads from {base} to {self.state}; apply updates in order, "
                "or open a subscriber with have=model"
            )
        if changes is not None:
            changes.check()  # it can name a tensor, where a digest cannot
        digest = target.digest()
        if digest != self._staged.base_digest:
            raise DivergedError(
                f"the model has digest {digest:016x}, but this update starts from {base} with digest "
                f"{self._staged.base_digest:016x}; open a subscriber with have=model, which starts from what it holds"
            )

    def retire(self) -> Staged | None:
        """Called when the next update is asked for: return what has to be folded into it, if anything."""
        if not self.applied:
            self._stale = True
            return self._staged
        self._stale = self.whole
        self._staged.release()
        return None
