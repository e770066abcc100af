"""Work on several segments at once, taken in order, without running away from whoever takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

__all__ = ["in_order"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_order(work: Callable[[_T], _R], items: Iterable[_T], *, pool: Executor | None, ahead: int) -> Iterator[_R]:
    """Yield the result of the work on each item, in order; at most `ahead` items are begun before they are taken.

    Without a pool each item is worked on when it is taken. When the iterator is closed, or an item's work fails, what
    has not begun is called off, and what has is waited for, so that no work goes on behind the caller's back.

    >>> list(in_order(lambda n: n * n, range(4), pool=None, ahead=2))
    [0, 1, 4, 9]
    """
    if pool is None:
        yield from map(work, items)
        return
    source = iter(items)
    begun: deque[Future[_R]] = deque()
    try:
        begun.extend(pool.submit(work, item) for item in islice(source, ahead))
        while begun:
            result = begun[0].result()
            begun.popleft()
            begun.extend(pool.submit(work, item) for item in islice(source, 1))
            yield result
    finally:
        for future in begun:
            future.cancel()
        for future in begun:
            if not future.cancelled():
                future.exception()
