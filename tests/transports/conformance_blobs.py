"""What every transport must do with blobs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time

import pytest

from deltabus.bus.errors import (
    KeyExistsError,
    KeyNotFoundError,
    UsageError,
)

from .topics import BAD_KEYS, in_another_loop


class BlobConformance:
    """A part of `TransportConformance`."""

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

    async def test_listing_blobs(self, transport, other, topic):
        assert await transport.blobs("blobs") == []
        sizes = {"blobs/main/1.x": 3, "blobs/main/2": 0, "blobs/second/1": 70_000, "blobs2/main/1": 1, "schemas/a": 2}
        before = time.time()
        for key, size in sizes.items():
            await transport.put(key, b"x" * size)
        await transport.append("main", 0, b"x")
        after = time.time()
        for folder in ("blobs", "blobs/main", "blobs/main/1.x", "schemas", "missing"):
            found = await other.blobs(folder)
            assert [blob.key for blob in found] == sorted(key for key in sizes if key.startswith(f"{folder}/"))
            for blob in found:
                assert blob.size in (sizes[blob.key], None)
                if self.tells_times:
                    assert before - 2 <= blob.stored <= after + 2
        await other.delete(["blobs/main/2"])
        assert [blob.key for blob in await transport.blobs("blobs")] == ["blobs/main/1.x", "blobs/second/1"]

    async def test_many_blobs_are_all_listed(self, transport, other):
        keys = [f"blobs/main/{number:04}" for number in range(self.listed)]
        await asyncio.gather(*(transport.put(key, b"x") for key in keys))
        assert [blob.key for blob in await other.blobs("blobs")] == keys

    @pytest.mark.parametrize("folder", ["", "/", "blobs/", "../a", "logs", "a*"])
    async def test_listing_a_bad_folder_is_refused(self, transport, folder):
        with pytest.raises(UsageError, match="key"):
            await transport.blobs(folder)
