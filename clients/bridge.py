"""An event loop in a thread of its own, for synchronous code that drives asynchronous work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from deltabus.bus.errors import ClosedError, WaitTimeoutError

__all__ = ["LoopThread"]

_T = TypeVar("_T")
_STOP_SECONDS = 10.0


class LoopThread:
    """One event loop that runs in a daemon thread until it is stopped.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(thread_name_prefix=name)
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start work on the loop and return its future.

        Raises:
            ClosedError: If the loop was stopped.
        """
        if not self._thread.is_alive():
            work.close()
            raise ClosedError(f"the event loop of {self._thread.name} was stopped; open a new one")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, _T], *, timeout: float | None = None, what: str = "the operation") -> _T:
        """Run work on the loop and return its result.

        Args:
            work: The coroutine.
            timeout: Limit in seconds, after which the work is cancelled.
            what: Named in the error.

        Raises:
            ClosedError: If the loop was stopped.
            WaitTimeoutError: If the limit is reached.
        """
        future = self.submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # the work's own timeout
            future.cancel()
            raise WaitTimeoutError(f"{what} did not finish within {timeout} s") from error
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs and end the thread; may be called more than once."""
        if not self._thread.is_alive():
            return
        concurrent.futures.wait([self.submit(self._drain())], timeout=_STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_STOP_SECONDS)
        # A thread that hangs in a dead file system must not hang whoever closes.
        ending = threading.Thread(target=self._executor.shutdown, daemon=True)
        ending.start()
        ending.join(_STOP_SECONDS)

    async def _drain(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
