"""`hf://buckets/...` when things go wrong: lost answers, dead servers, damage, races."""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest

from deltabus.bus.errors import (
    AppendUnknownError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
)
from deltabus.transports import open_transport

from .conformance import LIMIT, collected, fill, records_of, until
from .hub_server import HubServer
from .hub_topic import BUCKET, TOKEN, HubTopic

pytestmark = pytest.mark.usefixtures("hub_clients")


@pytest.fixture
def make_topic(hub_topics):
    return lambda: hub_topics(settle=0.05)


def adds(hub):
    return [line for line in hub.requests() if line.endswith("/batch")]


# Lost answers


@pytest.mark.parametrize("lost", [{"drop": "after"}, {"status": 502}, {"drop": "before"}])
async def test_a_blob_whose_answer_was_lost_may_be_put_again(hub, topic, lost):
    async with topic.open() as transport:
        hub.fault("/batch$", times=1, **lost)
        hub.requests()
        with pytest.raises(TransientTransportError):
            await transport.put("key", b"x" * 5000)
        assert len(adds(hub)) == 1  # nothing sends it again behind our back
        await transport.put("key", b"x" * 5000)
        assert len(adds(hub)) == (0 if lost == {"drop": "after"} else 1)
        assert await transport.get("key") == b"x" * 5000


async def test_a_record_whose_answer_was_lost_is_found(hub, topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        hub.fault("/batch$", drop="after", times=1)
        hub.requests()
        await transport.append("main", 1, b"found")
        assert len(adds(hub)) == 1
        assert await transport.read("main", 0) == records_of(b"found", start=1)


@pytest.mark.parametrize("lost", [{"status": 502}, {"drop": "before"}])
async def test_a_record_that_is_not_found_may_be_there_or_not(hub, topic, lost):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        hub.fault("/batch$", times=1, **lost)
        with pytest.raises(AppendUnknownError, match="read the position"):
            await transport.append("main", 1, b"lost")
        assert await transport.read("main", 0) == []
        await transport.append("main", 1, b"lost")
        assert await transport.read("main", 0) == records_of(b"lost", start=1)


async def test_a_record_that_arrives_late_displaces_nobody(hub, topic):
    async with topic.open(timeout=1.5) as late, topic.open() as other:
        await fill(other, "main", 1)
        hub.fault("/batch$", delay=4, times=1)
        with pytest.raises(AppendUnknownError):
            await late.append("main", 1, b"late")
        await other.append("main", 1, b"first")
        assert await other.read("main") == records_of(b"0", b"first")
        await until(lambda: len(topic.files("logs/main/00000000000000000001")) == 2)
        for transport in (late, other):
            assert await transport.read("main") == records_of(b"0", b"first")
            with pytest.raises(PositionTakenError):
                await transport.append("main", 1, b"late")
        await other.append("main", 2, b"next")
        async with topic.open() as fresh:
            assert await fresh.read("main") == records_of(b"0", b"first", b"next")


async def test_the_loser_takes_its_candidate_back(topic):
    async with topic.open() as first, topic.open() as second:
        outcomes = await asyncio.gather(
            first.append("main", 0, b"a"), second.append("main", 0, b"b"), return_exceptions=True
        )
        assert {type(outcome) for outcome in outcomes} == {type(None), PositionTakenError}
        assert len(topic.files("logs/main/")) == 1


async def test_who_won_may_stay_unknown(hub, topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        hub.fault("/tree/", status=503)
        with pytest.raises(AppendUnknownError, match="who won"):
            await transport.append("main", 1, b"x")
        hub.heal()
        await transport.append("main", 1, b"x")
        assert len(await transport.read("main")) == 2


async def test_a_sleeper_behind_the_beginning_is_refused_and_not_seen(hub, topic):
    async with topic.open() as sleeper, topic.open() as other, topic.open() as reader:
        await fill(sleeper, "main", 3)
        hub.requests()
        hub.fault("/batch$", delay=2, times=1)
        sleeping = asyncio.create_task(sleeper.append("main", 3, b"zombie"))
        await until(lambda: any(line.endswith("/batch") for line in hub.requests()))
        await other.append("main", 3, b"3")
        await fill(other, "main", 3, start=4)
        await topic.remove_records("main", 4)
        with pytest.raises(PositionTakenError):
            await sleeping
        assert [position for position, _ in await reader.read("main")] == [4, 5, 6]


# Servers that die, hang and are busy


async def test_what_was_acknowledged_outlives_the_server(tmp_path):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET) as hub:
        topic = HubTopic(hub, "killed", settle=0.05)
        stored, durable = [], []

        async def publish(transport):
            position = 0
            while position < 25:
                data = b"%d" % position * 300
                with contextlib.suppress(TransientTransportError, AppendUnknownError):
                    await transport.put(f"blobs/{position}", data)
                    stored.append(position)
                    await transport.append("main", position, data)
                    durable.append((position, data))
                    position += 1

        async with asyncio.timeout(3 * LIMIT), topic.open() as transport, topic.open() as other:
            reader = asyncio.create_task(collected(other, "main", -1, 8))
            writer = asyncio.create_task(publish(transport))
            assert await reader == [(position, b"%d" % position * 300) for position in range(8)]
            for goal in (10, 18):
                await until(lambda goal=goal: len(durable) >= goal)
                hub.kill()
                await asyncio.to_thread(hub.start)
            await writer
            assert await other.read("main") == durable
            for position in stored:
                assert await other.get(f"blobs/{position}") == b"%d" % position * 300


@pytest.mark.parametrize("path", ["/tree/", "/batch$", "/v1/xorbs"])
async def test_a_server_that_hangs_is_given_up(hub, topic, path):
    async with topic.open(timeout=0.5) as transport:
        await transport.put("warm", b"up")
        hub.fault(path, delay=20)
        began = time.monotonic()
        with pytest.raises(TransientTransportError, match="timeout"):
            await transport.put("key", os.urandom(3_000))
        assert time.monotonic() - began < 15


async def test_a_download_that_hangs_or_breaks_off_gives_nothing(hub, topic):
    data = os.urandom(3_000_000)
    async with topic.open(timeout=2) as transport:
        await transport.put("key", data)
        for fault in ({"delay": 20, "drop": "before"}, {"drop": "before"}, {"status": 503}):
            hub.fault("^/xorbs/", **fault)
            with pytest.raises(TransientTransportError):
                await transport.get("key")
            hub.heal()
        assert await transport.get("key") == data


async def test_a_busy_server_is_left_alone_as_long_as_it_asks(hub, topic):
    async with topic.open() as transport:
        hub.fault("/batch$", status=429, headers={"Retry-After": "1"}, times=1)
        began = time.monotonic()
        await transport.append("main", 0, b"x")
        assert time.monotonic() - began > 1
        hub.fault("/batch$", status=429, headers={"Retry-After": "3600"}, times=1)
        with pytest.raises(TransientTransportError, match="429"):
            await transport.append("main", 1, b"y")
        hub.fault("/tree/", status=503, headers={"Retry-After": "1"}, times=1)
        assert await transport.read("main") == records_of(b"x")


async def test_a_busy_server_that_asks_for_no_pause_is_not_stormed(hub, topic):
    async with topic.open(timeout=1) as transport:
        hub.fault("/tree/", status=429, headers={"Retry-After": "0"})
        hub.requests()
        with pytest.raises(TransientTransportError):
            await transport.read("main")
        assert 2 <= len([line for line in hub.requests() if "/tree/" in line]) <= 6


async def test_the_stores_tokens_may_be_forgotten(hub, topic, tmp_path):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET) as hub:
        topic = HubTopic(hub, "tokens", settle=0.05)
        data = os.urandom(2_000_000)
        async with topic.open() as transport:
            await transport.put("a", data)
            assert await transport.get("a") == data
            hub.kill()
            hub.start()
            await transport.put("b", data[::-1])
            assert await transport.get("a") == data


async def test_nobody_there(topic):
    async with open_transport(topic.url, **topic.options | {"endpoint": "http://127.0.0.1:9"}) as transport:
        with pytest.raises(TransientTransportError, match="no connection"):
            await transport.read("main")


# Damage


@pytest.mark.parametrize("size", [5_000, 3_000_000])
async def test_a_flipped_byte_in_the_store_is_noticed(tmp_path, size):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET) as hub:
        topic = HubTopic(hub, "damaged", settle=0.05)
        async with topic.open() as transport:
            await transport.put("key", os.urandom(size))
            await transport.append("main", 0, os.urandom(3000))
            for xorb in (tmp_path / "xorbs").iterdir():
                data = bytearray(xorb.read_bytes())
                data[1000] ^= 1
                xorb.write_bytes(data)
            for start in (0, 100):
                if size < 8 << 20:  # a part of a larger one is checked by who reads all parts
                    with pytest.raises(TransportError, match="hash"):
                        await transport.get("key", start)
            with pytest.raises(TransportError, match="other bytes"):
                await transport.read("main")


# Races

RACERS = 3
PLACES = 8


@pytest.mark.parametrize("delay", [0, 0.15])
async def test_of_many_processes_one_wins_each_place(hub, topic, delay):
    url = f"{topic.url}?{urlencode(topic.options | {'settle': 0.1})}"
    arguments = [Path(__file__).with_name("racing_writer.py"), url]
    pipe = asyncio.subprocess.PIPE

    async def start(name):
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, name, str(PLACES), stdin=pipe, stdout=pipe
        )
        assert await process.stdout.readline() == b"ready\n"
        return process

    async with asyncio.timeout(90), topic.open() as transport, topic.open() as other:
        readers = [asyncio.create_task(collected(each, "main", -1, PLACES)) for each in (transport, other)]
        processes = await asyncio.gather(*(start(f"writer-{number}") for number in range(RACERS)))
        if delay:
            for _ in range(PLACES):
                hub.fault("/batch$", delay=delay, times=1)
                hub.fault("/tree/", delay=delay, times=1)
        for process in processes:
            process.stdin.write(b"go\n")
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        assert [process.returncode for process in processes] == [0] * RACERS
        won = {f"writer-{number}": json.loads(output) for number, (output, _) in enumerate(outputs)}
        seen = await readers[0]
        assert seen == await readers[1] == await transport.read("main")
        for place in ("positions", "keys"):
            assert sorted(number for wins in won.values() for number in wins[place]) == list(range(PLACES))
        for name, wins in won.items():
            for number in wins["positions"]:
                assert seen[number] == (number, f"{name}:{number}".encode())
            for number in wins["keys"]:
                assert await transport.get(f"blobs/{number}") == name.encode() * 10_000
