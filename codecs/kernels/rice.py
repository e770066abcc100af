"""Loops of the Golomb-Rice coder for positions; `deltabus.codecs.rice` describes the code."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from . import kernel

__all__ = [
    "ESCAPE",
    "GAPS_IN_BLOCK",
    "NO_PARAMETER",
    "Parameters",
    "Positions",
    "Words",
    "choose_parameters",
    "estimate_bits",
    "read_gaps",
    "write_gaps",
]

GAPS_IN_BLOCK = 128
"""Gaps that share a parameter."""

ESCAPE = 12
"""Leading zeros that say that the gap follows as it is."""

NO_PARAMETER = -1
"""What `choose_parameters` answers to positions that do not increase or leave the segment."""

_ZEROS = np.array(
    [min((value & -value).bit_length() - 1, ESCAPE) if value else ESCAPE for value in range(1 << ESCAPE)], np.uint8
)

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.uint32]
Parameters = npt.NDArray[np.uint8]


@kernel
def estimate_bits(positions: Positions, redundancy: float) -> float:
    """Return about how many bits gaps take, from the mean of each block.

    It is the entropy of a geometric distribution of this mean, and what each code takes beyond it; at least one bit.
    """
    total, before = 0.0, -1
    for start in range(0, positions.size, GAPS_IN_BLOCK):
        stop = min(start + GAPS_IN_BLOCK, positions.size)
        last, count = int(np.int64(positions[stop - 1])), stop - start
        mean = (last - before - count) / count
        bits = math.log2(mean + 1) + redundancy
        if mean > 0:
            bits += mean * math.log2((mean + 1) / mean)
        total += count * max(bits, 1.0)
        before = last
    return total


@kernel
def choose_parameters(positions: Positions, size: int, width: int, parameters: Parameters) -> int:
    """Fill in the parameter of each block that takes the fewest bits; return the bits of all, or NO_PARAMETER."""
    gaps = np.empty(GAPS_IN_BLOCK, np.uint32)
    total = 0
    expected = 0
    for block in range(parameters.size):
        start = block * GAPS_IN_BLOCK
        count = min(GAPS_IN_BLOCK, positions.size - start)
        for at in range(count):
            position = int(np.int64(positions[start + at]))
            if position < expected or position >= size:
                return NO_PARAMETER
            gaps[at] = np.uint32(position - expected)
            expected = int(position + 1)
        best = 1 << 62
        for parameter in range(width):
            shift = np.uint32(parameter)
            short = np.uint32(parameter + 1)
            bits = np.uint32(0)
            for at in range(count):
                quotient = gaps[at] >> shift
                bits += quotient + short if quotient < np.uint32(ESCAPE) else np.uint32(ESCAPE + width)
            if bits < best:
                best = int(np.int64(bits))
                parameters[block] = parameter
        total += best
    return total


@kernel
def write_gaps(positions: Positions, width: int, parameters: Parameters, words: Words) -> None:
    """Write the codes of all gaps into zeroed words, least significant bit first."""
    waiting = np.uint64(0)
    filled = 0
    word = 0
    expected = np.uint32(0)
    for at in range(positions.size):
        parameter = int(np.int64(parameters[at // GAPS_IN_BLOCK]))
        gap = np.uint64(positions[at] - expected)
        expected = positions[at] + np.uint32(1)
        quotient = int(np.int64(gap >> np.uint64(parameter)))
        if quotient < ESCAPE:
            low = gap & ((np.uint64(1) << np.uint64(parameter)) - np.uint64(1))
            code = (np.uint64(1) << np.uint64(quotient)) | (low << np.uint64(quotient + 1))
            bits = quotient + 1 + parameter
        else:
            code = gap << np.uint64(ESCAPE)
            bits = ESCAPE + width
        waiting |= code << np.uint64(filled)
        if filled + bits >= 64:
            words[word] = waiting
            word += 1
            # A code is shorter than 64 bits, so `filled` is not 0 here and the shift is less than 64.
            waiting = code >> np.uint64(64 - filled)
            filled += bits - 64
        else:
            filled += bits
    if filled:
        words[word] = waiting


@kernel
def read_gaps(  # noqa: PLR0917 - compiled functions take their arguments by place
    words: Words, bits: int, size: int, width: int, parameters: Parameters, positions: Positions
) -> int:
    """Fill in the positions; return the bits read, or a negative number when the words hold no such positions.

    The words must reach at least 128 bits beyond `bits`, and each parameter be below `width`, which is below 32.
    """
    at_bit = 0
    expected = 0
    for at in range(positions.size):
        if at_bit >= bits:
            return -1
        parameter = np.uint64(parameters[at // GAPS_IN_BLOCK])
        word = at_bit >> 6
        shift = np.uint64(at_bit & 63)
        ahead = words[word] >> shift
        if shift:
            ahead |= words[word + 1] << (np.uint64(64) - shift)
        quotient = int(np.int64(_ZEROS[ahead & np.uint64((1 << ESCAPE) - 1)]))
        if quotient < ESCAPE:
            low = (ahead >> np.uint64(quotient + 1)) & ((np.uint64(1) << parameter) - np.uint64(1))
            gap = int(np.int64((np.uint64(quotient) << parameter) | low))
            at_bit += quotient + 1 + int(np.int64(parameter))
        else:
            gap = int(np.int64((ahead >> np.uint64(ESCAPE)) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))))
            at_bit += ESCAPE + width
        expected += gap
        if expected >= size:
            return -2
        positions[at] = np.uint32(expected)
        expected += 1
    return at_bit
