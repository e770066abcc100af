"""Byte planes: numbers taken apart byte by byte, each plane stored in the smallest of four ways.

The bytes of one significance behave alike: exponents repeat, low mantissa bytes are noise. A plane of a known number
of bytes is stored as one byte that says how, and then:

    0 raw        the bytes
    1 zstd       length (4 bytes, little endian), one zstd frame (RFC 8878) whose header says the content size
    2 constant   the byte that all of them are
    3 sparse     which bytes are not zero, as a plane of bits (8 to a byte, least significant first), and those bytes
                 as another plane; neither of the two is sparse itself
    A plane of no bytes takes no bytes at all.

A zstd frame spends at least one bit on every byte that it cannot repeat, so that planes that are mostly zero come out
well smaller as sparse.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from .changes import Bits
from .cursor import Cursor
from .dtypes import Order

__all__ = [
    "Bytes",
    "estimate_planes",
    "pack_plane",
    "pack_planes",
    "rotate",
    "thin_out",
    "thinning",
    "unpack_plane",
    "unpack_planes",
    "unrotate",
]

Bytes = npt.NDArray[np.uint8]

_RAW, _ZSTD, _CONSTANT, _SPARSE = range(4)

_WORTH_COMPRESSING = 24
"""Below this many bytes a zstd frame, with its head of about 10, saves nothing."""

_MAX_WINDOW = 8 << 20
"""The window that RFC 8878 asks every decoder to support; a frame that wants more memory is refused."""

_RUN = 1 << 15

_SAMPLE = 1 << 13
"""Values that an estimate looks at: enough for a histogram of 256 bins, few enough to cost nothing."""

_LEAST_BITS = 1.25
"""What zstd spends on a byte at least where bytes do not repeat in long runs, as measured on sparse steps."""

_FRAME_BYTES = 16
"""Heads of a plane and its frame."""


def _compressor() -> zstandard.ZstdCompressor:
    """Return a compressor for planes; one for each call, because they are not safe to share between threads.

    Weights hold no phrases to find. On the exponents of all-MiniLM-L6-v2 in bf16, level 1 gives 0.364 and level 3
    0.411 of the size; looking only for long matches, in a tiny table, gives 0.331 at 2.5 times the speed, because
    chance matches cost more than entropy coding alone. The same settings are also the smallest for step magnitudes.
    """
    settings = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=settings)


def _pack_flat(values: Bytes) -> bytes:
    """Return the plane's bytes, raw, zstd or constant, whichever is smallest."""
    if not values.size:
        return b""
    if not (values != values[0]).any():
        return bytes((_CONSTANT, int(values[0])))
    if values.size >= _WORTH_COMPRESSING:
        frame = _compressor().compress(values.data)
        if len(frame) + 4 < values.size:
            return bytes((_ZSTD,)) + len(frame).to_bytes(4, "little") + frame
    return b"".join((bytes((_RAW,)), values.data))


def pack_plane(values: Bytes) -> bytes:
    """Return a plane's bytes, stored in the smallest way.

    >>> pack_plane(np.full(1000, 65, np.uint8))[1:]
    b'A'

    Args:
        values: uint8, one dimension, contiguous.
    """
    flat = _pack_flat(values)
    if len(flat) <= _WORTH_COMPRESSING or np.count_nonzero(values) * 2 > values.size:
        return flat
    present = values != 0
    marks = _pack_flat(np.packbits(present, bitorder="little"))
    sparse = bytes((_SPARSE,)) + marks + _pack_flat(values[present])
    return min(flat, sparse, key=len)


def _unpack_flat(method: int, cursor: Cursor, size: int) -> Bytes:
    if method == _RAW:
        return np.frombuffer(cursor.take(size), np.uint8)
    if method == _CONSTANT:
        return np.full(size, cursor.u8(), np.uint8)
    if method != _ZSTD:
        raise cursor.corrupt(f"has a plane stored in the unknown way {method}")
    frame = cursor.take(cursor.u32())
    try:
        # The library allocates what the frame's own header asks for, whatever limit it is given: look first.
        head = zstandard.get_frame_parameters(frame)
        if head.content_size != size or head.window_size > max(size, _MAX_WINDOW):
            raise cursor.corrupt(f"has a frame of {head.content_size} bytes where a plane of {size} belongs")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise cursor.corrupt(f"has a plane that cannot be decompressed: {error}") from error
    if len(content) != size:
        raise cursor.corrupt(f"has a frame of {len(content)} bytes where a plane of {size} belongs")
    return np.frombuffer(content, np.uint8)


def unpack_plane(cursor: Cursor, size: int) -> Bytes:
    """Return the plane of `size` bytes that begins at the cursor; uint8, perhaps read-only.

    Never takes more memory than a few times `size`, whatever the bytes say.

    Raises:
        CorruptPayloadError: If the bytes hold no such plane.
    """
    if not size:
        return np.zeros(0, np.uint8)
    method = cursor.u8()
    if method != _SPARSE:
        return _unpack_flat(method, cursor, size)
    marks = _unpack_flat(cursor.u8(), cursor, (size + 7) // 8)
    if size % 8 and int(marks[-1]) >> size % 8:
        raise cursor.corrupt(f"has a sparse plane that marks bytes beyond its {size}")
    present = np.unpackbits(marks, count=size, bitorder="little").view(np.bool_)
    count = int(np.count_nonzero(present))
    values = np.zeros(size, np.uint8)
    if count:
        values[present] = _unpack_flat(cursor.u8(), cursor, count)
    return values


def _bytes_of(values: Bits) -> npt.NDArray[np.uint8]:
    """Return the numbers' bytes, one row for each number, the least significant first."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(values.size, values.dtype.itemsize)


def pack_planes(values: Bits, order: Order = Order.PLAIN) -> bytes:
    """Return numbers as one plane for each of their bytes, the least significant first.

    Args:
        values: The numbers, one dimension.
        order: Of their type; floats are rotated first, see `rotate`.
    """
    planes = np.empty((values.dtype.itemsize, values.size), np.uint8)
    for run in _runs(values.size):
        planes[:, run] = _bytes_of(rotate(values[run], order)).T
    return b"".join(pack_plane(plane) for plane in planes)


def unpack_planes(
    cursor: Cursor,
    size: int,
    dtype: np.dtype[np.unsignedinteger],
    order: Order = Order.PLAIN,
    *,
    out: Bits | None = None,
) -> Bits:
    """Return the `size` numbers whose planes begin at the cursor; the inverse of `pack_planes`.

    Args:
        cursor: Where to read.
        size: How many numbers there must be.
        dtype: Their type.
        order: The one that they were packed with.
        out: Filled and returned, where given: of this size and type, contiguous. After an error it holds anything.

    Raises:
        CorruptPayloadError: If the bytes hold no such planes.
    """
    bits = np.empty(size, dtype) if out is None else out
    rows = bits.view(np.uint8).reshape(size, dtype.itemsize)
    for at in range(dtype.itemsize):
        rows[:, at] = unpack_plane(cursor, size)
    if order is not Order.PLAIN:
        for run in _runs(size):
            bits[run] = unrotate(bits[run], order)
    return bits


def _runs(size: int) -> Iterator[slice]:
    """Yield runs short enough that what is made of them on the way stays in the processor's cache."""
    return (slice(start, start + _RUN) for start in range(0, size, _RUN))


def rotate(bits: Bits, order: Order) -> Bits:
    """Return float patterns rotated left by one bit, other patterns as they are.

    The sign of a weight is a coin flip. At the top it spoils the plane of the exponents; at the bottom it joins the
    mantissa, which is noise already, and bf16's exponent fills the top plane alone.
    """
    if order is Order.PLAIN:
        return bits
    top = bits.dtype.type(bits.dtype.itemsize * 8 - 1)
    return (bits << bits.dtype.type(1)) | (bits >> top)


def unrotate(bits: Bits, order: Order) -> Bits:
    """Return the patterns that `rotate` was given."""
    if order is Order.PLAIN:
        return bits
    top = bits.dtype.type(bits.dtype.itemsize * 8 - 1)
    return (bits >> bits.dtype.type(1)) | (bits << top)


def thin_out(values: Bits) -> Bits:
    """Return an evenly spaced sample that suffices for `estimate_planes`; one dimension, a view."""
    return values[:: thinning(len(values))]


def thinning(size: int) -> int:
    """Return how many values there are for each one that `thin_out` takes, of so many."""
    return size // _SAMPLE + 1


def estimate_planes(sample: Bits, count: int, *, zeros: int = 0) -> int:
    """Return about how many bytes `pack_planes` takes, from the entropy (Shannon 1948) of each plane of a sample.

    Args:
        sample: Some of the numbers, one dimension, at least one.
        count: How many numbers there are.
        zeros: How many zeros stand among them besides.
    """
    planes = _bytes_of(sample)
    estimate = 0.0
    for at in range(planes.shape[1]):
        counts = np.bincount(planes[:, at], minlength=256) * np.float64(count / len(planes))
        counts[0] += zeros
        estimate += _estimate_plane(counts)
    return int(estimate)


def _estimate_plane(counts: npt.NDArray[np.floating]) -> float:
    """Return about how many bytes a plane takes in which each byte occurs so often."""
    total, present = float(counts.sum()), float(counts[1:].sum())
    if counts.max() == total:
        return 2.0
    flat = total / 8 * max(_entropy(counts), _LEAST_BITS)
    marks = total / 64 * max(8 * _entropy(np.array([total - present, present])), _LEAST_BITS)
    sparse = marks + (present / 8 * max(_entropy(counts[1:]), _LEAST_BITS) if present else 0.0)
    return _FRAME_BYTES + min(total, flat, sparse)


def _entropy(counts: npt.NDArray[np.floating]) -> float:
    """Return the bits that one of these takes on average."""
    shares = counts[counts > 0] / counts.sum()
    return -float((shares * np.log2(shares)).sum())
