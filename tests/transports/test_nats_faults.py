"""`nats://` when things go wrong: servers that die or stop, lines that break, lost answers, racing processes."""

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from deltabus.bus.errors import (
    AppendUnknownError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
)
from deltabus.bus.retry import Retry
from deltabus.transports import open_transport
from deltabus.transports.nats import jetstream
from deltabus.transports.nats.jetstream import LostPlaceError
from deltabus.transports.nats.session import Session

from .conformance import LIMIT, collected, fill
from .nats_server import NatsCluster, NatsServer, told_by_libraries
from .nats_topic import CHUNK, NatsTopic
from .proxy import Proxy
from .topics import within

retry = Retry(limit=2 * LIMIT, pause=0.02, longest=0.2)


@pytest.fixture(autouse=True)
def quiet(caplog):
    yield
    assert told_by_libraries(caplog) == []


@pytest.fixture
def server(tmp_path):
    with NatsServer(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def proxied(server, **options):
    """A proxy in front of a server, and a transport through it."""
    async with (
        Proxy(server.port) as proxy,
        open_transport(f"nats://127.0.0.1:{proxy.port}/run", **{"timeout": 2, **options}) as transport,
    ):
        yield proxy, transport


async def patiently(work, *arguments):
    """Call as the core does: again after a fault that may pass."""
    return await retry.call("a test", lambda: work(*arguments), on=(TransientTransportError, AppendUnknownError))


async def follow(transport, log, count):
    """Read `count` records from a tail as the core does: again from the last one after a fault."""
    found = []

    async def listen():
        async with contextlib.aclosing(transport.tail(log, len(found) - 1)) as tail:
            while len(found) < count:
                found.append(tuple(await anext(tail)))

    async with asyncio.timeout(60):
        while len(found) < count:
            with contextlib.suppress(TransientTransportError):
                await listen()
            await asyncio.sleep(0)
    return found


# Servers that die


async def publish(transport, count, size):
    """Store and append as a trainer does; return what was acknowledged."""
    acknowledged = []
    for position in range(count):
        data = hashlib.shake_128(b"%d" % position).digest(size)
        await patiently(transport.put, f"blobs/{position}", data)
        record = b"%d %s" % (position, hashlib.sha256(data).hexdigest().encode())
        await patiently(transport.append, "main", position, record)
        acknowledged.append((position, record))
    return acknowledged


async def test_a_server_is_killed_and_started_again_under_load(server):
    url = f"nats://{server.host}/run?timeout=3"
    async with open_transport(url) as writer, open_transport(url) as early, open_transport(url) as late:
        writing = asyncio.create_task(publish(writer, 200, 60_000))
        reading = asyncio.create_task(follow(early, "main", 200))
        for mark in (30, 90, 150):
            await within(LIMIT, lambda mark=mark: _reached(early, mark))
            await asyncio.to_thread(server.kill)
            if mark == 90:
                with pytest.raises(TransientTransportError, match=r"no server can be reached"):
                    await late.read("main")
            await asyncio.to_thread(server.start)
        acknowledged = await asyncio.wait_for(writing, 60)
        assert len(acknowledged) == 200
        assert await reading == acknowledged
        assert await follow(late, "main", 200) == acknowledged
        assert await late.read("main") == acknowledged
        for position, record in acknowledged[::20]:
            data = await late.get(f"blobs/{position}")
            assert record == b"%d %s" % (position, hashlib.sha256(data).hexdigest().encode())
        assert set((await late._jetstream.subjects(late._streams.blobs, "deltabus.run.blob.*.head")).values()) == {1}


async def _reached(transport, position):
    with contextlib.suppress(TransientTransportError):
        return await transport.read("main", position - 1, 1)
    return None


async def test_a_large_blob_goes_on_where_the_server_died(server):
    data = os.urandom(60 * CHUNK)
    async with open_transport(f"nats://{server.host}/run", timeout=10) as transport:
        await transport.put("first", b"x")
        task = asyncio.create_task(transport.put("large", data))
        stats = transport._connection._session.client.stats
        await within(LIMIT, lambda: _true(stats["out_bytes"] > 10 * CHUNK))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(task, LIMIT)
        assert await transport.get("large") == data


async def _true(value):
    return value


async def test_a_server_that_stops_is_a_fault_that_passes(server):
    async with open_transport(f"nats://{server.host}/run", timeout=0.5) as transport:
        await fill(transport, "main", 1)
        await transport.put("key", b"x")
        with server.stopped():
            for call, kind in [
                (lambda: transport.read("main"), TransientTransportError),
                (lambda: transport.get("key"), TransientTransportError),
                (lambda: transport.put("other", b"x"), TransientTransportError),
                (lambda: transport.append("main", 1, b"1"), (TransientTransportError, AppendUnknownError)),
                (lambda: transport.logs(), TransientTransportError),
                (lambda: anext(transport.tail("main", 0)), TransientTransportError),
            ]:
                begun = time.monotonic()
                with pytest.raises(kind, match=r"127\.0\.0\.1"):
                    await call()
                assert time.monotonic() - begun < 5
        await patiently(transport.append, "main", 1, b"1")
        assert await patiently(transport.read, "main") == [(0, b"0"), (1, b"1")]


async def test_a_server_that_stops_while_much_is_under_way(server):
    """The line is full, so that nothing more can be written to it, and closing it must not wait either."""
    transport = open_transport(f"nats://{server.host}/run", timeout=0.5)
    await transport.put("first", b"x")
    with server.stopped():
        with pytest.raises(TransientTransportError):
            await asyncio.wait_for(transport.put("large", bytes(100 * CHUNK)), 15)
        await asyncio.wait_for(transport.close(), 10)


async def test_nobody_there_is_told_at_once():
    begun = time.monotonic()
    async with open_transport("nats://127.0.0.1:1/run") as transport:
        with pytest.raises(
            TransientTransportError, match=r"nats://127.0.0.1:1/run.*no server can be reached.*host and port"
        ):
            await transport.read("main")
    async with open_transport("nats://no-such-host.invalid/run") as transport:
        with pytest.raises(TransientTransportError, match="no-such-host"):
            await transport.put("key", b"x")
    assert time.monotonic() - begun < 5


async def test_another_server_is_used(server):
    """The first one is down, and the second is named by an option."""
    url = f"nats://127.0.0.1:1/run?servers=127.0.0.1:2,{server.host}"
    async with open_transport(url) as transport:
        await transport.put("key", b"x")
        assert await transport.get("key") == b"x"


async def test_something_else_listens():
    async def greet(_reader, writer):
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with other, open_transport(f"nats://127.0.0.1:{other.sockets[0].getsockname()[1]}/run") as transport:
        with pytest.raises(TransientTransportError, match="INFO"):
            await transport.read("main")


async def test_a_server_that_is_too_old(server):
    """The greeting of a real server, with another version in it."""

    async def serve(reader, writer):
        there, out = await asyncio.open_connection("127.0.0.1", server.port)
        greeting = json.loads((await there.readline())[5:]) | {"version": "2.9.25"}
        writer.write(b"INFO " + json.dumps(greeting).encode() + b"\r\n")
        tasks = [asyncio.create_task(_pump(reader, out)), asyncio.create_task(_pump(there, writer))]
        await asyncio.wait(tasks)

    old = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with old, open_transport(f"nats://127.0.0.1:{old.sockets[0].getsockname()[1]}/run") as transport:
        with pytest.raises(TransportError, match=r"2\.9\.25.*2\.10 or later is needed") as caught:
            await transport.read("main")
        assert not isinstance(caught.value, TransientTransportError)


async def _pump(reader, writer):
    with contextlib.suppress(OSError):
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
    writer.close()


# A list that cannot be read to its end


async def change_before(monkeypatch, request, change):
    """Have a change made before the `request`-th request of a list for its next pages of two."""
    monkeypatch.setattr(jetstream, "_HEADS", 2)
    send, count = Session.send, 0

    async def send_later(self, subject, payload, **options):
        nonlocal count
        if "CONSUMER.MSG.NEXT" in subject:
            count += 1
            if count == request:
                await change(*subject.split(".")[-2:])
        await send(self, subject, payload, **options)

    monkeypatch.setattr(Session, "send", send_later)


async def heads(transport):
    return await transport._jetstream.heads(transport._streams.blobs, transport._streams.blob_subject("*"))


@pytest.mark.parametrize("request_number", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
async def test_a_list_is_whole_or_a_fault(server, monkeypatch, request_number, again):
    """The consumer is lost on the way; it may also be made anew, as by a server that forgot how far it was."""
    async with open_transport(f"nats://{server.host}/run") as transport:
        for number in range(5):
            await transport.put(f"leases/{number}", b"x")
        api = transport._jetstream

        async def lose(stream, name):
            config = (await api.call(f"CONSUMER.INFO.{stream}.{name}"))["config"]
            await api.call(f"CONSUMER.DELETE.{stream}.{name}")
            if again:
                await api.call(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})

        with monkeypatch.context() as patches:
            await change_before(patches, request_number, lose)
            if again and request_number == 1:
                assert len(await heads(transport)) == 5
            else:
                with pytest.raises(LostPlaceError, match="lost its place"):
                    await heads(transport)
        with monkeypatch.context() as patches:
            await change_before(patches, request_number, lose)
            assert [blob.key for blob in await transport.blobs("leases")] == [f"leases/{n}" for n in range(5)]


@pytest.mark.parametrize(("request_number", "left"), [(2, 2), (2, 3), (3, 4)])
async def test_what_is_removed_while_it_is_listed_is_no_fault(server, monkeypatch, request_number, left):
    async with open_transport(f"nats://{server.host}/run") as transport:
        keys = [f"leases/{number}" for number in range(6)]
        for key in keys:
            await transport.put(key, b"x")

        async def remove(stream, name):
            await transport.delete(keys[left:])

        with monkeypatch.context() as patches:
            await change_before(patches, request_number, remove)
            assert [blob.key for blob in await transport.blobs("leases")] == keys[:left]


async def test_a_consumer_that_began_anew_and_finds_nothing_is_a_fault(server, monkeypatch):
    async with open_transport(f"nats://{server.host}/run") as transport:
        keys = [f"leases/{number}" for number in range(4)]
        for key in keys:
            await transport.put(key, b"x")
        api = transport._jetstream

        async def lose(stream, name):
            config = (await api.call(f"CONSUMER.INFO.{stream}.{name}"))["config"]
            await transport.delete(keys)
            await api.call(f"CONSUMER.DELETE.{stream}.{name}")
            await api.call(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})

        with monkeypatch.context() as patches:
            await change_before(patches, 2, lose)
            with pytest.raises(LostPlaceError, match="lost its place"):
                await heads(transport)


# Lines that break, and answers that are lost


async def test_a_tail_survives_that_its_line_is_cut(server):
    async with proxied(server) as (proxy, reader), open_transport(f"nats://{server.host}/run") as writer:
        await fill(writer, "main", 1)
        reading = asyncio.create_task(follow(reader, "main", 60))
        written = [(0, b"0")]
        for start in range(1, 60):
            written += await fill(writer, "main", 1, start=start)
            if start % 10 == 0:
                proxy.cut()
        assert await reading == written


async def test_an_append_whose_answer_was_lost(server):
    async with proxied(server) as (proxy, transport):
        await fill(transport, "main", 1)
        for position in range(1, 5):
            proxy.drop(b"Deltabus-Position", answer=b'"seq"')
            with pytest.raises(AppendUnknownError, match=r"position.*who won"):
                await transport.append("main", position, b"%d" % position)
            await patiently(transport.append, "main", position, b"%d" % position)
            with pytest.raises(PositionTakenError):
                await transport.append("main", position, b"other")
        assert proxy.dropped == 4
        assert await transport.read("main") == [(position, b"%d" % position) for position in range(5)]


async def test_an_append_that_was_never_sent_is_not_unknown(server):
    async with proxied(server) as (proxy, transport):
        await fill(transport, "main", 1)
        proxy.refusing = True
        proxy.cut()
        await within(LIMIT, lambda: _true(not transport._connection.alive))
        with pytest.raises(TransientTransportError):
            await transport.append("main", 1, b"1")
        proxy.refusing = False
        assert await transport.read("main", 0) == []
        transport._log._ends.clear()
        proxy.drop(b"STREAM.MSG.GET", answer=b"message")  # it looks where the log ends, and has sent nothing yet
        with pytest.raises(TransientTransportError):
            await transport.append("main", 1, b"1")
        assert proxy.dropped == 1
        assert await transport.read("main", 0) == []


@pytest.mark.parametrize("size", [10, 3 * CHUNK])
async def test_a_put_whose_answer_was_lost(server, size):
    data = os.urandom(size)
    async with proxied(server) as (proxy, transport):
        await transport.put("first", b"x")
        proxy.drop(b"HPUB deltabus.run.blob.key.head", answer=b'"seq"')
        await transport.put("key", data)
        assert await transport.get("key") == data
        assert proxy.dropped == 1
        subjects = await transport._jetstream.subjects(transport._streams.blobs, "deltabus.run.blob.key.*")
        assert subjects.pop("deltabus.run.blob.key.head") == 1
        assert list(subjects.values()) == ([] if size < CHUNK else [3])


async def test_parts_whose_answers_were_lost_are_sent_again(server):
    data = os.urandom(20 * CHUNK)
    async with proxied(server) as (proxy, transport):
        await transport.put("first", b"x")
        proxy.drop(b"PUB deltabus.run.blob.key.", answer=b'"seq":7')
        await transport.put("key", data)
        assert proxy.dropped == 1
        assert await transport.get("key") == data


async def test_a_line_that_falls_silent(server):
    """Nothing comes, and nothing says that it broke."""
    async with proxied(server, timeout=0.5) as (proxy, transport):
        written = await fill(transport, "main", 2)
        proxy.silent = True
        for call in (lambda: transport.read("main"), lambda: transport.put("key", b"x")):
            begun = time.monotonic()
            with pytest.raises(TransientTransportError):
                await call()
            assert time.monotonic() - begun < 5
        proxy.silent = False
        assert await patiently(transport.read, "main") == written


async def test_latency_costs_time_and_nothing_else(server):
    data = os.urandom(4 * CHUNK)
    async with proxied(server, timeout=20) as (proxy, transport):
        proxy.latency = 0.02
        await transport.put("key", data)
        written = await fill(transport, "main", 5)
        assert await transport.get("key") == data
        assert await collected(transport, "main", -1, 5) == written


async def test_a_client_that_the_server_closes_is_replaced(server):
    """A message that is too large with its headers ends the connection for good, as far as the library goes."""
    async with open_transport(f"nats://{server.host}/run") as transport:
        written = await fill(transport, "main", 2)
        reading = asyncio.create_task(follow(transport, "main", 4))
        client = transport._connection._session.client
        await client.publish("elsewhere", bytes(client.max_payload), headers={"a": "b"})
        await within(LIMIT, lambda: _true(client.is_closed))
        for start in (2, 3):
            await patiently(transport.append, "main", start, b"%d" % start)
        assert await reading == [*written, (2, b"2"), (3, b"3")]
        assert transport._connection._session.client is not client


# Racing processes

PROCESSES = 4
COUNT = 40


async def test_of_many_processes_one_wins_each_place(server):
    url = f"nats://{server.host}/run"
    names = [f"writer-{number}" for number in range(PROCESSES)]

    async def start(name):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            Path(__file__).with_name("racing_writer.py"),
            url,
            name,
            str(COUNT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert await process.stdout.readline() == b"ready\n"
        return process

    async with asyncio.timeout(90), open_transport(url) as transport:
        reader = asyncio.create_task(collected(transport, "main", -1, COUNT))
        processes = await asyncio.gather(*map(start, names))
        for process in processes:
            process.stdin.write(b"go\n")
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        assert [process.returncode for process in processes] == [0] * PROCESSES
        won = {name: json.loads(output) for name, (output, _) in zip(names, outputs, strict=True)}
        seen = await reader
        assert seen == await transport.read("main")
        for place in ("positions", "keys"):
            assert sorted(number for wins in won.values() for number in wins[place]) == list(range(COUNT))
        for name, wins in won.items():
            for number in wins["positions"]:
                assert seen[number] == (number, f"{name}:{number}".encode())
            for number in wins["keys"]:
                assert await transport.get(f"blobs/{number}") == name.encode() * 10_000


async def test_large_blobs_race(server):
    """All but one remove the parts that they stored."""
    topic = NatsTopic(server)
    data = [bytes([number]) * (5 * CHUNK) for number in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        transports = [await stack.enter_async_context(topic.open()) for _ in data]
        outcomes = await asyncio.gather(
            *(transport.put("key", each) for transport, each in zip(transports, data, strict=True)),
            return_exceptions=True,
        )
        winners = [number for number, outcome in enumerate(outcomes) if outcome is None]
        assert len(winners) == 1
        assert await transports[0].get("key") == data[winners[0]]
    assert sorted((await topic.subjects("blobs")).values()) == [1, 5]


# A cluster


async def test_a_cluster_that_loses_its_leader(tmp_path):
    """With three copies nothing that was acknowledged is lost, and writing goes on when there is a new leader."""
    with NatsCluster(tmp_path) as cluster:
        first, *others = cluster.hosts
        url = f"nats://{first}/run?replicas=3&timeout=1&servers={','.join(others)}"
        async with open_transport(url) as writer, open_transport(url) as early:
            await patiently(writer.append, "second", 0, b"x")
            info = await patiently(writer._jetstream.info, writer._streams.records)
            assert info["config"]["num_replicas"] == 3
            writing = asyncio.create_task(publish(writer, 40, 20_000))
            reading = asyncio.create_task(follow(early, "main", 40))
            await within(LIMIT, lambda: _reached(early, 15))
            info = await patiently(writer._jetstream.info, writer._streams.records)
            leader = next(s for s in cluster.servers if s.name == info["cluster"]["leader"])
            leader.kill()
            acknowledged = await asyncio.wait_for(writing, 45)
            assert await reading == acknowledged
            async with open_transport(url) as late:  # also where its first server is down
                assert await patiently(late.read, "main") == acknowledged
                for position, record in acknowledged[::10]:
                    data = await patiently(late.get, f"blobs/{position}")
                    assert record == b"%d %s" % (position, hashlib.sha256(data).hexdigest().encode())
                assert await patiently(late.logs) == ["main", "second"]
                # A second one, and nobody may write: that is told, and passes.
                second = next(s for s in cluster.servers if s is not leader)
                second.kill()
                begun = time.monotonic()
                with pytest.raises((TransientTransportError, AppendUnknownError)):
                    await late.append("main", 40, b"40")
                assert time.monotonic() - begun < 10
                leader.start()
                await patiently(late.append, "main", 40, b"40")
                assert await patiently(late.read, "main", 39) == [(40, b"40")]
