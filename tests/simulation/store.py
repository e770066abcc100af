"""A store that many processes use over a bad network, and the transport through which they reach it.

A request travels to the store, takes effect there, and its answer travels back. On the way it may get lost, its answer
may, it may arrive after it was given up, or twice; and whoever sent it may be dead when it takes effect. What the store
does it does at once and for good; the contract of `deltabus.bus.transport` leaves open when others see an append whose
answer is still under way, and what a listing shows of what is stored meanwhile, so that chance decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any, TypeVar

from deltabus.bus.errors import (
    AppendUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.transport import Buffer, Record, StoredBlob, Transport

from .faults import CALM, Faults
from .oracle import Oracle
from .process import Process

__all__ = ["SimulatedTransport", "Store"]

_T = TypeVar("_T")
URL = "simulated://topic"
_TIMEOUT = 4.0
"""Seconds after which a request without an answer is given up."""

_HIDDEN = 30.0
"""Most seconds for which a mount hides what is there."""


class Store:
    """What there is of a topic.

    Args:
        loop: Tells the time.
        chance: Decides.
        oracle: Is told of everything that changes.
        conditional: Whether the store knows what stood in front of a log, and refuses to write there, as brokers do;
            on object stores the transport has to look.

    Attributes:
        faults: What goes wrong now.
        blobs: Those that are there.
        records: Those that are there, by log and position.
        happened: How often each kind of fault struck.
        trace: A hash of everything that happened so far, and when.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, chance: random.Random, oracle: Oracle, *, conditional: bool
    ) -> None:
        self.loop = loop
        self.chance = chance
        self.oracle = oracle
        self.conditional = conditional
        self.faults = CALM
        self.blobs: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.records: dict[str, dict[int, bytes]] = defaultdict(dict)
        self.happened: dict[str, int] = defaultdict(int)
        self.trace = 0
        self._shown: dict[str, dict[int, float]] = defaultdict(dict)
        self._listening: dict[asyncio.Event, None] = {}

    @property
    def now(self) -> float:
        """The time on the store's own clock, which nobody else has."""
        return self.loop.time() + 5e8

    def note(self, *what: object) -> None:
        """Add something that happened now to the trace."""
        self.trace = zlib.crc32(f"{self.loop.time()!r} {what!r}".encode(), self.trace)

    # What takes effect, at once

    def put(self, key: str, data: bytes) -> None:
        held = self.blobs.get(key)
        if held is not None and held != data:
            raise KeyExistsError(f"other bytes are under {key}", url=URL)
        if held is None:
            self.blobs[key] = data
            self.times[key] = self.now
            self.note("put", key)
            self.oracle.stored(key, data, self.loop.time())

    def get(self, key: str, start: int, stop: int | None) -> bytes:
        if key not in self.blobs:
            raise KeyNotFoundError(f"no blob {key}", url=URL)
        return self.blobs[key][start:stop]

    def delete(self, keys: Iterable[str], process: Process) -> None:
        for key in keys:
            if self.blobs.pop(key, None) is not None:
                del self.times[key]
                self.note("delete", key)
                self.oracle.deleted(key, self.loop.time(), process)

    def append(self, log: str, position: int, record: bytes, *, shown: float) -> None:
        records = self.records[log]
        held = records.get(position)
        if held is not None and held != record:
            raise PositionTakenError(f"position {position} is taken", url=URL)
        if held is None:
            if self.conditional and records and position < min(records):
                raise PositionTakenError(f"position {position} was taken", url=URL)
            if self.conditional and position and position - 1 not in records:
                raise UsageError(f"position {position - 1} is empty")
            records[position] = record
            self.note("append", log, position)
            self.oracle.appended(log, position, record, self)
        times = self._shown[log]
        times[position] = max(min(times.get(position, shown), shown), times.get(position - 1, 0.0))
        self.loop.call_at(times[position], self._announce)

    def remove(self, log: str, before: int, process: Process) -> None:
        """Remove records in front of a position, but not the last."""
        records = self.records[log]
        for position in sorted(records)[:-1]:
            if position < before:
                del records[position]
                self.note("remove", log, position)
                self.oracle.removed(log, position, self, process)

    def visible(self, log: str, after: int, limit: int) -> list[Record]:
        """Return the run of records behind a position that can be seen by now."""
        records, shown, now = self.records.get(log, {}), self._shown[log], self.loop.time()
        found: list[Record] = []
        place = after + 1
        if place not in records:
            place = min((position for position in records if position > after), default=place)
        while place in records and shown[place] <= now and len(found) < limit:
            found.append(Record(place, records[place]))
            place += 1
        return found

    def names(self) -> list[str]:
        return sorted(log for log in list(self.records) if self.visible(log, -1, 1))

    def listing(self, folder: str) -> dict[str, StoredBlob]:
        return {
            key: StoredBlob(key, len(data), self.times[key])
            for key, data in self.blobs.items()
            if key.startswith(f"{folder}/")
        }

    # Who waits for news

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Give an event that is set when a record can be seen."""
        told = asyncio.Event()
        self._listening[told] = None
        try:
            yield told
        finally:
            del self._listening[told]

    def _announce(self) -> None:
        for told in self._listening:
            if self.chance.random() >= self.faults.deaf:
                told.set()


class SimulatedTransport(Transport):
    """A process's way to the store."""

    url = URL

    def __init__(self, store: Store, process: Process) -> None:
        self._store = store
        self._process = process
        self._loop = store.loop
        self._chance = store.chance
        self._hidden: dict[str, float] = {}

    def _way(self) -> float:
        return self._chance.expovariate(1 / self._store.faults.latency)

    async def _ask(
        self, what: str, effect: Callable[[float], _T], *, writes: bool = False, unknown: bool = False
    ) -> _T:
        """Send a request, and return its answer.

        Args:
            what: Named in errors.
            effect: What it does at the store, given when its answer will be there.
            writes: Whether it changes anything.
            unknown: Whether a lost answer has an error of its own.
        """
        faults, draw = self._store.faults, self._chance.random
        if faults.stall and draw() < faults.stall:
            self._store.happened["stall"] += 1
            await asyncio.sleep(self._chance.uniform(0, faults.sleep))
        dies = self._process.next_request()
        if dies == "before":
            self._process.crash()
            raise asyncio.CancelledError
        fate = self._fate(faults, writes=writes)
        there, back = self._way(), self._way()
        answer: asyncio.Future[Any] = self._loop.create_future()

        def tell(outcome: object) -> None:
            if not answer.done():
                if isinstance(outcome, Exception):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)

        def lost() -> TransportError:
            kind = AppendUnknownError if unknown and fate in ("lose", "late") else TransientTransportError
            return kind(f"no answer to {what}: {fate}", url=URL)

        def arrive() -> None:
            due = self._loop.time() + back
            try:
                outcome: object = effect(due)
            except (TransportError, UsageError) as error:
                outcome = error
            if fate == "arrives":
                self._loop.call_at(due, tell, outcome)

        if fate == "late":
            there = _TIMEOUT + self._chance.uniform(0, faults.longest)
        if fate not in ("fail", "cut off"):
            self._loop.call_later(there, arrive)
        if fate != "arrives":
            self._store.happened[fate] += 1
            self._loop.call_later(_TIMEOUT * draw() if fate == "fail" else _TIMEOUT, tell, lost())
        elif writes and draw() < faults.twice:
            self._store.happened["twice"] += 1
            self._loop.call_later(there + self._chance.uniform(0, faults.longest), arrive)
        if dies == "meanwhile":
            answer.cancel()
            self._process.crash()
            raise asyncio.CancelledError
        try:
            return await answer
        finally:
            if dies == "behind":
                self._process.crash()

    def _fate(self, faults: Faults, *, writes: bool) -> str:
        if self._process.cut_off:
            # What was under way when the line broke may have arrived.
            return "lose" if writes and self._chance.random() < 0.05 else "cut off"
        draw = self._chance.random()
        for name, chance in (("fail", faults.fail), ("lose", faults.lose * writes), ("late", faults.late * writes)):
            if draw < chance:
                return name
            draw -= chance
        return "arrives"

    async def put(self, key: str, data: Buffer) -> None:
        data = bytes(data)
        await self._ask(f"put {key}", lambda due: self._store.put(key, data), writes=True)

    def _get(self, key: str, start: int, stop: int | None) -> bytes:
        now, hide = self._loop.time(), self._store.faults.hide
        if hide and key.startswith("blobs/") and self._chance.random() < hide:
            self._store.happened["hidden"] += 1
            self._hidden[key] = now + self._chance.uniform(0, _HIDDEN)
        if now < self._hidden.get(key, 0.0):
            raise KeyNotFoundError(f"no blob {key} here", url=URL)
        return self._store.get(key, start, stop)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self._ask(f"get {key}", lambda due: self._get(key, start, stop))

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        some = keys[: self._chance.randint(0, len(keys))]

        def effect(due: float) -> None:
            self._store.delete(keys, self._process)

        def half(due: float) -> None:
            self._store.delete(some, self._process)

        await self._ask("delete", half if self._chance.random() < self._store.faults.lose else effect, writes=True)
        if some != keys:  # a batch is several requests on some stores
            await self._ask("delete", effect, writes=True)

    async def blobs(self, folder: str) -> list[StoredBlob]:
        before = await self._ask(f"list {folder}", lambda due: self._store.listing(folder))
        after = await self._ask(f"list {folder}", lambda due: self._store.listing(folder))
        found = []
        for key in sorted(before.keys() | after.keys()):
            if (key in before and key in after) or self._chance.random() < 0.5:
                found.append(after.get(key) or before[key])
        return found

    async def append(self, log: str, position: int, record: Buffer) -> None:
        data = bytes(record)
        if not self._store.conditional:
            # The real ones look once more behind the write. Here the time that retention waits must do.
            await self._ask("look", lambda due: self._check_place(log, position))

        def effect(due: float) -> None:
            shown = self._chance.uniform(self._loop.time(), due)
            self._store.append(log, position, data, shown=shown)

        await self._ask(f"append {position}", effect, writes=True, unknown=True)

    def _check_place(self, log: str, position: int) -> None:
        records = self._store.records[log]
        if not position or position - 1 in records:
            return
        if records and min(records) > position:
            raise PositionTakenError(f"position {position} was taken", url=URL)
        if position not in records:
            raise UsageError(f"position {position - 1} is empty")

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:
        return await self._ask(f"read {after}", lambda due: self._store.visible(log, after, limit))

    async def tail(self, log: str, after: int = -1) -> AsyncGenerator[Record, None]:
        pause = 1.0
        with self._store.listening() as told:
            while True:
                told.clear()
                records = await self.read(log, after)
                for record in records:
                    yield record
                    after = record.position
                pause = 1.0 if records else min(2 * pause, 30.0)
                if not records:
                    timer = self._loop.call_later(pause, told.set)
                    await told.wait()
                    timer.cancel()

    async def trim(self, log: str, before: int) -> None:
        if self._store.conditional:
            await self._ask("trim", lambda due: self._store.remove(log, before, self._process), writes=True)
            return
        first, last = await self._ask("ends", lambda due: self._ends(log))
        for position in range(first, min(before, last)):
            await self._ask(
                "trim", lambda due, position=position: self._store.remove(log, position + 1, self._process), writes=True
            )

    def _ends(self, log: str) -> tuple[int, int]:
        records = self._store.records.get(log)
        return (min(records), max(records)) if records else (0, 0)

    async def logs(self) -> list[str]:
        return await self._ask("logs", lambda due: self._store.names())

    async def close(self) -> None:
        pass
