"""The element types that can be published, by the names that safetensors gives them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from deltabus.bus.errors import UnsupportedTensorError

__all__ = ["INTEGERS", "DType", "Order", "by_name", "of_torch"]

INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""The torch dtype in which bit patterns of so many bytes are held; torch knows little about wider unsigned ones."""


class Order(enum.Enum):
    """How the bit patterns of a type follow each other from one value to the next."""

    SIGN_MAGNITUDE = "sign-magnitude"
    """Floats: the top bit is the sign, the rest grows with the magnitude."""
    PLAIN = "plain"
    """Integers, booleans, exponents alone, pairs: the pattern itself, modulo 2^bits."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: The name in safetensors files and schemas, such as `BF16`.
        torch: The torch dtype.
        bits: The unsigned numpy dtype that holds one element's bit pattern.
        order: How patterns follow each other.
        mantissa: Bits of the fraction below the exponent; 0 where there is none.
    """

    name: str
    torch: torch.dtype
    bits: np.dtype[np.unsignedinteger]
    order: Order = Order.PLAIN
    mantissa: int = 0

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return self.bits.itemsize


_U8, _U16, _U32, _U64 = (np.dtype(code) for code in ("<u1", "<u2", "<u4", "<u8"))
_FLOAT = Order.SIGN_MAGNITUDE

_ALL = (
    DType("BF16", torch.bfloat16, _U16, _FLOAT, 7),
    DType("F16", torch.float16, _U16, _FLOAT, 10),
    DType("F32", torch.float32, _U32, _FLOAT, 23),
    DType("F64", torch.float64, _U64, _FLOAT, 52),
    DType("F8_E4M3", torch.float8_e4m3fn, _U8, _FLOAT, 3),
    DType("F8_E5M2", torch.float8_e5m2, _U8, _FLOAT, 2),
    DType("F8_E8M0", torch.float8_e8m0fnu, _U8) if hasattr(torch, "float8_e8m0fnu") else None,
    DType("BOOL", torch.bool, _U8),
    DType("U8", torch.uint8, _U8),
    DType("I8", torch.int8, _U8),
    DType("U16", torch.uint16, _U16),
    DType("I16", torch.int16, _U16),
    DType("U32", torch.uint32, _U32),
    DType("I32", torch.int32, _U32),
    DType("U64", torch.uint64, _U64),
    DType("I64", torch.int64, _U64),
    DType("C64", torch.complex64, _U64),
)
_BY_NAME = {dtype.name: dtype for dtype in _ALL if dtype}
_BY_TORCH = {dtype.torch: dtype for dtype in _ALL if dtype}


def by_name(name: str) -> DType:
    """Return the type with this safetensors name.

    Raises:
        UnsupportedTensorError: If there is none.
    """
    if name not in _BY_NAME:
        raise UnsupportedTensorError(f"dtype {name!r} is not one of {', '.join(_BY_NAME)}; upgrade deltabus or torch")
    return _BY_NAME[name]


def of_torch(dtype: torch.dtype, tensor: str = "") -> DType:
    """Return the type of a torch dtype.

    Raises:
        UnsupportedTensorError: If it cannot be published; the error names the tensor.
    """
    if dtype not in _BY_TORCH:
        raise UnsupportedTensorError(f"tensor {tensor!r} has dtype {dtype}, which cannot be published", tensor=tensor)
    return _BY_TORCH[dtype]
