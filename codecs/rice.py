"""Positions as Golomb-Rice codes of the gaps between them.

Where changes fall at random, gaps follow a geometric distribution, for which this code is optimal to a few hundredths
of a bit (Golomb 1966; Rice and Plaunt 1971). Densities differ from tensor to tensor and from row to row, so that each
block of 128 gaps has a parameter of its own. Codes are limited in length, as in JPEG-LS (Weinberger, Seroussi and
Sapiro 2000), so that one far jump does not spoil its block and no code is longer than 44 bits.

With `width` the bits of the segment's size less one, but at least 1; the gap g = position - previous position - 1,
where -1 stands before the first position; and k the block's parameter, below `width`:

    g >> k < 12   (g >> k) zero bits, a one bit, and the low k bits of g
    otherwise     12 zero bits, and g in `width` bits

Bits fill bytes from the least significant bit up, low bits of g first. The whole is the parameters as a plane of one
byte each, the number of bytes of the codes (4 bytes, little endian), and the codes, the last byte filled with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltabus.bus.errors import UsageError

from .cursor import Cursor
from .kernels import rice as kernels
from .planes import pack_plane, unpack_plane

__all__ = ["MAX_SIZE", "PositionCode"]

MAX_SIZE = 1 << 28
"""The largest segment, in elements."""

_LENGTH_BYTES = 4

_REDUNDANCY = 0.04
"""Bits that a code takes on average beyond the entropy of its gap, as measured."""


def _width(size: int) -> int:
    """Return how many bits hold every gap of a segment; at least one, so that there is a parameter to choose."""
    return max((size - 1).bit_length(), 1)


class PositionCode(NamedTuple):
    """A plan to write positions: how many bytes it takes is known before anything is written.

    Attributes:
        positions: uint32, strictly increasing, each below the segment's size.
        width: Bits of a gap that is written as it is.
        parameters: uint8, one for each block of gaps.
        bits: Length of all codes.
    """

    positions: npt.NDArray[np.uint32]
    width: int
    parameters: npt.NDArray[np.uint8]
    bits: int

    @classmethod
    def of(cls, positions: npt.NDArray[np.uint32], size: int) -> PositionCode:
        """Return the plan that takes the fewest bits.

        Args:
            positions: uint32, at least one.
            size: Elements of the segment.

        Raises:
            UsageError: If the positions do not increase or leave the segment, or the segment is too large.
        """
        if not 0 < size <= MAX_SIZE:
            raise UsageError(f"a segment has 1 to {MAX_SIZE} elements, not {size}; use a smaller `segment_elements`")
        width = _width(size)
        parameters = np.empty(-(-positions.size // kernels.GAPS_IN_BLOCK), np.uint8)
        bits = kernels.choose_parameters(np.ascontiguousarray(positions), size, width, parameters)
        if bits == kernels.NO_PARAMETER:
            raise UsageError(f"positions must increase strictly and stay below the segment's {size} elements")
        return cls(np.ascontiguousarray(positions), width, parameters, bits)

    @property
    def nbytes(self) -> int:
        """At most how many bytes `encode` returns."""
        return 1 + self.parameters.size + _LENGTH_BYTES + (self.bits + 7) // 8

    @staticmethod
    def estimate(positions: npt.NDArray[np.uint32]) -> int:
        """Return about how many bytes positions take, from the mean gap of each block; at least one position."""
        blocks = -(-positions.size // kernels.GAPS_IN_BLOCK)
        bits = kernels.estimate_bits(np.ascontiguousarray(positions), _REDUNDANCY)
        return 1 + blocks + _LENGTH_BYTES + int(bits) // 8

    def encode(self) -> bytes:
        """Return the positions' bytes."""
        words = np.zeros(self.bits // 64 + 1, "<u8")
        kernels.write_gaps(self.positions, self.width, self.parameters, words)
        codes = words.view(np.uint8)[: (self.bits + 7) // 8].tobytes()
        return pack_plane(self.parameters) + len(codes).to_bytes(_LENGTH_BYTES, "little") + codes

    @staticmethod
    def decode(cursor: Cursor, count: int, size: int) -> npt.NDArray[np.uint32]:
        """Return the positions whose bytes begin at the cursor.

        Args:
            cursor: Where to read.
            count: How many positions there must be.
            size: Elements of the segment; all positions are below it.

        Raises:
            CorruptPayloadError: If the bytes do not hold so many positions, strictly increasing and in range.
        """
        if not 0 < count <= size:
            raise cursor.corrupt(f"claims {count} changes in {size} elements")
        width = _width(size)
        parameters = unpack_plane(cursor, -(-count // kernels.GAPS_IN_BLOCK))
        if int(parameters.max()) >= width:
            raise cursor.corrupt(f"has parameter {int(parameters.max())} where gaps have {width} bits")
        codes = cursor.take(cursor.u32())
        # Each code takes a bit or more, so that the memory taken below is bounded by the data that is here.
        if count > len(codes) * 8:
            raise cursor.corrupt(f"claims {count} changes in {len(codes)} bytes of positions")
        words = np.zeros(len(codes) // 8 + 3, "<u8")
        words.view(np.uint8)[: len(codes)] = np.frombuffer(codes, np.uint8)
        positions = np.empty(count, np.uint32)
        bits = kernels.read_gaps(words, len(codes) * 8, size, width, parameters, positions)
        if bits < 0 or (bits + 7) // 8 != len(codes):
            raise cursor.corrupt(f"does not hold {count} positions below {size}")
        if bits % 8 and codes[-1] >> bits % 8:
            raise cursor.corrupt("has bits behind its last position")
        return positions
