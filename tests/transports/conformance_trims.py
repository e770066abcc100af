"""What every transport must do where the beginning of a log was removed, or is."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from deltabus.bus.errors import (
    PositionTakenError,
    TransientTransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES

from .topics import LIMIT, collected, fill, in_another_loop, records_of, within


class TrimConformance:
    """A part of `TransportConformance`."""

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

    async def test_trimming_a_log(self, transport, other):
        written = await fill(transport, "main", 8)
        await fill(transport, "second", 2)
        for before in (0, 5, 5, 3):
            await other.trim("main", before)
        for reader in (transport, other):
            for after in (-1, 0, 3, 4):
                assert await reader.read("main", after) == written[5:]
            assert await reader.read("main", 6) == written[7:]
            assert await reader.logs() == ["main", "second"]
        assert await collected(transport, "main", 2, 3) == written[5:]
        for position in (0, 1, 4):
            with pytest.raises(PositionTakenError):
                await transport.append("main", position, b"zombie")
        await transport.append("main", 8, b"8")
        assert await other.read("main") == [*written[5:], (8, b"8")]
        assert await other.read("second") == records_of(b"0", b"1")

    async def test_trimming_leaves_the_last_record(self, transport, other):
        await transport.trim("main", 3)
        assert await other.logs() == []
        await fill(transport, "main", 4)
        for before in (4, 5, 1000):
            await transport.trim("main", before)
            assert await other.read("main") == [(3, b"3")]
        await other.append("main", 4, b"4")
        assert await transport.read("main") == [(3, b"3"), (4, b"4")]

    async def test_trimming_nothing_sensible_is_refused(self, transport):
        for log, before in (("a/b", 1), ("main", -1), ("main", 1 << 63)):
            with pytest.raises(UsageError):
                await transport.trim(log, before)

    async def test_trimming_large_records(self, transport, other):
        written = [(position, bytes([position]) * MAX_RECORD_BYTES) for position in range(4)]
        for position, record in written:
            await transport.append("main", position, record)
        await other.trim("main", 2)
        assert await transport.read("main") == written[2:]
        assert await other.read("main", 2) == written[3:]

    async def test_a_cancelled_trim_leaves_no_hole(self, transport, other):
        async def whole():
            positions = [record.position for record in await other.read("main")]
            assert positions == list(range(*positions[:1], 12))[: len(positions)]
            return positions[-1:] == [11]

        await fill(transport, "main", 12)
        for number in range(12):
            task = asyncio.create_task(transport.trim("main", number))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, LIMIT)
            # A server goes on with a trim that its client gave up, and a read meanwhile may end where it was overtaken.
            await within(LIMIT, whole)
        await transport.trim("main", 11)
        assert await other.read("main") == [(11, b"11")]

    async def test_readers_and_a_writer_go_on_while_a_log_is_trimmed(self, transport, other, topic):
        done = threading.Event()

        async def trim():
            async with topic.open() as trimming:
                while not done.is_set():
                    found = await trimming.read("main", limit=1000)
                    if len(found) > 3:
                        await trimming.trim("main", found[-3].position)

        async def read():
            async with topic.open() as reader:
                while not done.is_set():
                    try:
                        found = await reader.read("main")
                    except TransientTransportError:
                        continue  # what was read vanished meanwhile; it may be read again
                    positions = [record.position for record in found]
                    assert positions == list(range(positions[0], positions[-1] + 1)) if positions else True
                    assert all(record.data == b"%d" % record.position for record in found)

        others = [asyncio.create_task(in_another_loop(work)) for work in (trim, read)]
        try:
            await fill(transport, "main", self.many // 2)
        finally:
            done.set()
        await asyncio.gather(*others)
        end = self.many // 2 - 1
        assert (await other.read("main"))[-1] == (end, b"%d" % end)
