"""How staged states pass from whoever stages them to whoever takes them, folded where they pile up."""

from __future__ import annotations

import asyncio
from collections import deque

from deltabus.bus.errors import WaitTimeoutError

from .fetching import in_thread
from .staged import StagedState
from .update import Update

__all__ = ["Handover"]

_AHEAD = 2
"""States that are staged before they are asked for, when every version is delivered."""


class Handover:
    """A short queue of staged states, in one event loop; states are folded in threads, since that may take long.

    Args:
        topic: Named in errors.
        latest: Whether states that nobody took yet become one; otherwise `put` waits when a few are ready.
    """

    def __init__(self, *, topic: str, latest: bool) -> None:
        self._topic = topic
        self._latest = latest
        self._ready: deque[StagedState] = deque()
        self._changed = asyncio.Condition()
        self._taken = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False

    async def put(self, staged: StagedState) -> None:
        """Add a state behind those that are ready, or fold it into the last of them."""
        while True:
            waiting = self._ready[-1] if self._latest and self._ready else None
            # `waiting` may be taken meanwhile.
            folds = waiting is not None and not staged.whole
            update = await in_thread(waiting.followed_by, staged) if waiting is not None and folds else staged
            async with self._changed:
                if waiting is None:
                    self._ready.append(update)
                elif self._ready and self._ready[-1] is waiting:
                    self._ready[-1] = update if folds else waiting.followed_by(staged)
                else:
                    continue
                self._changed.notify_all()
                break
        while not self._latest and len(self._ready) >= _AHEAD:
            self._taken.clear()
            await self._taken.wait()

    async def take(self, current: Update | None, *, limit: float | None) -> StagedState | None:
        """Return the next state, waiting for it if need be; None once this was closed.

        A call that is cancelled takes nothing away.

        Args:
            current: What was made of the state before. It is retired, and where it was not applied folded into this.
            limit: Seconds to wait; None waits for ever.

        Raises:
            WaitTimeoutError: If the limit is reached.
            BaseException: What `fail` was told, once nothing is ready.
        """
        try:
            async with asyncio.timeout(limit), self._changed:
                await self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
        except TimeoutError as error:
            raise WaitTimeoutError(f"{self._topic} brought no update within {limit} s") from error
        if not self._ready:
            if self._failure is not None:
                raise self._failure
            return None
        staged = self._ready.popleft()
        try:
            skipped = current.skipped if current is not None else None
            folds = skipped is not None and not staged.whole
            folded = await in_thread(skipped.followed_by, staged) if skipped is not None and folds else staged
        except BaseException:
            self._ready.appendleft(staged)
            raise
        # From here on nothing waits.
        if self._closed:
            staged.release()
            return None
        self._taken.set()
        retired = current.retire() if current is not None else None
        if retired is None:
            return staged
        return folded if folds else retired.followed_by(staged)

    async def fail(self, error: BaseException) -> None:
        """Let whoever takes know, once nothing is ready any more, why nothing comes; the first error counts."""
        async with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    async def close(self) -> None:
        """Give back what is ready, and let whoever waits go."""
        self._closed = True
        async with self._changed:
            while self._ready:
                self._ready.popleft().release()
            self._changed.notify_all()
