"""Work over segments, in the caller's threads or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

__all__ = ["each"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def each(function: Callable[[_T], _R], items: Iterable[_T], pool: Executor | None) -> list[_R]:
    """Return `function(item)` for each item, in order.

    With a pool the calls run in its threads, and none of them is still running when this returns or raises; the caller
    must not be one of those threads itself.

    >>> each(abs, [-1, 2], None)
    [1, 2]

    Raises:
        BaseException: The first one that a call raised; calls that had not begun are left out.
    """
    if pool is None:
        return [function(item) for item in items]
    futures = []
    try:
        futures.extend(pool.submit(function, item) for item in items)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()
