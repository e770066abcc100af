"""`nats://`: the contract against a real server, and what is on the server."""

import asyncio
import contextlib
import random
import time

import pytest

from deltabus.bus.errors import (
    KeyExistsError,
    KeyNotFoundError,
    TransportError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.transports.nats import blobs

from .conformance import LIMIT, TransportConformance, collected, fill, waiting
from .nats_server import NatsServer
from .nats_topic import CHUNK, NatsTopic


@pytest.fixture
def make_topic(nats):
    return lambda **options: NatsTopic(nats, **options)


@pytest.fixture(scope="module")
def server_of_small_messages(tmp_path_factory):
    with NatsServer(tmp_path_factory.mktemp("small"), "max_payload: 64KB") as server:
        yield server


class TestNatsTransport(TransportConformance):
    @pytest.fixture
    def make_topic(self, make_topic):
        return make_topic


class TestNatsTransportWithSmallMessages(TransportConformance):
    """A server whose messages are so small that most blobs and some records have parts."""

    @pytest.fixture
    def make_topic(self, server_of_small_messages):
        return lambda **options: NatsTopic(server_of_small_messages, **options)


async def test_the_layout_is_as_documented(topic):
    async with topic.open() as transport:
        await transport.put("blobs/main/small.x", b"blob")
        await transport.put("blobs/main/large", bytes(3 * CHUNK + 1))
        await transport.append("main", 0, b"record")
        await transport.append("main", 1, bytes(MAX_RECORD_BYTES))
    blobs = await topic.subjects("blobs")
    attempts = [subject for subject in blobs if not subject.endswith(".head")]
    assert blobs == {"blob.blobs/main/small%x.head": 1, "blob.blobs/main/large.head": 1, attempts[0]: 4}
    assert attempts[0].startswith("blob.blobs/main/large.")
    records = await topic.subjects("records")
    assert records.pop("log.main.record") == 2
    assert list(records.values()) == [2]  # one message cannot hold it with its headers
    for which in ("records", "blobs"):
        config = await topic.config(which)
        assert (config["discard"], config["retention"], config["num_replicas"]) == ("new", "limits", 1)
        assert config["metadata"]["deltabus"] == "1"


async def test_opening_and_reading_create_nothing(topic):
    async with topic.open() as transport:
        assert await transport.logs() == []
        assert await transport.read("main") == []
        with pytest.raises(KeyNotFoundError):
            await transport.get("key")
        await transport.delete(["key"])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(transport.tail("main")), 0.2)
        assert await transport._jetstream.info(transport._streams.records) is None
        assert await transport._jetstream.info(transport._streams.blobs) is None


async def test_deleting_leaves_nothing(topic):
    async with topic.open() as transport:
        await transport.put("large", bytes(3 * CHUNK))
        await transport.put("large-2", bytes(3 * CHUNK))
        await transport.put("small", b"x")
        await transport.delete(["large", "small"])
    assert {subject.split(".")[1] for subject in await topic.subjects("blobs")} == {"large-2"}


async def test_a_cancelled_put_leaves_nothing(topic):
    async with topic.open() as transport:
        await transport.put("first", b"x")
        for pauses in (5, 20, 60):
            task = asyncio.create_task(transport.put("large", bytes(20 * CHUNK)))
            for _ in range(pauses):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await transport._blobs.settle(LIMIT)
        assert await topic.subjects("blobs") == {"blob.first.head": 1}


async def test_what_dead_writers_left_is_removed_after_a_day(topic, monkeypatch):
    async with topic.open() as transport:
        await transport.put("finished", bytes(2 * CHUNK))
        # What the writer's clock said does not matter.
        now = int(time.time())
        dead, wrong, foreign = f"blob.dead.{now + 90_000}-abc", f"blob.wrong.{now - 90_000}-abc", "blob.other.strange"
        for subject in (dead, wrong, foreign):
            for _ in range(2):
                await transport._jetstream.publish(f"{topic.prefix}.{subject}", bytes(CHUNK))
    before = await topic.subjects("blobs")
    async with topic.open() as transport:
        await transport.put("small", b"x")
        assert await topic.subjects("blobs") == before | {"blob.small.head": 1}
        await transport.put("large", bytes(2 * CHUNK))
        after = await topic.subjects("blobs")
        assert after == after | before
        with pytest.raises(KeyNotFoundError):
            await transport.get("dead")
        await transport.delete(["wrong"])
        assert wrong not in await topic.subjects("blobs")
    monkeypatch.setattr(blobs, "_ABANDONED", -60)
    async with topic.open() as transport:
        await transport.put("larger", bytes(3 * CHUNK))
    left = await topic.subjects("blobs")
    assert dead not in left
    assert foreign in left
    assert left == left | {subject: count for subject, count in after.items() if subject not in (dead, wrong)}


async def test_an_upload_whose_parts_were_taken_for_abandoned_is_done_again(topic, monkeypatch):
    """It paused for a day before it named its parts."""
    data = random.Random(1).randbytes(3 * CHUNK)
    paused, go_on = asyncio.Event(), asyncio.Event()
    async with topic.open() as slow, topic.open() as other:
        publish = slow._blobs._publish

        async def publish_later(*arguments):
            paused.set()
            await go_on.wait()
            await publish(*arguments)

        monkeypatch.setattr(slow._blobs, "_publish", publish_later)
        putting = asyncio.create_task(slow.put("slow", data))
        await asyncio.wait_for(paused.wait(), LIMIT)
        held = await topic.subjects("blobs")
        assert list(held.values()) == [3]
        monkeypatch.setattr(blobs, "_ABANDONED", -60)
        await other.put("other", bytes(2 * CHUNK))
        assert not held.keys() & (await topic.subjects("blobs")).keys()
        go_on.set()
        await asyncio.wait_for(putting, LIMIT)
        assert await other.get("slow") == data


async def test_a_blob_that_is_finished_at_the_last_moment_is_not_abandoned(topic, monkeypatch):
    data = bytes(3 * CHUNK)
    monkeypatch.setattr(blobs, "_ABANDONED", -60)
    async with topic.open() as slow, topic.open() as other:
        await slow.put("slow", data)
        heads = other._jetstream.heads

        async def heads_of_before(stream, pattern):
            return [head for head in await heads(stream, pattern) if not head.subject.endswith(".head")]

        monkeypatch.setattr(other._jetstream, "heads", heads_of_before)
        await other.put("other", data)
        assert await other.get("slow") == data


async def test_ranges_fetch_only_what_they_need(topic):
    data = random.Random(1).randbytes(8 * CHUNK)
    async with topic.open() as transport:
        await transport.put("large", data)
        stats = transport._connection._session.client.stats
        for start, stop, parts in [
            (0, 10, 1),
            (CHUNK - 1, CHUNK + 1, 2),
            (3 * CHUNK, 6 * CHUNK, 3),
            (8 * CHUNK, None, 0),
        ]:
            before = stats["in_bytes"]
            assert await transport.get("large", start, stop) == data[start:stop]
            assert parts * CHUNK <= stats["in_bytes"] - before < parts * CHUNK + 20_000


async def test_little_is_under_way(topic):
    """The library takes whatever it is given; what waits in it is bounded, however large and many the blobs are."""
    async with topic.open() as transport:
        await transport.put("first", b"x")
        client = transport._connection._session.client
        puts = asyncio.gather(*(transport.put(f"large-{number}", bytes(40 * CHUNK)) for number in range(4)))
        most = 0
        while not puts.done():
            most = max(most, client.pending_data_size)
            await asyncio.sleep(0)
        await puts
        assert 0 < most < 2 * CHUNK


async def test_a_blob_is_compared_without_holding_it(topic):
    """Putting other bytes of the same length is found at the first part, and of another length without any."""
    data = bytes(16 * CHUNK)
    async with topic.open() as transport:
        await transport.put("large", data)
        stats = transport._connection._session.client.stats
        before = stats["in_bytes"]
        with pytest.raises(KeyExistsError):
            await transport.put("large", data + b"x")
        with pytest.raises(KeyExistsError):
            await transport.put("large", b"x")
        assert stats["in_bytes"] - before < 20_000
        out = stats["out_bytes"]
        await transport.put("large", data)
        assert stats["out_bytes"] - out < 20_000


async def test_positions_are_found_among_other_logs_and_removed_records(topic):
    choose = random.Random(3)
    expected = {name: [] for name in ("a", "b", "c")}
    async with topic.open() as writer:
        for _ in range(400):
            name = choose.choice("aaabbc")
            records = expected[name]
            data = b"%s %d" % (name.encode(), len(records))
            await writer.append(name, len(records), data)
            records.append((len(records), data))
    await topic.remove_records("a", 57)
    for records, first in ((expected["a"], 57), (expected["b"], 0), (expected["c"], 0)):
        del records[:first]
    for name, records in expected.items():
        end = records[-1][0]
        for after in (-1, 0, 10, 56, 57, 58, end - 2, end - 1, end, end + 5):
            async with topic.open() as reader:  # one that knows nothing yet
                found = await reader.read(name, after)
                assert found == [record for record in records if record[0] > after]
                assert await reader.read(name, after, limit=7) == found[:7]
                stats = reader._connection._session.client.stats
                assert stats["out_msgs"] < 40


async def test_the_next_record_costs_one_request(topic):
    async with topic.open() as writer, topic.open() as reader:
        await fill(writer, "main", 3)
        await reader.read("main")
        stats, written = reader._connection._session.client.stats, writer._connection._session.client.stats
        for position in range(3, 8):
            before, sent = stats["out_msgs"], written["out_msgs"]
            await writer.append("main", position, b"x")
            assert written["out_msgs"] - sent == 1
            assert await reader.read("main", position - 1) == [(position, b"x")]
            assert await reader.read("main", position) == []
            assert stats["out_msgs"] - before == 2


async def test_a_record_that_lacks_a_part_is_told_not_waited_for(server_of_small_messages):
    topic = NatsTopic(server_of_small_messages)
    async with topic.open() as writer, topic.open() as reader:
        await writer.append("main", 0, b"0")
        following = asyncio.create_task(collected(reader, "main", -1, 3))
        await writer.append("main", 1, bytes(200_000))
        await writer.append("main", 2, b"2")
        assert await following == [(0, b"0"), (1, bytes(200_000)), (2, b"2")]
        await topic.call(f"STREAM.MSG.DELETE.{topic.stream}_records", {"seq": 3})
        for transport in (writer, reader):
            assert await transport.read("main") == [(0, b"0")]
            with pytest.raises(TransportError, match=r"position 1 of log 'main' is damaged") as caught:
                await transport.read("main", 0)
            assert type(caught.value) is TransportError
            assert await transport.read("main", 1) == [(2, b"2")]
        async with topic.open() as transport, contextlib.aclosing(transport.tail("main")) as tail:
            assert await anext(tail) == (0, b"0")
            with pytest.raises(TransportError, match="is damaged"):
                await asyncio.wait_for(anext(tail), LIMIT)


async def test_a_pushed_record_that_lacks_a_part_is_told(server_of_small_messages, monkeypatch):
    topic = NatsTopic(server_of_small_messages)
    async with topic.open() as writer, topic.open() as reader:
        await writer.append("main", 0, b"0")
        fetch = reader._log._chunks.fetch

        async def fetch_damaged(stream, subject, manifest):
            await topic.call(f"STREAM.MSG.DELETE.{stream}", {"seq": manifest.sequences()[0]})
            monkeypatch.setattr(reader._log._chunks, "fetch", fetch)
            return await fetch(stream, subject, manifest)

        monkeypatch.setattr(reader._log._chunks, "fetch", fetch_damaged)
        async with contextlib.aclosing(reader.tail("main", 0)) as tail:
            waiter = asyncio.create_task(anext(tail))
            await waiting(waiter)
            await writer.append("main", 1, bytes(200_000))
            with pytest.raises(TransportError, match="is damaged"):
                await asyncio.wait_for(waiter, LIMIT)


async def test_a_record_that_is_trimmed_while_it_is_read_is_no_damage(server_of_small_messages, monkeypatch):
    topic = NatsTopic(server_of_small_messages)
    async with topic.open() as writer, topic.open() as reader:
        for position in range(3):
            await writer.append("main", position, bytes([position]) * 200_000)
        fetch = reader._log._chunks.fetch

        async def fetch_trimmed(stream, subject, manifest):
            await writer.trim("main", 2)
            return await fetch(stream, subject, manifest)

        monkeypatch.setattr(reader._log._chunks, "fetch", fetch_trimmed)
        assert await reader.read("main") == []
        assert await reader.read("main") == [(2, b"\2" * 200_000)]


async def test_what_is_no_record_is_told(topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        await transport._jetstream.publish(f"{topic.prefix}.log.main.record", b"stranger")
        with pytest.raises(TransportError, match=r"no record of deltabus"):
            await transport.read("main")


async def test_a_manifest_that_makes_no_sense_is_told(topic):
    async with topic.open() as transport:
        await transport.put("key", b"x")
        for number, payload in enumerate(
            (b"", b"\xc1", b"\x94\x05\x01\xa1a\x90", b"\x94\xff\x01\xa1a\x91\x92\x01\x01")
        ):
            subject = transport._streams.blob_subject(f"bad-{number}")
            await transport._jetstream.publish(subject, payload, headers={"Deltabus-Manifest": "1"})
            with pytest.raises(TransportError, match="names parts in a way"):
                await transport.get(f"bad-{number}")
