"""Topics whose readers are told over a broker: what their tests share."""

import asyncio
import contextlib
import itertools
import logging
import statistics
import time

import nats

from .conformance import Topic, until

SLOW = 30.0
"""Seconds between looks of the stores here: as long as a wait may take, so that only announcements can be in time."""

_numbers = itertools.count()


def channel(server, name=None):
    return f"nats://{server.host}/{name or f'test/run-{next(_numbers)}'}"


class FileTopic(Topic):
    def __init__(self, root, notify, **options):
        super().__init__(root.as_uri(), **({"watch": False, "poll": SLOW, "notify": notify} | options))
        self.root = root

    async def stored_blob(self, key):
        path = self.root / key
        return path.read_bytes() if path.exists() else None

    async def remove_records(self, log, before):
        for position in range(before):
            (self.root / "logs" / log / f"{position:020}").unlink()


def topics_below(root, broker):
    """What makes fresh topics, with a channel of their own unless told which."""

    def make(notify=None, **options):
        return FileTopic(root / f"run-{next(_numbers)}", notify or channel(broker), **options)

    return make


@contextlib.asynccontextmanager
async def following(transport, log="main", after=-1):
    """A tail, from the moment on in which it is told; gives what it finds, and counts its looks for news."""
    found = Found()
    store, wake = transport._store, transport._store.wake

    def count(log=None):
        found.looks += 1
        wake(log)

    store.wake = count

    async def follow():
        async with contextlib.aclosing(transport.tail(log, after)) as tail:
            async for record in tail:
                found.records.append(tuple(record))
                found.times.append(time.perf_counter())

    task = asyncio.create_task(follow())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait((task,))
        store.wake = wake
    assert task.cancelled(), task.exception()


class Found:
    def __init__(self):
        self.records = []
        self.times = []
        self.looks = 0

    async def have(self, count):
        await until(lambda: len(self.records) >= count)


async def told(transport):
    """Wait until a transport with a tail hears announcements, and the look that this causes is over."""
    await until(lambda: transport._told)


@contextlib.asynccontextmanager
async def stranger(server, **options):
    """Somebody else on the broker."""
    client = await nats.connect(f"nats://{server.host}", **options)
    try:
        yield client
    finally:
        await client.close()


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("deltabus") and r.levelno >= logging.WARNING]


def tell(store, delays, lags):
    median, lag, worst = (figure * 1e3 for figure in (statistics.median(delays), statistics.median(lags), max(lags)))
    print(f"{store}: seen {median:.1f} ms after the append began, {lag:.1f} ms after it ended; worst {worst:.1f} ms")


def subject(topic):
    """The subject that is announced on, without the log."""
    name = topic.options["notify"].split("/", 3)[3]
    return f"deltabus.{name.replace('/', '=')}.news"


async def passed(seconds, since):
    """Wait until so much time has passed."""
    await until(lambda: time.perf_counter() - since > seconds)
