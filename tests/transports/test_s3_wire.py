"""`s3://` on the wire: what is asked, how often, and how large blobs go in parts."""

import asyncio
import contextlib
import random

import pytest
from aiohttp import web

from deltabus.bus.errors import (
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    TransportError,
)
from deltabus.transports import open_transport, s3_store
from deltabus.transports.s3_client import S3Client

from .conformance import LIMIT, fill, until

# What goes over the wire


async def test_waiting_takes_one_cheap_request_a_look_and_an_append_three(seaweed, s3_topics, s3_proxy):
    topic = s3_topics()
    endpoint = f"http://127.0.0.1:{s3_proxy.port}"
    async with seaweed.open(topic.bucket, topic.prefix, endpoint=endpoint, poll=0.02) as transport:
        await transport.append("main", 0, b"0")
        tail = transport.tail("main")
        await anext(tail)
        task = asyncio.create_task(anext(tail))
        await until(lambda: s3_proxy.count(b"GET /") > 3)
        s3_proxy.requests.clear()
        looks = 40
        await until(lambda: len(s3_proxy.requests) >= looks)
        asked = {block.split(b" HTTP/1.1")[0].rpartition(b"/")[2] for block in s3_proxy.requests}
        # The next record is asked for; now and then whether the last one is still there.
        assert asked == {b"1".rjust(20, b"0"), b"0" * 20}
        assert s3_proxy.count(b"GET /") >= 0.9 * looks
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        s3_proxy.requests.clear()
        await transport.append("main", 1, b"1")
        assert (s3_proxy.count(b"HEAD /"), s3_proxy.count(b"PUT /"), len(s3_proxy.requests)) == (2, 1, 3)


async def test_a_reader_that_slept_through_a_retention_goes_on(s3_topics):
    topic = s3_topics()
    async with topic.open(poll=0.01) as transport:
        written = await fill(transport, "main", 3)
        async with contextlib.aclosing(transport.tail("main")) as tail:
            for _ in range(3):
                await anext(tail)
            task = asyncio.create_task(anext(tail))
            async with topic.seaweed.client() as client:
                for position, data in (*((p, b"%d" % p) for p in range(5, 8)),):
                    key = f"{topic.prefix}/logs/main/{position:020}"
                    await client.put_object(Bucket=topic.bucket, Key=key, Body=data)
            await topic.remove_records("main", len(written))
            assert await asyncio.wait_for(task, LIMIT) == (5, b"5")


async def test_requests_carry_nothing_that_only_amazon_knows(through, s3_proxy):
    await through.put("key", b"x" * 100_000)
    await through.append("main", 0, b"x")
    await through.delete(["key"])
    await through.logs()
    sent = b"".join(s3_proxy.requests).lower()
    for word in (b"x-amz-checksum", b"x-amz-sdk-checksum", b"aws-chunked", b"100-continue", b"x-amz-trailer"):
        assert word not in sent
    lists = [block for block in s3_proxy.requests if b"delimiter" in block]
    assert lists
    assert all(b"list-type=2" in block and b"delimiter=%2F&" in block for block in lists)


async def test_records_of_others_that_are_too_long_are_refused_unread(seaweed, s3_topics):
    topic = s3_topics()
    async with seaweed.client() as client, topic.open() as transport:
        await client.put_object(Bucket=topic.bucket, Key=f"{topic.prefix}/logs/main/{0:020}", Body=b"x" * (1 << 20 | 1))
        with pytest.raises(TransportError, match="over 1048576 bytes"):
            await transport.read("main")


async def test_a_page_that_is_cut_short_is_not_the_end_of_a_log():
    """Amazon says that fewer keys than asked for, even none, may come, with a token for the rest."""
    stored = {f"run/logs/main/{position:020}": b"%d" % position for position in range(200, 203)}
    pages = 3

    async def serve(request):
        if "list-type" not in request.query:
            data = stored.get(request.path.removeprefix("/bucket/"))
            return web.Response(status=404) if data is None else web.Response(body=data)
        page = int(request.query.get("continuation-token", "0"))
        key = list(stored)[page - 1] if page else None  # the first page is empty
        entry = "" if key is None else f"<Contents><Key>{key}</Key><Size>3</Size></Contents>"
        more = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if page < pages else ""
        return web.Response(
            text=f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{entry}{more}</ListBucketResult>"
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        url = f"s3://bucket/run?endpoint=http://127.0.0.1:{port}&access_key=a&secret_key=b"
        async with open_transport(url) as transport:
            assert await transport.read("main") == [(position, b"%d" % position) for position in range(200, 203)]
            with pytest.raises(PositionTakenError):  # no second history in front of it
                await transport.append("main", 0, b"x")
            names = await transport._store.find_names("logs/main", "", 2)
            assert names == [f"{position:020}" for position in range(200, 202)]
    finally:
        await runner.cleanup()


# Large blobs


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(s3_store, "_PART", 5 << 20)
    monkeypatch.setattr(s3_store, "_WHOLE", 6 << 20)


async def uploads_of(seaweed, topic):
    async with seaweed.client() as client:
        answer = await client.list_multipart_uploads(Bucket=topic.bucket)
    return [upload for upload in answer.get("Uploads", []) if upload["Key"].startswith(f"{topic.prefix}/")]


async def test_large_blobs_go_in_parts_both_ways(through, s3_proxy, small_parts, seaweed):
    data = random.Random(1).randbytes(23 << 20)
    await through.put("large", data)
    assert s3_proxy.count(b"POST /") == 2
    assert await through.get("large") == data
    for start, stop in ((0, 7 << 20), (1, len(data) + 9), (6 << 20, None), (22 << 20, 40 << 20)):
        assert await through.get("large", start, stop) == data[start:stop]
    s3_proxy.requests.clear()
    await through.put("large", data)
    assert s3_proxy.count(b"GET /") == s3_proxy.count(b"PUT /") == 0
    for other in (data[:-1], data[:-1] + b"\0", data + b"\0"):
        with pytest.raises(KeyExistsError):
            await through.put("large", other)
    assert await uploads_of(seaweed, through.topic) == []


async def test_an_upload_in_parts_that_is_given_up_leaves_nothing(through, s3_proxy, small_parts, seaweed):
    data = random.Random(2).randbytes(23 << 20)
    task = asyncio.create_task(through.put("large", data))
    await until(lambda: any(b"partNumber=" in block for block in s3_proxy.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await uploads_of(seaweed, through.topic) == []
    with pytest.raises(KeyNotFoundError):
        await through.get("large")
    await through.put("large", data)
    assert await through.get("large") == data


async def test_a_part_whose_answer_was_lost_is_sent_again(through, s3_proxy, small_parts):
    data = random.Random(3).randbytes(12 << 20)
    s3_proxy.drop(b"partNumber=2", answer=b"HTTP/1.1")
    await through.put("large", data)
    assert s3_proxy.dropped == 1
    assert await through.get("large") == data


@pytest.fixture
def completed_in_turn(monkeypatch):
    """Lets no two uploads be completed at once: SeaweedFS looks for the name, and gives it, in two steps."""
    turn, call = asyncio.Lock(), S3Client.call

    async def in_turn(client, operation, *arguments, **options):
        async with turn if operation == "complete_multipart_upload" else contextlib.nullcontext():
            return await call(client, operation, *arguments, **options)

    monkeypatch.setattr(S3Client, "call", in_turn)


async def test_of_two_uploads_in_parts_one_wins(s3_topics, small_parts, completed_in_turn):
    topic = s3_topics()
    async with topic.open() as first, topic.open() as second:
        data = {transport: random.Random(n).randbytes(12 << 20) for n, transport in enumerate((first, second))}
        outcomes = await asyncio.gather(*(t.put("large", d) for t, d in data.items()), return_exceptions=True)
        (lost,) = [outcome for outcome in outcomes if outcome is not None]
        assert isinstance(lost, KeyExistsError)
        winner = (first, second)[outcomes.index(None)]
        assert await second.get("large") == data[winner]
