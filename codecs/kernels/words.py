"""What processors do in one or a few instructions, for which Python has no operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic
from numba.np import arrayobj

__all__ = [
    "CAN_DEPOSIT",
    "LANES_BYTES",
    "Elements",
    "apart",
    "broadcast",
    "constant",
    "deposit",
    "external",
    "leading_zeros",
    "ones",
    "prefetch",
    "trailing_zeros",
]

LANES_BYTES = 64
"""How much of an array is looked at as one: as many elements as there are in so many bytes, those of a cache line."""

_Word = Callable[[np.uint64], np.uint64]
_Bits = npt.NDArray[np.unsignedinteger]

_INDEX, _WORD = ir.IntType(32), ir.IntType(64)


def _instruction(name: str) -> Callable[[_Word], _Word]:
    """Compile a function of one 64-bit number into the instruction of LLVM with this name."""

    def generated(context: object, builder: Any, signature: object, arguments: list[Any]) -> Any:  # noqa: ANN401
        # A second operand says whether zero may give anything; it may, so that no check is made.
        operands = arguments[:1] if name == "ctpop" else [arguments[0], ir.Constant(ir.IntType(1), 1)]
        return getattr(builder, name)(*operands)

    def typed(context: object, number: object) -> tuple[Any, Any]:
        return types.uint64(types.uint64), generated

    return lambda function: cast(_Word, intrinsic(typed))


@_instruction("cttz")
def trailing_zeros(number: np.uint64) -> np.uint64:
    """Return how many bits below the lowest one are zero; of a number that is not 0."""
    raise NotImplementedError


@_instruction("ctlz")
def leading_zeros(number: np.uint64) -> np.uint64:
    """Return how many of 64 bits above the highest one are zero; of a number that is not 0."""
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
        place = self._builder.bitcast(self.at(start), ir.VectorType(ir.IntType(self._width), lanes).as_pointer())
        return self._builder.load(place, align=self._width // 8)

    def store(self, start: Any, values: Any) -> None:  # noqa: ANN401
        """Write one element, or the lanes of a vector from `start` on."""
        self._builder.store(
            values, self._builder.bitcast(self.at(start), values.type.as_pointer()), align=self._width // 8
        )

    def at(self, start: Any) -> Any:  # noqa: ANN401
        """Return a pointer to an element."""
        return self._builder.gep(self._data, [start])


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
    fitting = one.dtype == other.dtype and one.layout == other.layout == "C"
    return (types.uint64(one, other, types.int64), _told_apart) if fitting else None


apart = cast("Callable[[_Bits, _Bits, int], np.uint64]", intrinsic(_apart))
"""Return which elements of two arrays differ, in `LANES_BYTES` from `start` on: one bit each, the first's lowest;
unchecked."""


def external(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    """Return a function of LLVM's, to be called."""
    functions: Any = cgutils
    return functions.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _deposited(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    return builder.call(external(builder, "llvm.x86.bmi.pdep.64", _WORD, [_WORD, _WORD]), arguments)


def _deposit(context: object, bits: object, places: object) -> tuple[Any, Any]:
    return types.uint64(types.uint64, types.uint64), _deposited


deposit = cast("Callable[[np.uint64, np.uint64], np.uint64]", intrinsic(_deposit))
"""Return a number that has the lowest bits of one where the other has ones; only where `CAN_DEPOSIT`."""

_FEATURES, _TARGET = binding.get_host_cpu_features(), cast(Any, config)

CAN_DEPOSIT = bool(
    _FEATURES.get("bmi2") and _FEATURES.get("avx512vl") and _TARGET.CPU_NAME is None and _TARGET.CPU_FEATURES is None
)
"""Whether the processor does that in an instruction, and fast, which older ones that have it do not.

Not where loops are compiled for another processor than this one (`NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES`).
"""


def _prefetched(context: Any, builder: Any, signature: Any, arguments: list[Any]) -> Any:  # noqa: ANN401
    values, kind = Elements(context, builder, signature.args[0], arguments[0]), ir.IntType(8).as_pointer()
    # For reading; not into the first cache, whose few waiting places would fill up; data.
    options = [ir.Constant(_INDEX, option) for option in (0, 2, 1)]
    instruction = external(builder, "llvm.prefetch.p0i8", ir.VoidType(), [kind, *(option.type for option in options)])
    builder.call(instruction, [builder.bitcast(values.at(arguments[1]), kind), *options])
    return context.get_dummy_value()


def _prefetch(context: object, values: Any, start: object) -> tuple[Any, Any]:  # noqa: ANN401
    return types.void(values, types.uint64), _prefetched


prefetch = cast("Callable[[_Bits, np.uint64], None]", intrinsic(_prefetch))
"""Have the `LANES_BYTES` around an element brought into a cache; it need not exist."""
