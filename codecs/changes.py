"""Changes: what differs between two states of one schema, element by element, with both bit patterns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError

from .ahead import in_order
from .kernels import compare
from .kernels.words import LANES_BYTES
from .schema import Piece, Schema, Segment, TensorSpec

__all__ = [
    "Bits",
    "Changes",
    "Differing",
    "Gathered",
    "SegmentChanges",
    "changes_between",
    "changes_in_segment",
    "check_same_schema",
    "collected",
    "compose",
    "compose_in_segment",
    "diverged",
    "find_differing",
    "locate",
    "parts_of",
    "reverse",
    "reversed_in_segment",
    "validate",
]

_AHEAD = 64

Bits = npt.NDArray[np.unsignedinteger]
"""Bit patterns of elements: uint8, uint16, uint32 or uint64, as the dtype is wide."""


@dataclass(frozen=True, slots=True)
class SegmentChanges:
    """The changed elements of one segment.

    Attributes:
        positions: Where, counted in the segment; uint32, strictly increasing, at least one.
        old: The bits before.
        new: The bits after; each differs from `old`.
    """

    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the three arrays take."""
        return self.positions.nbytes + self.old.nbytes + self.new.nbytes


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two states of one schema.

    Attributes:
        schema: Of both states.
        segments: Changed elements by segment index; segments without changes are left out.
    """

    schema: Schema
    segments: Mapping[int, SegmentChanges]

    @property
    def count(self) -> int:
        """Number of changed elements."""
        return sum(segment.positions.size for segment in self.segments.values())


def check_same_schema(expected: Schema, found: Schema) -> None:
    """Check that two states have the same tensors, cut in the same way.

    Raises:
        SchemaMismatchError: If not; it names the first tensor that differs, and how.
    """
    if expected is found or expected == found:
        return
    ours, theirs = ({tensor.name: tensor for tensor in schema.tensors} for schema in (expected, found))
    for name in sorted({*ours, *theirs}):
        if name not in theirs or name not in ours:
            raise SchemaMismatchError(f"tensor {name!r} is in only one of the two states", tensor=name)
        for field in ("dtype", "shape", "aliases"):
            here, there = getattr(ours[name], field), getattr(theirs[name], field)
            if here != there:
                raise SchemaMismatchError(f"{field} of tensor {name!r} is {there}, expected {here}", tensor=name)
    raise SchemaMismatchError(
        f"segments have {found.segment_elements} elements, expected {expected.segment_elements}; or the formats differ"
    )


def parts_of(segment: Segment, change: SegmentChanges) -> list[tuple[Piece, slice]]:
    """Return each piece that a segment's change touches, and which of the changed elements lie in it."""
    inner = np.array([piece.offset for piece in segment.pieces[1:]], change.positions.dtype)
    bounds = [0, *np.searchsorted(change.positions, inner).tolist(), change.positions.size]
    return [
        (p, slice(low, high)) for p, low, high in zip(segment.pieces, bounds, bounds[1:], strict=False) if low < high
    ]


def locate(schema: Schema, index: int, position: int) -> tuple[TensorSpec, int]:
    """Return the tensor that a position of a segment belongs to, and the element's row-major number in it."""
    pieces = schema.segments[index].pieces
    piece = pieces[bisect_right(pieces, position, key=lambda piece: piece.offset) - 1]
    return schema.tensors[piece.tensor], piece.start + position - piece.offset


def diverged(schema: Schema, index: int, position: int, *, held: int, expected: int) -> DivergedError:
    """Return the error for an element that does not hold the bits that a change starts from."""
    tensor, element = locate(schema, index, position)
    width = 2 + 2 * schema.segments[index].dtype.size
    return DivergedError(
        f"tensor {tensor.name!r} holds {held:#0{width}x} at element {element}, but the change starts from "
        f"{expected:#0{width}x}; nothing was changed, load an anchor to get back in step",
        tensor=tensor.name,
    )


def validate(changes: Changes) -> None:
    """Check that changes are well formed, in O(changed).

    Raises:
        CorruptPayloadError: If a segment does not exist or is empty, arrays differ in length or type, positions are not
            strictly increasing or out of range, or an element does not change.
    """
    segments = changes.schema.segments
    for index, change in changes.segments.items():
        if not 0 <= index < len(segments):
            raise CorruptPayloadError(f"changes name segment {index} of a state of {len(segments)} segments")
        segment, positions = segments[index], change.positions
        if positions.dtype != np.uint32 or {change.old.dtype, change.new.dtype} != {segment.dtype.bits}:
            raise CorruptPayloadError(
                f"changes of segment {index} have arrays of other types than {segment.dtype.bits}"
            )
        if not positions.size or {positions.shape, change.old.shape, change.new.shape} != {(positions.size,)}:
            raise CorruptPayloadError(f"changes of segment {index} are empty or have arrays of different lengths")
        wrong = compare.first_malformed(positions, change.old, change.new, segment.size)
        if wrong >= 0:
            if change.old[wrong] == change.new[wrong]:
                raise CorruptPayloadError(f"changes of segment {index} hold an element that does not change")
            raise CorruptPayloadError(f"positions in segment {index} do not increase strictly below {segment.size}")


def reverse(changes: Changes) -> Changes:
    """Return the changes that lead back."""
    return Changes(changes.schema, {index: reversed_in_segment(each) for index, each in changes.segments.items()})


def reversed_in_segment(change: SegmentChanges) -> SegmentChanges:
    """Return the changes of one segment that lead back."""
    return SegmentChanges(change.positions, change.new, change.old)


def compose(first: Changes, second: Changes) -> Changes:
    """Return the changes equal to applying `first` and then `second`.

    An element that returns to its old bits is left out.

    Raises:
        SchemaMismatchError: If the two are of different schemas.
        DivergedError: If `second` does not start from the bits that `first` leaves at an element that both change.
    """
    check_same_schema(first.schema, second.schema)
    segments: dict[int, SegmentChanges] = {}
    for index in sorted({*first.segments, *second.segments}):
        composed = compose_in_segment(first.schema, index, first.segments.get(index), second.segments.get(index))
        if composed is not None:
            segments[index] = composed
    return Changes(first.schema, segments)


def compose_in_segment(
    schema: Schema, index: int, first: SegmentChanges | None, second: SegmentChanges | None
) -> SegmentChanges | None:
    """Return what one segment's changes amount to, one after the other; None is no change.

    Raises:
        DivergedError: If `second` does not start from the bits that `first` leaves at an element that both change.
    """
    if first is None or second is None:
        return first or second
    room = first.positions.size + second.positions.size
    positions, old, new = np.empty(room, np.uint32), np.empty(room, first.old.dtype), np.empty(room, first.old.dtype)
    count, conflict = compare.merge(
        first.positions, first.old, first.new, second.positions, second.old, second.new, positions, old, new
    )
    if conflict >= 0:
        position = second.positions[conflict]
        held = first.new[np.searchsorted(first.positions, position)]
        raise diverged(schema, index, int(position), held=int(held), expected=int(second.old[conflict]))
    return SegmentChanges(positions[:count].copy(), old[:count].copy(), new[:count].copy()) if count else None


class Differing(NamedTuple):
    """Where two arrays differ.

    Attributes:
        positions: In increasing order; uint32.
        old: The first array's elements there.
        new: The second's.
    """

    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits


def find_differing(old: Bits, new: Bits) -> Differing:
    """Return where two contiguous arrays of equal length and type differ, and what they hold there.

    Takes memory in proportion to the differences.
    """
    found = Gathered(old.dtype, old.size)
    found.add(old, new)
    return found.taken()


class Gathered:
    """Where several pairs of arrays differ, one behind the other; may be used again once that was taken.

    Args:
        dtype: Of the arrays.
        size: About how many elements they have together.
    """

    def __init__(self, dtype: np.dtype[np.unsignedinteger], size: int) -> None:
        self._lanes = LANES_BYTES // dtype.itemsize
        self._found = _room(dtype, compare.CHUNK * self._lanes + size // 64)
        self._work = compare.room()

    def add(self, old: Bits, new: Bits, origin: int = 0) -> None:
        """Add where two contiguous arrays of equal length differ.

        Args:
            old: What was there.
            new: What there is.
            origin: The position of their first elements.
        """
        at = 0
        if old.flags.aligned and new.flags.aligned:
            while True:
                at = compare.find_differing(old, new, at, origin, self._work, *self._found)
                if old.size - at < self._lanes:
                    break
                self._grow(self._found.positions.size)
        rest = np.flatnonzero(old[at:] != new[at:]).astype(np.uint32) + np.uint32(at)
        if rest.size:
            self.put(Differing(rest, old[rest], new[rest]), origin)

    def put(self, found: Differing, origin: int = 0) -> None:
        """Add what was found elsewhere, at positions that are counted from `origin` on."""
        filled = int(self._work.filled[0])
        end = filled + found.positions.size
        self._grow(end - self._found.positions.size)
        place = slice(filled, end)
        np.add(found.positions, np.uint32(origin), out=self._found.positions[place])
        self._found.old[place], self._found.new[place] = found.old, found.new
        self._work.filled[0] = end

    def taken(self) -> Differing:
        """Return what was found, and begin anew."""
        found = Differing(*(each[: int(self._work.filled[0])].copy() for each in self._found))
        self._work.filled[0] = 0
        return found

    def changes(self) -> SegmentChanges | None:
        """Return what was found as the changes of a segment; None when nothing differs."""
        return SegmentChanges(*self.taken()) if self._work.filled[0] else None

    def _grow(self, count: int) -> None:
        if count > 0:
            more = _room(self._found.old.dtype, count)
            self._found = Differing(*(np.concatenate(pair) for pair in zip(self._found, more, strict=True)))


def _room(dtype: np.dtype[np.unsignedinteger], count: int) -> Differing:
    return Differing(np.empty(count, np.uint32), np.empty(count, dtype), np.empty(count, dtype))


def changes_in_segment(old: Bits, new: Bits) -> SegmentChanges | None:
    """Return what differs between two states of a segment; None when nothing does."""
    found = Gathered(old.dtype, old.size)
    found.add(old, new)
    return found.changes()


def collected(
    schema: Schema, compared: Callable[[int], SegmentChanges | None], *, pool: Executor | None = None
) -> Changes:
    """Return the changes that a function finds in each segment of a schema, None where there are none."""
    found = enumerate(in_order(compared, range(len(schema.segments)), pool=pool, ahead=_AHEAD))
    return Changes(schema, {index: change for index, change in found if change is not None})


def changes_between(
    schema: Schema, old: Callable[[int], Bits], new: Callable[[int], Bits], *, pool: Executor | None = None
) -> Changes:
    """Return what differs between two states, each given by a function from segment index to that segment's bits."""
    return collected(schema, lambda index: changes_in_segment(old(index), new(index)), pool=pool)
