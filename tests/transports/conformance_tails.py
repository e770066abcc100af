"""What every transport must do for readers that wait for what comes."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from deltabus.bus.errors import (
    UsageError,
)

from .topics import LIMIT, collected, fill, in_another_loop, records_of, until, waiting


class TailConformance:
    """A part of `TransportConformance`."""

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
                return await fill(writer, "main", self.many)

        writer = asyncio.create_task(in_another_loop(write))
        tails = [collected(t, "main", -1, self.many) for t in (transport, other, other)]
        written, *found = await asyncio.gather(writer, *tails)
        assert found == [written] * 3

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
