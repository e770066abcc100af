"""The encoding `conditional`: positions and steps, each coded by what the reader knows of the old value.

An optimizer moves all weights by about as much, so that a small weight, among closely spaced floats, changes far more
often than a large one, and by more steps. So elements are sorted into **classes** by the exponent of their old value;
types without exponents are one class. A position is written as its gap: how many elements of its class were passed
over since the last change in it. Within a class changes fall nearly at random, and nothing is left to know but luck.

Gaps and magnitudes are Golomb-Rice codes (Golomb 1966; Rice and Plaunt 1971) whose parameter follows the mean of the
numbers before, so that there are no tables to store, and quiet rows and tensors cost little. Where the mean is below
2, as gaps where most elements change and magnitudes almost anywhere, the code's unary part goes through an adaptive
binary arithmetic coder (Witten, Neal and Cleary 1987), for which no bit is too small. `docs/format.md` says it all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deltabus.bus.errors import UsageError

from .changes import SegmentChanges
from .checked import check_base, check_changes
from .cursor import Cursor
from .held import Held, sampled
from .kernels import adaptive, classes, sampling
from .planes import thinning
from .ranks import Classes, places_of, ranks_of
from .rice import MAX_SIZE
from .schema import Segment
from .scratch import Scratch
from .steps import Steps, advance, masks_of, steps_between

__all__ = ["Conditional"]

_SCRATCH = Scratch()

_LENGTH_BYTES = 4
_LEAST_ROOM = 8192

_CHANGES_IN_STRETCH = 1024
_MOST_STRETCHES = 16
"""An estimate looks at stretches of the segment one by one, as the parameters do that follow the mean."""

_REDUNDANCY = 1.015
"""What adapting takes beyond the entropy, as measured on training steps."""

_CLASS_BYTES = 3
"""What the count and the first two parameters of a class take, about."""


class Conditional:
    """Gaps within classes of old values, and steps: writer and reader need all old bits of the segment."""

    name = "conditional"
    needs_base = True

    def estimate(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> int:
        """Return about how many bytes `encode` would return, in time that grows with the changes alone.

        The entropy of changed or not in each class, the bit length of magnitudes in each class, and what is left.

        Raises:
            UsageError: If `base` is missing.
        """
        base = _given(segment, base)
        classed, count = Classes.of(segment.dtype), changes.positions.size
        stretches = min(max(count // _CHANGES_IN_STRETCH, 1), _MOST_STRETCHES)
        changed, held = (np.zeros((stretches, classes.CLASSES)) for _ in range(2))
        magnitudes = np.zeros((segment.dtype.size * 8 + 1, classes.CLASSES))
        positions, old, new = changes.positions, changes.old, changes.new
        stride, masks = thinning(count), masks_of(segment.dtype.bits, segment.dtype.order)
        beyond_first = sampling.count_changed(
            positions, old, new, stride, segment.size, *classed, *masks, changed, magnitudes
        )
        # The same elements, wherever they lie: half of a sample are enough.
        if isinstance(base, Tensor):
            sampling.count_held(sampled(base)[::2].copy(), 1, *classed, held)
        else:
            sampling.count_held(base, 2 * thinning(segment.size), *classed, held)
        weight, weight_held = count / changed.sum(), segment.size / held.sum()
        bits = sampling.entropy_of_choice(changed, weight, held, weight_held)
        bits = _REDUNDANCY * (bits + weight * (sampling.entropy(magnitudes) + beyond_first)) + count
        return _LENGTH_BYTES + int(bits) // 8 + _CLASS_BYTES * int(np.count_nonzero(changed.any(axis=0)))

    def encode(self, segment: Segment, changes: SegmentChanges, base: Held | None = None) -> bytes:
        """Return the changes' bytes.

        Args:
            segment: Where they belong.
            changes: What to write.
            base: The bits of the whole segment that the changes start from; one dimension, not changed.

        Raises:
            UsageError: If the changes do not fit the segment, or `base` is missing or not what they start from.
            SchemaMismatchError: If `base` is not of the segment's size and dtype.
        """
        check_changes(segment, changes)
        base = _given(segment, base)
        check_base(segment, base)
        counts, order, gaps = ranks_of(segment, base, changes, _SCRATCH)
        negative, beyond = steps_between(changes.old, changes.new, segment.dtype.order)
        # One width for all types, because the loops take seconds to compile.
        magnitudes = _SCRATCH.array("magnitudes", beyond.size, np.uint64)
        magnitudes[:] = beyond
        room = _LEAST_ROOM + gaps.size // 4
        while True:
            code, raw = (
                _SCRATCH.array(name, room, kind, zeros=True) for name, kind in (("code", "u4"), ("raw", "<u8"))
            )
            words, bits, low, span = adaptive.write_changes(counts, order, gaps, magnitudes, code, raw, *_contexts())
            if words != adaptive.NO_ROOM:
                break
            room *= 2
        coded = _ended(code[:words], int(low), int(span))
        tail = raw.view(np.uint8)[: (bits + 7) // 8].tobytes()
        signs = np.packbits(negative, bitorder="little").tobytes()
        return b"".join((len(coded).to_bytes(_LENGTH_BYTES, "little"), coded, tail, signs))

    def decode(self, segment: Segment, data: bytes | memoryview, base: Held) -> SegmentChanges:
        """Return the changes that the bytes hold, checked: one or more, at rising positions in range, none idle.

        Args:
            segment: Where they belong.
            data: What `encode` returned, from outside.
            base: The reader's bits of the whole segment; one dimension, not changed.

        Raises:
            CorruptPayloadError: If the bytes are truncated, damaged or out of range, or the base is another state.
            SchemaMismatchError: If `base` is not of the segment's size and dtype.
        """
        check_base(segment, base)
        cursor = Cursor(data, f"segment {segment.index} ({self.name})")
        coded = cursor.take(cursor.u32())
        tail = np.frombuffer(cursor.rest(), np.uint8)
        code = np.frombuffer(bytes(coded) + bytes(-len(coded) % 4), ">u4").astype(np.uint32)
        raw = np.zeros(tail.size // 8 + 2, "<u8")
        raw.view(np.uint8)[: tail.size] = tail
        chances, used = _contexts()
        counts, state = np.zeros(Classes.of(segment.dtype).number, np.int64), np.zeros(4, np.uint64)
        count = adaptive.read_counts(code, raw, state, chances, used, counts)
        # Each change has a sign of one bit, so that the memory taken below is bounded by the data that is here.
        if not 0 < count <= min(segment.size, tail.size * 8):
            raise cursor.corrupt(f"claims {count if count >= 0 else 'no possible number of'} changes")
        gaps, beyond = (
            _SCRATCH.array(*each) for each in (("gaps", count, np.uint32), ("magnitudes", count, np.uint64))
        )
        limits = np.array([segment.size, 1 << segment.dtype.size * 8 - 1], np.uint64)
        if adaptive.read_changes(counts, code, raw, state, chances, used, limits, gaps, beyond):
            raise cursor.corrupt("holds gaps or steps that are out of range")
        if len(coded) > 4 * int(state[2]) or (len(coded) and not coded[-1]):
            raise cursor.corrupt("has code behind its last change")
        negative = _signs(cursor, tail, int(state[3]), count)
        positions, order, old = places_of(segment, base, counts, gaps, _SCRATCH)
        if positions.size != count:
            lost = count - positions.size
            raise cursor.corrupt(f"has {count} changes, of which {lost} have no place in the state read")
        magnitudes = beyond.take(order, out=_SCRATCH.array("in order", count, np.uint64), mode="clip")
        steps = Steps(negative, magnitudes)
        return SegmentChanges(positions, old, advance(old, steps, segment.dtype.order))


def _given(segment: Segment, base: Held | None) -> Held:
    if segment.size > MAX_SIZE:
        raise UsageError(
            f"a segment has 1 to {MAX_SIZE} elements, not {segment.size}; use a smaller `segment_elements`"
        )
    if base is None:
        raise UsageError(
            f"segment {segment.index} can be written as 'conditional' only beside the state that its changes start "
            "from; pass `base`, or use another encoding"
        )
    return base


def _contexts() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
    return (
        np.empty(adaptive.CONTEXTS, np.uint64),
        np.empty(adaptive.CONTEXTS, np.uint8),
    )


def _ended(words: npt.NDArray[np.uint32], low: int, span: int) -> bytes:
    """Return the code with its end: the fewest bytes whose continuation with zeros lies in the last interval."""
    code = words.astype(">u4").tobytes()
    for kept in range(9):
        unit = 1 << 8 * (8 - kept)
        end = -(-low // unit) * unit
        if end < low + span:
            break
    value = (int.from_bytes(code, "big") << 64) + end
    return value.to_bytes(len(code) + 8, "big").rstrip(b"\0")


def _signs(cursor: Cursor, tail: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.bool_]:
    """Return the signs that stand behind so many raw bits, checked: all bytes are used, and what fills them is zero."""
    stop = (bits + 7) // 8
    signs = tail[stop:]
    if signs.size != (count + 7) // 8:
        raise cursor.corrupt(f"has {tail.size} bytes where {bits} bits and {count} signs belong")
    if (bits % 8 and tail[stop - 1] >> bits % 8) or (count % 8 and signs[-1] >> count % 8):
        raise cursor.corrupt("has bits behind its last change")
    return np.unpackbits(signs, count=count, bitorder="little").view(np.bool_)
