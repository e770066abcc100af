from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import (
    AccessDeniedError,
    CorruptPayloadError,
    KeyNotFoundError,
    MessageFormatError,
    TransientTransportError,
    UsageError,
)
from deltabus.bus.message import Blob, Message, encode_message
from deltabus.bus.transport import Record

from .support import LIMIT, FakeTransport, Store, Time, anchor, chain

SOON = 0.001


def busy() -> TransientTransportError:
    return TransientTransportError("busy", url="fake://topic")


class Topic:
    """A topic with a reader of it, and a back door that writes it."""

    def __init__(self) -> None:
        self.time = Time()
        self.store = Store()
        self.transport = FakeTransport(self.store)
        self.reader = self.new_reader()

    def new_reader(self) -> TopicReader:
        return TopicReader(self.transport, retry=self.time.retry(), discovery=SOON)

    async def write(self, *messages: Message) -> None:
        for message in messages:
            self.store.records[message.writer][message.position] = encode_message(message)
        await self.transport.wake()

    async def fail_tail(self, *faults: BaseException | Callable[[], Awaitable[None]]) -> None:
        self.transport.fail("tail", *faults)
        await self.transport.wake()


@pytest.fixture
async def topic() -> AsyncIterator[Topic]:
    yield Topic()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"


async def take(messages: AsyncIterator[Message], count: int) -> list[Message]:
    async with asyncio.timeout(LIMIT):
        return [await anext(messages) for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - what the condition looks at tells nobody when it changes
            await asyncio.sleep(0)


# load


async def test_a_topic_that_does_not_exist_is_empty(topic):
    assert await topic.reader.load() == []
    assert dict(topic.reader.starts) == {}


async def test_load_returns_every_log_to_its_end(topic):
    first, second = chain(2500), chain(3, writer="b")
    await topic.write(*second, *first)
    assert await topic.reader.load() == [*first, *second]
    assert dict(topic.reader.starts) == {"a": 0, "b": 0}
    await topic.write(*chain(4, writer="b"))
    assert await topic.reader.load() == chain(4, writer="b")[3:]


async def test_a_log_whose_beginning_was_removed_says_where_it_begins(topic):
    await topic.write(*chain(9)[6:])
    assert await topic.reader.load() == chain(9)[6:]
    assert dict(topic.reader.starts) == {"a": 6}


async def test_a_reader_that_fell_behind_retention_learns_the_new_start(topic):
    log = chain(9)
    await topic.write(*log[:3])
    await topic.reader.load()
    await topic.write(*log)
    for position in range(5):
        del topic.store.records["a"][position]
    assert await topic.reader.load() == log[5:]
    assert dict(topic.reader.starts) == {"a": 5}


async def test_what_retention_removes_while_it_is_loaded_is_not_returned(topic):
    log = chain(2500)
    await topic.write(*log)

    async def remove() -> None:
        for position in range(1500):
            del topic.store.records["a"][position]

    topic.transport.fail("read", None, remove)
    assert await topic.reader.load() == log[1500:]
    assert dict(topic.reader.starts) == {"a": 1500}


async def test_load_tries_again_and_loses_nothing(topic):
    await topic.write(*chain(3), *chain(3, writer="b"))
    topic.transport.fail("logs", busy(), busy())
    topic.transport.fail("read", busy(), None, None, AccessDeniedError("no"))
    with pytest.raises(AccessDeniedError):
        await topic.reader.load()
    assert await topic.reader.load() == [*chain(3), *chain(3, writer="b")]


async def test_a_record_that_is_none_of_ours_is_an_error(topic):
    topic.store.records["a"][0] = b"something else"
    with pytest.raises(MessageFormatError, match="record 0 of log a in fake://topic"):
        await topic.reader.load()


async def test_a_record_in_the_wrong_log_is_an_error(topic):
    topic.store.records["b"][0] = encode_message(anchor(0, 1))
    with pytest.raises(MessageFormatError, match="belongs to the log of 'a'"):
        await topic.reader.load()


# follow


async def test_follow_goes_on_behind_what_was_loaded(topic):
    log = chain(5)
    await topic.write(*log[:3])
    assert await topic.reader.load() == log[:3]
    async with aclosing(topic.reader.follow()) as messages:
        await topic.write(*log)
        assert await take(messages, 2) == log[3:]


async def test_follow_waits_for_a_topic_that_does_not_exist_and_finds_new_logs(topic):
    async with aclosing(topic.reader.follow()) as messages:
        coming = asyncio.create_task(take(messages, 2))
        await until(lambda: topic.transport.calls.count("logs") > 3)
        assert not coming.done()
        await topic.write(*chain(2))
        assert await coming == chain(2)
        await topic.write(*chain(3, writer="b"))
        assert await take(messages, 3) == chain(3, writer="b")
        await topic.write(*chain(3))
        assert await take(messages, 1) == chain(3)[2:]


async def test_a_log_that_a_message_names_in_its_group_is_looked_for_at_once(topic):
    reader = TopicReader(topic.transport, retry=topic.time.retry(), discovery=1000 * LIMIT)
    alone, together = chain(2), chain(2, writer="b", group=("a", "b"))
    await topic.write(*alone)
    async with aclosing(reader.follow()) as messages:
        assert await take(messages, 2) == alone
        looks = topic.transport.calls.count("logs")
        await topic.write(*together, chain(3, group=("a", "b"))[2])
        assert {message.writer for message in await take(messages, 3)} == {"a", "b"}
        assert topic.transport.calls.count("logs") > looks


async def test_looks_for_logs_are_rare_where_none_is_missing(topic):
    await topic.write(*chain(1))
    other = FakeTransport(lacking := Store())
    lacking.records["a"][0] = encode_message(chain(1, group=("a", "b"))[0])
    pauses = 0.01
    whole = TopicReader(topic.transport, retry=topic.time.retry(), discovery=pauses)
    searching = TopicReader(other, retry=topic.time.retry(), discovery=pauses)
    async with aclosing(whole.follow()) as one, aclosing(searching.follow()) as two:
        await take(one, 1)
        await take(two, 1)
        before = topic.transport.calls.count("logs")
        async with asyncio.timeout(LIMIT):
            while other.calls.count("logs") < 40:  # noqa: ASYNC110 - calls tell nobody
                await asyncio.sleep(0)
        assert topic.transport.calls.count("logs") - before < 20


async def test_connections_that_break_are_taken_up_where_they_broke(topic):
    log = chain(6)
    async with aclosing(topic.reader.follow()) as messages:
        await topic.write(*log[:2])
        assert await take(messages, 2) == log[:2]
        await topic.fail_tail(busy(), busy(), busy())
        topic.transport.fail("read", busy())
        topic.transport.fail("logs", busy())
        await topic.write(*log[:4])
        assert await take(messages, 2) == log[2:4]
        await topic.fail_tail(busy())
        await topic.write(*log)
        assert await take(messages, 2) == log[4:]


async def test_records_that_a_backend_repeats_are_yielded_once(topic):
    log = chain(3)
    await topic.write(*log)

    class Repeating(FakeTransport):
        async def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:
            async with aclosing(super().tail(log, -1)) as records:
                async for record in records:
                    yield record
                    yield record

    reader = TopicReader(Repeating(topic.store), retry=topic.time.retry())
    async with aclosing(reader.follow()) as messages:
        assert await take(messages, 3) == log


async def test_a_backend_that_stays_away_is_an_error_with_a_limit(topic):
    await topic.write(*chain(1))
    async with aclosing(topic.reader.follow()) as messages:
        await take(messages, 1)
        await topic.fail_tail(*(busy() for _ in range(1000)))
        with pytest.raises(TransientTransportError, match=r"following log 'a' .* limit is 120 s: busy"):
            await take(messages, 1)
    assert topic.transport.open_tails == 0


async def test_faults_that_are_far_apart_do_not_add_up(topic):
    """A quiet log whose connection breaks every hour is followed for ever."""
    log = chain(2)
    await topic.write(*log[:1])

    async def break_after_an_hour() -> None:
        topic.time.now += 3600
        raise busy()

    async with aclosing(topic.reader.follow()) as messages:
        await take(messages, 1)
        await topic.fail_tail(*[break_after_an_hour] * 100)
        await until(lambda: not topic.transport.before["tail"])
        await topic.write(*log)
        assert await take(messages, 1) == log[1:]


async def test_a_hole_is_filled_by_reading(topic):
    log = chain(6)
    await topic.write(*log[:1])
    async with aclosing(topic.reader.follow()) as messages:
        assert await take(messages, 1) == log[:1]
        topic.transport.hidden = {1, 3}

        async def appear() -> None:
            topic.transport.hidden = set()

        topic.transport.fail("read", None, None, appear)
        await topic.write(*log)
        assert await take(messages, 5) == log[1:]
    assert dict(topic.reader.starts) == {"a": 0}


async def test_a_hole_that_stays_is_an_error_with_a_limit(topic):
    await topic.write(*chain(1))
    async with aclosing(topic.reader.follow()) as messages:
        await take(messages, 1)
        topic.transport.hidden = {1}
        await topic.write(*chain(3))
        with pytest.raises(TransientTransportError, match="shows position 2 but not 1"):
            await take(messages, 1)


async def test_a_follower_that_fell_behind_retention_learns_the_new_start(topic):
    log = chain(9)
    await topic.write(*log[:2])
    await topic.reader.load()
    await topic.write(*log)
    for position in range(6):
        del topic.store.records["a"][position]
    async with aclosing(topic.reader.follow()) as messages:
        assert await take(messages, 3) == log[6:]
        assert dict(topic.reader.starts) == {"a": 6}


@pytest.mark.parametrize("method", ["tail", "logs", "read"])
async def test_permanent_faults_reach_the_consumer(topic, method):
    await topic.write(*chain(1))
    fault = AccessDeniedError("no")
    async with aclosing(topic.reader.follow()) as messages:
        await take(messages, 1)
        topic.transport.fail(method, fault)
        if method == "read":
            topic.transport.hidden = {1}
            await topic.write(*chain(3))
        await topic.transport.wake()
        with pytest.raises(AccessDeniedError) as caught:
            await take(messages, 1)
        assert caught.value is fault
    assert topic.transport.open_tails == 0


async def test_a_bad_record_reaches_the_consumer_behind_the_good_ones(topic):
    await topic.write(*chain(2))
    topic.store.records["a"][2] = b"something else"
    async with aclosing(topic.reader.follow()) as messages:
        assert await take(messages, 2) == chain(2)
        with pytest.raises(MessageFormatError, match="record 2"):
            await take(messages, 1)


async def test_what_was_not_yielded_is_not_lost(topic):
    log = chain(600)
    await topic.write(*log)
    seen: list[Message] = []
    for count in (1, 3, 200):
        async with aclosing(topic.reader.follow()) as messages:
            seen += await take(messages, count)
    seen += await topic.reader.load()
    assert seen == log


async def test_a_slow_consumer_bounds_what_is_read_ahead(topic):
    log = chain(3000)
    await topic.write(*log)
    read = 0

    class Counting(FakeTransport):
        async def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:
            nonlocal read
            async with aclosing(super().tail(log, after)) as records:
                async for record in records:
                    read += 1
                    yield record

    reader = TopicReader(Counting(topic.store), retry=topic.time.retry())
    async with aclosing(reader.follow()) as messages:
        await take(messages, 1)
        await until(lambda: read > 100)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert read < 300
        assert await take(messages, 2999) == log[1:]


@pytest.mark.parametrize("written", [0, 1, 1000])
async def test_closing_leaves_nothing_behind(topic, written):
    await topic.write(*chain(written)[:written])
    messages = topic.reader.follow()
    if written:
        await take(messages, 1)
    else:
        waiting = asyncio.create_task(take(messages, 1))
        await until(lambda: "logs" in topic.transport.calls)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await messages.aclose()
    await messages.aclose()
    assert topic.transport.open_tails == 0


async def test_a_cancelled_consumer_leaves_nothing_behind(topic):
    await topic.write(*chain(1))
    got = asyncio.Event()

    async def consume() -> None:
        async with aclosing(topic.reader.follow()) as messages:
            async for _ in messages:
                got.set()

    task = asyncio.create_task(consume())
    async with asyncio.timeout(LIMIT):
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert topic.transport.open_tails == 0
    assert await topic.reader.load() == []


async def test_one_reader_is_followed_once(topic):
    await topic.write(*chain(1))
    async with aclosing(topic.reader.follow()) as messages:
        await take(messages, 1)
        with pytest.raises(UsageError, match="followed already"):
            await take(topic.reader.follow(), 1)
        with pytest.raises(UsageError, match="while fake://topic is followed"):
            await topic.reader.load()


# fetch


def stored(topic: Topic, data: bytes) -> Blob:
    blob = Blob(key="blobs/a/x", size=len(data), checksum=hashlib.sha256(data).digest())
    topic.store.blobs[blob.key] = data
    return blob


@pytest.mark.parametrize("size", [0, 1, 1 << 18])
async def test_fetch_returns_the_bytes(topic, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    blob = stored(topic, data)
    topic.transport.fail("get", busy(), busy())
    assert await topic.reader.fetch(blob) == data
    assert await topic.reader.schema(blob) == data


@pytest.mark.parametrize("damaged", [b"", b"dat", b"data and more", b"tada"])
async def test_a_damaged_blob_is_fetched_once_more(topic, damaged):
    blob = stored(topic, b"data")
    topic.store.blobs[blob.key] = damaged

    async def heal() -> None:
        topic.store.blobs[blob.key] = b"data"

    topic.transport.fail("get", None, heal)
    assert await topic.reader.fetch(blob) == b"data"


@pytest.mark.parametrize("damaged", [b"", b"dat", b"data and more", b"tada"])
async def test_a_blob_that_stays_damaged_is_an_error_that_names_it(topic, damaged):
    blob = stored(topic, b"data")
    topic.store.blobs[blob.key] = damaged
    with pytest.raises(CorruptPayloadError, match="blob blobs/a/x of fake://topic is damaged"):
        await topic.reader.fetch(blob)
    assert topic.transport.calls.count("get") == 2


async def test_a_blob_that_is_gone_is_an_error_at_once(topic):
    blob = stored(topic, b"data")
    topic.store.blobs.clear()
    with pytest.raises(KeyNotFoundError):
        await topic.reader.fetch(blob)
    assert topic.transport.calls.count("get") == 1


async def test_fetch_can_be_cancelled(topic):
    blob = stored(topic, b"data")
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    topic.transport.fail("get", hang)
    task = asyncio.create_task(topic.reader.fetch(blob))
    async with asyncio.timeout(LIMIT):
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await topic.reader.fetch(blob) == b"data"
