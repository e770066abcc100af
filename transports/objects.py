"""A topic as objects of a store that can create, fetch and list: what S3, fsspec and the Hub share.

    <key>                               a blob
    logs/<log>/00000000000000000007     the record at position 7 of a log

A reader finds a new record by asking for the object that would be next, which both asks and fetches; a folder is listed
only to find where a log begins whose first records were removed. Whatever removes records must take the oldest first,
and leave those that an append still under way may stand behind.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial

from deltabus.bus.errors import (
    AppendUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Buffer, Record, StoredBlob

from .names import (
    LOGS,
    byte_view,
    check_after,
    check_key,
    check_keys,
    check_log,
    check_position,
    check_range,
    check_record,
    is_log,
)
from .notifier import WakeableTransport
from .parallel import run_parallel
from .records import record_name

__all__ = ["POLL", "ObjectStore", "ObjectTransport", "UncertainError"]

POLL = 1.0
"""The longest pause between two looks for a new record, in seconds, unless told otherwise."""

_FIRST_POLL = 0.05
_WINDOW = 16
"""Records that are fetched at a time, at most, while a reader catches up."""

_PAGE = 100
_ATTEMPTS = 5
_CHECK_EVERY = 16
"""After this many looks in vain one asks whether the log was cut off in front of the reader, instead of for the next
record; without it a reader that slept through a retention would wait for ever."""

_RECORD = re.compile(r"[0-9]{20}")


class UncertainError(Exception):
    """The answer to a write was lost: it may or may not be done, now or later; the text says why."""


class ObjectStore(abc.ABC):
    """What an object transport needs of its backend; names are `/`-separated and relative to the topic.

    Every method may raise `TransientTransportError`, `AccessDeniedError` and `TransportError`, with the topic's URL,
    and takes a bounded time.
    """

    @abc.abstractmethod
    async def fetch(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return bytes `start` to `stop` of an object, fewer where it ends sooner; None if there is none."""

    @abc.abstractmethod
    async def exists(self, name: str) -> bool:
        """Return whether there is such an object."""

    @abc.abstractmethod
    async def create(self, name: str, data: memoryview) -> bool:
        """Store an object that is not there yet, whole or not at all.

        Args:
            name: Where.
            data: A flat view of its bytes, which do not change before this returns.

        Returns:
            Whether it is stored by this call; False says that an object is, or was, there, perhaps of an earlier
            attempt.

        Raises:
            UncertainError: If the answer was lost.
            TransientTransportError: If the backend did not answer, and surely wrote nothing.
            StorageFullError: If there is no room.
        """

    @abc.abstractmethod
    async def holds(self, name: str, data: memoryview) -> bool | None:
        """Return whether an object has exactly these bytes, None if there is none; fetch no more of it than needed."""

    @abc.abstractmethod
    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there count as removed."""

    @abc.abstractmethod
    async def find_names(self, folder: str, after: str, limit: int) -> list[str]:
        """Return the first names in a folder that sort behind `after`, in order, without the folder.

        Fewer than `limit` say that there are no more. What lies deeper may be among them.
        """

    @abc.abstractmethod
    async def find_all(self, folder: str) -> list[StoredBlob]:
        """Return all objects below a folder, at any depth, by their whole names, in any order."""

    @abc.abstractmethod
    async def find_folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder that hold anything, without that folder."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections; may be called more than once, also when nothing was ever connected."""


class ObjectTransport(WakeableTransport):
    """A topic in an object store; subclasses say which, and what it guarantees.

    Args:
        store: Where.
        url: The topic's URL, without secrets.
        poll: The longest pause between two looks for a new record, in seconds. It begins short after each record.
    """

    def __init__(self, store: ObjectStore, *, url: str, poll: float = POLL) -> None:
        self.url = url
        self._store = store
        self._poll = poll
        self._tails: dict[asyncio.Event, str] = {}
        self._closed = False

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        self._check_open()
        check_key(key)
        view = byte_view(data)
        try:
            same = await self._store.create(key, view) or await self._store.holds(key, view)
        except UncertainError as error:
            raise TransientTransportError(
                f"{self.url} lost the answer when told to store blob {key!r}: {error}; it may be done again",
                url=self.url,
            ) from error
        if same is None:
            raise TransientTransportError(
                f"blob {key!r} in {self.url} was removed while it was stored; do it again", url=self.url
            )
        if not same:
            raise KeyExistsError(
                f"cannot store blob {key!r} in {self.url}: other bytes are there, and keys are write-once", url=self.url
            )

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        self._check_open()
        check_key(key)
        check_range(start, stop)
        data = await self._store.fetch(key, start, stop)
        if data is None:
            raise KeyNotFoundError(f"{self.url} has no blob {key!r}", url=self.url)
        return data

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        self._check_open()
        await self._store.remove(check_keys(keys))

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        self._check_open()
        return sorted(await self._store.find_all(check_key(folder)), key=lambda blob: blob.key)

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        self._check_open()
        check_log(log)
        check_position(position)
        view = check_record(record)
        await self._check_place(log, position)
        name = _name(log, position)
        try:
            held: bytes | None = None
            if created := await self._store.create(name, view):
                await self._confirm(log, position)
            if created or (held := await self._fetch_record(log, position)) == bytes(view):
                self.wake(log)
                return
        except UncertainError as error:
            with contextlib.suppress(TransportError):  # then it stays unknown, which is said below
                held = await self._fetch_record(log, position)
            if held is None:
                raise AppendUnknownError(
                    f"{self.url} lost the answer to an append to log {log!r} at position {position}: {error}; read it "
                    "to learn who won",
                    url=self.url,
                ) from error
            if held == bytes(view):
                await self._confirm(log, position)
                self.wake(log)
                return
        raise self._taken(log, position)

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        self._check_open()
        check_log(log)
        check_after(after, limit)
        found = await self._fetch_run(log, after + 1, limit)
        return found or await self._read_past_cut(log, after, limit)

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        self._check_open()
        check_log(log)
        check_after(after)
        return self._tail(log, after)

    async def _tail(self, log: str, after: int) -> AsyncIterator[Record]:
        shortest = pause = min(_FIRST_POLL, self._poll)
        looks = 0
        with self._listening(log) as wake:
            found = await self.read(log, after)
            while True:
                for record in found:
                    yield record
                    after = record.position
                if found:
                    pause, looks = shortest, 0
                elif not await self._pause(wake, pause):
                    pause = min(2 * pause, self._poll)
                wake.clear()
                self._check_open()
                looks += 1
                if looks % _CHECK_EVERY:
                    found = await self._fetch_run(log, after + 1, _PAGE)
                else:
                    found = await self._read_past_cut(log, after, _PAGE)

    async def _pause(self, wake: asyncio.Event, pause: float) -> bool:
        """Wait until it is time to look again; return whether that was said by somebody."""
        try:
            async with asyncio.timeout(pause):
                await wake.wait()
        except TimeoutError:
            return False
        return True

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        self._check_open()
        check_log(log)
        check_position(before)
        first = await self._find_first(log, -1)
        if first is None or first >= before:
            return
        if not await self._store.exists(_name(log, before)):
            before = min(before, await self._find_last(log, first))
        # One by one, so that a hole is never left; and each of them, because a listing may miss one that is there.
        for position in range(first, before):
            await self._store.remove([_name(log, position)])

    async def logs(self) -> list[str]:  # noqa: D102
        self._check_open()
        return sorted({name for name in await self._store.find_folders(LOGS) if is_log(name)})

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        self.wake()
        await self._store.close()

    @contextlib.contextmanager
    def _listening(self, log: str) -> Iterator[asyncio.Event]:
        """Give an event that is set when this transport appends to the log, and when it is closed."""
        event = asyncio.Event()
        self._tails[event] = log
        try:
            yield event
        finally:
            del self._tails[event]

    def wake(self, log: str | None = None) -> None:  # noqa: D102
        for event, name in self._tails.items():
            if log in (None, name):
                event.set()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.url} is closed; open another", url=self.url)

    def _taken(self, log: str, position: int) -> PositionTakenError:
        return PositionTakenError(
            f"another record is, or was, at position {position} of log {log!r} in {self.url}", url=self.url
        )

    async def _check_place(self, log: str, position: int) -> None:
        """Refuse a position behind a hole, and one from which retention has removed the record."""
        if position and await self._store.exists(_name(log, position - 1)):
            return
        first = await self._find_first(log, -1)
        if first is not None and first > position:
            raise self._taken(log, position)
        if position and first != position:
            raise UsageError(f"position {position - 1} of log {log!r} in {self.url} is empty; append there first")

    async def _confirm(self, log: str, position: int) -> None:
        """Take back a record that was written in front of the log, because its beginning was removed meanwhile."""
        try:
            if position and await self._store.exists(_name(log, position - 1)):
                return
            behind = await self._find_first(log, position)
        except TransportError as error:
            raise AppendUnknownError(
                f"cannot tell whether log {log!r} in {self.url} was cut off while position {position} was written: "
                f"{error}; read it to learn who won",
                url=self.url,
            ) from error
        # A log keeps its last record: with nothing behind, this is it. Nobody writes behind a hole, and position 0 may
        # well be followed already.
        if behind is None or (position == 0 and behind == 1):
            return
        taken = self._taken(log, position)
        try:
            await self._store.remove([_name(log, position)])
        except TransportError as error:
            raise taken from error
        raise taken

    async def _fetch_record(self, log: str, position: int) -> bytes | None:
        # One byte more than may be there shows a record that is too long, without taking memory for all of it.
        data = await self._store.fetch(_name(log, position), 0, MAX_RECORD_BYTES + 1)
        if data is not None and len(data) > MAX_RECORD_BYTES:
            raise TransportError(
                f"the record at position {position} of log {log!r} in {self.url} is over {MAX_RECORD_BYTES} bytes; "
                "check that only deltabus writes there",
                url=self.url,
            )
        return data

    async def _fetch_run(self, log: str, first: int, limit: int) -> list[Record]:
        """Return the records from a position on without a hole, at most `limit`; one request where there is none."""
        records: list[Record] = []
        while len(records) < limit:
            width = min(max(1, len(records)), _WINDOW, limit - len(records))
            positions = range(first + len(records), first + len(records) + width)
            for position, data in zip(
                positions,
                await run_parallel([partial(self._fetch_record, log, place) for place in positions], width=width),
                strict=True,
            ):
                if data is None:
                    return records
                records.append(Record(position, data))
        return records

    async def _read_past_cut(self, log: str, after: int, limit: int) -> list[Record]:
        """Return the records behind `after` if those in front of them were removed, and nothing otherwise."""
        if after >= 0 and await self._store.exists(_name(log, after)):
            return []
        # The log ends before `after`, or its beginning was removed, perhaps by somebody who is still at it.
        for _ in range(_ATTEMPTS):
            first = await self._find_first(log, after)
            if first is None:
                return []
            if found := await self._fetch_run(log, first, limit):
                return found
        raise TransientTransportError(
            f"the first records of log {log!r} in {self.url} vanish while they are read; read again", url=self.url
        )

    async def _find_first(self, log: str, after: int) -> int | None:
        """Return the first position behind `after` that holds a record, None if there is none."""
        seen = record_name(after) if after >= 0 else ""
        while True:
            names = await self._store.find_names(f"{LOGS}/{log}", seen, _PAGE)
            for name in names:
                if _RECORD.fullmatch(name) and int(name) > after:
                    return await self._step_back(log, after, int(name))
            if len(names) < _PAGE:
                return None
            seen = names[-1]

    async def _find_last(self, log: str, first: int) -> int:
        """Return the last position of a log that is listed, from one on that holds a record."""
        last, seen = first, record_name(first)
        while True:
            names = await self._store.find_names(f"{LOGS}/{log}", seen, _PAGE)
            last = max([last, *(int(name) for name in names if _RECORD.fullmatch(name))])
            if len(names) < _PAGE:
                return last
            seen = names[-1]

    async def _step_back(self, log: str, after: int, first: int) -> int:
        """Return the true first position; a listing may miss a record that was appended meanwhile and show the next."""
        while first - 1 > after and await self._store.exists(_name(log, first - 1)):
            first -= 1
        return first


def _name(log: str, position: int) -> str:
    return f"{LOGS}/{log}/{record_name(position)}"
