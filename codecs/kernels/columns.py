"""What vector instructions do to sort elements into columns, and to count them; `classes` says what that is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .words import Elements, broadcast, constant, external

__all__ = ["NO_COLUMN", "PLANES", "SINGLE_COLUMN", "Columns", "count_both", "write_planes"]

PLANES = 4
"""Bits of a column's number."""

NO_COLUMN = (1 << PLANES) - 1
"""What stands for the column of a class that has none."""

SINGLE_COLUMN = NO_COLUMN - 1
"""The column of the class that stands alone."""

_Bits = npt.NDArray[np.unsignedinteger]
_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]
_U64 = npt.NDArray[np.uint64]

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


class Columns(NamedTuple):
    """Which classes have columns, and how an element's class is told.

    Attributes:
        shift: The class of an element is `bits >> shift & mask`.
        mask: See `shift`.
        first: The class of column 0.
        width: How many classes from there on have columns, at most `SINGLE_COLUMN`.
        single: The class of `SINGLE_COLUMN`, not among those.
        of: The column of each class; `NO_COLUMN` for most.
    """

    shift: np.uint64
    mask: np.uint64
    first: np.uint8
    width: np.uint8
    single: np.uint8
    of: _U8


def _planes_written(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    bits, start, classes_to_columns, words, place = arguments
    shift, mask, first, width, single = (builder.extract_value(classes_to_columns, number) for number in range(5))
    loaded = Elements(context, builder, signature.args[0], bits).load(start, 64)
    kind = loaded.type.element
    by = shift if kind == _WORD else builder.trunc(shift, kind)
    classes = builder.lshr(loaded, broadcast(builder, by, 64))
    if kind != _BYTE:
        classes = builder.trunc(classes, ir.VectorType(_BYTE, 64))
    classes = builder.and_(classes, broadcast(builder, builder.trunc(mask, _BYTE), 64))
    beyond = builder.sub(classes, broadcast(builder, first, 64))
    within = builder.icmp_unsigned("<", beyond, broadcast(builder, width, 64))
    columns = builder.select(within, beyond, constant(beyond.type, NO_COLUMN))
    alone = builder.icmp_unsigned("==", classes, broadcast(builder, single, 64))
    columns = builder.select(alone, constant(beyond.type, SINGLE_COLUMN), columns)
    target = Elements(context, builder, signature.args[3], words)
    for plane in range(PLANES):
        tested = builder.and_(columns, constant(columns.type, 1 << plane))
        word = builder.bitcast(builder.icmp_unsigned("!=", tested, constant(columns.type, 0)), _WORD)
        target.store(builder.add(place, ir.Constant(place.type, plane * 64)), word)
    return context.get_dummy_value()


def _write_planes(  # noqa: PLR0917 - compiled functions take their arguments by place
    context: object,
    bits: Any,  # noqa: ANN401
    start: object,
    columns: Any,  # noqa: ANN401
    words: Any,  # noqa: ANN401
    place: object,
) -> tuple[Any, Any] | None:
    if bits.layout != "C":
        return None
    return types.void(bits, types.uint64, columns, words, types.uint64), _planes_written


write_planes = cast("Callable[[_Bits, np.uint64, Columns, _U64, np.uint64], None]", intrinsic(_write_planes))
"""Write the columns of 64 elements from `start` on as `PLANES` words of one bit for each, 64 words apart, from `place`
on; unchecked.

An element's column is `SINGLE_COLUMN` if its class is `single`, the class less `first` if that is below `width`, and
`NO_COLUMN` for all others.
"""


def _both_counted(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    one, other, place, last = (arguments[number] for number in (1, 2, 4, 6))
    words, above, totals = (Elements(context, builder, signature.args[n], arguments[n]) for n in (0, 3, 5))
    kind, narrow = ir.VectorType(_WORD, 8), ir.VectorType(ir.IntType(16), 8)
    total = constant(kind, 0)
    count_ones = external(builder, "llvm.ctpop.v8i64", kind, [kind])
    for row in range(8):
        offset = ir.Constant(_WORD, row * 8)
        both = builder.and_(*(words.load(builder.add(start, offset), 8) for start in (one, other)))
        above.store(builder.add(place, offset), builder.trunc(total, narrow))
        total = builder.add(total, builder.call(count_ones, [both]))
    totals.store(last, total)
    return context.get_dummy_value()


def _count_both(  # noqa: PLR0917 - compiled functions take their arguments by place
    context: object,
    words: Any,  # noqa: ANN401
    one: object,
    other: object,
    above: Any,  # noqa: ANN401
    place: object,
    totals: Any,  # noqa: ANN401
    last: object,
) -> tuple[Any, Any]:
    at = types.uint64
    return types.void(words, at, at, above, at, totals, at), _both_counted


count_both = cast(
    "Callable[[_U64, np.uint64, np.uint64, _U16, np.uint64, _U64, np.uint64], None]", intrinsic(_count_both)
)
"""Count the ones that 8 rows of 8 words from `one` on have in common with those from `other` on, in each of 8 columns.

Writes how many stand in a column above each word, in as many rows from `place` on, and how many in all, from `last` on;
unchecked.
"""
