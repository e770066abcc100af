"""Shadows: a copy of a state's bits that follows changes, and snapshots that still see it as it was.

Its segments are arrays in host memory, or tensors on devices; what is done to them is done where they lie.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltabus.bus.errors import CorruptPayloadError, DivergedError, StorageFullError, UsageError

from . import dtypes, on_device
from .ahead import in_order
from .changes import Bits, Changes, Gathered, SegmentChanges, check_same_schema, collected, diverged, validate
from .digest import digest_of
from .held import Held, copied, copy_into, differing, fits, scatter, take
from .kernels import compare
from .schema import Schema, Segment
from .scratch import Scratch
from .state import State

__all__ = ["Allocate", "Shadow", "Snapshot", "capture", "in_memory", "on_devices"]

_AHEAD = 64

Allocate = Callable[[Schema, Sequence[torch.device]], Sequence[Held]]
"""Makes the memory of a shadow: for each segment of a schema, of its size and bits, all zero. It is told on which
device each segment of the state itself lies; on the host's, where there is no state yet."""


def in_memory(schema: Schema, devices: Sequence[torch.device] = ()) -> list[Bits]:
    """Return arrays of zeros in this process's memory, whatever the devices.

    Raises:
        StorageFullError: If there is no room for them.
    """
    try:
        return [np.zeros(segment.size, segment.dtype.bits) for segment in schema.segments]
    except MemoryError as error:
        raise StorageFullError(
            f"this process has no memory for a copy of {schema.nbytes} bytes of weights; use a larger machine"
        ) from error


def on_devices(schema: Schema, devices: Sequence[torch.device]) -> list[Tensor]:
    """Return tensors of zeros on these devices, one for each segment.

    Raises:
        StorageFullError: If a device has no memory for them.
    """
    return [
        on_device.zeros(segment.size, dtypes.INTEGERS[segment.dtype.size], device)
        for segment, device in zip(schema.segments, devices, strict=True)
    ]


class Shadow:
    """A copy of a state's bits, one run of them for each segment.

    One thread at a time advances, loads or captures; snapshots may be taken and read in any thread meanwhile.

    Attributes:
        schema: The state's schema.
    """

    def __init__(self, schema: Schema, bits: Sequence[Held]) -> None:
        self.schema = schema
        self._bits = bits
        # The writer's lock makes a snapshot fall between two changes; a segment's lock covers one copy or one write.
        self._writing = threading.Lock()
        self._locks = [threading.Lock() for _ in bits]
        self._torn = False
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @classmethod
    def empty(cls, schema: Schema, *, allocate: Allocate = in_memory) -> Shadow:
        """Return a shadow whose bits are all zero, to be loaded."""
        return cls(schema, allocate(schema, [torch.device("cpu")] * len(schema.segments)))

    @classmethod
    def of(cls, state: State, *, pool: Executor | None = None, allocate: Allocate = in_memory) -> Shadow:
        """Return a shadow that holds the state's bits as they are now."""
        indices = range(len(state.schema.segments))
        bits = allocate(state.schema, [state.device(index) for index in indices])

        def filled(index: int) -> Held:
            place = bits[index]
            if not isinstance(place, Tensor):
                return state.read(index, place)
            copy_into(place, state.read_on(place.device, index))
            return place

        return cls(state.schema, list(in_order(filled, indices, pool=pool, ahead=_AHEAD)))

    def read(self, index: int) -> Held:
        """Return the bits of a segment: the live ones, not to be written to."""
        return self._bits[index]

    def room(self, index: int) -> Bits | None:
        """Return the array of a segment, to be filled while nobody else has the shadow; None if it is on a device."""
        bits = self._bits[index]
        return None if isinstance(bits, Tensor) else bits

    def digest(self, pool: Executor | None = None) -> int:
        """Return the digest of the bits that it holds."""
        return digest_of(self.schema, self.read, pool=pool)

    def advance(self, changes: Changes, *, pool: Executor | None = None) -> None:
        """Apply changes, all or nothing.

        Args:
            changes: What to apply.
            pool: Works on several segments at once.

        Raises:
            SchemaMismatchError: If they are of another schema.
            CorruptPayloadError: If they are not well formed.
            DivergedError: If a touched element does not hold the bits that its change starts from. Or if it holds a
                mixture of two states, because changes could not be taken back, now or before.
            StorageFullError: If it lies on a device that has no memory for the changes.
        """
        check_same_schema(self.schema, changes.schema)
        validate(changes)
        numbered = list(enumerate(changes.segments.items()))
        done = np.zeros(len(numbered), np.bool_)
        with self._writing:
            self._check_whole()
            # Arrays are looked at in the pass that writes; on a device that would save nothing, and may lack memory.
            pairs = ((index, self._bits[index]) for index in changes.segments)
            elsewhere = [(index, changes.segments[index], bits) for index, bits in pairs if isinstance(bits, Tensor)]
            for _ in in_order(self._check, elsewhere, pool=pool, ahead=_AHEAD):
                pass
            try:
                for _ in in_order(partial(self._write, done), numbered, pool=pool, ahead=_AHEAD):
                    pass
            except BaseException:
                # What a snapshot noted and is now taken back does no harm: undoing it once more sets the same bits.
                self._take_back([item for number, item in numbered if done[number]])
                raise

    def _take_back(self, written: Sequence[tuple[int, SegmentChanges]]) -> None:
        """Write old bits back, those of all segments that can be written to."""
        self._torn = True
        failure: Exception | None = None
        for index, change in written:
            try:
                with self._locks[index]:
                    scatter(self._bits[index], change.positions, change.old)
            except Exception as error:
                failure = error
        if failure is not None:
            raise self._mixture() from failure
        self._torn = False

    def _check_whole(self) -> None:
        if self._torn:
            raise self._mixture()

    def _mixture(self) -> DivergedError:
        return DivergedError(
            "the copy of the weights holds a mixture of two states, because a change to it failed midway and could not "
            "be taken back; open the publisher or subscriber anew"
        )

    def _check(self, item: tuple[int, SegmentChanges, Tensor]) -> None:
        """Check that the bits on a device are those that changes start from."""
        index, change, bits = item
        self._refuse(index, change, on_device.first_not_holding(bits, change.positions, change.old))

    def _write(self, done: npt.NDArray[np.bool_], numbered: tuple[int, tuple[int, SegmentChanges]]) -> None:
        number, (index, change) = numbered
        bits, wrong = self._bits[index], -1
        with self._locks[index]:
            try:
                if isinstance(bits, Tensor):
                    done[number] = True
                    on_device.scatter(bits, change.positions, change.new)
                else:
                    wrong = int(compare.replace(bits, change.positions, change.old, change.new, done, number))
                if wrong < 0:
                    for snapshot in self._snapshots:
                        snapshot._note(index, change)
            except BaseException:
                # Before anybody can read a snapshot that does not know of the change.
                if done[number]:
                    scatter(bits, change.positions, change.old)
                raise
        self._refuse(index, change, wrong)

    def _refuse(self, index: int, change: SegmentChanges, wrong: int) -> None:
        """Raise an error that names a change that other bits were found for, if there is one."""
        if wrong >= 0:
            position, expected = int(change.positions[wrong]), int(change.old[wrong])
            held = int(take(self._bits[index], change.positions[wrong : wrong + 1])[0])
            raise diverged(self.schema, index, position, held=held, expected=expected)

    def load(self, index: int, bits: Held) -> None:
        """Replace a segment's bits by a copy of these.

        Raises:
            CorruptPayloadError: If there are too few, too many, or of another width.
        """
        segment = self.schema.segments[index]
        if not fits(segment, bits):
            expected = f"{segment.size} elements of {segment.dtype.bits}"
            raise CorruptPayloadError(f"segment {index} has {expected}, not {tuple(bits.shape)} of {bits.dtype}")
        with self._writing, self._locks[index]:
            for snapshot in self._snapshots:
                snapshot._keep(index)
            copy_into(self._bits[index], bits)

    def snapshot(self) -> Snapshot:
        """Return a view of the state as it is now, which later changes do not alter.

        Raises:
            DivergedError: If it holds a mixture of two states.
        """
        with self._writing:
            self._check_whole()
            snapshot = Snapshot(self)
            self._snapshots.add(snapshot)
            return snapshot

    def _release(self, snapshot: Snapshot) -> None:
        with self._writing:
            self._snapshots.discard(snapshot)


class Snapshot:
    """A shadow's state as it was when the snapshot was taken.

    It keeps the changes that come later and undoes them when it is read: memory in O(changed), and for each
    segment at most one copy of its bits. Release it, or leave its `with` block, to give that back.

    Attributes:
        schema: The state's schema.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.schema = shadow.schema
        self._shadow = shadow
        self._released = False
        self._later: dict[int, list[SegmentChanges]] = {}
        self._kept: dict[int, Held] = {}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def again(self) -> Snapshot:
        """Return another snapshot of the same state, to be released by itself.

        Raises:
            UsageError: If the snapshot was released.
        """
        with self._shadow._writing:
            other = Snapshot(self._shadow)
            other._later = {index: list(later) for index, later in self._later.items()}
            other._kept = dict(self._kept)
            # Looked at last: what is copied here is whole if the snapshot is not released even now.
            if self._released:
                raise UsageError("the snapshot was released and can no longer be read")
            self._shadow._snapshots.add(other)
            return other

    def read(self, index: int, scratch: Scratch | None = None) -> Held:
        """Return the bits of a segment as they were; not to be written to.

        Args:
            index: Which segment.
            scratch: Given, the bits may lie there, until this thread reads into it again.

        Raises:
            UsageError: If the snapshot was released.
        """
        with self._shadow._locks[index]:
            kept = self._kept.get(index)
            bits = _copied(self._shadow._bits[index], scratch) if kept is None else kept
            later = tuple(self._later.get(index, ()))
            # Looked at last: until here the snapshot was told of every change, if it is not released even now.
            if self._released:
                raise UsageError("the snapshot was released and can no longer be read")
        _undo(bits, later)
        return bits

    def read_before(self, index: int, change: SegmentChanges, scratch: Scratch | None = None) -> Held:
        """Return a copy of the bits of a segment as they were before the change that led to this state.

        Args:
            index: Which segment.
            change: What led to this state.
            scratch: Given, the bits may lie there, until this thread reads into it again.

        Raises:
            UsageError: If the snapshot was released.
        """
        bits = self.read(index, scratch)
        if bits is self._kept.get(index):
            bits = _copied(bits, scratch)
        _undo(bits, (change,))
        return bits

    def digest(self, pool: Executor | None = None) -> int:
        """Return the digest of the state as it was."""
        return digest_of(self.schema, partial(self.read, scratch=Scratch()), pool=pool)

    def release(self) -> None:
        """Give back what was kept; may be called again."""
        self._released = True
        self._shadow._release(self)
        self._later, self._kept = {}, {}

    def _note(self, index: int, change: SegmentChanges) -> None:
        """Remember a change that was just made; the segment's lock is held."""
        if index in self._kept:
            return
        later = self._later.setdefault(index, [])
        later.append(change)
        if sum(kept.nbytes for kept in later) > self._shadow._bits[index].nbytes:
            self._keep(index)

    def _keep(self, index: int) -> None:
        """Copy a segment as it was; the segment's lock is held."""
        if index not in self._kept:
            bits = copied(self._shadow._bits[index])
            _undo(bits, tuple(self._later.get(index, ())))
            # In this order: an interrupt may leave both, which leads to the same bits, but not neither.
            self._kept[index] = bits
            self._later.pop(index, None)


def _copied(bits: Held, scratch: Scratch | None) -> Held:
    return copied(bits) if scratch is None or isinstance(bits, Tensor) else scratch.copy(bits)


def _undo(bits: Held, later: tuple[SegmentChanges, ...]) -> None:
    for change in reversed(later):
        scatter(bits, change.positions, change.old)


def capture(
    state: State, shadow: Shadow, *, pool: Executor | None = None, skip: Container[int] = frozenset()
) -> Changes:
    """Return the changes that lead from the shadow to the state, compared bit by bit; the shadow stays as it is.

    Takes memory in proportion to the changes, and copies of single runs where a tensor must be copied to be read.

    Args:
        state: What there is now.
        shadow: What there was.
        pool: Compares several segments at once.
        skip: Numbers of tensors that are known to hold what the shadow does, and are not compared.

    Raises:
        SchemaMismatchError: If the state has another schema; the error names the tensor that differs, and how.
        StorageFullError: If the shadow lies on a device that has no memory to compare.
    """
    check_same_schema(shadow.schema, state.schema)
    # The shadow's own schema object, because its segments are computed once and not anew for each captured state.
    schema = shadow.schema
    of_thread = threading.local()

    def gathered(segment: Segment) -> Gathered:
        # The same for all segments that a thread compares: fresh memory is cleared by the system, page by page.
        found: Gathered | None = getattr(of_thread, segment.dtype.name, None)
        if found is None:
            found = Gathered(segment.dtype.bits, segment.size)
            setattr(of_thread, segment.dtype.name, found)
        return found

    def compared(index: int) -> SegmentChanges | None:
        segment, held = schema.segments[index], shadow.read(index)
        found = gathered(segment)
        for piece in segment.pieces:
            if piece.tensor in skip:
                continue
            run = held[piece.offset : piece.offset + piece.stop - piece.start]
            if isinstance(run, Tensor):
                found.put(differing(run, state.piece_on(run.device, piece)), piece.offset)
            else:
                found.add(run, state.piece(piece), piece.offset)
        return found.changes()

    return collected(schema, compared, pool=pool)
