"""`s3://` when the network or the server goes wrong."""

import asyncio
import contextlib
import functools
import random
import time

import pytest

from deltabus.bus.errors import (
    AppendUnknownError,
    KeyExistsError,
    PositionTakenError,
    TransientTransportError,
)
from deltabus.bus.retry import Retry

from .conformance import LIMIT, collected, fill, until
from .proxy import Proxy


async def test_a_server_that_is_down_is_told_at_once(seaweed, bucket):
    async with Proxy(seaweed.port) as s3_proxy:
        endpoint = f"http://127.0.0.1:{s3_proxy.port}"
    async with asyncio.timeout(LIMIT), seaweed.open(bucket, endpoint=endpoint) as transport:
        for call in (
            lambda: transport.put("key", b"x"),
            lambda: transport.get("key"),
            lambda: transport.append("main", 0, b"x"),
            lambda: transport.logs(),
        ):
            with pytest.raises(TransientTransportError, match=r"nothing was sent.*endpoint"):
                await call()


async def test_a_silent_server_is_given_up(seaweed, s3_topics, s3_proxy):
    topic = s3_topics()
    endpoint = f"http://127.0.0.1:{s3_proxy.port}"
    async with seaweed.open(topic.bucket, topic.prefix, endpoint=endpoint, timeout=0.4) as transport:
        await transport.put("key", b"x")
        await transport.append("main", 0, b"x")
        s3_proxy.silent = True
        for call in (
            lambda: transport.get("key"),
            lambda: transport.put("large", b"x" * 20_000_000),
            lambda: transport.append("main", 1, b"x"),
            lambda: anext(transport.tail("main", 0)),
        ):
            async with asyncio.timeout(LIMIT):
                with pytest.raises(TransientTransportError, match=r"0\.4 s|[Tt]imeout"):
                    await call()


async def test_an_answer_may_take_longer_than_a_server_may_be_silent(seaweed, s3_topics, s3_proxy):
    topic = s3_topics()
    data = random.Random(1).randbytes(1_500_000)
    async with topic.open() as direct:
        await direct.put("key", data)
    timeout = 1.0
    async with seaweed.open(
        topic.bucket, topic.prefix, endpoint=f"http://127.0.0.1:{s3_proxy.port}", timeout=timeout
    ) as transport:
        s3_proxy.latency = timeout / 10  # before each 64 KiB
        begun = time.monotonic()
        assert await transport.get("key") == data
        assert time.monotonic() - begun > timeout


async def test_an_append_whose_answer_was_lost_is_a_success(through, s3_proxy):
    await through.append("main", 0, b"0")
    s3_proxy.drop(b"PUT /", answer=b"HTTP/1.1 200", times=1)
    await through.append("main", 1, b"1")
    assert s3_proxy.dropped == 1
    async with through.topic.open() as direct:
        assert await direct.read("main") == [(0, b"0"), (1, b"1")]


async def test_an_append_that_lost_is_a_loss_though_its_answer_was_lost(through, s3_proxy):
    await through.append("main", 0, b"0")
    async with through.topic.open() as other:
        await other.append("main", 1, b"other")
    s3_proxy.drop(b"PUT /", answer=b"HTTP/1.1", times=2)
    with pytest.raises(PositionTakenError):
        await through.append("main", 1, b"mine")
    assert s3_proxy.dropped
    assert await through.read("main", 0) == [(1, b"other")]


async def test_an_append_whose_outcome_cannot_be_found_out_is_unknown(through, s3_proxy):
    await through.append("main", 0, b"0")
    s3_proxy.drop(b"PUT /", answer=b"HTTP/1.1", refuse=True)
    with pytest.raises(AppendUnknownError, match=r"lost the answer.*position 1") as caught:
        await through.append("main", 1, b"1")
    assert caught.value.url == through.url
    s3_proxy.refusing = False
    assert await through.read("main", 0) == [(1, b"1")]
    await through.append("main", 1, b"1")


async def test_a_put_whose_answer_was_lost_may_be_done_again(through, s3_proxy):
    data = bytes(range(256)) * 2000
    await through.put("first", data)
    s3_proxy.drop(b"PUT /", answer=b"HTTP/1.1", refuse=True)
    with pytest.raises(TransientTransportError, match="may be done again"):
        await through.put("key", data)
    s3_proxy.refusing = False
    s3_proxy.requests.clear()
    await through.put("key", data)
    assert s3_proxy.count(b"GET /") == 0  # its size and checksum tell that it is the same
    with pytest.raises(KeyExistsError):
        await through.put("key", data[::-1])


async def test_a_body_may_be_refused_before_all_of_it_is_sent(through, s3_proxy):
    data = random.Random(4).randbytes(24 << 20)
    await through.put("key", data[:100])
    for _ in range(3):
        with pytest.raises(KeyExistsError):
            await through.put("key", data)
    await through.put("other", data)
    assert await through.get("other") == data


async def test_a_probe_whose_answer_was_lost_is_done_again(through, s3_proxy):
    s3_proxy.drop(b"/.conditional-writes", answer=b"HTTP/1.1", refuse=True)
    with pytest.raises(TransientTransportError, match=r"whether it refuses to overwrite.*do it again"):
        await through.append("main", 0, b"x")
    s3_proxy.refusing = False
    await through.append("main", 0, b"x")
    assert await through.read("main") == [(0, b"x")]


async def test_a_tail_goes_on_behind_a_cut(through, s3_proxy):
    written = await fill(through, "main", 3)
    async with contextlib.aclosing(through.tail("main")) as tail:
        assert [await anext(tail) for _ in range(3)] == written
        s3_proxy.refusing = True
        s3_proxy.cut()
        with pytest.raises(TransientTransportError):
            await asyncio.wait_for(anext(tail), LIMIT)
    s3_proxy.refusing = False
    async with through.topic.open() as direct:
        written += await fill(direct, "main", 2, start=3)
    assert await collected(through, "main", 2, 2) == written[3:]


async def test_latency_costs_time_and_nothing_else(through, s3_proxy):
    s3_proxy.latency = 0.03
    async with through.topic.open() as direct:
        task = asyncio.create_task(collected(through, "main", -1, 5))
        assert await fill(direct, "main", 5) == await task


async def test_a_server_that_was_killed_loses_nothing_that_it_acknowledged(seaweed, s3_topics):
    topic = s3_topics()
    retry = Retry(pause=0.05, longest=0.5, limit=LIMIT)
    acknowledged = []

    async def write(writer):
        for position in range(40):
            record = b"%d" % position
            await retry.call(
                "appending",
                functools.partial(writer.append, "main", position, record),
                on=(TransientTransportError, AppendUnknownError),
            )
            acknowledged.append((position, record))

    async with topic.open(timeout=5) as writer:
        task = asyncio.create_task(write(writer))
        await until(lambda: len(acknowledged) > 10)
        seaweed.kill()
        assert len(acknowledged) < 40
        await asyncio.to_thread(seaweed.start)
        await asyncio.wait_for(task, LIMIT)
        assert await writer.read("main") == acknowledged
    async with topic.open() as reader:
        assert await collected(reader, "main", -1, 40) == acknowledged
