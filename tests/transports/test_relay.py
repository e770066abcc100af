"""A relay before a service: one fetch for all, nothing damaged, nothing lost, and nobody who may not."""

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltabus.bus.errors import AccessDeniedError, KeyNotFoundError, TransientTransportError, UsageError
from deltabus.transports import open_transport
from deltabus.transports.http.access import read_access
from deltabus.transports.http.service import Service, ServiceSettings

from .conformance import LIMIT, collected, fill, waiting
from .proxy import Proxy
from .relay_server import RelayServer

TLS = Path(__file__).with_name("nats_tls")
TOKENS = """
[[tokens]]
name = "trainer"
token = "the-trainers-own-token"
scope = "write"
topics = ["team/*"]

[[tokens]]
name = "engine"
sha256 = "%s"
scope = "read"

[[tokens]]
name = "keeper"
token = "the-keepers-own-token"
scope = "admin"
"""
ENGINE, TRAINER, KEEPER = "the-engines-own-token", "the-trainers-own-token", "the-keepers-own-token"


def blob(seed, size):
    """Bytes, and a key that names them."""
    data = random.Random(seed).randbytes(size)
    return f"blobs/main/{seed}-delta-0-{hashlib.sha256(data).hexdigest()[:16]}", data


class Cutting(Proxy):
    """Cuts the first lines, each after so many bytes of answers."""

    cuts, after = 2, 8_000_000

    async def _pass_answers(self, line, reader, writer):
        passed = 0
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
            passed += len(block)
            if self.cuts and passed > self.after:
                self.cuts -= 1
                return


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("bus")


@pytest.fixture(scope="module")
def bus(place):
    """A bus by itself, whose readers are told by nobody but itself."""
    with RelayServer(place, f"{(place / 'topics').as_uri()}?watch=false&poll=30", "--heartbeat", "1") as server:
        yield server


@pytest.fixture(scope="module")
def relays(bus, tmp_path_factory):
    """Starts relays before it, with a cache of their own."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, upstream=None):
            place = tmp_path_factory.mktemp("relay")
            options = ("--cache-dir", str(place / "cache"), *arguments)
            return stack.enter_context(RelayServer(place, upstream or bus.url, *options))

        yield start


@pytest.fixture(scope="module")
def relay(relays):
    return relays()


async def test_of_many_who_ask_one_fetches(bus, relay):
    key, data = blob(1, 9_000_000)
    async with open_transport(f"{bus.url}/many") as there, contextlib.AsyncExitStack() as stack:
        await there.put(key, data)
        before = bus.figure("deltabus_sent_bytes_total")
        readers = [await stack.enter_async_context(open_transport(f"{relay.url}/many")) for _ in range(12)]
        assert set(await asyncio.gather(*(reader.get(key) for reader in readers))) == {data}
        assert await readers[0].get(key, 4_000_000, 5_000_001) == data[4_000_000:5_000_001]
        assert await readers[0].get(key, 8_999_990) == data[-10:]
        assert bus.figure("deltabus_sent_bytes_total") - before == len(data)
        assert relay.figure("deltabus_upstream_bytes_total") == len(data)


async def test_what_is_published_through_a_relay_is_not_fetched(bus, relay):
    key, data = blob(2, 3_000_000)
    async with open_transport(f"{relay.url}/through") as transport:
        before = bus.figure("deltabus_sent_bytes_total")
        await transport.put(key, data)
        assert await transport.get(key) == data
        assert bus.figure("deltabus_sent_bytes_total") == before
        await transport.delete([key])
        with pytest.raises(KeyNotFoundError):
            await transport.get(key)


async def test_a_blob_is_given_on_while_it_arrives(bus, relays):
    key, data = blob(3, 20_000_000)
    async with Proxy(bus.port) as proxy:
        relay = relays(upstream=f"http://127.0.0.1:{proxy.port}")
        async with open_transport(f"{bus.url}/slow") as there:
            await there.put(key, data)
        proxy.latency = 0.01
        async with open_transport(f"{relay.url}/slow") as transport, contextlib.AsyncExitStack() as stack:
            answer = await stack.enter_async_context(transport._session.request("GET", f"blobs/{key}", what="read"))
            found = bytearray()
            async for piece in answer.pieces():
                if not found:
                    seen = await asyncio.to_thread(relay.figure, "deltabus_upstream_bytes_total")
                    assert 0 < seen < len(data)
                    proxy.latency = 0
                found += piece
            assert found == data


async def test_a_download_goes_on_behind_a_cut(bus):
    key, data = blob(4, 30_000_000)
    async with Cutting(bus.port) as proxy, open_transport(f"http://127.0.0.1:{proxy.port}/cuts") as transport:
        await transport.put(key, data)
        before = bus.figure("deltabus_sent_bytes_total")
        assert await asyncio.wait_for(transport.get(key), LIMIT) == data
        assert proxy.cuts == 0
        assert bus.figure("deltabus_sent_bytes_total") - before < 2 * len(data)


async def test_what_is_damaged_is_neither_believed_nor_kept(bus, relays, place):
    relay = relays()
    key, data = blob(5, 1_000_000)
    bad, other = blob(6, 5_000_000)
    async with open_transport(f"{relay.url}/damaged") as transport:
        await transport.put(key, data)
        await transport.put(bad, other)
    cache = relay.directory / "cache"
    relay.stop()
    for path in cache.glob("*/*"):
        path.write_bytes(b"x" + path.read_bytes()[1:])
    (place / "topics" / "damaged" / bad).write_bytes(b"y" + other[1:])
    relay.start()
    async with open_transport(f"{relay.url}/damaged") as transport:
        assert await transport.get(key) == data
        assert await transport.get(key) == data
        assert relay.figure("deltabus_upstream_bytes_total") == len(data)
        # The reader, who knows better, is given what is there, as without a relay.
        assert await transport.get(bad) == b"y" + other[1:]
        assert relay.figure("deltabus_cache_bytes") == len(data)


async def test_a_cache_keeps_its_limit_and_a_full_one_is_no_obstacle(relays, bus):
    relay = relays("--cache-size", "3500kB")
    async with open_transport(f"{relay.url}/full") as transport:
        blobs = [blob(10 + number, 1_000_000) for number in range(6)]
        for key, data in blobs:
            await transport.put(key, data)
            assert relay.figure("deltabus_cache_bytes") <= 3_500_000
        for key, data in reversed(blobs[3:]):
            assert await transport.get(key) == data
        assert relay.figure("deltabus_upstream_bytes_total") == 0
        assert await transport.get(blobs[0][0]) == blobs[0][1]
        assert relay.figure("deltabus_upstream_bytes_total") == 1_000_000
        large, data = blob(20, 12_000_000)
        await transport.put(large, data)
        assert await transport.get(large) == data
        assert await transport.get(large, 5_000_000, 11_000_000) == data[5_000_000:11_000_000]
        assert relay.figure("deltabus_cache_bytes") <= 3_500_000
        assert [path for path in files_below(relay.directory / "cache") if ".tmp" in path] == []


async def test_a_temporary_cache_goes_with_its_process_or_with_the_next(bus, tmp_path):
    key, data = blob(21, 100_000)

    def caches():
        return list(tmp_path.glob("deltabus-cache-*"))

    with RelayServer(tmp_path, bus.url) as relay:
        async with open_transport(f"{relay.url}/temporary") as transport:
            await transport.put(key, data)
        (left,) = caches()
        relay.kill()
        relay.start()
        assert len(caches()) == 1 and left not in caches()
        assert relay.stop() == 0
        assert caches() == []


async def test_followers_are_told_at_once_whatever_the_backend(bus, relay):
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(open_transport(f"{relay.url}/told"))
        readers = [await stack.enter_async_context(open_transport(f"{url}/told")) for url in (bus.url, relay.url) * 3]
        tasks = [asyncio.create_task(collected(reader, "main", -1, 8)) for reader in readers]
        await asyncio.to_thread(until_followers, relay, 3)
        begun = time.monotonic()
        written = await fill(writer, "main", 8)
        assert await asyncio.gather(*tasks) == [written] * 6
        assert time.monotonic() - begun < 10  # the backend is looked at every 30 s


def until_followers(server, count):
    deadline = time.monotonic() + LIMIT
    while server.figure("deltabus_followers") < count:
        assert time.monotonic() < deadline


async def test_a_follower_goes_on_when_its_service_was_killed(bus, relays):
    relay = relays()
    async with open_transport(f"{relay.url}/killed") as transport, open_transport(f"{bus.url}/killed") as there:
        task = asyncio.create_task(collected(transport, "main", -1, 6))
        written = await fill(transport, "main", 3)
        relay.kill()
        written += await fill(there, "main", 1, start=3)
        relay.start()
        written += await fill(there, "main", 2, start=4)
        assert await task == written


async def test_a_service_that_is_gone_is_an_error_after_a_limit(tmp_path):
    with RelayServer(tmp_path, (tmp_path / "topics").as_uri()) as server:
        transport = open_transport(f"{server.url}/gone", timeout=0.5)
        task = asyncio.create_task(anext(transport.tail("main")))
        await waiting(task)
    async with transport:
        with pytest.raises(TransientTransportError, match="is the service running"):
            await asyncio.wait_for(task, LIMIT)
        with pytest.raises(TransientTransportError, match=r"gone.*is the service running"):
            await transport.append("main", 0, b"x")


async def test_who_is_being_served_may_finish_when_it_is_told_to_stop(tmp_path):
    with RelayServer(tmp_path, (tmp_path / "topics").as_uri()) as server:
        key, data = blob(30, 3_000_000)
        async with open_transport(f"{server.url}/drained") as follower:
            task = asyncio.create_task(anext(follower.tail("main")))
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = f"PUT /drained/-/blobs/{key} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data[:1_500_000])
            await writer.drain()
            await asyncio.to_thread(until_followers, server, 1)
            ending = asyncio.create_task(asyncio.to_thread(server.stop))
            async with asyncio.timeout(LIMIT):
                while "stopping" not in server.log.read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            writer.write(data[1_500_000:])
            assert (await asyncio.wait_for(reader.readline(), LIMIT)).startswith(b"HTTP/1.1 204 ")
            writer.close()
            assert await ending == 0
            assert (tmp_path / "topics" / "drained" / key).read_bytes() == data
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_records_of_a_long_log_are_read_in_pages(bus):
    async with open_transport(f"{bus.url}/long") as transport:
        written = [(position, bytes([position]) * 300_000) for position in range(90)]
        for position, record in written:
            await transport.append("main", position, record)
        assert await transport.read("main") == written
        assert await transport.read("main", 10, 70) == written[11:81]
        assert await collected(transport, "main", 3, 86) == written[4:]


# Who may do what


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    place = tmp_path_factory.mktemp("guarded")
    tokens = place / "tokens.toml"
    tokens.write_text(TOKENS % hashlib.sha256(ENGINE.encode()).hexdigest())
    cache = ("--cache-dir", str(place / "cache"))
    arguments = ("--token-file", str(tokens), "--max-body", "1MB", "--log-format", "json", "--log-requests")
    tls = ("--certificate", str(TLS / "server.pem"), "--private-key", str(TLS / "server_key.pem"))
    with RelayServer(place, (place / "topics").as_uri(), *arguments, *cache, *tls) as server:
        yield server


async def test_a_token_allows_what_its_scope_says(guarded, monkeypatch, tmp_path):
    options = {"ca_file": str(TLS / "authority.pem")}

    def open_as(token, topic="team/run"):
        return open_transport(f"{guarded.url}/{topic}", token=token, **options)

    async with open_as(TRAINER) as trainer, open_as(ENGINE) as engine, open_as(KEEPER) as keeper:
        await fill(trainer, "main", 3)
        await trainer.put("leases/a/1", b"x")
        await trainer.put("blobs/a", b"x")
        await trainer.delete(["leases/a/1"])
        assert await engine.logs() == ["main"]
        assert len(await collected(engine, "main", -1, 3)) == 3
        for call in (
            lambda: engine.put("blobs/b", b"x"),
            lambda: engine.append("main", 3, b"x"),
            lambda: engine.delete(["leases/a/1"]),
            lambda: trainer.delete(["blobs/a"]),
            lambda: trainer.trim("main", 1),
        ):
            with pytest.raises(AccessDeniedError, match=r"does not allow.*administrator"):
                await call()
        await keeper.trim("main", 1)
        await keeper.delete(["blobs/a"])
    async with open_as(TRAINER, "other/run") as elsewhere:
        with pytest.raises(AccessDeniedError, match="does not allow"):
            await elsewhere.logs()
    for token in ("", "not-a-token-that-is-known"):
        async with open_as(token) as nobody:
            with pytest.raises(AccessDeniedError, match=r"token.*DELTABUS_TOKEN"):
                await nobody.logs()
    monkeypatch.setenv("DELTABUS_TOKEN", ENGINE)
    (tmp_path / "token").write_text(f"{KEEPER}\n")
    async with (
        open_as("") as engine,
        open_transport(f"{guarded.url}/team/run", token_file=str(tmp_path / "token"), **options) as keeper,
    ):
        assert await engine.logs() == ["main"]
        await keeper.trim("main", 2)
    async with open_transport(f"{guarded.url}/team/run", token=ENGINE) as stranger:
        with pytest.raises(AccessDeniedError, match=r"certificate.*ca_file"):
            await stranger.logs()
    log = guarded.log.read_text()
    assert {"trainer", "engine", "keeper", "nobody"} <= {json.loads(line).get("who") for line in log.splitlines()}
    for secret in (ENGINE, TRAINER, KEEPER):
        assert secret not in log


async def test_many_who_read_one_blob_over_tls(guarded):
    key, data = blob(31, 9_000_000)
    async with open_transport((guarded.directory / "topics" / "team" / "tls").as_uri()) as there:
        await there.put(key, data)
    options = {"ca_file": str(TLS / "authority.pem"), "token": ENGINE}
    async with open_transport(f"{guarded.url}/team/tls", **options) as transport:
        assert set(await asyncio.gather(*(transport.get(key) for _ in range(8)))) == {data}
        assert await transport.get(key, 4_000_000, 6_000_000) == data[4_000_000:6_000_000]


def test_a_body_over_the_limit_is_refused_and_leaves_nothing(guarded):
    before = files_below(guarded.directory / "topics")
    context = ssl.create_default_context(cafile=TLS / "authority.pem")
    heads = (
        b"Content-Length: 2000000\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n",
    )
    for head in heads:
        with (
            socket.create_connection(("127.0.0.1", guarded.port), LIMIT) as line,
            context.wrap_socket(line, server_hostname="127.0.0.1") as secure,
        ):
            token = f"Authorization: Bearer {TRAINER}\r\n".encode()
            secure.sendall(b"PUT /team/run/-/blobs/big HTTP/1.1\r\nHost: 127.0.0.1\r\n" + token + head)
            if b"chunked" in head:
                for _ in range(20):
                    secure.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            assert secure.recv(200).startswith(b"HTTP/1.1 413 ")
    assert files_below(guarded.directory / "topics") == before


TRICKS = [
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/blobs/../../../secret HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/blobs/%2e%2e/%2e%2e/secret HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/blobs/a%2fb HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/logs/main/-/blobs/00000000000000000000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PUT /run/logs/-/blobs/main/00000000000000000000 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/logs/main/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/below/logs/main/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/below/blobs/main/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"GET /run/-/blobs/below/logs/main/00000000000000000000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PUT /.hidden/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/a HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://evil.example\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    b"PUT /run/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
    b"PUT /run/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: other\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\nx",
    b"PUT /run/-/logs/main/-1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/logs/main/99999999999999999999 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/logs/main/0x0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"PUT /run/-/logs/main/1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx",
    b"POST /run/-/delete HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n[]",
    b"POST /run/-/delete HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20\r\n\r\n" + b"[" * 20,
    b"GET /run/-/logs/main?after=x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/logs/main?limit=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/logs/main?after=1&after=2 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/logs/main?what=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/logs/main/events?after=-2 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /run/-/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"BREW /run/-/blobs/a HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nbad header\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
]


def test_tricks_are_answered_and_leave_nothing(bus, place):
    before = files_below(place / "topics")
    for trick in TRICKS:
        with socket.create_connection(("127.0.0.1", bus.port), LIMIT) as line:
            line.sendall(trick)
            answer = line.recv(4096)
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (trick[:80], answer)
    assert files_below(place / "topics") == before
    assert bus.call("GET", "/healthz")[0] == 200


def test_a_page_of_this_service_may_use_it(bus):
    origin = {"Origin": bus.url}
    assert bus.call("GET", "/-/status", headers=origin)[0] == 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "0.0.0.0"}, "--token-file, or --insecure"),
        ({"certificate": Path("/nowhere/cert.pem")}, "cannot be used"),
        ({"private_key": Path("/nowhere/key.pem")}, "--certificate as well"),
        ({"cache_dir": Path("/proc/cache")}, "cannot be kept"),
        ({"upstream": "s4://bucket"}, "no transport serves s4"),
    ],
)
async def test_what_makes_no_sense_is_refused_at_the_start(given, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        async with Service(ServiceSettings(**{"upstream": str(tmp_path), "port": 0, **given})):
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lets nobody in"),
        ("[[tokens]", "malformed"),
        ('[[tokens]]\nname = "a"\ntoken = "hunter2-hunter2-hunter2"\nscope = "all"', "not one of none, read"),
        ('[[tokens]]\nname = "a"\ntoken = "hunter2"\nscope = "read"', "at least 16"),
        ('[[tokens]]\nname = "a"\nsha256 = "hunter2"\nscope = "read"', "64 hexadecimal digits"),
        ('[[tokens]]\nname = "a"\nscope = "read"', "one of sha256 and token"),
        ('[[tokens]]\nname = "a"\ntokn = "hunter2-hunter2-hunter2"\nscope = "read"', "malformed"),
    ],
)
def test_files_of_tokens_that_make_no_sense(text, words, tmp_path):
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_access(file)
    assert "hunter2" not in str(caught.value)


def test_it_loads_no_torch(bus):
    maps = Path(f"/proc/{bus.process.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not show what a process has loaded")
    assert "torch" not in maps.read_text()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "http://127.0.0.1:1/",
        "http:///run",
        "http://user:hunter2@127.0.0.1/run",
        "http://127.0.0.1/a/logs/b",
        "http://127.0.0.1/run?token=a&token_file=b",
        "http://127.0.0.1/run?ca_file=b",
        "http://127.0.0.1/run?reader=a/b",
    ],
)
def test_urls_that_make_no_sense(url):
    with pytest.raises(UsageError) as caught:
        open_transport(url)
    assert "hunter2" not in str(caught.value)


async def test_state_and_figures(bus, relay):
    assert relay.call("GET", "/readyz")[0] == 200
    status, headers, body = relay.call("GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html") and b"deltabus" in body
    shown = relay.get("/-/status")
    assert shown["upstream"] == bus.url
    assert relay.call("POST", "/told/-/readers/engine-1", b'{"holds": {"main": 3}}')[0] == 204
    (engine,) = [reader for reader in relay.get("/told/-/status")["readers"] if reader["name"] == "engine-1"]
    assert engine["versions"] == {"main": 3}
    assert relay.figure("deltabus_requests_total", route="/-/status", status="200") == 1


def test_two_relays_do_not_share_a_cache(relay, tmp_path):
    command = [sys.executable, "-m", "deltabus.cli", "serve", relay.url, "--port", "0"]
    done = subprocess.run(
        [*command, "--cache-dir", relay.directory / "cache"], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 2
    assert "another process uses the cache" in " ".join(done.stderr.split())
