"""`?notify=nats://...`: the contract, and stores whose readers are told at once, whatever is announced."""

import asyncio
import contextlib
import statistics
import time

import pytest
import pytest_asyncio

from deltabus.bus.errors import AppendUnknownError
from deltabus.transports import open_transport
from deltabus.transports.file import FileTransport
from deltabus.transports.notified import NotifiedTransport
from deltabus.transports.registry import _open_notifier

from .announced import SLOW, channel, following, passed, stranger, subject, tell, told, topics_below
from .conformance import Topic, TransportConformance, collected, fill, until
from .proxy import Proxy

SECRET = "hunter2"


@pytest.fixture
def make_topic(tmp_path, broker):
    return topics_below(tmp_path, broker)


@pytest_asyncio.fixture(autouse=True)
async def nothing_left():
    """Each test ends with the tasks it began with."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


class TestNotifiedFileTransport(TransportConformance):
    @pytest.fixture
    def make_topic(self, make_topic):
        return make_topic


# What announcements are for


async def test_a_record_is_seen_long_before_the_store_would_be_asked_again(make_topic):
    topic = make_topic()
    async with topic.open() as writer, topic.open() as reader, following(reader) as found:
        await told(reader)
        delays, lags = [], []
        for position in range(30):
            await passed(0.02 * (position % 3), time.perf_counter())  # also behind the pauses that follow each record
            before = time.perf_counter()
            await writer.append("main", position, b"%d" % position)
            after = time.perf_counter()
            await found.have(position + 1)
            delays.append(found.times[-1] - before)
            lags.append(found.times[-1] - after)
        tell("file", delays, lags)
        assert statistics.median(lags) < 0.25
        assert max(delays) < SLOW / 10


async def test_after_a_long_pause_a_reader_still_sees_at_once(make_topic):
    topic = make_topic()
    async with topic.open() as writer, topic.open() as reader, following(reader) as found:
        await fill(writer, "main", 1)
        await found.have(1)
        await told(reader)
        await passed(3, found.times[-1])  # its own pause is at some seconds by now
        before = time.perf_counter()
        await writer.append("main", 1, b"1")
        await found.have(2)
        assert found.times[-1] - before < 0.5


async def test_a_transport_says_that_it_pushes_and_hides_the_broker(make_topic, broker):
    async with make_topic(f"nats://user:{SECRET}@{broker.host}/run").open() as transport:
        assert type(transport) is NotifiedTransport
        assert transport.guarantees.push
        assert transport.guarantees.conditional_append
        assert SECRET not in transport.url
        assert "nats" not in transport.url


async def test_an_append_whose_answer_was_lost_is_announced(make_topic, tmp_path):
    class Losing(FileTransport):
        async def append(self, log, position, record):
            await super().append(log, position, record)
            raise AppendUnknownError("lost", url=self.url)

    topic = make_topic()
    losing = NotifiedTransport(Losing(topic.root), _open_notifier(topic.options["notify"]))
    async with losing, topic.open() as reader, following(reader) as found:
        await told(reader)
        with pytest.raises(AppendUnknownError):
            await losing.append("main", 0, b"x")
        await found.have(1)
        assert found.times[-1] < time.perf_counter() + SLOW / 10


async def test_the_last_record_before_closing_is_announced(make_topic):
    topic = make_topic()
    async with topic.open() as reader, following(reader) as found:
        await told(reader)
        for position in range(5):
            async with topic.open() as writer:
                await writer.append("main", position, b"x")
        await found.have(5)


async def test_an_append_that_ends_behind_the_close_leaves_no_task(make_topic):
    begun, going_on = asyncio.Event(), asyncio.Event()

    class Slow(FileTransport):
        async def append(self, log, position, record):
            await super().append(log, position, record)
            begun.set()
            await going_on.wait()

    topic = make_topic()
    slow = NotifiedTransport(Slow(topic.root), _open_notifier(topic.options["notify"]))
    appending = asyncio.create_task(slow.append("main", 0, b"x"))
    await begun.wait()
    await slow.close()
    before = asyncio.all_tasks()
    going_on.set()
    await appending
    assert asyncio.all_tasks() <= before


async def test_topics_and_logs_on_one_broker_do_not_wake_each_other(make_topic, broker):
    first, second = make_topic(), make_topic()
    async with first.open() as writer, first.open() as reader, second.open() as other, contextlib.AsyncExitStack() as s:
        mine, others = [await s.enter_async_context(following(each)) for each in (reader, other)]
        foreign = await s.enter_async_context(following(reader, "second"))
        for each in (reader, other):
            await told(each)
        await until(lambda: mine.looks and others.looks)
        before = others.looks
        await fill(writer, "main", 20)
        await mine.have(20)
        assert others.looks == before == 1
        assert others.records == foreign.records == []


# Announcements that are wrong


@pytest.mark.parametrize(
    "text", [b"", b"x", b"-1", b"1.5", b"\xff", b"9" * 19, b"9" * 20, "\u0661".encode(), b"0" * 5000, b"0", b"7"]
)
async def test_what_was_not_written_is_not_seen(make_topic, broker, text):
    topic = make_topic()
    async with topic.open() as writer, topic.open() as reader, following(reader) as found, stranger(broker) as client:
        await fill(writer, "main", 3)
        await told(reader)
        await found.have(3)
        for _ in range(20):
            await client.publish(f"{subject(topic)}.main", text)
            await client.publish(f"{subject(topic)}.{'l' * 200}", text)
        await client.flush()
        await fill(writer, "main", 3, start=3)
        await found.have(6)
        assert found.records == [(position, b"%d" % position) for position in range(6)]


async def test_a_flood_of_forged_announcements_costs_a_look_a_second(make_topic, broker):
    topic = make_topic()
    async with topic.open() as writer, topic.open() as reader, following(reader) as found, stranger(broker) as client:
        await told(reader)
        await until(lambda: found.looks == 1)
        begin = time.perf_counter()
        sent = 0
        while time.perf_counter() - begin < 2:
            for _ in range(100):
                sent += 1
                await client.publish(f"{subject(topic)}.main", b"%d" % sent)
            await client.flush()
        assert sent > 1000
        assert found.looks < 12  # 0.05, 0.1, 0.2, 0.4, 0.8 s apart, and then one
        await fill(writer, "main", 1)
        await found.have(1)
        assert found.times[-1] - begin < SLOW / 2


async def test_announcements_of_what_is_known_cause_no_look(make_topic, broker):
    topic = make_topic()
    async with topic.open() as writer, topic.open() as reader, stranger(broker) as client:
        await fill(writer, "main", 10)
        async with following(reader, after=4) as found:
            await told(reader)
            await found.have(5)
            await until(lambda: found.looks)
            before = found.looks
            for position in range(10):
                await client.publish(f"{subject(topic)}.main", b"%d" % position)
            await client.flush()
            await writer.append("main", 10, b"10")
            await found.have(6)
            assert found.looks <= before + 2


# On S3


@pytest.fixture
def s3_topic(seaweed, broker):
    return Topic(f"s3://{seaweed.new_bucket()}/run", **seaweed.options(), poll=SLOW, notify=channel(broker))


async def test_on_s3_readers_see_at_once_and_ask_rarely(seaweed, s3_topic):
    async with Proxy(seaweed.port) as proxy, s3_topic.open() as writer:
        async with (
            open_transport(s3_topic.url, **s3_topic.options | {"endpoint": f"http://127.0.0.1:{proxy.port}"}) as reader,
            following(reader) as found,
        ):
            await told(reader)
            delays, lags = [], []
            for position in range(10):
                before = time.perf_counter()
                await writer.append("main", position, b"%d" % position)
                after = time.perf_counter()
                await found.have(position + 1)
                delays.append(found.times[-1] - before)
                lags.append(found.times[-1] - after)
            tell("s3", delays, lags)
            assert max(delays) < SLOW / 5
            await passed(3, found.times[-1])
            before = len(proxy.requests)
            await passed(6, found.times[-1])
            assert len(proxy.requests) - before <= 1
        assert found.records == [(position, b"%d" % position) for position in range(10)]


async def test_a_topic_on_s3_can_be_read_with_and_without_announcements(s3_topic):
    plain = {name: value for name, value in s3_topic.options.items() if name not in {"notify", "poll"}}
    async with s3_topic.open() as writer, open_transport(s3_topic.url, **plain) as reader:
        written = await fill(writer, "main", 5)
        assert await collected(reader, "main", -1, 5) == written
        assert await collected(writer, "main", -1, 5) == written
