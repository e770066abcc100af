"""Loops of the adaptive code for counts, gaps and magnitudes; `docs/format.md` describes the code.

An arithmetic coder is three numbers that the loops hand on: `low`, `span` and the words filled for writing; `offset`
(how far the code lies above `low`), `span` and the words taken for reading. Beside it run raw bits, of which `at` are
written or read. `chances` and `used` are the contexts; `sums` holds total, count and parameter of the numbers before,
in the series of gaps (0) and of magnitudes (1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import inlined, loop

__all__ = ["CONTEXTS", "DAMAGED", "NO_ROOM", "SUMS", "read_changes", "read_counts", "write_changes"]

NO_ROOM = -1
"""What `write_changes` answers when its output does not fit; call again with more room."""

DAMAGED = -1
"""What the reading loops answer to bits that were never written so."""

CONTEXTS = 288
"""Size of `chances` and `used`."""

SUMS = (2, 3)
"""Shape of `sums`."""

_ESCAPE = 16
_MOST_ZEROS = np.uint64(_ESCAPE)
_PER_CLASS = 32
_COUNTS, _COUNTS_ON, _PARAMETERS = 32, 96, 160
_UNARY = 64

_WINDOW = 32
_MOST = 43
_LARGEST_SUMMAND = np.uint64(1 << _MOST)

# How far a chance moves when its context is used for the n-th time, of 2^16: 1 / (n + 1.5), after Krichevsky and
# Trofimov (1981), until it is about 1 / 128.
_RATES = np.array([(1 << 17) // (2 * n + 3) for n in range(128)], np.uint64)

_ZEROS = np.array([min((n & -n).bit_length() - 1, _ESCAPE) if n else _ESCAPE for n in range(1 << _ESCAPE)], np.uint8)

# Typed constants: a Python int beside an unsigned number would turn an expression into floating-point arithmetic.
_0, _1, _16, _32, _63 = (np.uint64(n) for n in (0, 1, 16, 32, 63))
_CERTAIN = np.uint64(1 << 16)
_LEAST_SPAN = np.uint64(1 << 32)
_FULL_SPAN = np.uint64((1 << 64) - 1)
_FULL_WORD = np.uint32((1 << 32) - 1)
_NO_WORD, _ONE_MORE = np.uint32(0), np.uint32(1)

_Counts = npt.NDArray[np.int64]
_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]


@inlined
def _write_bit(  # noqa: PLR0917 - compiled functions take their arguments by place
    bit: bool, context: int, low: np.uint64, span: np.uint64, filled: int, code: _U32, chances: _U64, used: _U8
) -> tuple[np.uint64, np.uint64, int]:
    chance, rate = chances[context], _RATES[used[context]]
    used[context] += np.uint8(used[context] < _RATES.size - 1)
    bound = (span >> _16) * chance
    if bit:
        span = bound
        chances[context] = chance + (((_CERTAIN - chance) * rate) >> _16)
    else:
        low += bound
        if low < bound:
            word = filled - 1
            while code[word] == _FULL_WORD:
                code[word] = _NO_WORD
                word -= 1
            code[word] += _ONE_MORE
        span -= bound
        chances[context] = chance - ((chance * rate) >> _16)
    if span < _LEAST_SPAN:
        code[filled] = np.uint32(low >> _32)
        filled += 1
        low <<= _32
        span <<= _32
    return low, span, filled


@loop
def _write_unary(  # noqa: PLR0917 - compiled functions take their arguments by place
    value: int, context: int, low: np.uint64, span: np.uint64, filled: int, code: _U32, chances: _U64, used: _U8
) -> tuple[np.uint64, np.uint64, int]:
    for place in range(value + 1):
        low, span, filled = _write_bit(place == value, context + place, low, span, filled, code, chances, used)
    return low, span, filled


@inlined
def _write_raw(value: np.uint64, bits: int, raw: _U64, at: int) -> int:
    word, shift = at >> 6, np.uint64(at & 63)
    raw[word] |= value << shift
    if np.int64(shift) + bits > 64:
        # In two shifts, because none shifts by 64 bits.
        raw[word + 1] |= (value >> (_63 - shift)) >> _1
    return at + bits


@inlined
def _bit_length(value: np.uint64) -> int:
    length = 0
    while value:
        value >>= _1
        length += 1
    return length


@inlined
def _start(parameter: int, sums: _Counts, series: int) -> None:
    """Let the next number have this parameter."""
    sums[series, 0], sums[series, 1], sums[series, 2] = np.int64(1) << parameter, 1, parameter


@inlined
def _note(value: np.uint64, sums: _Counts, series: int) -> None:
    """Let the parameter follow the mean: the largest k with count * 2^k <= total, or 0."""
    total = sums[series, 0] + np.int64(min(value, _LARGEST_SUMMAND))
    count, parameter = sums[series, 1] + 1, sums[series, 2]
    if count == _WINDOW:
        total >>= 1
        count >>= 1
    while (count << (parameter + 1)) <= total:
        parameter += 1
    while parameter and (count << parameter) > total:
        parameter -= 1
    sums[series, 0], sums[series, 1], sums[series, 2] = total, count, parameter


@inlined
def _write_number(  # noqa: PLR0917 - compiled functions take their arguments by place
    value: np.uint64,
    series: int,
    low: np.uint64,
    span: np.uint64,
    filled: int,
    at: int,
    code: _U32,
    raw: _U64,
    chances: _U64,
    used: _U8,
    sums: _Counts,
) -> tuple[np.uint64, np.uint64, int, int]:
    parameter, context = np.uint64(sums[series, 2]), series * _ESCAPE
    quotient = min(value >> parameter, _MOST_ZEROS)
    zeros = int(np.int64(quotient))
    if not parameter:
        for place in range(min(zeros + 1, _ESCAPE)):
            low, span, filled = _write_bit(place == zeros, context + place, low, span, filled, code, chances, used)
    elif zeros < _ESCAPE:
        rest = value & ((_1 << parameter) - _1)
        bits = zeros + 1 + int(np.int64(parameter))
        at = _write_raw((_1 << quotient) | (rest << (quotient + _1)), bits, raw, at)
    else:
        at += _ESCAPE
    if zeros == _ESCAPE:
        length = _bit_length(value)
        at = _write_raw(np.uint64(length), 6, raw, at)
        at = _write_raw(value, length, raw, at)
    _note(value, sums, series)
    return low, span, filled, at


@inlined
def _forget(chances: _U64, used: _U8, stop: int) -> None:
    for context in range(stop):
        chances[context] = _CERTAIN >> _1
        used[context] = 0


@inlined
def _parameter_for(total: float, count: int) -> int:
    """Return the parameter for numbers with this sum."""
    parameter = 0
    while parameter < _MOST and (1 << (parameter + 1)) * float(count) <= total:
        parameter += 1
    return parameter


@loop
def write_changes(  # noqa: PLR0917 - compiled functions take their arguments by place
    counts: _Counts,
    order: _U32,
    gaps: _U32,
    beyond: _U64,
    code: _U32,
    raw: _U64,
    chances: _U64,
    used: _U8,
    sums: _Counts,
) -> tuple[int, int, np.uint64, np.uint64]:
    """Write counts, gaps (class by class) and magnitudes (by position) into zeroed words.

    Returns the words of code and the raw bits written, NO_ROOM for the first when they do not fit; then `low` and
    `span`, which say what may follow the code. 8192 words hold all counts.
    """
    _forget(chances, used, CONTEXTS)
    low, span, filled, at = _0, _FULL_SPAN, 0, 0
    before = 0
    for c in range(counts.size):
        length = _bit_length(np.uint64(counts[c]))
        context = _COUNTS_ON if before else _COUNTS
        low, span, filled = _write_unary(length, context, low, span, filled, code, chances, used)
        if length > 1:
            at = _write_raw(np.uint64(counts[c]) - (_1 << np.uint64(length - 1)), length - 1, raw, at)
        before = length
    slot = 0
    for c in range(counts.size):
        stop = slot + counts[c]
        if slot == stop:
            continue
        _forget(chances, used, _PER_CLASS)
        for series in range(2):
            total = 0.0
            for s in range(slot, stop):
                total += float(beyond[order[s]] if series else np.uint64(gaps[s]))
            parameter = _parameter_for(total, counts[c])
            context = _PARAMETERS + series * _UNARY
            low, span, filled = _write_unary(parameter, context, low, span, filled, code, chances, used)
            _start(parameter, sums, series)
        for s in range(slot, stop):
            # A change takes at most 32 adaptive bits and the start of a class 88, each at most half a word, as no
            # chance is less than 2^-16; raw bits are at most 140.
            if filled + 128 > code.size or (at >> 6) + 8 > raw.size:
                return NO_ROOM, 0, low, span
            for series in range(2):
                value = beyond[order[s]] if series else np.uint64(gaps[s])
                low, span, filled, at = _write_number(
                    value, series, low, span, filled, at, code, raw, chances, used, sums
                )
        slot = stop
    return filled, at, low, span


@inlined
def _read_bit(  # noqa: PLR0917 - compiled functions take their arguments by place
    context: int, offset: np.uint64, span: np.uint64, taken: int, code: _U32, chances: _U64, used: _U8
) -> tuple[bool, np.uint64, np.uint64, int]:
    chance, rate = chances[context], _RATES[used[context]]
    used[context] += np.uint8(used[context] < _RATES.size - 1)
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
        if taken < code.size:
            offset |= np.uint64(code[taken])
        taken += 1
    return bit, offset, span, taken


@loop
def _read_unary(  # noqa: PLR0917 - compiled functions take their arguments by place
    context: int, offset: np.uint64, span: np.uint64, taken: int, code: _U32, chances: _U64, used: _U8
) -> tuple[int, np.uint64, np.uint64, int]:
    """Read a unary number; `_UNARY` stands for one that is too large."""
    value = 0
    while value < _UNARY:
        bit, offset, span, taken = _read_bit(context + value, offset, span, taken, code, chances, used)
        if bit:
            break
        value += 1
    return value, offset, span, taken


@inlined
def _read_ahead(raw: _U64, at: int) -> np.uint64:
    """Return the 64 raw bits from this one on; zeros near the end of the words and beyond."""
    word, shift = at >> 6, np.uint64(at & 63)
    if word + 1 >= raw.size:
        return _0
    # In two shifts, because none shifts by 64 bits.
    ahead: np.uint64 = (raw[word] >> shift) | ((raw[word + 1] << (_63 - shift)) << _1)
    return ahead


@inlined
def _read_number(  # noqa: PLR0917 - compiled functions take their arguments by place
    series: int,
    offset: np.uint64,
    span: np.uint64,
    taken: int,
    at: int,
    code: _U32,
    raw: _U64,
    chances: _U64,
    used: _U8,
    sums: _Counts,
) -> tuple[np.uint64, np.uint64, np.uint64, int, int]:
    parameter, context = np.uint64(sums[series, 2]), series * _ESCAPE
    zeros = 0
    if not parameter:
        while zeros < _ESCAPE:
            bit, offset, span, taken = _read_bit(context + zeros, offset, span, taken, code, chances, used)
            if bit:
                break
            zeros += 1
        value = np.uint64(zeros)
    else:
        ahead = _read_ahead(raw, at)
        zeros = int(np.int64(_ZEROS[ahead & np.uint64(_ZEROS.size - 1)]))
        rest = (ahead >> np.uint64(zeros + 1)) & ((_1 << parameter) - _1)
        value = (np.uint64(zeros) << parameter) | rest
        at += zeros + 1 + int(np.int64(parameter)) if zeros < _ESCAPE else _ESCAPE
    if zeros == _ESCAPE:
        length = int(np.int64(_read_ahead(raw, at) & _63))
        value = _read_ahead(raw, at + 6) & ((_1 << np.uint64(length)) - _1)
        at += 6 + length
    _note(value, sums, series)
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
    span, taken, at = _FULL_SPAN, 2, 0
    before = total = 0
    for c in range(counts.size):
        context = _COUNTS_ON if before else _COUNTS
        length, offset, span, taken = _read_unary(context, offset, span, taken, code, chances, used)
        if length > 32:
            return DAMAGED
        if length:
            top = _1 << np.uint64(length - 1)
            counts[c] = np.int64(top | (_read_ahead(raw, at) & (top - _1)))
            at += length - 1
            total += counts[c]
        before = length
    state[0], state[1], state[2], state[3] = offset, span, np.uint64(taken), np.uint64(at)
    return total


@loop
def read_changes(  # noqa: PLR0917 - compiled functions take their arguments by place
    counts: _Counts,
    code: _U32,
    raw: _U64,
    state: _U64,
    chances: _U64,
    used: _U8,
    sums: _Counts,
    limits: _U64,
    gaps: _U32,
    beyond: _U64,
) -> int:
    """Fill in gaps and magnitudes, class by class, and in `state` what was taken; returns 0, or DAMAGED.

    Gaps and magnitudes must be below the two limits.
    """
    offset, span = state[0], state[1]
    taken, at = int(np.int64(state[2])), int(np.int64(state[3]))
    slot = 0
    for c in range(counts.size):
        stop = slot + counts[c]
        if slot == stop:
            continue
        _forget(chances, used, _PER_CLASS)
        for series in range(2):
            context = _PARAMETERS + series * _UNARY
            parameter, offset, span, taken = _read_unary(context, offset, span, taken, code, chances, used)
            if parameter > _MOST:
                return DAMAGED
            _start(parameter, sums, series)
        for s in range(slot, stop):
            for series in range(2):
                value, offset, span, taken, at = _read_number(
                    series, offset, span, taken, at, code, raw, chances, used, sums
                )
                if value >= limits[series]:
                    return DAMAGED
                if series:
                    beyond[s] = value
                else:
                    gaps[s] = value
        slot = stop
    state[2], state[3] = np.uint64(taken), np.uint64(at)
    return 0
