"""What is measured on a backend: the way from end to end, speed of plain bytes, and requests."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from backend_clients import Parts, PlainClient, at_once, plain_client
from backend_kinds import Backend, Count
from backend_results import Requests, Speed, Steps

from deltabus.bench.peer import Setup
from deltabus.bench.peers import LocalPeer, Peer, ProcessPeer
from deltabus.bench.source import Source
from deltabus.bus.transport import Transport
from deltabus.transports import open_transport

__all__ = ["count_requests", "measure_speed", "measure_steps"]

_STAGES = ("blocked", "encode", "decode", "apply")


class _Pair:
    """A trainer and an engine; every step's bits are compared."""

    def __init__(self, trainer: Peer, engine: Peer) -> None:
        self.trainer, self.engine = trainer, engine
        self.exact = True
        self._number = 0

    def begin(self) -> None:
        """Let the engine wait, and publish the whole state to it."""
        self.engine.send("next")
        self.trainer.ask("open")
        self.engine.answer()
        self._compare()

    def wait(self) -> None:
        """Let the engine wait for the next step."""
        self.engine.send("next")

    def step(self) -> dict[str, float]:
        """Take a step for which the engine waits, and return its bytes and seconds."""
        self._number += 1
        sent = self.trainer.ask("step", self._number)
        taken = self.engine.answer()
        self._compare()
        seconds = sent["seconds"] | taken["seconds"] | {"blocked": sent["blocked"]}
        whole = taken["applied"] - sent["called"]
        moving = whole - sum(seconds[stage] for stage in _STAGES)
        return {"applied": whole, "moving": max(0.0, moving), "nbytes": sent["nbytes"]}

    def _compare(self) -> None:
        self.exact = self.exact and self.trainer.ask("digest") == self.engine.ask("digest")


@contextmanager
def _pair(source: Source, writer: str, reader: str, kind: Callable[[Setup], Peer]) -> Iterator[_Pair]:
    """Start both sides; the context's end closes them."""
    with (
        kind(Setup(role="trainer", source=source, url=writer)) as trainer,
        kind(Setup(role="engine", source=source, url=reader)) as engine,
    ):
        trainer.answer()
        engine.answer()
        pair = _Pair(trainer, engine)
        pair.begin()
        yield pair
        if kind is ProcessPeer:  # the other one closes its side by itself
            engine.ask("close")
            trainer.ask("close")


def measure_steps(backend: Backend, source: Source, *, steps: int, apart: bool) -> Steps:
    """Measure the way of steps from the call of `publish` until they are applied; the first is not counted.

    Args:
        backend: The backend.
        source: The two states between which the trainer goes to and fro.
        steps: How many count.
        apart: Whether both sides have a process of their own.
    """
    url = backend.url()
    found = []
    with _pair(source, url, url, ProcessPeer if apart else LocalPeer) as pair:
        for _ in range(steps + 1):
            pair.wait()
            found.append(pair.step())
    counted = found[1:]
    return Steps(
        nbytes=int(statistics.median(each["nbytes"] for each in counted)),
        applied=statistics.median(each["applied"] for each in counted),
        moving=statistics.median(each["moving"] for each in counted),
        exact=pair.exact,
    )


async def count_requests(
    backend: Backend, source: Source, *, steps: int, settle: float, idle: float, turn: asyncio.Lock
) -> Requests | None:
    """Count what a writer and a reader ask per step, and a reader that waits per minute; None without a server.

    Args:
        backend: The backend.
        source: As for `measure_steps`.
        steps: How many count.
        settle: Seconds that the reader waits before it is watched.
        idle: Seconds for which it is watched.
        turn: Held while steps are taken, so that several backends can be watched at a time.
    """
    async with backend.counted() as topic:
        if topic is None:
            return None

        async def count(role: str) -> Count:
            return await asyncio.to_thread(topic.count, role)

        manager = _pair(source, topic.urls["writer"], topic.urls["reader"], LocalPeer)
        async with turn:
            pair = await asyncio.to_thread(manager.__enter__)
        try:
            async with turn:
                before = [await count(role) for role in ("writer", "reader")]
                for _ in range(steps):
                    pair.wait()
                    await asyncio.to_thread(pair.step)
                after = [await count(role) for role in ("writer", "reader")]
            pair.wait()
            await asyncio.sleep(settle)
            start, since = await count("reader"), time.monotonic()
            await asyncio.sleep(idle)
            end, seconds = await count("reader"), time.monotonic() - since
            async with turn:
                await asyncio.to_thread(pair.step)  # it was still there
        except BaseException as error:
            await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(manager.__exit__, None, None, None)
    writer, reader = (_less(a, b, steps) for a, b in zip(after, before, strict=True))
    return Requests(writer=writer, reader=reader, idle=_less(end, start, seconds / 60), exact=pair.exact)


def _less(after: Count, before: Count, times: float) -> dict[str, float]:
    return {what: (number - before[what]) / times for what, number in after.items()}


async def measure_speed(backend: Backend, *, parts: int, size: int, rounds: int) -> Speed | None:
    """Measure parts through the transport and by the server's own client, in turn; None where bytes go another's way.

    Args:
        backend: The backend.
        parts: How many.
        size: Bytes of each.
        rounds: How often; the other one comes first in every second.
    """
    if not backend.has_own_bytes:
        return None
    times: dict[str, list[float]] = {"up": [], "down": [], "plain_up": [], "plain_down": []}
    exact = True
    async with open_transport(backend.url()) as transport, plain_client(backend) as plain:
        ways: list[tuple[str, PlainClient]] = [("", _Ours(transport)), ("plain_", plain)]
        for _, client in ways:  # connections are made, and a store's abilities found out, before anything is timed
            await client.put({"first": os.urandom(size)})
            await client.get(["first"])
            await client.clear()
        for number in range(rounds):
            for prefix, client in ways if number % 2 == 0 else ways[::-1]:
                # New bytes each time, so that no store recognises what it has.
                data = {uuid.uuid4().hex: os.urandom(size) for _ in range(parts)}
                start = time.perf_counter()
                await client.put(data)
                between = time.perf_counter()
                found = await client.get(list(data))
                end = time.perf_counter()
                times[f"{prefix}up"].append(between - start)
                times[f"{prefix}down"].append(end - between)
                exact = exact and await client.read(found) == data
                await client.clear()
    total = parts * size
    medians = {what: total / statistics.median(seconds) for what, seconds in times.items()}
    return Speed(exact=exact, **medians)


class _Ours(PlainClient):
    """`put` and `get` of a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._stored: list[str] = []

    async def put(self, parts: Parts) -> None:
        self._stored += [_key(name) for name in parts]
        await at_once(lambda item=item: self._transport.put(_key(item[0]), item[1]) for item in parts.items())

    async def get(self, names: Iterable[str]) -> Parts:
        found: Parts = {}

        async def one(name: str) -> None:
            found[name] = await self._transport.get(_key(name))

        await at_once(lambda name=name: one(name) for name in names)
        return found

    async def clear(self) -> None:
        await self._transport.delete(self._stored)
        self._stored.clear()


def _key(name: str) -> str:
    return f"blobs/plain/{name}"
