"""`memory://`: the contract, and what only it has."""

import asyncio
import itertools

import pytest

from deltabus.bus.errors import KeyNotFoundError, StorageFullError, UsageError
from deltabus.transports import open_transport
from deltabus.transports.memory import MemoryTransport, drop_topic

from .conformance import Topic, TransportConformance, collected, waiting


class MemoryTopic(Topic):
    async def stored_blob(self, key):
        return self.open()._topic.blobs.get(key)

    async def remove_records(self, log, before):
        records = self.open()._topic.logs[log]
        for position in [position for position in records if position < before]:
            del records[position]


@pytest.fixture
def make_topic():
    names = []

    def make():
        names.append(f"test/{next(counter)}")
        return MemoryTopic(f"memory://{names[-1]}")

    counter = itertools.count()
    yield make
    for name in names:
        drop_topic(name)


class TestMemoryTransport(TransportConformance):
    @pytest.fixture
    def make_topic(self, make_topic):
        return make_topic


async def test_a_topic_outlives_its_transports_until_it_is_dropped(make_topic):
    topic = make_topic()
    async with topic.open() as transport:
        await transport.put("key", b"x")
    async with topic.open() as transport:
        assert await transport.get("key") == b"x"
        drop_topic("test/0")
        assert await transport.get("key") == b"x"
        async with topic.open() as another:
            with pytest.raises(KeyNotFoundError):
                await another.get("key")


async def test_a_full_topic_takes_nothing_and_keeps_all(make_topic):
    topic = make_topic()
    async with topic.open(limit="1KiB") as transport:
        await transport.put("key", b"x" * 1000)
        await transport.append("main", 0, b"x" * 24)
        with pytest.raises(StorageFullError, match="limit"):
            await transport.put("other", b"x")
        with pytest.raises(StorageFullError, match="position 1"):
            await transport.append("main", 1, b"x")
        await transport.put("key", b"x" * 1000)
        with pytest.raises(KeyNotFoundError):
            await transport.get("other")
        assert len(await transport.read("main")) == 1
        await transport.delete(["key"])
        await transport.put("other", b"x")
        await transport.append("main", 1, b"x")


async def test_a_listener_whose_loop_was_closed_disturbs_nobody(make_topic):
    topic = make_topic()

    def abandon():
        loop = asyncio.new_event_loop()
        tail = topic.open().tail("main")
        task = loop.create_task(anext(tail))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return tail, task

    abandoned = await asyncio.to_thread(abandon)
    async with topic.open() as transport:
        task = asyncio.create_task(collected(transport, "main", -1, 1))
        await waiting(task)
        await transport.append("main", 0, b"x")
        assert await task == [(0, b"x")]
    abandoned[1]._log_destroy_pending = False


@pytest.mark.parametrize("url", ["memory://", "memory:///", "memory:///run", "memory://a//b", "memory://a%20b"])
def test_a_bad_name_is_refused(url):
    with pytest.raises(UsageError, match="memory://run-7"):
        open_transport(url)


def test_names_may_have_parts():
    assert open_transport("memory://team/run-7").url == MemoryTransport("team/run-7").url == "memory://team/run-7"
    drop_topic("team/run-7")
    drop_topic("team/run-7")
