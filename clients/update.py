"""What a subscriber yields: `Update`, ready to be written into a model."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from torch import Tensor, nn

from deltabus.bus.errors import DivergedError, StaleUpdateError
from deltabus.bus.message import Message
from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Staged as StagedChanges
from deltabus.codecs.apply import Target, load_all
from deltabus.codecs.changes import Changes
from deltabus.codecs.drift import Meant, count_drift, stage_differences
from deltabus.codecs.schema import Schema

from .bindings import Bindings
from .holdings import Holdings
from .patches import TensorPatch, patches_of
from .staged import Staged, StagedState
from .verification import Verification, check_base, holds, listed, refusal

__all__ = ["Update"]

_log = logging.getLogger("deltabus.update")
_UNDO = 0.1
"""What the undo of a whole state may take, as a share of the model's bytes; one that changes more has none."""
_LEAST_UNDO = 16 << 20
"""What it may take in any case."""


class Update:
    """One state of the topic, on its way into a model.

    It is already downloaded, decoded, and checked against the publisher's digest; what is left is the short write. An
    update that was not applied when the next one is asked for is folded into that one, so that nothing is missed.
    """

    def __init__(
        self,
        staged: StagedState,
        holdings: Holdings,
        bindings: Bindings,
        verification: Verification,
        *,
        before: int | None = None,
        tell: Callable[[Update], object] = lambda update: None,
    ) -> None:
        self._staged = staged
        self._tell = tell
        self._before = before
        self._message = max(staged.messages, key=lambda message: (message.step, message.version))
        self._holdings = holdings
        self._bindings = bindings
        self._verification = verification
        self._due: bool | None = None
        self._stale = False
        self._taken = False
        self._writing: StagedChanges | None = None
        self.verified = False
        """Whether the whole model was compared with the state, and found to hold it, maybe after a repair."""
        self.repaired: Mapping[str, int] = {}
        """How many elements of which tensors did not hold what they should, and were written all the same."""
        self.seconds: dict[str, float] = dict(staged.seconds)
        """Duration of each stage: `download`, `decode`, and after `apply` also `apply`."""

    def __repr__(self) -> str:
        start = "nothing" if self.base is None else str(self.base)
        return f"<Update to step {self.step}: {start} -> {self.state}, {self.changed} of {self.total} elements>"

    @property
    def applied(self) -> bool:
        """Whether a model has taken it."""
        # An interrupt right behind the write would otherwise leave a model that holds the state, and nobody who knows.
        return self._taken or (self._writing is not None and self._writing.written)

    @property
    def message(self) -> Message:
        """The newest message in it; of several writers', that of the greatest step."""
        return self._message

    @property
    def messages(self) -> tuple[Message, ...]:
        """Every message that it was made from, writer by writer, each in order."""
        return self._staged.messages

    @property
    def step(self) -> int:
        """The training step that the weights belong to."""
        return self.message.step

    @property
    def version(self) -> int:
        """The writer's state counter; of several writers, the sum of theirs."""
        return sum(self.state.values())

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
        return self._staged.whole

    @property
    def rewound_from(self) -> int | None:
        """The step of the state before, where the trainer went back to an earlier one; None where it did not.

        A trainer that resumes from an older checkpoint leaves the steps after it behind, and takes them anew.
        """
        return self._before if self._before is not None and self._before > self.step else None

    @property
    def detours(self) -> tuple[str, ...]:
        """Why it came by another way than the one that leads on from the state before, in words; empty if it did not.

        Retention removed what led on, or something was missing or damaged.
        """
        return self._staged.detours

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """The tables of the tensors that it writes to, writer by writer."""
        return tuple(part.schema for part in self._staged.parts)

    @property
    def touched(self) -> frozenset[str]:
        """The names of the tensors that it writes to; all of them when it carries the whole state."""
        return self._staged.touched

    @property
    def changed(self) -> int:
        """Elements that it writes."""
        if self.whole:
            return self.total
        return sum(part.changes.count for part in self._staged.parts if part.changes is not None)

    @property
    def total(self) -> int:
        """Elements of the state."""
        return sum(part.schema.total for part in self._staged.parts)

    @property
    def density(self) -> float:
        """Written elements over all elements."""
        return self.changed / self.total if self.total else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes downloaded for it."""
        return sum(part.downloaded for part in self._staged.parts)

    @property
    def parts(self) -> tuple[Staged, ...]:
        """The way of each writer's part, with its bits until the next update is asked for; for who encodes it anew."""
        return self._staged.parts

    @property
    def metadata(self) -> Mapping[str, str]:
        """The publisher's key-value pairs of the newest message."""
        return self.message.metadata

    def apply(self, model: nn.Module | MutableMapping[str, Tensor]) -> None:
        """Write the update into a model, in place: all of it, or on any error or interrupt nothing.

        A whole state alone keeps no undo, unless it differs little from what the model is known to hold: when writing
        it fails midway the model holds a mixture. The error says so, and the same update, or the next one, makes it
        good.

        Every element that is touched must hold the bits that the publisher had. A model that this subscriber sees for
        the first time, or that is due by `verify="full"`, is compared whole, by its digest. With `on_drift="repair"` a
        model that holds something else is brought to the update's state, and `repaired` tells of it. Applying an update
        to a model that already holds its state does nothing.

        Args:
            model: The model, or a mapping of names to tensors; it may have more tensors than the topic.

        Raises:
            DivergedError: If the model does not hold the state that the update starts from; the tensors are named. Or
                if writing a whole state failed midway; the reason is chained.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
            UnsupportedTensorError: If a tensor cannot be written in place.
            StaleUpdateError: If a later update was asked for since.
        """
        started = time.perf_counter()
        targets = self._bind(model)
        held = self._holdings.of(targets)
        if held != self.state:
            if self._due is None:
                self._due = self._verification.due
            if self.whole:
                self._load(targets, held)
            else:
                self._write(targets, held)
            self._holdings.record(targets, self.state)
        if not self._taken:
            self._taken = True
            self._verification.count(verified=self.verified)
        self._writing = None  # what it holds is no longer needed
        self.seconds["apply"] = time.perf_counter() - started
        self._tell(self)

    def verify(self, model: nn.Module | MutableMapping[str, Tensor]) -> None:
        """Compare a whole model, to which the update was applied, with its state: every element, by its digest.

        With `on_drift="repair"` what differs is written, and told in `repaired`.

        Args:
            model: The model, or a mapping of names to tensors.

        Raises:
            DivergedError: If the model does not hold the state; the tensors that differ are named.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
            UnsupportedTensorError: If a tensor cannot be written in place.
            StaleUpdateError: If a later update was asked for since.
        """
        targets = self._bind(model, bits=True)
        self._verify(targets)
        self._holdings.record(targets, self.state)

    def patches(self) -> Iterator[TensorPatch]:
        """Yield what it writes, tensor by tensor, for a writer of another kind than `apply`; see `mark_applied`."""
        for part in self._staged.parts:
            yield from patches_of(part)

    def mark_applied(self) -> None:
        """Say that the update was taken in some other way than `apply`, and need not be folded into the next."""
        self._taken = True

    @property
    def skipped(self) -> StagedState | None:
        """What has to be folded into the next update, as it stands now; None when this one was applied."""
        return None if self.applied else self._staged

    def retire(self) -> StagedState | None:
        """Called when the next update is asked for: return what has to be folded into it, if anything."""
        staged, self._staged = self._staged, self._staged.without_bits()
        if not self.applied:
            self._stale = True
            return staged
        self._stale = self.whole
        staged.release()
        return None

    def _bind(self, model: nn.Module | MutableMapping[str, Tensor], *, bits: bool = False) -> list[Target]:
        if self._stale or (bits and not self._staged.readable):
            raise StaleUpdateError(
                f"the update to step {self.step} was overtaken: apply the update that the subscriber gave last"
            )
        return self._bindings.bind(model, [part.schema for part in self._staged.parts])

    def _meant(self, targets: Sequence[Target]) -> list[Meant]:
        return [(target, part.read) for target, part in zip(targets, self._staged.parts, strict=True)]

    def _load(self, targets: Sequence[Target], held: VersionVector | None) -> None:
        """Write a whole state."""
        meant = self._meant(targets)
        # What is known of a model is mostly that it holds an older state, which differs little.
        changes = None if held is None else stage_differences(meant, limit=_limit(targets))
        # Should it fail midway, the model is one that nothing is known of.
        self._holdings.forget(targets)
        if changes is None:
            load_all(meant)
        else:
            self._commit(changes)
        if not self._due:
            return
        try:
            self._verify(targets, done="the rest of it was written" if changes is None else "it was taken back")
        except DivergedError:
            if changes is not None:
                changes.take_back()
            raise

    def _write(self, targets: Sequence[Target], held: VersionVector | None) -> None:
        """Write changes into a model that holds the state they start from, or is to be repaired."""
        pairs = list(zip(targets, self._staged.parts, strict=True))
        # What a way holds was taken by the subscriber's own copy before.
        changes = StagedChanges.joined(
            target.stage(part.changes, valid=True) for target, part in pairs if part.changes is not None
        )
        whole = held is None or bool(self._due)
        try:
            self._check(targets, held, changes, whole=whole)
        except DivergedError:
            # Should it go wrong from here on, the model is one that nothing is known of.
            self._holdings.forget(targets)
            if held is None and holds(targets, self._staged):
                self.verified = True  # it was interrupted when all was written
            elif self._verification.repairs and self._staged.readable:
                self._repair(targets, besides=[part.changes for part in self._staged.parts])
            else:
                raise
            return
        self._holdings.forget(targets)
        self._commit(changes, checked=True)
        self.verified = self.verified or whole

    def _check(
        self, targets: Sequence[Target], held: VersionVector | None, changes: StagedChanges, *, whole: bool
    ) -> None:
        base = self._staged.base
        if held is not None and held != base:
            raise DivergedError(
                f"the model holds {held}, and this update leads from {base} to {self.state}; apply updates in order, "
                "or open a subscriber with on_drift='repair', or with have=model"
            )
        changes.check()  # first, because it costs less, and names the element
        if whole:
            check_base(targets, self._staged)

    def _commit(self, changes: StagedChanges, *, checked: bool = False) -> None:
        self._taken, self._writing = self.applied, changes
        changes.write(checked=checked)

    def _verify(self, targets: Sequence[Target], *, done: str = "nothing was changed") -> None:
        """Compare a whole model with the state, and repair it if that is wanted.

        Args:
            targets: The model's tensors.
            done: What was written before, in words for an error.
        """
        if not holds(targets, self._staged):
            self._holdings.forget(targets)
            if not self._verification.repairs:
                raise refusal(f"{self.state}, the state of this update", self._meant(targets), done=done)
            self._repair(targets)
        self.verified = True

    def _repair(self, targets: Sequence[Target], *, besides: Sequence[Changes | None] = ()) -> None:
        """Bring a model to the state, whatever it holds: what differs is written, from the subscriber's own copy."""
        meant = self._meant(targets)
        counts = count_drift(meant, besides=besides)
        changes = stage_differences(meant, limit=_limit(targets))
        if changes is None:
            load_all(meant)
        else:
            self._commit(changes)
        if not holds(targets, self._staged):
            if changes is not None:
                changes.take_back()
            raise DivergedError(
                f"the model cannot be repaired: the subscriber's own copy of {self.state} is damaged, or the model's "
                "memory is; open another subscriber"
            )
        self.verified = True
        if counts:
            self.repaired = dict(Counter(self.repaired) + Counter(counts))
            _log.warning("the model was repaired while step %d was applied: %s", self.step, listed(counts))


def _limit(targets: Sequence[Target]) -> int:
    return max(_LEAST_UNDO, int(_UNDO * sum(target.schema.nbytes for target in targets)))
