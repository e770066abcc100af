"""Compiled loops. They take and give numpy arrays, release the interpreter lock, and check nothing: callers do."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numba

__all__ = ["inlined", "kernel", "loop"]

# numba has no public name for this option, nor its annotations, but has had it for long.
_NO_REFERENCES: MappingProxyType[str, Any] = MappingProxyType({"_nrt": False})

_F = TypeVar("_F", bound=Callable[..., object])


def kernel(function: _F) -> _F:
    """Compile a loop over arrays; cached on disk, without the interpreter lock."""
    return cast(_F, numba.njit(nogil=True, cache=True)(function))


def loop(function: _F) -> _F:
    """Compile a loop that makes no arrays itself and calls nothing but loops and what is `inlined`.

    Without arrays of its own it need not count references to those that it is given, which is done at each call
    otherwise and takes longer than what small functions do.
    """
    return cast(_F, numba.njit(nogil=True, cache=True, **_NO_REFERENCES)(function))


def inlined(function: _F) -> _F:
    """Make a function a part of each `loop` that calls it."""
    return cast(_F, numba.njit(nogil=True, inline="always", **_NO_REFERENCES)(function))
