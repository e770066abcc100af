"""One fetch of a blob for all who ask for it, and what they get it from.

Whoever asks gets a `Content`: a file of the cache, a flight that fills one while others read what is there already,
or, where there is no cache or no room in it, the backend itself.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from typing import BinaryIO

from deltabus.bus.errors import DeltabusError, TransportError

from .cache import CacheFullError, Draft

__all__ = ["CHUNK", "OWN_CHUNK", "Content", "DirectContent", "Fetch", "Flight", "FlightContent", "KeptContent"]

_log = logging.getLogger("deltabus.http")

CHUNK = 4 << 20
"""Bytes that are asked of a backend at a time, for all who wait for a blob."""

OWN_CHUNK = 1 << 20
"""Bytes that are asked of a backend at a time where each reader holds its own."""

Fetch = Callable[[int, int], Awaitable[bytes]]
"""Returns a range of a blob's bytes."""


class Content(abc.ABC):
    """A blob on its way to somebody; close it.

    Attributes:
        size: Of the whole blob; None while it is not known.
        file: Where the bytes that are there can be sent from; None if they are only in memory.
    """

    size: int | None
    file: BinaryIO | None = None

    @abc.abstractmethod
    async def extent(self, at: int) -> int:
        """Wait until bytes behind `at` are there, and return where they end; `at` itself if the blob ends sooner.

        Raises:
            DeltabusError: If they cannot be had.
        """

    @abc.abstractmethod
    async def read(self, at: int, end: int) -> bytes:
        """Return bytes that are there."""

    async def close(self) -> None:  # noqa: B027 - nothing to do for some
        """Release what it holds."""


class KeptContent(Content):
    """A blob that the cache holds."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file: BinaryIO = file
        self.size: int = size

    async def extent(self, at: int) -> int:  # noqa: D102
        return max(at, self.size)

    async def read(self, at: int, end: int) -> bytes:  # noqa: D102
        return await asyncio.to_thread(os.pread, self.file.fileno(), end - at, at)

    async def close(self) -> None:  # noqa: D102
        self.file.close()


class DirectContent(Content):
    """A blob on its backend; the next bytes are fetched while those before are sent.

    Args:
        fetch: Returns a range of the blob's bytes.
        size: Of the blob, if it is known.
        span: What part of it is wanted, first byte and end; None is all.
    """

    def __init__(self, fetch: Fetch, size: int | None, *, span: tuple[int, int] | None = None) -> None:
        self.size = size
        self._chunk = OWN_CHUNK if span is None else min(CHUNK, span[1] - span[0])
        self._ahead = _Ahead(fetch, size, self._chunk, stop=None if span is None else span[1])
        self._at = 0
        self._held = b""

    async def extent(self, at: int) -> int:  # noqa: D102
        if self._at <= at < self._at + len(self._held):
            return self._at + len(self._held)
        self._at, self._held = at, await self._ahead.fetch(at)
        if len(self._held) < self._chunk and (self._held or at == 0):
            self.size = at + len(self._held)
        return at + len(self._held)

    async def read(self, at: int, end: int) -> bytes:  # noqa: D102
        return self._held[at - self._at : end - self._at]

    async def close(self) -> None:  # noqa: D102
        await self._ahead.close()


class _Ahead:
    """Fetches one chunk after the other, and the next one beforehand."""

    def __init__(self, fetch: Fetch, size: int | None, chunk: int, *, stop: int | None = None) -> None:
        self._fetch = fetch
        self._size = size
        self._stop = stop
        self._length = chunk
        self._next: tuple[int, asyncio.Task[bytes]] | None = None

    async def fetch(self, at: int) -> bytes:
        """Return the chunk that begins there; a shorter one, or nothing, at the end."""
        if self._size is not None and at >= self._size > 0:
            return b""
        ready, self._next = self._next, None
        if ready is not None and ready[0] == at:
            task = ready[1]
        else:
            if ready is not None:
                await _end(ready[1])
            task = asyncio.create_task(self._chunk(at))
        try:
            data = await asyncio.shield(task)
        except asyncio.CancelledError:
            await _end(task)
            raise
        end = at + len(data)
        if len(data) == self._length and end != self._size and (self._stop is None or end < self._stop):
            self._next = end, asyncio.create_task(self._chunk(end))
        return data

    async def close(self) -> None:
        """Give up what is under way."""
        ready, self._next = self._next, None
        if ready is not None:
            await _end(ready[1])

    async def _chunk(self, at: int) -> bytes:
        return await self._fetch(at, at + self._length)


async def _end(task: asyncio.Task[bytes]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


class Flight:
    """Fetches a blob into the cache, for all who read from it meanwhile.

    The last chunk is shown only when all bytes are known to be right, so that nobody is given a whole blob that is not.

    Args:
        fetch: Returns a range of the blob's bytes.
        draft: Where they go.
        place: Under which name they are kept.
        size: Of the blob, if it is known.
        digest: What the hexadecimal digits of its SHA-256 begin with.
    """

    def __init__(self, fetch: Fetch, draft: Draft, *, place: str, size: int | None, digest: str) -> None:
        self.fetch = fetch
        self.size = size
        self.shown = 0
        self.over = False
        self.failure: DeltabusError | None = None
        self.usable = True
        self._draft = draft
        self._place = place
        self._digest = digest
        self._news: asyncio.Future[None] | None = None
        self._users = 1  # itself

    @property
    def file(self) -> BinaryIO:
        """What is there so far."""
        return self._draft.file

    async def run(self) -> None:
        """Fetch all of it."""
        ahead = _Ahead(self.fetch, self.size, CHUNK)
        kept = False
        try:
            at = 0
            while True:
                data = await ahead.fetch(at)
                await asyncio.to_thread(self._draft.write, data)
                before, at = at, at + len(data)
                if len(data) < CHUNK or at == self.size:
                    break
                self._show(before if self.size is None else at)
            if (self.size is not None and at != self.size) or not self._draft.digest.startswith(self._digest):
                _log.warning("a blob is not what its name says, and is not kept: %s bytes, %s", at, self._digest)
                self.usable = False
            else:
                self._draft.keep(self._place)
                kept = True
                self.size = at
                self._show(at)
        except CacheFullError as error:
            _log.warning("the cache is full, or cannot be written; blobs are streamed instead: %s", error)
            self.usable = False
        except DeltabusError as error:
            self.failure = error
        except Exception as error:
            _log.exception("a blob could not be fetched")
            self.failure = TransportError(f"a blob could not be fetched: {error}")
            raise
        finally:
            if not kept:
                self._draft.drop()
                self.usable = False
            self.over = True
            self._wake()
            self.leave()
            await ahead.close()

    async def extent(self, at: int) -> int:
        """Wait until bytes behind `at` are there, or all is over, and return where they end."""
        while self.shown <= at and not self.over:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)
        return max(at, self.shown)

    def join(self) -> None:
        """Keep the file open for one more."""
        self._users += 1

    def leave(self) -> None:
        """Keep the file open for one less."""
        self._users -= 1
        if not self._users:
            self._draft.file.close()

    def _show(self, end: int) -> None:
        self.shown = end
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)


class FlightContent(Content):
    """What a flight fetches; where it cannot be kept, the rest comes from the backend."""

    def __init__(self, flight: Flight) -> None:
        flight.join()
        self._flight = flight
        self._direct: DirectContent | None = None
        self.size = flight.size
        self.file = flight.file

    async def extent(self, at: int) -> int:  # noqa: D102
        if self._direct is None:
            end = await self._flight.extent(at)
            self.size = self._flight.size
            if end > at or self._flight.usable:
                return end
            if self._flight.failure is not None:
                raise self._flight.failure
            self._direct = DirectContent(self._flight.fetch, self.size)
            self.file = None
        end = await self._direct.extent(at)
        self.size = self._direct.size
        return end

    async def read(self, at: int, end: int) -> bytes:  # noqa: D102
        if self._direct is not None:
            return await self._direct.read(at, end)
        return await asyncio.to_thread(os.pread, self._flight.file.fileno(), end - at, at)

    async def close(self) -> None:  # noqa: D102
        self._flight.leave()
        if self._direct is not None:
            with contextlib.suppress(DeltabusError):
                await self._direct.close()
