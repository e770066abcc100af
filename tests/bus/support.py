"""What the tests of the bus share: short ways to make messages, and a transport whose faults are scripted."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

from deltabus.bus.errors import KeyExistsError, KeyNotFoundError, PositionTakenError, UsageError
from deltabus.bus.message import Blob, Kind, Message, Stats
from deltabus.bus.retry import Retry
from deltabus.bus.transport import Buffer, Record, StoredBlob, Transport

LIMIT = 20.0
"""Seconds after which a wait in a test has failed."""

_NAMED = hashlib.sha256(b"{}")
SCHEMA = Blob(key=f"schemas/{_NAMED.hexdigest()}.json", size=2, checksum=_NAMED.digest())
OTHER_SCHEMA = Blob(key="schemas/" + "1" * 64 + ".json", size=2, checksum=b"\1" * 32)


def digest(writer: str, version: int) -> int:
    """A digest that every version of every writer has to itself."""
    return int.from_bytes(hashlib.sha256(f"{writer} {version}".encode()).digest()[:8], "little")


def payload(size: int) -> tuple[Blob, ...]:
    return (Blob(key=f"blobs/{size}", size=size, checksum=bytes(32)),)


def anchor(position: int, version: int, *, writer: str = "a", size: int = 1000, **fields: Any) -> Message:
    return Message(
        **{
            "writer": writer,
            "position": position,
            "epoch": 1,
            "kind": Kind.ANCHOR,
            "step": version,
            "base": {},
            "version": version,
            "group": (writer,),
            "schema": SCHEMA,
            "digest_before": None,
            "digest_after": digest(writer, version),
            "blobs": payload(size),
            "stats": Stats(changed=0, total=0),
            "created": 0.0,
            **fields,
        }
    )


def delta(
    position: int, version: int, *, base: int | None = None, writer: str = "a", size: int = 10, **fields: Any
) -> Message:
    base = version - 1 if base is None else base
    whole = {"kind": Kind.DELTA, "base": {writer: base}, "digest_before": digest(writer, base), **fields}
    return anchor(position, version, writer=writer, size=size, **whole)


def chain(length: int, *, writer: str = "a", **fields: Any) -> list[Message]:
    """An anchor and the deltas behind it."""
    first = anchor(0, 1, writer=writer, **fields)
    return [first, *(delta(p, p + 1, writer=writer, **fields) for p in range(1, length))]


class Time:
    """A clock that only goes on when somebody sleeps, and lets the loop turn once then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def retry(self, **options: float) -> Retry:
        return Retry(sleep=self.sleep, clock=lambda: self.now, **options)


class Store:
    """What every transport of one topic sees."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.now = 0.0
        self.records: dict[str, dict[int, bytes]] = defaultdict(dict)
        self.order: list[str] = []
        self.grew = asyncio.Condition()


Fault = BaseException | Callable[[], Awaitable[None]]


class FakeTransport(Transport):
    """A topic in memory. `before` and `after` script what goes wrong around the effect of the next calls of a method.

    A fault is an exception that is raised, or a coroutine function that is awaited; None lets one call pass.
    """

    url = "fake://topic"

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.before: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.after: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.calls: list[str] = []
        self.hidden: set[int] = set()
        self.open_tails = 0

    def fail(self, method: str, *faults: Fault | None, late: bool = False) -> None:
        (self.after if late else self.before)[method].extend(faults)

    async def _meet(self, faults: dict[str, deque[Fault | None]], method: str) -> None:
        fault = faults[method].popleft() if faults[method] else None
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            await fault()

    async def _begin(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(0)
        await self._meet(self.before, method)

    async def put(self, key: str, data: Buffer) -> None:
        await self._begin("put")
        self.store.times.setdefault(key, self.store.now)
        if self.store.blobs.setdefault(key, bytes(data)) != bytes(data):
            raise KeyExistsError(key, url=self.url)
        self.store.order.append(key)
        await self._meet(self.after, "put")

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await self._begin("get")
        if key not in self.store.blobs:
            raise KeyNotFoundError(key, url=self.url)
        return self.store.blobs[key][start:stop]

    async def delete(self, keys: Iterable[str]) -> None:
        await self._begin("delete")
        for key in keys:
            if self.store.blobs.pop(key, None) is not None:
                del self.store.times[key]
                self.store.order.append(f"-{key}")

    async def blobs(self, folder: str) -> list[StoredBlob]:
        await self._begin("blobs")
        found = sorted(item for item in self.store.blobs.items() if item[0].startswith(f"{folder}/"))
        return [StoredBlob(key, len(data), self.store.times.get(key, 0.0)) for key, data in found]

    async def append(self, log: str, position: int, record: Buffer) -> None:
        await self._begin("append")
        records = self.store.records[log]
        if position and position - 1 not in records:
            raise UsageError(f"position {position - 1} of log {log} is empty")
        if records.setdefault(position, bytes(record)) != bytes(record):
            raise PositionTakenError(f"{log} {position}", url=self.url)
        self.store.order.append(f"{log}@{position}")
        async with self.store.grew:
            self.store.grew.notify_all()
        await self._meet(self.after, "append")

    def _behind(self, log: str, after: int) -> list[Record]:
        records = self.store.records.get(log, {})
        return [Record(p, records[p]) for p in sorted(records) if p > after and p not in self.hidden]

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:
        await self._begin("read")
        return self._behind(log, after)[:limit]

    async def tail(self, log: str, after: int = -1) -> AsyncGenerator[Record, None]:
        self.open_tails += 1
        try:
            while True:
                await self._begin("tail")
                async with self.store.grew:
                    await self.store.grew.wait_for(
                        lambda: self._behind(log, after) or self.before["tail"]  # noqa: B023
                    )
                for record in self._behind(log, after):
                    yield record
                    after = record.position
        finally:
            self.open_tails -= 1

    async def wake(self) -> None:
        """Let every tail look again."""
        async with self.store.grew:
            self.store.grew.notify_all()

    async def trim(self, log: str, before: int) -> None:
        await self._begin("trim")
        records = self.store.records[log]
        for position in sorted(records)[:-1]:
            if position < before:
                del records[position]
                self.store.order.append(f"-{log}@{position}")

    async def logs(self) -> list[str]:
        await self._begin("logs")
        return sorted(log for log, records in self.store.records.items() if records)

    async def close(self) -> None:
        self.calls.append("close")
