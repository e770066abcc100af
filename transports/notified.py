"""`?notify=...`: bytes in a store, announcements on a broker.

Everything is the store's business; the broker only makes its readers look sooner. Without it they poll as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import cast

from deltabus.bus.errors import AppendUnknownError, TransportError
from deltabus.bus.transport import Buffer, Record, StoredBlob

from .attention import Attention
from .notifier import Notifier, WakeableTransport

__all__ = ["NotifiedTransport"]

_PAUSES = (0.1, 5.0)
"""Seconds until a broker is tried again: at first, and at most."""

_HEALTHY = 10.0
"""Seconds after which a line that is lost had worked."""

_LIMIT = 30.0
"""Seconds that an announcement may take."""

_LAST = 1.0
"""Seconds that the last announcement may take when the transport is closed."""

_logger = logging.getLogger(__name__)


class NotifiedTransport(WakeableTransport):
    """A topic in a store whose readers are told of new records over a broker.

    Args:
        store: Where everything is; it is closed with this transport.
        notifier: Over which to tell; likewise.
    """

    def __init__(self, store: WakeableTransport, notifier: Notifier) -> None:
        self.url = store.url
        self.guarantees = replace(store.guarantees, push=True)
        self._store = store
        self._notifier = notifier
        self._teller = _Teller(notifier, url=self.url)
        self._trouble = _Trouble(f"{self.url} hears no announcements over {notifier.url}, and polls instead")
        self._listening: asyncio.Task[None] | None = None
        self._tails: dict[Attention, str] = {}
        self._told = False
        self._closed = False

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        await self._store.put(key, data)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        return await self._store.get(key, start, stop)

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        await self._store.delete(keys)

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        return await self._store.blobs(folder)

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        try:
            await self._store.append(log, position, record)
        except AppendUnknownError:
            self._teller.tell(log, position)  # whoever looks in vain loses nothing
            raise
        self._teller.tell(log, position)

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        return await self._store.read(log, after, limit)

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        # The contract says that the iterator can be closed, which its type does not.
        return self._tail(log, after, cast("AsyncGenerator[Record]", self._store.tail(log, after)))

    async def _tail(self, log: str, after: int, records: AsyncGenerator[Record]) -> AsyncIterator[Record]:
        with self._attending(log, after) as attention:
            async with contextlib.aclosing(records):
                async for record in records:
                    attention.see(record.position)
                    yield record

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        await self._store.trim(log, before)

    async def logs(self) -> list[str]:  # noqa: D102
        return await self._store.logs()

    def wake(self, log: str | None = None) -> None:  # noqa: D102
        self._store.wake(log)

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        listening, self._listening = self._listening, None
        try:
            await self._teller.close()
            if listening is not None:
                listening.cancel()
                await asyncio.wait((listening,))
        finally:
            for attention in self._tails:
                attention.close()
            try:
                await self._store.close()
            finally:
                await self._notifier.close()

    @contextlib.contextmanager
    def _attending(self, log: str, after: int) -> Iterator[Attention]:
        """Let a tail look whenever its log is announced."""
        loop = asyncio.get_running_loop()
        attention = Attention(lambda: self._store.wake(log), seen=after, told=self._told, loop=loop)
        self._tails[attention] = log
        if self._listening is None and not self._closed:
            self._listening = asyncio.create_task(self._listen())
        try:
            yield attention
        finally:
            attention.close()
            del self._tails[attention]

    async def _listen(self) -> None:
        """Listen for ever, on one line after another."""
        loop = asyncio.get_running_loop()
        pause, longest = _PAUSES
        while True:
            began = loop.time()
            try:
                await self._notifier.listen(self._hear, ready=self._begin)
            except Exception as error:
                self._trouble.note(error)
            finally:
                self._turn(told=False)
            pause = _PAUSES[0] if loop.time() - began > _HEALTHY else min(2 * pause, longest)
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - readers must not come back together

    def _hear(self, log: str, position: int) -> None:
        for attention, name in self._tails.items():
            if name == log:
                attention.hear(position)

    def _begin(self) -> None:
        self._trouble.end()
        self._turn(told=True)

    def _turn(self, *, told: bool) -> None:
        self._told = told
        for attention in self._tails:
            attention.turn(told=told)


class _Trouble:
    """What goes wrong with the broker, told once until it has gone right again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = False

    def note(self, error: Exception) -> None:
        unknown = None if isinstance(error, TransportError | TimeoutError) else error
        reason = str(error) or type(error).__name__
        _logger.log(logging.DEBUG if self._begun else logging.WARNING, "%s: %s", self._what, reason, exc_info=unknown)
        self._begun = True

    def end(self) -> None:
        if self._begun:
            _logger.info("no longer so: %s", self._what)
        self._begun = False


class _Teller:
    """Announces in the background; of each log only the newest record waits, however long the broker is away."""

    def __init__(self, notifier: Notifier, *, url: str) -> None:
        self._notifier = notifier
        self._trouble = _Trouble(f"records of {url} are not announced over {notifier.url}, and readers poll instead")
        self._news: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def tell(self, log: str, position: int) -> None:
        """Announce a record as soon as the broker takes it; do nothing once closed."""
        if self._closed:
            return
        self._news[log] = max(position, self._news.get(log, -1))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Say the last word, if it can be said in a moment."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=_LAST)
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        pause, longest = _PAUSES
        while self._news:
            news = dict(self._news)
            try:
                async with asyncio.timeout(_LIMIT):
                    await self._notifier.announce(news)
            except Exception as error:
                self._trouble.note(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
            else:
                self._trouble.end()
                pause = _PAUSES[0]
                self._news = {log: last for log, last in self._news.items() if last > news.get(log, -1)}
