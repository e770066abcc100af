"""Readers of topics on NATS that wait for what comes."""

import asyncio
import contextlib
import statistics
import time

import pytest

from deltabus.bus.errors import (
    TransportError,
)

from .conformance import LIMIT, collected, fill, waiting
from .nats_server import NatsServer
from .nats_topic import CHUNK, NatsTopic
from .topics import within


@pytest.fixture
def make_topic(nats):
    return lambda **options: NatsTopic(nats, **options)


async def test_records_are_pushed(topic, record_property):
    count = 50
    async with topic.open() as writer, topic.open() as reader:
        await fill(writer, "main", 1)
        async with asyncio.timeout(LIMIT), contextlib.aclosing(reader.tail("main", 0)) as tail:
            delays = []
            for number in range(1, count):
                waiter = asyncio.create_task(anext(tail))
                await waiting(waiter)
                began = time.perf_counter()
                await writer.append("main", number, b"x")
                assert (await waiter).position == number
                delays.append(time.perf_counter() - began)
    milliseconds = 1000 * statistics.median(delays)
    record_property("append_to_tail_ms", round(milliseconds, 2))
    print(f"append to tail: median {milliseconds:.1f} ms, worst {1000 * max(delays):.1f} ms")
    assert milliseconds < 200


async def test_a_waiting_tail_asks_for_nothing(topic):
    async with topic.open() as writer, topic.open() as reader:
        await fill(writer, "main", 1)
        async with contextlib.aclosing(reader.tail("main")) as tail:
            await anext(tail)
            waiter = asyncio.create_task(anext(tail))

            async def pulled():
                listed = (await topic.call(f"CONSUMER.LIST.{topic.stream}_records"))["consumers"]
                return listed and listed[0]["num_waiting"] == 1

            await within(LIMIT, pulled)
            stats = reader._connection._session.client.stats
            before = stats["out_msgs"]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiter), 0.5)
            assert stats["out_msgs"] == before
            await writer.append("main", 1, b"x")
            assert await asyncio.wait_for(waiter, LIMIT) == (1, b"x")
            assert stats["out_msgs"] == before


async def test_a_slow_reader_holds_few_records(topic):
    async with topic.open() as writer, topic.open() as reader:
        await fill(writer, "main", 1)
        async with contextlib.aclosing(reader.tail("main")) as tail:
            assert await anext(tail) == (0, b"0")
            waiter = asyncio.create_task(anext(tail))
            await waiting(waiter)
            data = bytes(100_000)
            await writer.append("main", 1, data)
            assert (await asyncio.wait_for(waiter, LIMIT)).position == 1
            stats = reader._connection._session.client.stats
            for position in range(2, 100):
                await writer.append("main", position, data)
            await reader.logs()  # whatever was under way has arrived before the answer
            assert stats["in_bytes"] < 30 * len(data)
            for position in range(2, 100):
                assert (await asyncio.wait_for(anext(tail), LIMIT)).position == position


async def test_a_closed_tail_takes_its_consumer_along(topic):
    async with topic.open() as writer, topic.open() as reader:
        await fill(writer, "main", 1)
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(collected(reader, "main", 0, 1), 0.3)

        async def none():
            return not (await topic.call(f"CONSUMER.LIST.{topic.stream}_records"))["consumers"]

        await within(LIMIT, none)


async def test_a_tail_survives_that_its_consumer_is_deleted(topic):
    async with topic.open() as writer, topic.open() as reader:
        written = await fill(writer, "main", 1)
        task = asyncio.create_task(collected(reader, "main", -1, 21))

        async def delete():
            async with topic.api() as jetstream:
                answer = await jetstream.call(f"CONSUMER.LIST.{topic.stream}_records")
                for consumer in answer["consumers"]:
                    await jetstream.call(f"CONSUMER.DELETE.{topic.stream}_records.{consumer['name']}")
                return bool(answer["consumers"])

        for start in range(1, 21, 5):
            await within(LIMIT, delete)
            written += await fill(writer, "main", 5, start=start)
        assert await asyncio.wait_for(task, LIMIT) == written


async def test_a_tail_of_a_domain(tmp_path):
    with NatsServer(tmp_path, jetstream="domain: hub, max_file: 1GB") as server:
        for options in ({}, {"domain": "hub"}):
            async with NatsTopic(server, name=f"run{len(options)}", **options).open() as transport:
                written = await fill(transport, "main", 2)
                await transport.put("large", bytes(2 * CHUNK))
                assert await transport.get("large") == bytes(2 * CHUNK)
                task = asyncio.create_task(collected(transport, "main", -1, 4))
                assert await asyncio.gather(fill(transport, "main", 2, start=2), task) == [
                    [(2, b"2"), (3, b"3")],
                    [*written, (2, b"2"), (3, b"3")],
                ]
        async with NatsTopic(server, domain="elsewhere").open() as transport:
            with pytest.raises(TransportError, match="domain"):
                await transport.put("key", b"x")
