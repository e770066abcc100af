"""What every transport must do with logs."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from deltabus.bus.errors import (
    KeyNotFoundError,
    PositionTakenError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES

from .topics import BAD_LOGS, fill, in_another_loop, records_of


class LogConformance:
    """A part of `TransportConformance`."""

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

            for position in range(self.rounds):
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
