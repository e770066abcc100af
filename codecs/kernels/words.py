"""What processors do in one or a few instructions, for which Python has no operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np import arrayobj

__all__ = ["LANES_BYTES", "apart", "matching", "ones", "trailing_zeros"]

LANES_BYTES = 64
"""How much of an array is looked at as one: as many elements as there are in so many bytes."""

_Word = Callable[[np.uint64], np.uint64]
_Bits = npt.NDArray[np.unsignedinteger]
_LANES = ir.VectorType(ir.IntType(8), LANES_BYTES)


def _instruction(name: str) -> Callable[[_Word], _Word]:
    """Compile a function of one 64-bit number into the instruction of LLVM with this name."""

    def generated(context: object, builder: Any, signature: object, arguments: list[Any]) -> Any:  # noqa: ANN401
        # A second operand says whether zero may give anything; it may, so that no check is made.
        operands = [arguments[0], ir.Constant(ir.IntType(1), 1)] if name == "cttz" else [arguments[0]]
        return getattr(builder, name)(*operands)

    def typed(context: object, number: object) -> tuple[Any, Any]:
        return types.uint64(types.uint64), generated

    return lambda function: cast(_Word, intrinsic(typed))


@_instruction("cttz")
def trailing_zeros(number: np.uint64) -> np.uint64:
    """Return how many bits below the lowest one are zero; of a number that is not 0."""
    raise NotImplementedError


@_instruction("ctpop")
def ones(number: np.uint64) -> np.uint64:
    """Return how many bits are one."""
    raise NotImplementedError


def _loaded(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:  # noqa: ANN401
    """Return the elements of an array from `start` on, in lanes."""
    width = kind.dtype.bitwidth
    lanes = ir.VectorType(ir.IntType(width), LANES_BYTES * 8 // width)
    values: Any = arrayobj
    data = values.make_array(kind)(context, builder, array).data
    loaded = builder.load(builder.bitcast(builder.gep(data, [start]), lanes.as_pointer()))
    loaded.align = width // 8
    return loaded


def _compared(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    array, start, byte = arguments
    loaded = _loaded(context, builder, signature.args[0], array, start)
    nothing, first = ir.Constant(_LANES, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    one = builder.insert_element(nothing, byte, first)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    same = builder.icmp_unsigned("==", loaded, builder.shuffle_vector(one, nothing, everywhere))
    # As bits of one number, the first byte's lowest; of the other byte order, the first would be the highest.
    return builder.bitcast(same, ir.IntType(64))


def _matching(context: object, values: Any, start: object, byte: object) -> tuple[Any, Any]:  # noqa: ANN401
    return types.uint64(values, types.int64, types.uint8), _compared


matching = cast("Callable[[npt.NDArray[np.uint8], int, np.uint8], np.uint64]", intrinsic(_matching))
"""Return which of 64 bytes from `start` on are equal to `byte`: one bit for each, the first's lowest; unchecked."""


def _told_apart(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    one, other, start = arguments
    both = (_loaded(context, builder, signature.args[n], array, start) for n, array in enumerate((one, other)))
    differ = builder.icmp_unsigned("!=", *both)
    lanes = builder.bitcast(differ, ir.IntType(differ.type.count))
    return lanes if differ.type.count == 64 else builder.zext(lanes, ir.IntType(64))


def _apart(context: object, one: Any, other: Any, start: object) -> tuple[Any, Any] | None:  # noqa: ANN401
    return (types.uint64(one, other, types.int64), _told_apart) if one.dtype == other.dtype else None


apart = cast("Callable[[_Bits, _Bits, int], np.uint64]", intrinsic(_apart))
"""Return which elements of two arrays differ, in `LANES_BYTES` from `start` on: one bit each, the first's lowest;
unchecked."""
