"""Streams on NATS: how they are made, what they keep, and what a full one says."""

import asyncio
import time

import pytest

from deltabus.bus.errors import (
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    StorageFullError,
    TransportError,
    UsageError,
)

from .conformance import LIMIT, fill
from .nats_server import NatsServer
from .nats_topic import CHUNK, NatsTopic
from .topics import within


@pytest.fixture
def make_topic(nats):
    return lambda **options: NatsTopic(nats, **options)


async def test_streams_are_made_as_the_options_say(make_topic):
    topic = make_topic(storage="memory", max_bytes="8MiB", max_age=3600, replicas=1)
    async with topic.open() as transport:
        assert not transport.guarantees.durable
        await transport.put("key", b"x")
    blobs, records = await topic.config("blobs"), await topic.config("records")
    assert (blobs["storage"], blobs["max_bytes"], blobs["max_age"]) == ("memory", 8 << 20, 3600 * 10**9)
    assert (records["storage"], records["max_bytes"], records.get("max_age", 0)) == ("memory", -1, 0)


async def test_streams_are_taken_as_they_are_unless_the_options_say_otherwise(topic):
    async with topic.open(max_bytes="8MiB", max_age=60) as transport:
        await transport.put("key", b"x")
    async with topic.open() as transport:
        await transport.put("other", b"x")
    for options, told in [
        ({"max_bytes": "9MiB"}, r"max_bytes=8388608, the URL says 9437184"),
        ({"max_age": 61}, r"max_age=60.*61"),
        ({"storage": "memory"}, "storage=file"),
        ({"replicas": 3}, "replicas=1"),
    ]:
        async with topic.open(**options) as transport:
            with pytest.raises(UsageError, match=told):
                await transport.put("third", b"x")
            with pytest.raises(UsageError, match=told):
                await transport.append("main", 0, b"x")
            assert await transport.get("key") == b"x"
    assert await topic.subjects("blobs") == {"blob.key.head": 1, "blob.other.head": 1}


async def test_replicas_need_a_cluster(make_topic):
    async with make_topic(replicas=3).open() as transport:
        with pytest.raises(TransportError, match="needs a cluster"):
            await transport.put("key", b"x")


@pytest.mark.parametrize(
    "change", [{"discard": "old"}, {"max_age": 10**12}, {"max_msgs_per_subject": 5}, {"subjects": ["other.>"]}]
)
async def test_streams_that_would_lose_records_are_refused(topic, change):
    config = {"name": f"{topic.stream}_records", "subjects": [f"{topic.prefix}.log.*.*"], "discard": "new"}
    await topic.call(f"STREAM.CREATE.{topic.stream}_records", config | change)
    async with topic.open() as transport:
        with pytest.raises(TransportError, match="not one of deltabus"):
            await transport.append("main", 0, b"x")


async def test_a_stream_in_the_way_is_named(topic):
    config = {"name": f"other-{topic.stream}", "subjects": [f"{topic.prefix}.>"]}
    await topic.call(f"STREAM.CREATE.other-{topic.stream}", config)
    async with topic.open() as transport:
        with pytest.raises(TransportError, match=r"subjects overlap.*rename the topic"):
            await transport.append("main", 0, b"x")


async def test_a_full_topic_takes_nothing_and_keeps_all(make_topic):
    topic = make_topic(max_bytes=10 * CHUNK)
    async with topic.open() as transport:
        await transport.put("first", bytes(4 * CHUNK))
        held = await topic.subjects("blobs")
        for data in (bytes(8 * CHUNK), bytes(40 * CHUNK)):
            with pytest.raises(StorageFullError, match=r"store.*delete blobs, or raise"):
                await transport.put("second", data)
            assert await topic.subjects("blobs") == held
        with pytest.raises(KeyNotFoundError):
            await transport.get("second")
        assert await transport.get("first") == bytes(4 * CHUNK)
        await fill(transport, "main", 3)  # the limit is one of blobs
        await transport.delete(["first"])
        await transport.put("second", bytes(8 * CHUNK))


async def test_a_full_server_is_told(tmp_path):
    with NatsServer(tmp_path, jetstream="max_file: 4MB, max_mem: 1MB") as server:
        async with NatsTopic(server).open() as transport:
            with pytest.raises(StorageFullError):
                await transport.put("key", bytes(20 * CHUNK))
            await transport.put("key", bytes(CHUNK))
        async with NatsTopic(server, max_bytes="1GiB").open() as transport:
            with pytest.raises(StorageFullError, match="find or make stream"):
                await transport.put("key", b"x")


async def test_age_removes_blobs_but_never_records(make_topic):
    topic = make_topic(max_age=1.0)
    async with topic.open() as transport:
        written = await fill(transport, "main", 2)
        await transport.put("small", b"x")
        await transport.put("large", bytes(2 * CHUNK))

        async def gone():
            return not await topic.subjects("blobs")

        await within(LIMIT, gone)
        for key in ("small", "large"):
            with pytest.raises(KeyNotFoundError, match="max_age"):
                await transport.get(key)
        assert await transport.read("main") == written
        with pytest.raises(PositionTakenError):
            await transport.append("main", 0, b"another")
        await transport.append("main", 2, b"2")
        await transport.put("large", bytes(2 * CHUNK))


async def test_putting_again_renews_what_would_soon_be_removed(make_topic):
    topic = make_topic(max_age=3.0)
    data = {"small": b"x", "large": bytes(2 * CHUNK)}
    async with topic.open() as transport:
        for key, value in data.items():
            await transport.put(key, value)
        stored = {key: (await transport._jetstream.last(*_place(transport, key))).seq for key in data}

        async def old():
            await asyncio.gather(*(transport.put(key, value) for key, value in data.items()))
            found = [await transport._jetstream.last(*_place(transport, key)) for key in data]
            return all(f.seq > seq for f, seq in zip(found, stored.values(), strict=True))

        begun = time.monotonic()
        await within(LIMIT, old)
        assert time.monotonic() - begun > 1.0
        with pytest.raises(KeyExistsError):
            await transport.put("small", b"y")
        for key, value in data.items():
            assert await transport.get(key) == value


def _place(transport, key):
    return transport._streams.blobs, transport._streams.blob_subject(key)


async def test_a_part_that_was_removed_by_hand_is_not_there(topic):
    async with topic.open() as transport:
        await transport.put("large", bytes(3 * CHUNK))
        await topic.call(f"STREAM.MSG.DELETE.{topic.stream}_blobs", {"seq": 2})
        assert await transport.get("large", 0, 10) == bytes(10)
        with pytest.raises(KeyNotFoundError, match="no longer all of it"):
            await transport.get("large")
        await transport.put("large", bytes(3 * CHUNK))  # what is damaged may be put again
        assert await transport.get("large") == bytes(3 * CHUNK)
