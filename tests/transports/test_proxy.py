"""The proxy that makes networks go wrong does what the tests believe it does."""

import asyncio
import contextlib
import time

import pytest
import pytest_asyncio

from .conformance import LIMIT, until
from .proxy import Proxy


@pytest_asyncio.fixture
async def heard():
    """A server that answers each line with the same in capitals; gives its port and what it heard."""
    lines = []

    async def serve(reader, writer):
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                lines.append(line)
                writer.write(line.upper())
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], lines
    server.close()
    await server.wait_closed()


@contextlib.asynccontextmanager
async def connected(proxy):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

    async def ask(line):
        writer.write(line)
        async with asyncio.timeout(LIMIT):
            return await reader.readline()

    try:
        yield ask
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_bytes_pass_both_ways(heard):
    async with Proxy(heard[0]) as proxy, connected(proxy) as ask:
        assert await ask(b"get one\n") == b"GET ONE\n"
        assert await ask(b"put two\n") == b"PUT TWO\n"
        assert (proxy.count(b"get"), proxy.count(b"put"), len(proxy.requests)) == (1, 1, 2)


async def test_a_dropped_answer_is_lost_after_the_request_took_effect(heard):
    async with Proxy(heard[0]) as proxy:
        proxy.drop(b"put", answer=b"PUT")
        async with connected(proxy) as ask:
            assert await ask(b"get one\n") == b"GET ONE\n"
            with contextlib.suppress(OSError):
                assert await ask(b"put two\n") == b""
        assert heard[1] == [b"get one\n", b"put two\n"]
        assert proxy.dropped == 1
        async with connected(proxy) as ask:
            assert await ask(b"put two\n") == b"PUT TWO\n"


async def test_connections_are_cut_and_refused(heard):
    async with Proxy(heard[0]) as proxy:
        async with connected(proxy) as ask:
            await ask(b"one\n")
            proxy.cut()
            with contextlib.suppress(OSError):
                assert await ask(b"two\n") == b""
        proxy.refusing = True
        async with connected(proxy) as ask:
            with contextlib.suppress(OSError):
                assert await ask(b"three\n") == b""
    assert b"three\n" not in heard[1]


async def test_silence_and_latency(heard):
    async with Proxy(heard[0]) as proxy:
        proxy.latency = 0.05
        async with connected(proxy) as ask:
            began = time.monotonic()
            assert await ask(b"one\n") == b"ONE\n"
            assert time.monotonic() - began >= 0.05
            proxy.silent = True
            task = asyncio.create_task(ask(b"two\n"))
            await until(lambda: len(proxy.requests) == 2)
            assert not task.done()
            proxy.cut()
            with contextlib.suppress(OSError):
                assert await task == b""
    assert heard[1] == [b"one\n"]


async def test_a_target_that_is_down_is_told_by_a_cut(heard):
    async with Proxy(1) as proxy, connected(proxy) as ask:
        with contextlib.suppress(OSError):
            assert await ask(b"one\n") == b""
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
