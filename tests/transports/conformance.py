"""What every transport must do: the contract of `deltabus.bus.transport`, as tests.

A backend's test module subclasses `TransportConformance` and overrides the fixture `make_topic` with a function that
gives a fresh `Topic` at each call. Back doors of a topic are optional; tests that need a missing one are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabus.bus.errors import (
    AppendUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.transports import open_transport

LIMIT = 30.0
"""Seconds that any wait in these tests may take."""

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".a",
    "a/.b",
    "a/..",
    "../a",
    "a b",
    "a\\b",
    "é",
    "a\n",
    "a\0",
    "=a",
    "a/=b",
    "k" * 513,
]
BAD_KEYS += ["a/" + "k" * 256, "logs", "logs/main/00000000000000000000", "a?b", "a#b", "a%2fb", "a*"]
BAD_LOGS = ["", ".", "..", "a/b", "a.b", "-a", "_a", "a b", "a\n", "é", "l" * 64, "a*", "a>"]


class Topic:
    """One fresh topic, and ways around its transport."""

    def __init__(self, url: str, **options):
        self.url = url
        self.options = options

    def open(self, **options):
        """Return one more transport of the topic; call it in the loop that will use it."""
        return open_transport(self.url, **self.options, **options)

    async def stored_blob(self, key):
        """Back door: the blob's bytes, None when there is none, read without the transport."""
        pytest.skip("this backend has no back door to its blobs")

    async def remove_records(self, log, before):
        """Back door: remove the records in front of a position, oldest first, as retention does."""
        pytest.skip("this backend has no back door to its records")


async def collected(transport, log, after, count):
    """The next `count` records of a tail, within the limit."""
    records = []
    async with asyncio.timeout(LIMIT), contextlib.aclosing(transport.tail(log, after)) as tail:
        while len(records) < count:
            records.append(await anext(tail))
    return [tuple(record) for record in records]


async def in_another_loop(function, *arguments):
    """Run a coroutine function in a thread with an event loop of its own."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(function(*arguments))), LIMIT)


async def until(condition):
    """Wait until a condition holds, within the limit."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - the conditions are of threads, files and processes
            await asyncio.sleep(0.005)


def records_of(*texts, start=0):
    return [(position, text) for position, text in enumerate(texts, start)]


async def fill(transport, log, count, start=0):
    """Append `count` records, and return them."""
    records = [(position, b"%d" % position) for position in range(start, start + count)]
    for position, data in records:
        await transport.append(log, position, data)
    return records


async def waiting(task):
    """Let a task run until it has surely begun to wait."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()


class TransportConformance:
    """Subclass it for a backend, and override `make_topic`."""

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

    # Blobs

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300], ids=["empty", "one byte", "76800 bytes"])
    async def test_a_blob_reads_back(self, transport, other, data):
        await transport.put("blobs/main/one", data)
        assert await transport.get("blobs/main/one") == data
        found = await other.get("blobs/main/one")
        assert found == data
        assert type(found) is bytes

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("H")])
    async def test_a_blob_may_come_in_any_buffer(self, transport, kind):
        await transport.put("key", kind(b"abcdef"))
        assert await transport.get("key") == b"abcdef"

    async def test_a_strided_buffer_is_stored_as_its_elements(self, transport):
        await transport.put("key", memoryview(b"a-b-c-")[::2])
        assert await transport.get("key") == b"abc"

    async def test_a_blob_does_not_follow_the_callers_buffer(self, transport):
        buffer = bytearray(b"before")
        await transport.put("key", buffer)
        buffer[:] = b"after!"
        assert await transport.get("key") == b"before"

    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, None), (0, 4), (3, 7), (7, None), (9, 10), (5, 5), (7, 3), (8, 99), (10, None), (50, 60)],
    )
    async def test_ranges_are_those_of_a_slice(self, transport, start, stop):
        await transport.put("key", b"0123456789")
        assert await transport.get("key", start, stop) == b"0123456789"[start:stop]

    async def test_any_range_of_an_empty_blob_is_empty(self, transport):
        await transport.put("key", b"")
        assert await transport.get("key", 0, 10) == await transport.get("key", 3) == b""

    @pytest.mark.parametrize(("start", "stop"), [(-1, None), (0, -1), (-4, -2)])
    async def test_a_range_from_the_end_is_refused(self, transport, start, stop):
        await transport.put("key", b"0123456789")
        with pytest.raises(UsageError, match="range"):
            await transport.get("key", start, stop)

    async def test_a_missing_blob_is_an_error_that_names_it(self, transport, topic):
        for _ in range(2):  # an empty topic, and then one that has something
            with pytest.raises(KeyNotFoundError, match="blobs/missing") as caught:
                await transport.get("blobs/missing")
            assert caught.value.url == transport.url
            assert transport.url in str(caught.value)
            await transport.put("blobs/other", b"x")

    async def test_neither_a_part_of_a_key_nor_what_is_below_one_is_a_blob(self, transport):
        await transport.put("a/b/c", b"x")
        for key in ("a", "a/b", "a/b/c/d", "a/b/c/d/e"):
            with pytest.raises(KeyNotFoundError):
                await transport.get(key)
        await transport.delete(["a", "a/b", "a/b/c/d"])
        assert await transport.get("a/b/c") == b"x"

    @pytest.mark.parametrize("key", ["k", "a/b", "A-b_c=d.e", "0", "_x", "-x", "a" * 255, "/".join(["d" * 63] * 8)])
    async def test_good_keys(self, transport, key):
        await transport.put(key, b"x")
        assert await transport.get(key) == b"x"
        await transport.delete([key])

    @pytest.mark.parametrize("key", BAD_KEYS)
    async def test_bad_keys_are_refused_everywhere(self, transport, key):
        await transport.put("good", b"x")
        with pytest.raises(UsageError, match="key"):
            await transport.put(key, b"x")
        with pytest.raises(UsageError, match="key"):
            await transport.get(key)
        with pytest.raises(UsageError, match="key"):
            await transport.delete(["good", key])
        assert await transport.get("good") == b"x"
        assert await transport.logs() == []

    async def test_a_blob_is_written_once(self, transport, other):
        await transport.put("key", b"first")
        await transport.put("key", b"first")
        await other.put("key", memoryview(b"first"))
        for data in (b"other", b"", b"firs", b"first!", b"x" * 100_000):
            with pytest.raises(KeyExistsError, match="key") as caught:
                await other.put("key", data)
            assert caught.value.url == other.url
        assert await transport.get("key") == b"first"

    async def test_an_empty_blob_is_written_once(self, transport):
        await transport.put("key", b"")
        await transport.put("key", b"")
        with pytest.raises(KeyExistsError):
            await transport.put("key", b"x")

    async def test_deleting(self, transport, other):
        for key in ("a", "b/c", "b/d"):
            await transport.put(key, b"x")
        await other.delete(key for key in ("a", "missing", "b/c"))
        await other.delete([])
        for key in ("a", "b/c"):
            with pytest.raises(KeyNotFoundError):
                await transport.get(key)
        assert await transport.get("b/d") == b"x"
        await transport.put("a", b"another")
        assert await other.get("a") == b"another"

    async def test_deleting_a_string_is_refused(self, transport):
        await transport.put("a", b"x")
        with pytest.raises(UsageError, match="list"):
            await transport.delete("a")
        assert await transport.get("a") == b"x"

    async def test_many_writers_of_the_same_bytes_all_succeed(self, topic):
        async with contextlib.AsyncExitStack() as stack:
            transports = [await stack.enter_async_context(topic.open()) for _ in range(8)]
            await asyncio.gather(*(transport.put("shared/key", b"same" * 1000) for transport in transports))
            assert {await transport.get("shared/key") for transport in transports} == {b"same" * 1000}

    async def test_of_many_writers_of_different_bytes_one_wins(self, topic):
        async def write(number):
            async with topic.open() as transport:
                try:
                    await transport.put("key", b"%d" % number * 10_000)
                except KeyExistsError:
                    return None
                return number

        winners = [w for w in await asyncio.gather(*(in_another_loop(write, n) for n in range(6))) if w is not None]
        assert len(winners) == 1
        async with topic.open() as transport:
            assert await transport.get("key") == b"%d" % winners[0] * 10_000

    async def test_a_large_blob_streams_and_reads_in_ranges(self, transport, other):
        block = hashlib.shake_256(b"deltabus").digest(1 << 20)
        data = bytearray(block * 64)
        for index in range(64):
            data[index << 20] = index
        await transport.put("large", memoryview(data))
        step = 9_999_991
        parts = await asyncio.gather(*(other.get("large", at, at + step) for at in range(0, len(data), step)))
        assert b"".join(parts) == data
        assert hashlib.sha256(await other.get("large")).digest() == hashlib.sha256(data).digest()
        await transport.put("large", data)
        data[-1] ^= 1
        with pytest.raises(KeyExistsError):
            await transport.put("large", data)

    async def test_readers_never_see_a_part_of_a_blob(self, transport, topic):
        data = [bytes([number]) * 3_000_000 for number in range(8)]
        done = threading.Event()

        async def look():
            async with topic.open() as reader:
                seen = 0
                while not done.is_set():
                    for number, expected in enumerate(data):
                        try:
                            found = await reader.get(f"blob/{number}")
                        except KeyNotFoundError:
                            continue
                        assert found == expected
                        seen += 1
                return seen

        readers = [asyncio.create_task(in_another_loop(look)) for _ in range(2)]
        try:
            for number, expected in enumerate(data):
                await transport.put(f"blob/{number}", expected)
        finally:
            done.set()
        await asyncio.gather(*readers)

    async def test_the_back_door_finds_what_was_put(self, transport, topic):
        await transport.put("a/b", b"bytes")
        assert await topic.stored_blob("a/b") == b"bytes"
        await transport.delete(["a/b"])
        assert await topic.stored_blob("a/b") is None

    # Logs

    async def test_a_new_topic_is_empty(self, transport):
        assert await transport.logs() == []
        assert await transport.read("main") == []
        assert await transport.read("main", 41) == []
        await transport.delete(["missing"])

    async def test_records_read_back_in_order(self, transport, other):
        written = await fill(transport, "main", 12)
        for reader in (transport, other):
            found = await reader.read("main")
            assert found == written
            assert [record.position for record in found] == list(range(12))
            assert {type(record.data) for record in found} == {bytes}

    async def test_reading_after_a_position(self, transport):
        written = await fill(transport, "main", 7)
        for after in range(-1, 7):
            assert await transport.read("main", after) == written[after + 1 :]
        assert await transport.read("main", 7) == []
        assert await transport.read("main", 1000) == []

    async def test_reading_with_a_limit(self, transport):
        written = await fill(transport, "main", 7)
        assert await transport.read("main", limit=3) == written[:3]
        assert await transport.read("main", 2, limit=1) == written[3:4]
        assert await transport.read("main", 4, limit=100) == written[5:]

    @pytest.mark.parametrize(("after", "limit"), [(-2, 10), (0, 0), (0, -1)])
    async def test_reading_nothing_sensible_is_refused(self, transport, after, limit):
        with pytest.raises(UsageError):
            await transport.read("main", after, limit)

    @pytest.mark.parametrize("record", [b"", b"x", b"\0" * 1000, b"r" * MAX_RECORD_BYTES])
    async def test_records_of_any_size_up_to_the_limit(self, transport, other, record):
        await transport.append("main", 0, record)
        await transport.append("main", 1, memoryview(bytearray(b"next")))
        assert await other.read("main") == records_of(record, b"next")

    async def test_a_record_over_the_limit_is_refused(self, transport):
        with pytest.raises(UsageError, match="limit"):
            await transport.append("main", 0, b"r" * (MAX_RECORD_BYTES + 1))
        assert await transport.logs() == []

    async def test_a_record_is_written_once(self, transport, other):
        await fill(transport, "main", 3)
        for writer in (transport, other):
            for position in range(3):
                await writer.append("main", position, b"%d" % position)
                for data in (b"", b"x", b"%d " % position):
                    with pytest.raises(PositionTakenError, match=f"main.*{position}|{position}.*main") as caught:
                        await writer.append("main", position, data)
                    assert caught.value.url == writer.url
        assert await transport.read("main") == records_of(b"0", b"1", b"2")

    async def test_a_log_has_no_holes(self, transport):
        with pytest.raises(UsageError, match="position 0"):
            await transport.append("main", 1, b"x")
        assert await transport.logs() == []
        await fill(transport, "main", 2)
        for position in (3, 4, 1000):
            with pytest.raises(UsageError, match=f"position {position - 1}"):
                await transport.append("main", position, b"x")
        assert len(await transport.read("main")) == 2

    @pytest.mark.parametrize("position", [-1, -100, 1 << 63, 10**20])
    async def test_positions_out_of_range_are_refused(self, transport, position):
        with pytest.raises(UsageError, match="position"):
            await transport.append("main", position, b"x")

    @pytest.mark.parametrize("log", BAD_LOGS)
    async def test_bad_log_names_are_refused_everywhere(self, transport, log):
        with pytest.raises(UsageError, match="log"):
            await transport.append(log, 0, b"x")
        with pytest.raises(UsageError, match="log"):
            await transport.read(log)
        with pytest.raises(UsageError, match="log"):
            await anext(transport.tail(log))
        assert await transport.logs() == []

    @pytest.mark.parametrize("log", ["m", "0", "Main", "rank-0_of_8", "l" * 63])
    async def test_good_log_names(self, transport, log):
        await transport.append(log, 0, b"x")
        assert await transport.logs() == [log]

    async def test_many_logs_are_kept_apart(self, transport, other):
        names = [f"rank-{number:02}" for number in range(24)]
        await asyncio.gather(*(fill(transport, name, 3) for name in reversed(names)))
        await transport.append(names[5], 3, b"more")
        assert await other.logs() == names
        assert await other.read(names[5], 1) == records_of(b"2", b"more", start=2)
        assert await other.read(names[6], 1) == records_of(b"2", start=2)

    async def test_blobs_make_no_logs(self, transport):
        await transport.put("blobs/main/1", b"x")
        await transport.put("log/main/1", b"x")
        assert await transport.logs() == []

    async def test_topics_are_kept_apart(self, make_topic):
        async with make_topic().open() as first, make_topic().open() as second:
            await first.put("key", b"first")
            await first.append("main", 0, b"first")
            with pytest.raises(KeyNotFoundError):
                await second.get("key")
            assert await second.read("main") == []
            await second.append("main", 0, b"second")
            assert await first.read("main") == records_of(b"first")

    async def test_of_many_who_append_at_one_position_one_wins(self, topic):
        async with contextlib.AsyncExitStack() as stack:
            transports = [await stack.enter_async_context(topic.open()) for _ in range(6)]

            async def append(number, position):
                try:
                    await transports[number].append("main", position, b"%d" % number)
                except PositionTakenError:
                    return None
                return number

            for position in range(8):
                outcomes = await asyncio.gather(*(append(number, position) for number in range(6)))
                winners = [number for number in outcomes if number is not None]
                assert len(winners) == 1
                assert await transports[0].read("main", position - 1) == [(position, b"%d" % winners[0])]

    async def test_writers_in_other_loops_share_a_log(self, topic):
        async def write(number):
            """Append ten records, each wherever the log ends at that moment."""
            async with topic.open() as transport:
                won, position = [], 0
                while len(won) < 10:
                    try:
                        await transport.append("main", position, b"%d:%d" % (number, len(won)))
                        won.append(position)
                    except PositionTakenError:
                        pass
                    position += 1
                return won

        won = await asyncio.gather(*(in_another_loop(write, number) for number in range(4)))
        assert sorted(position for positions in won for position in positions) == list(range(40))
        async with topic.open() as transport:
            records = await transport.read("main")
        assert [position for position, _ in records] == list(range(40))
        for number, positions in enumerate(won):
            assert [records[p].data for p in positions] == [b"%d:%d" % (number, count) for count in range(10)]

    async def test_the_same_record_from_two_writers_is_there_once(self, transport, other):
        await asyncio.gather(transport.append("main", 0, b"same"), other.append("main", 0, b"same"))
        assert await transport.read("main") == records_of(b"same")

    async def test_a_log_whose_beginning_was_removed(self, transport, other, topic):
        written = await fill(transport, "main", 8)
        await topic.remove_records("main", 5)
        for reader in (transport, other):
            for after in (-1, 0, 3, 4):
                assert await reader.read("main", after) == written[5:]
            assert await reader.read("main", 5) == written[6:]
            assert await reader.read("main", 7) == []
            assert await reader.read("main", 8) == []
            assert await reader.read("main", limit=2) == written[5:7]
            assert await reader.logs() == ["main"]
        assert await collected(other, "main", -1, 3) == written[5:]
        assert await collected(other, "main", 2, 3) == written[5:]
        await transport.append("main", 8, b"8")
        assert await other.read("main", 7) == records_of(b"8", start=8)
        for position in (0, 1, 4):
            with pytest.raises(PositionTakenError):
                await transport.append("main", position, b"zombie")
        assert await other.read("main") == [*written[5:], (8, b"8")]

    # Tails

    async def test_a_tail_gives_what_is_there_and_what_comes(self, transport, other):
        written = await fill(transport, "main", 3)
        task = asyncio.create_task(collected(other, "main", -1, 6))
        await waiting(task)
        written += await fill(transport, "main", 3, start=3)
        assert await task == written

    async def test_a_tail_of_the_writers_own_transport(self, transport):
        task = asyncio.create_task(collected(transport, "main", -1, 3))
        await waiting(task)
        assert await fill(transport, "main", 3) == await task

    @pytest.mark.parametrize("after", [0, 2, 4])
    async def test_a_tail_from_the_middle(self, transport, other, after):
        written = await fill(transport, "main", 5)
        task = asyncio.create_task(collected(other, "main", after, 6 - after - 1 + 2))
        written += await fill(transport, "main", 3, start=5)
        assert await task == written[after + 1 : 8]

    async def test_a_tail_from_beyond_the_end_waits_for_what_is_behind(self, transport, other):
        await fill(transport, "main", 2)
        task = asyncio.create_task(collected(other, "main", 4, 1))
        await waiting(task)
        await fill(transport, "main", 4, start=2)
        assert await task == records_of(b"5", start=5)

    async def test_a_tail_waits_for_a_log_that_does_not_exist(self, transport, other):
        await transport.append("another", 0, b"x")
        task = asyncio.create_task(collected(other, "main", -1, 2))
        await waiting(task)
        await transport.append("another", 1, b"y")
        assert await fill(transport, "main", 2) == await task

    async def test_tails_are_independent(self, transport, other):
        tasks = [
            asyncio.create_task(collected(t, "main", after, 4 - after)) for t in (transport, other) for after in (-1, 1)
        ]
        tasks.append(asyncio.create_task(collected(other, "second", -1, 2)))
        written = await fill(transport, "main", 5)
        second = await fill(transport, "second", 2)
        assert await asyncio.gather(*tasks) == [written, written[2:], written, written[2:], second]

    async def test_a_tail_in_another_loop(self, transport, topic):
        begun = threading.Event()

        async def follow():
            async with topic.open() as reader:
                begun.set()
                return await collected(reader, "main", -1, 30)

        task = asyncio.create_task(in_another_loop(follow))
        await until(begun.is_set)
        assert await fill(transport, "main", 30) == await task

    async def test_a_tail_gives_each_record_once_while_others_write_and_read(self, transport, other, topic):
        async def write():
            async with topic.open() as writer:
                return await fill(writer, "main", 150)

        writer = asyncio.create_task(in_another_loop(write))
        found = await asyncio.gather(*(collected(t, "main", -1, 150) for t in (transport, other, other)))
        assert found == [await writer] * 3

    async def test_whoever_sees_a_record_can_read_the_blob_before_it(self, transport, topic):
        async def follow():
            async with topic.open() as reader, contextlib.aclosing(reader.tail("main")) as tail:
                for number in range(20):
                    record = await anext(tail)
                    assert await reader.get(record.data.decode()) == b"%d" % number * 5000

        reader = asyncio.create_task(in_another_loop(follow))
        for number in range(20):
            await transport.put(f"blobs/{number}", b"%d" % number * 5000)
            await transport.append("main", number, f"blobs/{number}".encode())
        await reader

    async def test_closing_a_tail_stops_it(self, transport):
        await fill(transport, "main", 2)
        tail = transport.tail("main")
        assert await anext(tail) == (0, b"0")
        await asyncio.wait_for(tail.aclose(), LIMIT)
        with pytest.raises(StopAsyncIteration):
            await anext(tail)

    async def test_a_waiting_tail_can_be_cancelled(self, transport, other):
        written = await fill(transport, "main", 1)
        for _ in range(5):
            task = asyncio.create_task(collected(other, "main", 0, 1))
            await waiting(task)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, LIMIT)
        written += await fill(transport, "main", 2, start=1)
        assert await collected(other, "main", -1, 3) == written

    async def test_a_tail_that_waits_too_long_can_be_left_with_a_limit(self, transport):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(transport.tail("main")), 0.05)

    @pytest.mark.parametrize("after", [-2, -100])
    async def test_a_tail_from_nowhere_is_refused(self, transport, after):
        with pytest.raises(UsageError, match="after"):
            await anext(transport.tail("main", after))

    # Life

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

    def test_any_sequence_of_calls_does_what_two_dicts_do(self, make_topic):
        # Made here, because Hypothesis wants a function of its own for each class that inherits the test.
        @settings(max_examples=25)
        @given(steps=_STEPS)
        def compare(steps):
            asyncio.run(_compare_with_dicts(make_topic(), steps))

        compare()


_KEYS = st.sampled_from(["a", "b/c", "b/d"])
_LOGS = st.sampled_from(["main", "second"])
_DATA = st.sampled_from([b"", b"x", b"xy", b"x" * 5000])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _KEYS, _DATA),
        st.tuples(st.just("get"), _KEYS, st.integers(0, 4), st.none() | st.integers(0, 6000)),
        st.tuples(st.just("delete"), st.lists(_KEYS, max_size=3)),
        st.tuples(st.just("append"), _LOGS, st.integers(0, 5), _DATA),
        st.tuples(st.just("read"), _LOGS, st.integers(-1, 5), st.integers(1, 6)),
    ),
    max_size=25,
)


async def _compare_with_dicts(topic, steps):
    blobs: dict[str, bytes] = {}
    logs: dict[str, list[bytes]] = {}
    async with topic.open() as first, topic.open() as second:
        for number, (name, *arguments) in enumerate(steps):
            transport = (first, second)[number % 2]
            expected: object = None
            if name == "put":
                key, data = arguments
                if blobs.setdefault(key, data) != data:
                    expected = KeyExistsError
            elif name == "get":
                key, start, stop = arguments
                expected = blobs[key][start:stop] if key in blobs else KeyNotFoundError
            elif name == "delete":
                for key in arguments[0]:
                    blobs.pop(key, None)
            elif name == "append":
                log, position, data = arguments
                records = logs.get(log, [])
                if position > len(records):
                    expected = UsageError
                elif position == len(records):
                    logs[log] = [*records, data]
                elif records[position] != data:
                    expected = PositionTakenError
            else:
                log, after, limit = arguments
                expected = list(enumerate(logs.get(log, [])))[after + 1 :][:limit]
            if isinstance(expected, type):
                with pytest.raises(expected):
                    await getattr(transport, name)(*arguments)
            else:
                assert await getattr(transport, name)(*arguments) == expected
        assert await first.logs() == sorted(logs)
