"""Changes: what differs between two states of one schema, element by element, with both bit patterns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError

from .ahead import in_order
from .kernels import compare
from .schema import Piece, Schema, Segment, TensorSpec

__all__ = [
    "Bits",
    "Changes",
    "SegmentChanges",
    "changes_between",
    "changes_in_segment",
    "check_same_schema",
    "collected",
    "compose",
    "diverged",
    "find_differing",
    "locate",
    "parts_of",
    "reverse",
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
        if positions[-1] >= segment.size or not np.all(positions[1:] > positions[:-1]):
            raise CorruptPayloadError(f"positions in segment {index} do not increase strictly below {segment.size}")
        if np.any(change.old == change.new):
            raise CorruptPayloadError(f"changes of segment {index} hold an element that does not change")


def reverse(changes: Changes) -> Changes:
    """Return the changes that lead back."""
    return Changes(
        changes.schema,
        {i: SegmentChanges(change.positions, change.new, change.old) for i, change in changes.segments.items()},
    )


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
        a, b = first.segments.get(index), second.segments.get(index)
        if a is None or b is None:
            segments[index] = a or b  # type: ignore[assignment]  # one of the two is there
            continue
        room = a.positions.size + b.positions.size
        positions, old, new = np.empty(room, np.uint32), np.empty(room, a.old.dtype), np.empty(room, a.old.dtype)
        count, conflict = compare.merge(a.positions, a.old, a.new, b.positions, b.old, b.new, positions, old, new)
        if conflict >= 0:
            position = b.positions[conflict]
            held = a.new[np.searchsorted(a.positions, position)]
            raise diverged(first.schema, index, int(position), held=int(held), expected=int(b.old[conflict]))
        if count:
            segments[index] = SegmentChanges(positions[:count].copy(), old[:count].copy(), new[:count].copy())
    return Changes(first.schema, segments)


def find_differing(old: Bits, new: Bits) -> npt.NDArray[np.uint32]:
    """Return the positions at which two contiguous arrays of equal length and type differ, in increasing order.

    Takes memory in proportion to the differences.
    """
    width = old.itemsize
    before, after = (array.__array_interface__["data"][0] for array in (old, new))
    head = -before % 8 // width
    words = (old.size - head) * width // 8
    if words < 8 or (before - after) % 8 or before % width:
        return np.flatnonzero(old != new).astype(np.uint32)
    tail = head + words * 8 // width
    positions, filled, at = np.empty(compare.CHUNK * 8 + old.size // 64 + 1, np.uint32), 0, head
    while at < tail:
        before_left, after_left = old[at:tail], new[at:tail]
        compared, filled = compare.find_differing(
            before_left, after_left, before_left.view(np.uint64), after_left.view(np.uint64), at, positions, filled
        )
        at += compared * 8 // width
        if at < tail:
            positions = np.concatenate((positions, np.empty_like(positions)))
    edges = np.flatnonzero(old[:head] != new[:head]), np.flatnonzero(old[tail:] != new[tail:])
    return np.concatenate(
        (edges[0].astype(np.uint32), positions[:filled], edges[1].astype(np.uint32) + np.uint32(tail))
    )


def changes_in_segment(old: Bits, new: Bits) -> SegmentChanges | None:
    """Return what differs between two states of a segment; None when nothing does."""
    positions = find_differing(old, new)
    return SegmentChanges(positions, old.take(positions), new.take(positions)) if positions.size else None


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
