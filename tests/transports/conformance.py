"""What every transport must do: the contract of `deltabus.bus.transport`, as tests.

A backend's test module subclasses `TransportConformance` and overrides the fixture `make_topic` with a function that
gives a fresh `Topic` at each call. Back doors of a topic are optional; tests that need a missing one are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import pytest_asyncio

from deltabus.bus.errors import (
    AppendUnknownError,
    KeyNotFoundError,
    TransportError,
)
from deltabus.transports import open_transport

from .conformance_blobs import BlobConformance
from .conformance_calls import CallConformance
from .conformance_logs import LogConformance
from .conformance_tails import TailConformance
from .conformance_trims import TrimConformance
from .topics import (
    LIMIT,
    Topic,
    collected,
    fill,
    in_another_loop,
    records_of,
    until,
    waiting,
)

__all__ = [
    "LIMIT",
    "Topic",
    "TransportConformance",
    "collected",
    "fill",
    "in_another_loop",
    "records_of",
    "until",
    "waiting",
]


class TransportConformance(BlobConformance, LogConformance, TrimConformance, TailConformance, CallConformance):
    """Subclass it for a backend, and override `make_topic`; the numbers may be lowered where each call takes long."""

    rounds = 8
    examples = 25
    many = 150
    listed = 40
    tells_times = True

    @pytest.fixture
    def make_topic(self):
        raise NotImplementedError("override `make_topic` with a function that gives a fresh Topic at each call")

    @pytest.fixture
    def topic(self, make_topic):
        return make_topic()

    @pytest_asyncio.fixture
    async def transport(self, topic):
        async with topic.open() as transport:
            yield transport

    @pytest_asyncio.fixture
    async def other(self, topic):
        async with topic.open() as transport:
            yield transport

    @pytest_asyncio.fixture(autouse=True)
    async def nothing_left(self):
        """Each test ends with the tasks it began with, and without a watching thread."""
        before = asyncio.all_tasks()
        yield
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
        await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("deltabus")])

    async def test_closing_twice(self, topic):
        transport = topic.open()
        await transport.close()
        await transport.close()
        async with transport:
            pass

    async def test_a_closed_transport_says_so(self, topic):
        async with topic.open() as transport:
            await fill(transport, "main", 1)
        calls = [
            lambda: transport.put("key", b"x"),
            lambda: transport.get("key"),
            lambda: transport.delete(["key"]),
            lambda: transport.append("main", 1, b"x"),
            lambda: transport.read("main"),
            lambda: transport.blobs("blobs"),
            lambda: transport.trim("main", 0),
            lambda: transport.logs(),
            lambda: anext(transport.tail("main")),
        ]
        for call in calls:
            with pytest.raises(TransportError, match="closed"):
                await call()
        async with topic.open() as transport:
            assert await transport.read("main") == records_of(b"0")

    async def test_closing_a_transport_ends_its_waiting_tails(self, topic):
        transport = topic.open()
        task = asyncio.create_task(anext(transport.tail("main")))
        await waiting(task)
        await transport.close()
        with pytest.raises(TransportError, match="closed"):
            await asyncio.wait_for(task, LIMIT)

    async def test_a_cancelled_put_is_done_or_not_done(self, transport, topic):
        for number in range(12):
            data = bytes([number]) * 2_000_000
            task = asyncio.create_task(transport.put(f"blob/{number}", data))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, LIMIT)
            with contextlib.suppress(KeyNotFoundError):
                assert await transport.get(f"blob/{number}") == data
            await transport.put(f"blob/{number}", data)
            assert await transport.get(f"blob/{number}") == data

    async def test_a_cancelled_append_is_done_or_not_done(self, transport):
        for position in range(20):
            task = asyncio.create_task(transport.append("main", position, b"%d" % position))
            for _ in range(position % 7):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AppendUnknownError):
                await asyncio.wait_for(task, LIMIT)
            assert await transport.read("main", position - 1) in ([], [(position, b"%d" % position)])
            await transport.append("main", position, b"%d" % position)
        assert [record.position for record in await transport.read("main")] == list(range(20))

    async def test_the_url_opens_the_same_topic(self, transport, topic):
        await transport.put("key", b"x")
        assert "://" in transport.url
        async with open_transport(transport.url, **topic.options) as again:
            assert await again.get("key") == b"x"
            assert again.url == transport.url
