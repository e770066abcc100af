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

__all__ = ["LANES_BYTES", "Elements", "apart", "broadcast", "constant", "ones", "trailing_zeros"]

LANES_BYTES = 64
"""How much of an array is looked at as one: as many elements as there are in so many bytes."""

_Word = Callable[[np.uint64], np.uint64]
_Bits = npt.NDArray[np.unsignedinteger]

_INDEX, _WORD = ir.IntType(32), ir.IntType(64)


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


class Elements:
    """The elements of an array, for code that is generated.

    Args:
        context: What numba hands to whoever generates code.
        builder: Likewise.
        kind: The array's type.
        array: The array.
    """

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any) -> None:  # noqa: ANN401
        values: Any = arrayobj
        self._builder, self._data = builder, values.make_array(kind)(context, builder, array).data
        self._width = kind.dtype.bitwidth

    def load(self, start: Any, lanes: int) -> Any:  # noqa: ANN401
        """Return so many elements from `start` on, in lanes."""
        vector = ir.VectorType(ir.IntType(self._width), lanes)
        return self._builder.load(self._at(start, vector), align=self._width // 8)

    def store(self, start: Any, values: Any) -> None:  # noqa: ANN401
        """Write one element, or the lanes of a vector from `start` on."""
        self._builder.store(values, self._at(start, values.type), align=self._width // 8)

    def _at(self, start: Any, kind: Any) -> Any:  # noqa: ANN401
        return self._builder.bitcast(self._builder.gep(self._data, [start]), kind.as_pointer())


def constant(kind: Any, number: int) -> Any:  # noqa: ANN401
    """Return a constant with the same number in each lane."""
    return ir.Constant(kind, [number] * kind.count)


def broadcast(builder: Any, number: Any, lanes: int) -> Any:  # noqa: ANN401
    """Return a vector with the same number in each lane."""
    nothing = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_INDEX, lanes), [0] * lanes))


def _told_apart(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    one, other = (Elements(context, builder, *each) for each in zip(signature.args[:2], arguments[:2], strict=True))
    lanes = LANES_BYTES * 8 // signature.args[0].dtype.bitwidth
    differ = builder.icmp_unsigned("!=", one.load(arguments[2], lanes), other.load(arguments[2], lanes))
    # As bits of one number, the first lane's lowest; of the other byte order, the first would be the highest.
    together = builder.bitcast(differ, ir.IntType(lanes))
    return together if lanes == 64 else builder.zext(together, _WORD)


def _apart(context: object, one: Any, other: Any, start: object) -> tuple[Any, Any] | None:  # noqa: ANN401
    return (types.uint64(one, other, types.int64), _told_apart) if one.dtype == other.dtype else None


apart = cast("Callable[[_Bits, _Bits, int], np.uint64]", intrinsic(_apart))
"""Return which elements of two arrays differ, in `LANES_BYTES` from `start` on: one bit each, the first's lowest;
unchecked."""
