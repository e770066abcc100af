"""Payloads on their way in: parts that are fetched ahead of the decoder that takes them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from deltabus.bus.core import TopicReader
from deltabus.bus.message import Blob

__all__ = ["Fetcher", "in_thread"]

_T = TypeVar("_T")
_DOWNLOADS = 2


class Fetcher:
    """Fetches payloads.

    Args:
        reader: Where blobs are fetched, and checked.
    """

    def __init__(self, reader: TopicReader) -> None:
        self._reader = reader

    async def decode(self, blobs: Sequence[Blob], seconds: list[float], decode: Callable[[Iterator[bytes]], _T]) -> _T:
        """Run a decoder in a thread, over parts that are fetched ahead of it, and return what it returns.

        Args:
            blobs: The parts, in order.
            seconds: Its first number grows by the time that the decoder waits for them.
            decode: Takes the parts' bytes one by one.

        Raises:
            TransportError: If a part cannot be fetched.
            BaseException: What the decoder raises.
        """
        loop = asyncio.get_running_loop()
        parts = self._fetch_all(blobs)
        coming: asyncio.Task[bytes | None] | None = None
        stopped = False

        async def following() -> bytes | None:
            nonlocal coming
            if stopped:
                return None
            coming = asyncio.current_task()
            return await anext(parts, None)

        def taken() -> Iterator[bytes]:
            while not stopped:
                before = time.perf_counter()
                part = asyncio.run_coroutine_threadsafe(following(), loop).result()
                seconds[0] += time.perf_counter() - before
                if part is None:
                    return
                yield part
                del part  # not kept while the next one is waited for

        def stop() -> None:
            # On the loop, where `following` begins: either it sees this, or it is called off.
            nonlocal stopped
            stopped = True
            if coming is not None:
                coming.cancel()

        # A thread of its own: it waits for downloads, which need the loop's common threads themselves.
        with ThreadPoolExecutor(1, thread_name_prefix="deltabus-stage") as thread:
            try:
                return await in_thread(decode, taken(), on_cancel=stop, executor=thread)
            finally:
                await parts.aclose()

    async def fetch(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Return parts, in order, a few of them on their way at once.

        Raises:
            TransportError: If one cannot be fetched.
            CorruptPayloadError: If one is not what its checksum says.
        """
        async with contextlib.aclosing(self._fetch_all(blobs)) as parts:
            return [part async for part in parts]

    async def _fetch_all(self, blobs: Sequence[Blob]) -> AsyncGenerator[bytes, None]:
        """Yield blobs in order, a few of them on their way at once."""
        waiting = deque(blobs)
        coming: deque[asyncio.Task[bytes]] = deque()
        try:
            while waiting or coming:
                while waiting and len(coming) < _DOWNLOADS:
                    coming.append(asyncio.create_task(self._reader.fetch(waiting.popleft())))
                part = await coming[0]
                coming.popleft()
                yield part
                del part
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)


async def in_thread(
    function: Callable[..., _T],
    *arguments: object,
    on_cancel: Callable[[], object] = lambda: None,
    executor: Executor | None = None,
) -> _T:
    """Run a function in a thread; when cancelled, wait until it has ended, so that nothing goes on unseen.

    Args:
        function: What to run.
        arguments: Its arguments.
        on_cancel: Called first on cancellation, to bring the function to an end soon.
        executor: Where; None is the loop's own threads, which transports use too: for work that waits for no transport.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        on_cancel()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        _ = running.cancelled() or running.exception()  # nobody else asks, and asyncio would report it as forgotten
        raise
