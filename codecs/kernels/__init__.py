"""Compiled loops. They take and give numpy arrays, release the interpreter lock, and check nothing: callers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

__all__ = ["kernel"]

_F = TypeVar("_F", bound=Callable[..., object])


def kernel(function: _F) -> _F:
    """Compile a loop over arrays; cached on disk, without the interpreter lock."""
    return cast(_F, numba.njit(nogil=True, cache=True)(function))
