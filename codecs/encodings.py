"""Encodings: the ways in which a segment's changes are written, and the choice between them.

    name          holds                                          smallest for
    conditional   steps, positions among elements as large       training
    step          positions, signs, how far beyond the next      a handful of small steps
    overwrite     positions, new bits                            steps that are far, as after a reset; any dtype
    dense         a step for every element, most often zero      nearly all changed, in patterns
    full          every element's bits, no base needed           anchors

Each segment is coded by itself, by the encoding that an estimate finds smallest; its name is written in the data. A
further encoding is a class like those below and an entry in `ENCODINGS`. `conditional` is described in a module of its
own; it needs all old bits of the segment at the writer too, and is left out of the choice where they are not at hand.

The bytes, numbers little endian, planes as `deltabus.codecs.planes` and positions as `deltabus.codecs.rice` say:

    overwrite   count (4 bytes), positions, planes of the new bits (floats rotated left by one bit)
    step        count (4 bytes), positions, signs (one bit each, 1 is down, 8 to a byte from the least significant bit)
                as a plane, planes of the magnitudes less one
    dense       planes of the zigzag steps of all elements
    full        planes of the bits of all elements (floats rotated left by one bit)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from deltabus.bus.errors import DivergedError

from .changes import Bits, SegmentChanges
from .checked import check_base, check_changes
from .conditional import Conditional
from .cursor import Cursor
from .held import Held, take, to_host
from .planes import estimate_planes, pack_plane, pack_planes, rotate, thin_out, unpack_plane, unpack_planes
from .rice import PositionCode
from .schema import Segment
from .steps import Steps, advance, advance_zigzag, steps_between, zigzag_between

__all__ = ["ENCODINGS", "FULL", "Encoding", "choose", "decode_full", "encode_full"]

_FEW = 8
"""Where less than one element in so many changes, one number for each element takes more than positions."""

FULL = "full"
"""The name of the encoding that holds a segment's whole state."""


class Encoding(Protocol):
    """One way to write a segment's changes.

    An encoding holds no state and may be used in several threads at once.
    """

    @property
    def name(self) -> str:
        """What the data calls it: at most 32 lower-case letters."""

    @property
    def needs_base(self) -> bool:
        """Whether the writer must give `base`, the bits of the whole segment that the changes start from."""

    def estimate(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> int:
        """Return about how many bytes `encode` would return, in time that grows with the changes alone.

        Does not look whether changes and base fit; `choose` does.
        """

    def encode(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> bytes:
        """Return the changes' bytes.

        Raises:
            UsageError: If the changes do not fit the segment, or `base` is needed and missing or another state.
            SchemaMismatchError: If `base` is needed and not of the segment's size and dtype.
        """

    def decode(self, segment: Segment, data: bytes | memoryview, base: Held) -> SegmentChanges:
        """Return the changes that the bytes hold, checked: one or more, at rising positions in range, none idle.

        Args:
            segment: Where they belong.
            data: What `encode` returned, from outside.
            base: The reader's bits of the whole segment; one dimension, not changed.

        Raises:
            CorruptPayloadError: If the bytes are truncated, damaged or out of range.
            DivergedError: If an element to be overwritten holds its new bits already.
            SchemaMismatchError: If `base` is not of the segment's size and dtype.
        """


class _Overwrite:
    """Positions and new bits: the reader needs nothing to make sense of them."""

    name = "overwrite"
    needs_base = False

    def estimate(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> int:
        new = rotate(thin_out(changes.new), segment.dtype.order)
        return 4 + PositionCode.estimate(changes.positions) + estimate_planes(new, changes.new.size)

    def encode(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> bytes:
        positions = _positions(segment, changes)
        new = pack_planes(changes.new, segment.dtype.order)
        return changes.positions.size.to_bytes(4, "little") + positions.encode() + new

    def decode(self, segment: Segment, data: bytes | memoryview, base: Held) -> SegmentChanges:
        check_base(segment, base)
        cursor = Cursor(data, f"segment {segment.index} ({self.name})")
        count = cursor.u32()
        positions = PositionCode.decode(cursor, count, segment.size)
        new = unpack_planes(cursor, count, segment.dtype.bits, segment.dtype.order)
        cursor.finish()
        old = take(base, positions)
        if (old == new).any():
            at = int(positions[np.argmax(old == new)])
            raise DivergedError(
                f"element {at} of segment {segment.index} holds the bits already that this update is to write; "
                "it was applied before, or the model is another; start again from an anchor"
            )
        return SegmentChanges(positions, old, new)


class _Step:
    """Positions and the way from the old bits, in ULP: the reader needs the old bits at those positions."""

    name = "step"
    needs_base = False

    def estimate(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> int:
        count = changes.positions.size
        beyond = steps_between(thin_out(changes.old), thin_out(changes.new), segment.dtype.order).beyond
        return 4 + PositionCode.estimate(changes.positions) + count // 8 + estimate_planes(beyond, count)

    def encode(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> bytes:
        positions = _positions(segment, changes)
        negative, beyond = steps_between(changes.old, changes.new, segment.dtype.order)
        signs = pack_plane(np.packbits(negative, bitorder="little"))
        return changes.positions.size.to_bytes(4, "little") + positions.encode() + signs + pack_planes(beyond)

    def decode(self, segment: Segment, data: bytes | memoryview, base: Held) -> SegmentChanges:
        check_base(segment, base)
        cursor = Cursor(data, f"segment {segment.index} ({self.name})")
        count = cursor.u32()
        positions = PositionCode.decode(cursor, count, segment.size)
        signs = unpack_plane(cursor, (count + 7) // 8)
        if count % 8 and int(signs[-1]) >> count % 8:
            raise cursor.corrupt(f"has signs beyond its {count} steps")
        beyond = unpack_planes(cursor, count, segment.dtype.bits)
        cursor.finish()
        negative = np.unpackbits(signs, count=count, bitorder="little").view(np.bool_)
        old = take(base, positions)
        new = advance(old, Steps(negative, beyond), segment.dtype.order)
        if (old == new).any():
            raise cursor.corrupt("has a step of nothing")
        return SegmentChanges(positions, old, new)


class _Dense:
    """A step for every element: no positions to write, but all elements to read."""

    name = "dense"
    needs_base = False

    def estimate(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> int:
        count = changes.positions.size
        steps = zigzag_between(thin_out(changes.old), thin_out(changes.new), segment.dtype.order)
        return estimate_planes(steps, count, zeros=segment.size - count)

    def encode(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> bytes:
        check_changes(segment, changes)
        steps = np.zeros(segment.size, segment.dtype.bits)
        steps[changes.positions] = zigzag_between(changes.old, changes.new, segment.dtype.order)
        return pack_planes(steps)

    def decode(self, segment: Segment, data: bytes | memoryview, base: Held) -> SegmentChanges:
        check_base(segment, base)
        cursor = Cursor(data, f"segment {segment.index} ({self.name})")
        steps = unpack_planes(cursor, segment.size, segment.dtype.bits)
        cursor.finish()
        positions = np.flatnonzero(steps).astype(np.uint32)
        if not positions.size:
            raise cursor.corrupt("holds no change")
        old = take(base, positions)
        return SegmentChanges(positions, old, advance_zigzag(old, steps[positions], segment.dtype.order))


ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {each.name: each for each in (Conditional(), _Step(), _Overwrite(), _Dense())}
)
"""The encodings of changes, by name."""


def choose(segment: Segment, changes: SegmentChanges, base: Held | None = None) -> Encoding:
    """Return the encoding that takes the fewest bytes, by estimate.

    Args:
        segment: Where the changes belong.
        changes: What is to be written.
        base: The bits of the whole segment that the changes start from; without it, encodings that need it are left
            out.

    Raises:
        UsageError: If the changes do not fit the segment.
        SchemaMismatchError: If `base` is not of the segment's size and dtype.
    """
    check_changes(segment, changes)
    if base is not None:
        check_base(segment, base)
    sizes: dict[str, int] = {}
    for name, encoding in ENCODINGS.items():
        if base is not None or not encoding.needs_base:
            sizes[name] = encoding.estimate(segment, changes, base)
        # The others take no less than positions do that are written without regard to the old bits; or, where many
        # elements change, all of them alike.
        few = changes.positions.size < segment.size // _FEW
        if few and encoding.needs_base and sizes.get(name, math.inf) <= PositionCode.estimate(changes.positions):
            break
    return ENCODINGS[min(sizes, key=sizes.__getitem__)]


def encode_full(segment: Segment, bits: Held) -> bytes:
    """Return the bytes that hold a segment's whole state.

    Args:
        segment: The segment.
        bits: All its bits, one dimension.

    Raises:
        SchemaMismatchError: If `bits` is not of the segment's size and dtype.
    """
    check_base(segment, bits)
    return pack_planes(to_host(bits), segment.dtype.order)


def decode_full(segment: Segment, data: bytes | memoryview, *, out: Bits | None = None) -> Bits:
    """Return the segment's bits that the bytes hold; the inverse of `encode_full`.

    Args:
        segment: The segment.
        data: What `encode_full` returned, from outside.
        out: Filled and returned, where given: of the segment's size and type. After an error it holds anything.

    Raises:
        CorruptPayloadError: If the bytes are truncated, damaged or out of range.
    """
    cursor = Cursor(data, f"segment {segment.index} ({FULL})")
    bits = unpack_planes(cursor, segment.size, segment.dtype.bits, segment.dtype.order, out=out)
    cursor.finish()
    return bits


def _positions(segment: Segment, changes: SegmentChanges) -> PositionCode:
    check_changes(segment, changes)
    return PositionCode.of(changes.positions, segment.size)
