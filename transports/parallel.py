"""Several calls at a time, none of which outlives the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

__all__ = ["run_parallel"]

_Result = TypeVar("_Result")


async def run_parallel(calls: Sequence[Callable[[], Awaitable[_Result]]], *, width: int) -> list[_Result]:
    """Return what the calls return, in their order; at most `width` of them run at a time.

    Raises:
        Exception: Whatever the first call that fails raises; the others are cancelled, and have ended, by then.
    """
    if len(calls) == 1:
        return [await calls[0]()]
    places = asyncio.Semaphore(width)

    async def run(call: Callable[[], Awaitable[_Result]]) -> _Result:
        async with places:
            return await call()

    tasks = [asyncio.create_task(run(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
