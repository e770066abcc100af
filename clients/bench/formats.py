"""The formats that others ship, each written here from its public description, one tensor at a time.

Nothing is counted for what they keep beside the arrays (names, shapes, headers), so their figures are lower bounds. All
hold the new bits exactly, also those whose originals add differences, which bf16 cannot do without rounding. They were
made for bf16; other dtypes are written in the same way, an element as wide as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from deltabus.codecs.changes import Bits

__all__ = ["FORMATS", "Format", "size_of"]

_Array = npt.NDArray[np.unsignedinteger]
_Buffer = bytes | _Array

_LEVEL = 1


class Format(Protocol):
    """One way to write what differs between two states of a tensor."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def used_by(self) -> str:
        """Who ships it, or shipped it."""

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        """Return what is sent; both arrays in the tensor's shape, contiguous."""

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        """Write the new bits into an array that holds the old ones."""


def size_of(sent: Sequence[_Buffer]) -> int:
    """Return how many bytes are sent."""
    return sum(part.nbytes if isinstance(part, np.ndarray) else len(part) for part in sent)


def _compress(*parts: _Array) -> bytes:
    joined = b"".join(part.tobytes() for part in parts)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(joined)


def _decompress(frame: _Buffer) -> bytes:
    return zstandard.ZstdDecompressor().decompress(bytes(frame))


def _gaps(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many elements lie between each position and the one before."""
    return np.diff(positions, prepend=-1) - 1


def _positions(gaps: _Array) -> npt.NDArray[np.int64]:
    positions: npt.NDArray[np.int64] = np.cumsum(gaps.astype(np.int64) + 1) - 1
    return positions


def _narrow(values: npt.NDArray[np.int64], narrow: type[np.unsignedinteger]) -> _Array:
    """Return the values in the narrow type if all of them fit it, in 32 bits otherwise."""
    fits = not values.size or int(values.max()) <= np.iinfo(narrow).max
    return values.astype(narrow if fits else np.uint32)


def _width(bits: Bits) -> int:
    """Return the length of a row; of what has no rows, 1."""
    return max(1, bits.shape[-1]) if bits.ndim else 1


class _Index:
    name, used_by = "int32 index + value", "TRL (first), vLLM sparse NCCL, verl, vime, AstraFlow"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        positions = np.flatnonzero(old.ravel() != new.ravel())
        return positions.astype(np.uint32), new.ravel()[positions]

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        positions, values = sent
        assert isinstance(positions, np.ndarray)
        held.reshape(-1)[positions] = values


class _Gap:
    name, used_by = "uint16 gap + value", "TRL (third)"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        positions = np.flatnonzero(old.ravel() != new.ravel())
        return _narrow(_gaps(positions), np.uint16), new.ravel()[positions]

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        gaps, values = sent
        held.reshape(-1)[_positions(gaps)] = values  # type: ignore[arg-type]


class _Varint:
    name, used_by = "LEB128 gap + value", "AuroraRL, SparrowRL"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        positions = np.flatnonzero(old.ravel() != new.ravel())
        gaps = _gaps(positions)
        lengths = np.ones(gaps.size, np.int64)
        for bits in (7, 14, 21, 28):
            lengths += gaps >= 1 << bits
        starts = np.cumsum(lengths) - lengths
        codes = np.zeros(int(lengths.sum()), np.uint8)
        for byte in range(5):
            here = np.flatnonzero(lengths > byte)
            more = np.where(lengths[here] > byte + 1, 0x80, 0)
            codes[starts[here] + byte] = ((gaps[here] >> 7 * byte) & 0x7F) | more
        return codes, new.ravel()[positions]

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        codes, values = sent
        assert isinstance(codes, np.ndarray)
        ends = np.flatnonzero(codes < 0x80)
        starts = np.concatenate((np.zeros(min(1, ends.size), np.int64), ends[:-1] + 1))
        gaps = np.zeros(ends.size, np.int64)
        for byte in range(5):
            here = np.flatnonzero(ends - starts >= byte)
            gaps[here] |= (codes[starts[here] + byte].astype(np.int64) & 0x7F) << 7 * byte
        held.reshape(-1)[_positions(gaps.view(np.uint64))] = values


class _RowColumn:
    name, used_by = "row u8, column u16 + value, zstd-1", "grail, PULSE"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        positions = np.flatnonzero(old.ravel() != new.ravel())
        rows, columns = np.divmod(positions, _width(old))
        values = new.ravel()[positions]
        down = np.diff(rows, prepend=0)
        # Columns are counted from the one before in the same row, and from 0 in a new one.
        across = np.where(down > 0, columns, np.diff(columns, prepend=0))
        downs, acrosses = _narrow(down, np.uint8), _narrow(across, np.uint16)
        head = np.array([values.size, downs.itemsize, acrosses.itemsize], np.uint32)
        return (_compress(head, downs, acrosses, values),)

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        data = _decompress(sent[0])
        count, wide, wider = (int(value) for value in np.frombuffer(data, np.uint32, 3))
        down = np.frombuffer(data, f"<u{wide}", count, 12).astype(np.int64)
        across = np.frombuffer(data, f"<u{wider}", count, 12 + count * wide).astype(np.int64)
        values = np.frombuffer(data, held.dtype, count, 12 + count * (wide + wider))
        sums = np.cumsum(across)
        first = np.flatnonzero(down > 0)
        before = np.concatenate((np.zeros(1, np.int64), sums[first] - across[first]))
        columns = sums - before[np.cumsum(down > 0)]
        held.reshape(-1)[np.cumsum(down) * _width(held) + columns] = values


class _Bytes:
    name, used_by = "u32 byte positions + bytes, zstd-1", "slime (overwrite)"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        before, after = (bits.reshape(-1).view(np.uint8) for bits in (old, new))
        positions = np.flatnonzero(before != after)
        return (_compress(positions.astype(np.uint32), after[positions]),)

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        data = _decompress(sent[0])
        count = len(data) // 5
        held.reshape(-1).view(np.uint8)[np.frombuffer(data, np.uint32, count)] = np.frombuffer(
            data, np.uint8, -1, 4 * count
        )


class _DenseXor:
    name, used_by = "dense XOR, zstd-1", "slime, miles, vime, stitch, ModelExpress"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        return (zstandard.ZstdCompressor(level=_LEVEL).compress((old ^ new).data),)

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        held ^= np.frombuffer(_decompress(sent[0]), held.dtype).reshape(held.shape)


class _GapXor:
    name, used_by = "uint16 gap + XOR, zstd-1", "NeMo-RL"

    def encode(self, old: Bits, new: Bits) -> Sequence[_Buffer]:
        positions = np.flatnonzero(old.ravel() != new.ravel())
        gaps = _narrow(_gaps(positions), np.uint16)
        xor = old.ravel()[positions] ^ new.ravel()[positions]
        return (_compress(np.array([xor.size, gaps.itemsize], np.uint32), gaps, xor),)

    def decode(self, sent: Sequence[_Buffer], held: Bits) -> None:
        data = _decompress(sent[0])
        count, wide = (int(value) for value in np.frombuffer(data, np.uint32, 2))
        gaps = np.frombuffer(data, f"<u{wide}", count, 8)
        flat = held.reshape(-1)
        flat[_positions(gaps)] ^= np.frombuffer(data, held.dtype, count, 8 + count * wide)


_ALL: tuple[Format, ...] = (_Index(), _Bytes(), _Gap(), _Varint(), _RowColumn(), _DenseXor(), _GapXor())

FORMATS: Mapping[str, Format] = MappingProxyType({each.name: each for each in _ALL})
"""The published formats of changes, by name."""
