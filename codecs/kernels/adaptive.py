"""Loops of the adaptive code for counts, gaps and magnitudes; `docs/format.md` describes the code.

An arithmetic coder is three numbers that the loops hand on: `low`, `span` and the words filled for writing; `offset`
(how far the code lies above `low`), `span` and the words taken for reading. Beside it run raw bits, of which `at` are
written or read. `chances` and `used` are the contexts. A series of numbers, gaps or magnitudes, has a total and a count
of those before, and the parameter that follows from them.

All of these are unsigned numbers that live in registers: a loop runs once for each change, and waits for itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import inlined, loop
from .words import leading_zeros, trailing_zeros

__all__ = ["CONTEXTS", "DAMAGED", "NO_ROOM", "read_changes", "read_counts", "write_changes"]

NO_ROOM = -1
"""What `write_changes` answers when its output does not fit; call again with more room."""

DAMAGED = -1
"""What the reading loops answer to bits that were never written so."""

CONTEXTS = 288
"""Size of `chances` and `used`."""

_ESCAPE = 16
_PER_CLASS = 32
_COUNTS, _COUNTS_ON, _PARAMETERS = (np.uint64(context) for context in (32, 96, 160))
_UNARY = np.uint64(64)

_MOST = 43
_LARGEST_SUMMAND = np.uint64(1 << _MOST)

# How far a chance moves when its context is used for the n-th time, of 2^16: 1 / (n + 1.5), after Krichevsky and
# Trofimov (1981), until it is about 1 / 128.
_RATES = np.array([(1 << 17) // (2 * n + 3) for n in range(128)], np.uint64)
_LAST_RATE = np.uint8(_RATES.size - 1)

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic. And
# places are unsigned, because others could count from the end, which is looked at each time.
_0, _1, _2, _6, _8, _16, _32, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 6, 8, 16, 32, 63, 64))
_WINDOW = np.uint64(32)
_ZEROS = np.uint64(_ESCAPE)
_END_OF_ZEROS = np.uint64(1 << _ESCAPE)
_MOST_PARAMETER = np.uint64(_MOST)
_CERTAIN = np.uint64(1 << 16)
_LEAST_SPAN = np.uint64(1 << 32)
_FULL_SPAN = np.uint64((1 << 64) - 1)
_FULL_WORD = np.uint32((1 << 32) - 1)
_NO_WORD, _ONE_MORE = np.uint32(0), np.uint32(1)

# A change takes at most 32 adaptive bits and the start of a class 88, each at most half a word, as no chance is less
# than 2^-16; raw bits are at most 140.
_CODE_WORDS, _RAW_WORDS = np.uint64(128), np.uint64(8)

_Counts = npt.NDArray[np.int64]
_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]
_Bits = npt.NDArray[np.unsignedinteger]


@inlined
def _write_bit(  # noqa: PLR0917 - compiled functions take their arguments by place
    bit: bool,
    context: np.uint64,
    low: np.uint64,
    span: np.uint64,
    filled: np.uint64,
    code: _U32,
    chances: _U64,
    used: _U8,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    chance, uses = chances[context], used[context]
    rate = _RATES[uses]
    used[context] = uses + np.uint8(uses < _LAST_RATE)
    bound = (span >> _16) * chance
    if bit:
        span = bound
        chances[context] = chance + (((_CERTAIN - chance) * rate) >> _16)
    else:
        low += bound
        if low < bound:
            word = filled - _1
            while code[word] == _FULL_WORD:
                code[word] = _NO_WORD
                word -= _1
            code[word] += _ONE_MORE
        span -= bound
        chances[context] = chance - ((chance * rate) >> _16)
    if span < _LEAST_SPAN:
        code[filled] = np.uint32(low >> _32)
        filled += _1
        low <<= _32
        span <<= _32
    return low, span, filled


@loop
def _write_unary(  # noqa: PLR0917 - compiled functions take their arguments by place
    value: np.uint64,
    context: np.uint64,
    low: np.uint64,
    span: np.uint64,
    filled: np.uint64,
    code: _U32,
    chances: _U64,
    used: _U8,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    place = _0
    while place <= value:
        low, span, filled = _write_bit(place == value, context + place, low, span, filled, code, chances, used)
        place += _1
    return low, span, filled


@inlined
def _write_raw(value: np.uint64, bits: np.uint64, raw: _U64, at: np.uint64) -> np.uint64:
    word, shift = at >> _6, at & _63
    raw[word] |= value << shift
    # Without a branch, which would be mispredicted; in two shifts, because none shifts by 64 bits.
    raw[word + _1] |= (value >> (_63 - shift)) >> _1
    return at + bits


@inlined
def _bit_length(value: np.uint64) -> np.uint64:
    length: np.uint64 = _64 - leading_zeros(value) if value else _0
    return length


@inlined
def _noted(value: np.uint64, total: np.uint64, count: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return total and count with one number more, and the parameter: the largest k with count * 2^k <= total, or 0."""
    total += min(value, _LARGEST_SUMMAND)
    count += _1
    halved = np.uint64(count == _WINDOW)
    total >>= halved
    count >>= halved
    # Without a branch, which would be mispredicted.
    wide, wider = leading_zeros(count), leading_zeros(total | _1)
    parameter = wide - wider if wide > wider else _0
    parameter -= np.uint64((parameter > _0) & (count << parameter > total))
    return total, count, parameter


@inlined
def _write_number(  # noqa: PLR0917 - compiled functions take their arguments by place
    value: np.uint64,
    parameter: np.uint64,
    context: np.uint64,
    low: np.uint64,
    span: np.uint64,
    filled: np.uint64,
    at: np.uint64,
    code: _U32,
    raw: _U64,
    chances: _U64,
    used: _U8,
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    zeros = min(value >> parameter, _ZEROS)
    if not parameter:
        place = _0
        while place <= zeros and place < _ZEROS:
            low, span, filled = _write_bit(place == zeros, context + place, low, span, filled, code, chances, used)
            place += _1
    elif zeros < _ZEROS:
        rest = value & ((_1 << parameter) - _1)
        at = _write_raw((_1 << zeros) | (rest << (zeros + _1)), zeros + _1 + parameter, raw, at)
    else:
        at += _ZEROS
    if zeros == _ZEROS:
        length = _bit_length(value)
        at = _write_raw(length, _6, raw, at)
        at = _write_raw(value, length, raw, at)
    return low, span, filled, at


@inlined
def _forget(chances: _U64, used: _U8, stop: int) -> None:
    for context in range(stop):
        chances[context] = _CERTAIN >> _1
        used[context] = 0


@inlined
def _parameter_for(total: float, count: float) -> np.uint64:
    """Return the parameter for numbers with this sum."""
    parameter = 0
    while parameter < _MOST and (1 << (parameter + 1)) * count <= total:
        parameter += 1
    return np.uint64(parameter)


@loop
def write_changes(  # noqa: PLR0917 - compiled functions take their arguments by place
    counts: _Counts, order: _U32, gaps: _U32, beyond: _Bits, code: _U32, raw: _U64, chances: _U64, used: _U8
) -> tuple[int, int, np.uint64, np.uint64]:
    """Write counts, gaps (class by class) and magnitudes (by position) into zeroed words.

    Returns the words of code and the raw bits written, NO_ROOM for the first when they do not fit; then `low` and
    `span`, which say what may follow the code. 8192 words hold all counts.
    """
    _forget(chances, used, CONTEXTS)
    low, span, filled, at = _0, _FULL_SPAN, _0, _0
    before = _0
    for c in range(counts.size):
        count = np.uint64(counts[c])
        length = _bit_length(count)
        context = _COUNTS_ON if before else _COUNTS
        low, span, filled = _write_unary(length, context, low, span, filled, code, chances, used)
        if length > _1:
            at = _write_raw(count - (_1 << (length - _1)), length - _1, raw, at)
        before = length
    slot, code_size, raw_size = _0, np.uint64(code.size), np.uint64(raw.size)
    for c in range(counts.size):
        stop = slot + np.uint64(counts[c])
        if slot == stop:
            continue
        _forget(chances, used, _PER_CLASS)
        sum_of_gaps, sum_of_magnitudes = 0.0, 0.0
        s = slot
        while s < stop:
            sum_of_gaps += float(gaps[s])
            sum_of_magnitudes += float(beyond[order[s]])
            s += _1
        for_gap = _parameter_for(sum_of_gaps, float(counts[c]))
        for_magnitude = _parameter_for(sum_of_magnitudes, float(counts[c]))
        low, span, filled = _write_unary(for_gap, _PARAMETERS, low, span, filled, code, chances, used)
        low, span, filled = _write_unary(for_magnitude, _PARAMETERS + _UNARY, low, span, filled, code, chances, used)
        gap_total, gap_count, magnitude_total, magnitude_count = _1 << for_gap, _1, _1 << for_magnitude, _1
        while slot < stop:
            if filled + _CODE_WORDS > code_size or (at >> _6) + _RAW_WORDS > raw_size:
                return NO_ROOM, 0, low, span
            gap, magnitude = np.uint64(gaps[slot]), np.uint64(beyond[order[slot]])
            low, span, filled, at = _write_number(gap, for_gap, _0, low, span, filled, at, code, raw, chances, used)
            low, span, filled, at = _write_number(
                magnitude, for_magnitude, _ZEROS, low, span, filled, at, code, raw, chances, used
            )
            gap_total, gap_count, for_gap = _noted(gap, gap_total, gap_count)
            magnitude_total, magnitude_count, for_magnitude = _noted(magnitude, magnitude_total, magnitude_count)
            slot += _1
    return int(np.int64(filled)), int(np.int64(at)), low, span


@inlined
def _read_bit(  # noqa: PLR0917 - compiled functions take their arguments by place
    context: np.uint64, offset: np.uint64, span: np.uint64, taken: np.uint64, code: _U32, chances: _U64, used: _U8
) -> tuple[bool, np.uint64, np.uint64, np.uint64]:
    chance, uses = chances[context], used[context]
    rate = _RATES[uses]
    used[context] = uses + np.uint8(uses < _LAST_RATE)
    bound = (span >> _16) * chance
    bit = offset < bound
    if bit:
        span = bound
        chances[context] = chance + (((_CERTAIN - chance) * rate) >> _16)
    else:
        offset -= bound
        span -= bound
        chances[context] = chance - ((chance * rate) >> _16)
    if span < _LEAST_SPAN:
        span <<= _32
        offset <<= _32
        if taken < np.uint64(code.size):
            offset |= np.uint64(code[taken])
        taken += _1
    return bit, offset, span, taken


@loop
def _read_unary(  # noqa: PLR0917 - compiled functions take their arguments by place
    context: np.uint64, offset: np.uint64, span: np.uint64, taken: np.uint64, code: _U32, chances: _U64, used: _U8
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Read a unary number; `_UNARY` stands for one that is too large."""
    value = _0
    while value < _UNARY:
        bit, offset, span, taken = _read_bit(context + value, offset, span, taken, code, chances, used)
        if bit:
            break
        value += _1
    return value, offset, span, taken


@inlined
def _read_ahead(raw: _U64, at: np.uint64) -> np.uint64:
    """Return the 64 raw bits from this one on; zeros near the end of the words and beyond."""
    word, shift = at >> _6, at & _63
    if word + _1 >= np.uint64(raw.size):
        return _0
    # In two shifts, because none shifts by 64 bits.
    ahead: np.uint64 = (raw[word] >> shift) | ((raw[word + _1] << (_63 - shift)) << _1)
    return ahead


@inlined
def _read_number(  # noqa: PLR0917 - compiled functions take their arguments by place
    parameter: np.uint64,
    context: np.uint64,
    offset: np.uint64,
    span: np.uint64,
    taken: np.uint64,
    at: np.uint64,
    code: _U32,
    raw: _U64,
    chances: _U64,
    used: _U8,
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]:
    zeros = _0
    if not parameter:
        while zeros < _ZEROS:
            bit, offset, span, taken = _read_bit(context + zeros, offset, span, taken, code, chances, used)
            if bit:
                break
            zeros += _1
        value = zeros
    else:
        ahead = _read_ahead(raw, at)
        zeros = trailing_zeros(ahead | _END_OF_ZEROS)
        value = (zeros << parameter) | ((ahead >> (zeros + _1)) & ((_1 << parameter) - _1))
        at += zeros + _1 + parameter if zeros < _ZEROS else _ZEROS
    if zeros == _ZEROS:
        length = _read_ahead(raw, at) & _63
        value = _read_ahead(raw, at + _6) & ((_1 << length) - _1)
        at += _6 + length
    return value, offset, span, taken, at


@loop
def read_counts(  # noqa: PLR0917 - compiled functions take their arguments by place
    code: _U32, raw: _U64, state: _U64, chances: _U64, used: _U8, counts: _Counts
) -> int:
    """Fill in how many changes each class has; returns their sum, or DAMAGED.

    Leaves the coder in `state`, for `read_changes`: offset, span, words of code and raw bits taken. Behind the end of
    the code and of the raw words, of which one more is needed than holds raw bits, all bits count as zero.
    """
    _forget(chances, used, CONTEXTS)
    offset = _0
    for word in range(2):
        offset = (offset << _32) | (np.uint64(code[word]) if word < code.size else _0)
    span, taken, at = _FULL_SPAN, _2, _0
    before = total = _0
    for c in range(counts.size):
        context = _COUNTS_ON if before else _COUNTS
        length, offset, span, taken = _read_unary(context, offset, span, taken, code, chances, used)
        if length > _32:
            return DAMAGED
        if length:
            top = _1 << (length - _1)
            count = top | (_read_ahead(raw, at) & (top - _1))
            counts[c] = np.int64(count)
            at += length - _1
            total += count
        before = length
    state[0], state[1], state[2], state[3] = offset, span, taken, at
    return int(np.int64(total))


@loop
def read_changes(  # noqa: PLR0917 - compiled functions take their arguments by place
    counts: _Counts,
    code: _U32,
    raw: _U64,
    state: _U64,
    chances: _U64,
    used: _U8,
    limits: _U64,
    gaps: _U32,
    beyond: _Bits,
) -> int:
    """Fill in gaps and magnitudes, class by class, and in `state` what was taken; returns 0, or DAMAGED.

    Gaps and magnitudes must be below the two limits.
    """
    offset, span, taken, at = state[0], state[1], state[2], state[3]
    most_gap, most_magnitude = limits[0], limits[1]
    slot = _0
    for c in range(counts.size):
        stop = slot + np.uint64(counts[c])
        if slot == stop:
            continue
        _forget(chances, used, _PER_CLASS)
        for_gap, offset, span, taken = _read_unary(_PARAMETERS, offset, span, taken, code, chances, used)
        if for_gap > _MOST_PARAMETER:
            return DAMAGED
        for_magnitude, offset, span, taken = _read_unary(_PARAMETERS + _UNARY, offset, span, taken, code, chances, used)
        if for_magnitude > _MOST_PARAMETER:
            return DAMAGED
        gap_total, gap_count, magnitude_total, magnitude_count = _1 << for_gap, _1, _1 << for_magnitude, _1
        while slot < stop:
            gap, offset, span, taken, at = _read_number(for_gap, _0, offset, span, taken, at, code, raw, chances, used)
            magnitude, offset, span, taken, at = _read_number(
                for_magnitude, _ZEROS, offset, span, taken, at, code, raw, chances, used
            )
            if gap >= most_gap or magnitude >= most_magnitude:
                return DAMAGED
            gap_total, gap_count, for_gap = _noted(gap, gap_total, gap_count)
            magnitude_total, magnitude_count, for_magnitude = _noted(magnitude, magnitude_total, magnitude_count)
            gaps[slot], beyond[slot] = gap, magnitude
            slot += _1
    state[2], state[3] = taken, at
    return 0
