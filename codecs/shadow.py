"""Shadows: a copy of a state's bits that follows changes, and snapshots that still see it as it was."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container
from concurrent.futures import Executor
from types import TracebackType

import numpy as np

from deltabus.bus.errors import CorruptPayloadError, StorageFullError, UsageError

from .ahead import in_order
from .changes import Bits, Changes, SegmentChanges, check_same_schema, collected, diverged, find_differing, validate
from .digest import digest_of
from .kernels import compare
from .schema import Schema
from .state import State

__all__ = ["Allocate", "Shadow", "Snapshot", "capture", "in_memory"]

_AHEAD = 64

Allocate = Callable[[Schema], list[Bits]]
"""Makes the arrays of a shadow: one for each segment of a schema, of its size and bits, all zero."""


def in_memory(schema: Schema) -> list[Bits]:
    """Return arrays of zeros in this process's memory.

    Raises:
        StorageFullError: If there is no room for them.
    """
    try:
        return [np.zeros(segment.size, segment.dtype.bits) for segment in schema.segments]
    except MemoryError as error:
        raise StorageFullError(
            f"this process has no memory for a copy of {schema.nbytes} bytes of weights; use a larger machine"
        ) from error


class Shadow:
    """A copy of a state's bits, one array of unsigned integers for each segment.

    One thread at a time advances, loads or captures; snapshots may be taken and read in any thread meanwhile.

    Attributes:
        schema: The state's schema.
    """

    def __init__(self, schema: Schema, bits: list[Bits]) -> None:
        self.schema = schema
        self._bits = bits
        # The writer's lock makes a snapshot fall between two changes; a segment's lock covers one copy or one write.
        self._writing = threading.Lock()
        self._locks = [threading.Lock() for _ in bits]
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @classmethod
    def empty(cls, schema: Schema, *, allocate: Allocate = in_memory) -> Shadow:
        """Return a shadow whose bits are all zero, to be loaded."""
        return cls(schema, allocate(schema))

    @classmethod
    def of(cls, state: State, *, pool: Executor | None = None, allocate: Allocate = in_memory) -> Shadow:
        """Return a shadow that holds the state's bits as they are now."""
        bits = allocate(state.schema)

        def copied(index: int) -> Bits:
            return state.read(index, bits[index])

        return cls(state.schema, list(in_order(copied, range(len(bits)), pool=pool, ahead=_AHEAD)))

    def read(self, index: int) -> Bits:
        """Return the bits of a segment: the live array, not to be written to."""
        return self._bits[index]

    def digest(self, pool: Executor | None = None) -> int:
        """Return the digest of the bits that it holds."""
        return digest_of(self.schema, self.read, pool=pool)

    def advance(self, changes: Changes) -> None:
        """Apply changes, all or nothing.

        Raises:
            SchemaMismatchError: If they are of another schema.
            CorruptPayloadError: If they are not well formed.
            DivergedError: If a touched element does not hold the bits that its change starts from.
        """
        check_same_schema(self.schema, changes.schema)
        validate(changes)
        with self._writing:
            for index, change in changes.segments.items():
                bits = self._bits[index]
                wrong = compare.first_not_holding(bits, change.positions, change.old)
                if wrong >= 0:
                    position, expected = int(change.positions[wrong]), int(change.old[wrong])
                    raise diverged(self.schema, index, position, held=int(bits[position]), expected=expected)
            try:
                for index, change in changes.segments.items():
                    with self._locks[index]:
                        for snapshot in self._snapshots:
                            snapshot._note(index, change)
                        compare.scatter(self._bits[index], change.positions, change.new)
            except BaseException:
                # What a snapshot noted and is now taken back does no harm: undoing it once more sets the same bits.
                for index, change in changes.segments.items():
                    with self._locks[index]:
                        compare.scatter(self._bits[index], change.positions, change.old)
                raise

    def load(self, index: int, bits: Bits) -> None:
        """Replace a segment's bits by a copy of these.

        Raises:
            CorruptPayloadError: If there are too few, too many, or of another width.
        """
        segment = self.schema.segments[index]
        if bits.dtype != segment.dtype.bits or bits.shape != (segment.size,):
            text = (
                f"segment {index} has {segment.size} elements of {segment.dtype.bits}, not {bits.shape} of {bits.dtype}"
            )
            raise CorruptPayloadError(text)
        with self._writing, self._locks[index]:
            for snapshot in self._snapshots:
                snapshot._keep(index)
            np.copyto(self._bits[index], bits)

    def snapshot(self) -> Snapshot:
        """Return a view of the state as it is now, which later changes do not alter."""
        with self._writing:
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
        self._kept: dict[int, Bits] = {}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def read(self, index: int) -> Bits:
        """Return the bits of a segment as they were; not to be written to.

        Raises:
            UsageError: If the snapshot was released.
        """
        with self._shadow._locks[index]:
            kept = self._kept.get(index)
            bits = self._shadow._bits[index].copy() if kept is None else kept
            later = tuple(self._later.get(index, ()))
            # Looked at last: until here the snapshot was told of every change, if it is not released even now.
            if self._released:
                raise UsageError("the snapshot was released and can no longer be read")
        _undo(bits, later)
        return bits

    def read_before(self, index: int, change: SegmentChanges) -> Bits:
        """Return a copy of the bits of a segment as they were before the change that led to this state.

        Raises:
            UsageError: If the snapshot was released.
        """
        bits = self.read(index)
        if bits is self._kept.get(index):
            bits = bits.copy()
        _undo(bits, (change,))
        return bits

    def digest(self, pool: Executor | None = None) -> int:
        """Return the digest of the state as it was."""
        return digest_of(self.schema, self.read, pool=pool)

    def release(self) -> None:
        """Give back what was kept; may be called again."""
        self._released = True
        self._shadow._release(self)
        self._later, self._kept = {}, {}

    def _note(self, index: int, change: SegmentChanges) -> None:
        """Remember a change that is about to be made; the segment's lock is held."""
        if index in self._kept:
            return
        later = self._later.setdefault(index, [])
        if sum(kept.nbytes for kept in later) + change.nbytes > self._shadow._bits[index].nbytes:
            self._keep(index)
        else:
            later.append(change)

    def _keep(self, index: int) -> None:
        """Copy a segment as it was; the segment's lock is held."""
        if index not in self._kept:
            bits = self._shadow._bits[index].copy()
            _undo(bits, tuple(self._later.pop(index, ())))
            self._kept[index] = bits


def _undo(bits: Bits, later: tuple[SegmentChanges, ...]) -> None:
    for change in reversed(later):
        compare.scatter(bits, change.positions, change.old)


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
    """
    check_same_schema(shadow.schema, state.schema)
    # The shadow's own schema object, because its segments are computed once and not anew for each captured state.
    schema = shadow.schema

    def compared(index: int) -> SegmentChanges | None:
        held = shadow.read(index)
        positions, new = [], []
        for piece in schema.segments[index].pieces:
            if piece.tensor in skip:
                continue
            live = state.piece(piece)
            places = find_differing(held[piece.offset : piece.offset + live.size], live)
            if places.size:
                positions.append(places + np.uint32(piece.offset))
                new.append(live.take(places))
        if not positions:
            return None
        where = np.concatenate(positions)
        return SegmentChanges(where, held.take(where), np.concatenate(new))

    return collected(schema, compared, pool=pool)
