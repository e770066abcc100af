"""`memory://name`: topics inside one process, for tests, demos and trainers that share a process with their engine.

Topics are found by name from every thread and event loop of the process, and live until `drop_topic`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import ClassVar, Self

from deltabus.bus.errors import (
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    StorageFullError,
    TransportError,
    UsageError,
)
from deltabus.bus.transport import Buffer, Guarantees, Record, StoredBlob, Transport

from .names import (
    byte_view,
    check_after,
    check_key,
    check_keys,
    check_log,
    check_position,
    check_range,
    check_record,
)
from .options import Option, parse_size
from .registry import Address

__all__ = ["MemoryTransport", "drop_topic"]

_LIMIT = 8 << 30


class _Topic:
    """The blobs and logs of one name; `lock` guards all of it."""

    __slots__ = ("blobs", "listeners", "lock", "logs", "nbytes", "times")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blobs: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.logs: dict[str, dict[int, bytes]] = {}
        self.nbytes = 0
        self.listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def read(self, log: str, after: int, limit: int) -> list[Record]:
        with self.lock:
            records = self.logs.get(log, {})
            if not records:
                return []
            first = max(after + 1, next(iter(records)))
            last = min(first + limit - 1, next(reversed(records)))
            return [Record(position, records[position]) for position in range(first, last + 1)]

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Give an event of the running loop that is set after each append."""
        event = asyncio.Event()
        with self.lock:
            self.listeners[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self.lock:
                del self.listeners[event]

    def wake(self) -> None:
        """Set the listeners' events, each in its own loop; the caller holds the lock."""
        for event, loop in self.listeners.items():
            # A loop that was closed with a listener still in it has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)


_topics: dict[str, _Topic] = {}
_topics_lock = threading.Lock()  # the only way two loops can meet without being handed a common object


def drop_topic(name: str) -> None:
    """Forget what is stored under `memory://name`; the next one to open it finds it empty.

    Transports that are open keep the topic that they hold. A name that is not there counts as dropped.
    """
    with _topics_lock:
        _topics.pop(name, None)


class MemoryTransport(Transport):
    """A topic in this process's memory.

    Args:
        name: The topic's name, written like a key.
        limit: Bytes that the topic may hold before a write raises `StorageFullError`.

    Raises:
        UsageError: If the name is malformed.
    """

    guarantees = Guarantees(
        conditional_append=True,
        push=True,
        durable=False,
        atomic_visibility=True,
        remark="Within one process, and gone with it.",
    )
    options: ClassVar[Sequence[Option]] = (
        Option(name="limit", parse=parse_size, default=_LIMIT, help="bytes that the topic may hold, such as 2GiB"),
    )

    def __init__(self, name: str, *, limit: int = _LIMIT) -> None:
        try:
            check_key(name)
        except UsageError as error:
            raise UsageError(f"memory:// needs a name, such as memory://run-7: {error}") from error
        self.url = f"memory://{name}"
        self._limit = limit
        self._closed = False
        self._tails: set[asyncio.Event] = set()
        with _topics_lock:
            self._topic = _topics.setdefault(name, _Topic())

    @classmethod
    def from_address(cls, address: Address, *, limit: int = _LIMIT) -> Self:
        """Return the topic named by the URL's host and path."""
        return cls(address.host + address.path, limit=limit)

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        self._check_open()
        check_key(key)
        view = byte_view(data)
        with self._topic.lock:
            held = self._topic.blobs.get(key)
            if held is None:
                self._reserve(view.nbytes, f"blob {key!r}")
                self._topic.blobs[key] = bytes(view)
                self._topic.times[key] = time.time()
            elif held != bytes(view):  # views compare item by item, bytes at once
                raise KeyExistsError(
                    f"{self.url} holds other bytes under key {key!r}; keys are write-once", url=self.url
                )

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        self._check_open()
        check_key(key)
        check_range(start, stop)
        with self._topic.lock:
            if key not in self._topic.blobs:
                raise KeyNotFoundError(f"{self.url} has no blob {key!r}", url=self.url)
            return self._topic.blobs[key][start:stop]

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        self._check_open()
        checked = check_keys(keys)
        with self._topic.lock:
            for key in checked:
                self._topic.nbytes -= len(self._topic.blobs.pop(key, b""))
                self._topic.times.pop(key, None)

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        self._check_open()
        head = f"{check_key(folder)}/"
        with self._topic.lock:
            found = sorted((key, len(data)) for key, data in self._topic.blobs.items() if key.startswith(head))
            return [StoredBlob(key, size, self._topic.times.get(key)) for key, size in found]

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        self._check_open()
        check_log(log)
        check_position(position)
        view = check_record(record)
        with self._topic.lock:
            records = self._topic.logs.get(log, {})
            held = records.get(position)
            if held is not None and held == view:
                return
            if held is not None or (records and position < next(iter(records))):
                raise PositionTakenError(
                    f"another record is, or was, at position {position} of log {log!r} in {self.url}", url=self.url
                )
            if position and position - 1 not in records:
                raise UsageError(f"position {position - 1} of log {log!r} in {self.url} is empty; append there first")
            self._reserve(view.nbytes, f"position {position} of log {log!r}")
            self._topic.logs.setdefault(log, {})[position] = bytes(view)
            self._topic.wake()

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        self._check_open()
        check_log(log)
        check_after(after, limit)
        return self._topic.read(log, after, limit)

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        self._check_open()
        check_log(log)
        check_after(after)
        return self._tail(log, after)

    async def _tail(self, log: str, after: int) -> AsyncIterator[Record]:
        with self._topic.listening() as wake:
            self._tails.add(wake)
            try:
                while True:
                    wake.clear()
                    records = await self.read(log, after)
                    for record in records:
                        yield record
                        after = record.position
                    if not records:
                        await wake.wait()
            finally:
                self._tails.discard(wake)

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        self._check_open()
        check_log(log)
        check_position(before)
        with self._topic.lock:
            records = self._topic.logs.get(log, {})
            for position in [position for position in list(records)[:-1] if position < before]:
                self._topic.nbytes -= len(records.pop(position))

    async def logs(self) -> list[str]:  # noqa: D102
        self._check_open()
        with self._topic.lock:
            return sorted(log for log, records in self._topic.logs.items() if records)

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        for wake in self._tails:
            wake.set()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.url} is closed; open another", url=self.url)

    def _reserve(self, nbytes: int, what: str) -> None:
        if self._topic.nbytes + nbytes > self._limit:
            raise StorageFullError(
                f"{what} of {nbytes} bytes does not fit into {self.url}, which holds {self._topic.nbytes} of at most "
                f"{self._limit} bytes; raise its option 'limit' or delete blobs",
                url=self.url,
            )
        self._topic.nbytes += nbytes
