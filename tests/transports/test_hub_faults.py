"""`hf://buckets/...` when things go wrong: lost answers, dead servers, damage, refusals, a lost feed, races."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest
from huggingface_hub import HfApi

from deltabus.bus.errors import (
    AccessDeniedError,
    AppendUnknownError,
    KeyNotFoundError,
    PositionTakenError,
    StorageFullError,
    TransientTransportError,
    TransportError,
    UnknownOptionError,
    UsageError,
)
from deltabus.transports import hub_client, hub_log, open_transport
from deltabus.transports.hub_errors import clean
from deltabus.transports.hub_rule import name_candidate, trace_log

from .conformance import LIMIT, collected, fill, records_of, until
from .hub_server import HubServer, small_clients
from .test_hub import BUCKET, TOKEN, HubTopic, counter

READ_TOKEN = "hf_reader_of_the_tests"
SETTLE = 0.05


@pytest.fixture(scope="module", autouse=True)
def clients(tmp_path_factory):
    with small_clients(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    arguments = ["--token", TOKEN, "--read-token", READ_TOKEN, "--bucket", BUCKET]
    with HubServer(tmp_path_factory.mktemp("hub"), *arguments) as server:
        yield server


@pytest.fixture
def server(running):
    yield running
    running.heal()


@pytest.fixture
def topic(server):
    return HubTopic(server, f"faults/{next(counter)}", settle=SETTLE)


def adds(server):
    return [line for line in server.requests() if line.endswith("/batch")]


# Lost answers


@pytest.mark.parametrize("lost", [{"drop": "after"}, {"status": 502}, {"drop": "before"}])
async def test_a_blob_whose_answer_was_lost_may_be_put_again(server, topic, lost):
    async with topic.open() as transport:
        server.fault("/batch$", times=1, **lost)
        server.requests()
        with pytest.raises(TransientTransportError):
            await transport.put("key", b"x" * 5000)
        assert len(adds(server)) == 1  # nothing sends it again behind our back
        await transport.put("key", b"x" * 5000)
        assert len(adds(server)) == (0 if lost == {"drop": "after"} else 1)
        assert await transport.get("key") == b"x" * 5000


async def test_a_record_whose_answer_was_lost_is_found(server, topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        server.fault("/batch$", drop="after", times=1)
        server.requests()
        await transport.append("main", 1, b"found")
        assert len(adds(server)) == 1
        assert await transport.read("main", 0) == records_of(b"found", start=1)


@pytest.mark.parametrize("lost", [{"status": 502}, {"drop": "before"}])
async def test_a_record_that_is_not_found_may_be_there_or_not(server, topic, lost):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        server.fault("/batch$", times=1, **lost)
        with pytest.raises(AppendUnknownError, match="read the position"):
            await transport.append("main", 1, b"lost")
        assert await transport.read("main", 0) == []
        await transport.append("main", 1, b"lost")
        assert await transport.read("main", 0) == records_of(b"lost", start=1)


async def test_a_record_that_arrives_late_displaces_nobody(server, topic):
    async with topic.open(timeout=0.4) as late, topic.open() as other:
        await fill(late, "main", 1)
        server.fault("/batch$", delay=1.5, times=1)
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


async def test_who_won_may_stay_unknown(server, topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        server.fault("/tree/", status=503)
        with pytest.raises(AppendUnknownError, match="who won"):
            await transport.append("main", 1, b"x")
        server.heal()
        await transport.append("main", 1, b"x")
        assert len(await transport.read("main")) == 2


async def test_a_sleeper_behind_the_beginning_is_refused_and_not_seen(server, topic):
    async with topic.open() as sleeper, topic.open() as other, topic.open() as reader:
        await fill(sleeper, "main", 3)
        server.fault("/batch$", delay=2, times=1)
        sleeping = asyncio.create_task(sleeper.append("main", 3, b"zombie"))
        await until(lambda: any(line.endswith("/batch") for line in server.requests()))
        await other.append("main", 3, b"3")
        await fill(other, "main", 3, start=4)
        await topic.remove_records("main", 4)
        with pytest.raises(PositionTakenError):
            await sleeping
        assert [position for position, _ in await reader.read("main")] == [4, 5, 6]


# Servers that die, hang and are busy


async def test_what_was_acknowledged_outlives_the_server(tmp_path):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET) as server:
        topic = HubTopic(server, "killed", settle=SETTLE)
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
                server.kill()
                await asyncio.to_thread(server.start)
            await writer
            assert await other.read("main") == durable
            for position in stored:
                assert await other.get(f"blobs/{position}") == b"%d" % position * 300


@pytest.mark.parametrize("path", ["/tree/", "/batch$", "/v1/xorbs"])
async def test_a_server_that_hangs_is_given_up(server, topic, path):
    async with topic.open(timeout=0.5) as transport:
        await transport.put("warm", b"up")
        server.fault(path, delay=20)
        began = time.monotonic()
        with pytest.raises(TransientTransportError, match="timeout"):
            await transport.put("key", os.urandom(3_000))
        assert time.monotonic() - began < 15


async def test_a_download_that_hangs_or_breaks_off_gives_nothing(server, topic):
    data = os.urandom(3_000_000)
    async with topic.open(timeout=2) as transport:
        await transport.put("key", data)
        for fault in ({"delay": 20, "drop": "before"}, {"drop": "before"}, {"status": 503}):
            server.fault("^/xorbs/", **fault)
            with pytest.raises(TransientTransportError):
                await transport.get("key")
            server.heal()
        assert await transport.get("key") == data


async def test_a_busy_server_is_left_alone_as_long_as_it_asks(server, topic):
    async with topic.open() as transport:
        server.fault("/batch$", status=429, headers={"Retry-After": "1"}, times=1)
        began = time.monotonic()
        await transport.append("main", 0, b"x")
        assert time.monotonic() - began > 1
        server.fault("/batch$", status=429, headers={"Retry-After": "3600"}, times=1)
        with pytest.raises(TransientTransportError, match="429"):
            await transport.append("main", 1, b"y")
        server.fault("/tree/", status=503, headers={"Retry-After": "1"}, times=1)
        assert await transport.read("main") == records_of(b"x")


async def test_a_busy_server_that_asks_for_no_pause_is_not_stormed(server, topic):
    async with topic.open(timeout=1) as transport:
        server.fault("/tree/", status=429, headers={"Retry-After": "0"})
        server.requests()
        with pytest.raises(TransientTransportError):
            await transport.read("main")
        assert 2 <= len([line for line in server.requests() if "/tree/" in line]) <= 6


async def test_the_stores_tokens_may_be_forgotten(server, topic, tmp_path):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET) as server:
        topic = HubTopic(server, "tokens", settle=SETTLE)
        data = os.urandom(2_000_000)
        async with topic.open() as transport:
            await transport.put("a", data)
            assert await transport.get("a") == data
            server.kill()
            server.start()
            await transport.put("b", data[::-1])
            assert await transport.get("a") == data


async def test_nobody_there(topic):
    async with open_transport(topic.url, **topic.options | {"endpoint": "http://127.0.0.1:9"}) as transport:
        with pytest.raises(TransientTransportError, match="no connection"):
            await transport.read("main")


# Damage


@pytest.mark.parametrize("size", [5_000, 3_000_000])
async def test_a_flipped_byte_in_the_store_is_noticed(tmp_path, size):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET) as server:
        topic = HubTopic(server, "damaged", settle=SETTLE)
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


# Refusals


def secrets_in(error):
    told = error
    while told is not None:
        yield from (secret for secret in (TOKEN, READ_TOKEN, "hf_stranger_of_the_tests", "xet_") if secret in str(told))
        told = told.__cause__ or told.__context__


async def all_calls(transport):
    for call in (
        lambda: transport.put("key", b"x" * 2_000_000),
        lambda: transport.append("main", 0, b"x"),
        lambda: transport.delete(["key"]),
        lambda: transport.get("key"),
        lambda: transport.read("main"),
        lambda: transport.logs(),
        lambda: anext(transport.tail("main")),
    ):
        try:
            await call()
        except Exception as error:
            yield error
        else:
            yield None


async def test_a_wrong_token_is_refused_everywhere(topic, caplog):
    caplog.set_level(logging.DEBUG)
    async with (
        topic.open(token="hf_stranger_of_the_tests")
        if False
        else open_transport(topic.url, **topic.options | {"token": "hf_stranger_of_the_tests"}) as transport
    ):
        async for error in all_calls(transport):
            assert type(error) is AccessDeniedError
            assert "HF_TOKEN" in str(error)
            assert topic.url in str(error)
            assert not list(secrets_in(error))
    assert "hf_stranger_of_the_tests" not in caplog.text
    assert "hf_stranger_of_the_tests" not in repr(vars(transport))


async def test_a_token_that_may_only_read_reads(topic):
    async with topic.open() as writer, open_transport(topic.url, **topic.options | {"token": READ_TOKEN}) as reader:
        data = os.urandom(2_000_000)
        await writer.put("there", data)
        await fill(writer, "main", 2)
        assert await reader.get("there") == data
        assert len(await reader.read("main")) == 2
        for call in (reader.put("key", b"x"), reader.append("main", 2, b"x"), reader.delete(["there"])):
            with pytest.raises(AccessDeniedError, match="may only read") as caught:
                await call
            assert not list(secrets_in(caught.value))
        assert len(await writer.read("main")) == 2


async def test_a_missing_bucket_is_an_error_that_says_so(topic):
    async with open_transport("hf://buckets/team/missing/run", **topic.options) as transport:
        async for error in all_calls(transport):
            assert type(error).__mro__[1] is TransportError
            assert "no bucket team/missing" in str(error)
            assert "create=true" in str(error)


async def test_a_missing_bucket_is_created_if_wanted(server, topic):
    async with open_transport("hf://buckets/team/created/run?create=true", **topic.options) as transport:
        assert await transport.logs() == []
        await transport.put("key", b"x")
        assert await transport.get("key") == b"x"
    assert server.call("GET", "/api/buckets/team/created", token=TOKEN)["private"] is True
    async with open_transport(
        "hf://buckets/team/refused/run?create=true", **topic.options | {"token": READ_TOKEN}
    ) as transport:
        with pytest.raises(AccessDeniedError, match="create bucket team/refused"):
            await transport.logs()


async def test_a_full_store_says_so_and_keeps_all(tmp_path):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET, "--quota", "3000000") as server:
        topic = HubTopic(server, "full", settle=SETTLE)
        async with topic.open() as transport:
            await transport.put("there", os.urandom(2_000_000))
            await fill(transport, "main", 1)
            with pytest.raises(StorageFullError, match="storage limit"):
                await transport.put("key", os.urandom(2_000_000))
            with pytest.raises(KeyNotFoundError):
                await transport.get("key")
            await transport.append("main", 1, b"still")
            server.fault("/batch$", status=403, message="Private repository storage limit reached", times=1)
            with pytest.raises(StorageFullError):
                await transport.append("main", 2, b"x")
            assert len(await transport.read("main")) == 2


async def test_what_is_no_hub_is_noticed(server, topic):
    async with topic.open() as transport:
        server.fault("/tree/", status=200)
        for call in (transport.read("main"), transport.get("key"), transport.logs()):
            with pytest.raises(TransportError, match="HF_ENDPOINT"):
                await call


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/team/weights",
        "hf://buckets/team",
        "hf://buckets/",
        "hf://buckets/te~am/weights/run",
        "hf://buckets/team/weights/a//b",
        "hf://buckets/team/weights/a b",
        "hf://user:hf_secret_of_the_tests@buckets/team/weights/run",
        "hf://buckets/team/weights/run?endpoint=ftp://host",
        "hf://buckets/team/weights/run?endpoint=http://user:hf_secret_of_the_tests@host",
        "hf://buckets/team/weights/run?settle=0",
    ],
)
def test_malformed_urls(url):
    with pytest.raises(UsageError) as caught:
        open_transport(url)
    assert "hf_secret" not in str(caught.value) or "endpoint" in url


def test_the_url_tells_no_secret():
    transport = open_transport(f"hf://buckets/team/weights/run?token={TOKEN}&endpoint=http://127.0.0.1:1/")
    assert transport.url == "hf://buckets/team/weights/run"
    assert open_transport("hf://buckets/team/weights").url == "hf://buckets/team/weights"
    with pytest.raises(UnknownOptionError, match="settle"):
        open_transport("hf://buckets/team/weights/run?tokn=x")


async def test_token_and_address_are_found_where_the_ecosystem_keeps_them(server, topic):
    async with topic.open() as transport:
        await transport.put("key", b"x")
    program = (
        "import asyncio, sys\n"
        "from deltabus.transports import open_transport\n"
        "async def main():\n"
        "    async with open_transport(sys.argv[1]) as transport:\n"
        "        print(await transport.get('key'))\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"HF_ENDPOINT": server.endpoint}
    stored = Path(os.environ["HF_HOME"]) / "token"
    for found in ({"HF_TOKEN": READ_TOKEN}, {}):
        if not found:
            stored.write_text(READ_TOKEN)  # as a login does
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, topic.url, env=environment | found, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT)
        assert output == b"b'x'\n"
    stored.unlink()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("error for url (https://cdn/file?X-Amz-Signature=abc&b=c) at", "error for url (https://cdn/file?...) at"),
        (f"token {TOKEN} and xet_abcdefgh", "token *** and ***"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("https://user:pass@host/x", "***host/x"),
        ("opaque-secret here", "*** here"),
    ],
)
def test_texts_from_outside_are_cleaned(text, shown):
    assert clean(text, "opaque-secret") == shown


# The feed


@pytest.mark.parametrize("fault", [{"status": 404}, {"status": 500}, {"drop": "before"}, {"status": 200}])
async def test_without_the_feed_records_come_later(server, topic, fault):
    server.fault("/events$", **fault)
    async with topic.open() as writer, topic.open(poll=0.3) as reader:
        task = asyncio.create_task(collected(reader, "main", -1, 5))
        assert await fill(writer, "main", 5) == await task


@pytest.mark.parametrize("forget", [False, True])
async def test_a_feed_that_sends_its_readers_away_is_taken_up_again(server, topic, forget):
    async with topic.open() as writer, topic.open(poll=LIMIT) as reader:
        task = asyncio.create_task(collected(reader, "main", -1, 6))
        written = await fill(writer, "main", 2)
        server.call("POST", "/_test/reconnect", {"forget": forget})
        written += await fill(writer, "main", 2, start=2)
        server.call("POST", "/_test/reconnect", {})
        written += await fill(writer, "main", 2, start=4)
        assert await task == written


async def test_following_costs_no_requests_while_nothing_happens(server, topic):
    async with topic.open() as writer, topic.open() as reader, contextlib.aclosing(reader.tail("main")) as tail:
        await fill(writer, "main", 1)
        assert await anext(tail) == (0, b"0")
        waiting = asyncio.create_task(anext(tail))
        await until(lambda: reader._logs._feed.live)
        await reader.logs()
        await asyncio.wait((waiting,), timeout=1)
        server.requests()
        for _ in range(20):
            assert await reader.logs() == ["main"]
        await asyncio.wait((waiting,), timeout=1)
        assert server.requests() == []
        await writer.append("second", 0, b"x")
        await until(lambda: reader._logs._names is None)
        assert await reader.logs() == ["main", "second"]
        await writer.append("main", 1, b"1")
        assert await waiting == (1, b"1")


# Long logs


async def test_a_long_log_is_read_from_anywhere_with_few_requests(server, topic):
    count = 1215
    places = [f"{topic.name}/logs/main/{position:020}" for position in range(count)]
    data = [b"%d" % position for position in range(count)]
    names = [
        name_candidate(place, hashlib.sha256(part).hexdigest(), "0" * 16)
        for place, part in zip(places, data, strict=True)
    ]
    HfApi(endpoint=server.endpoint, token=TOKEN).batch_bucket_files(BUCKET, add=list(zip(data, names, strict=True)))
    async with topic.open() as transport:
        for after in (-1, 0, 8, 9, 95, 979, 998, 999, 1000, 1207, 1208, 1209, 1213, 1214, 1215):
            for limit in (1, 25):
                server.requests()
                found = await transport.read("main", after, limit)
                assert found == list(enumerate(data))[after + 1 :][:limit]
                listings = [line for line in server.requests() if "/tree/" in line]
                assert len(listings) <= 4
                assert len(listings) <= 2 or limit > 1 or after in (-1, 1213, 1215)
        await transport.append("main", count, b"end")
        assert await transport.read("main", count - 1) == records_of(b"end", start=count)


@pytest.mark.parametrize("most", [2, 3, 1000])
async def test_a_trim_that_dies_anywhere_lets_no_loser_become_the_first_record(server, topic, monkeypatch, most):
    """Each place has a winner and a loser that was stored before the next place's winner, as after a race."""
    monkeypatch.setattr(hub_client, "BATCH", most)
    monkeypatch.setattr(hub_log, "BATCH", most)
    api, names = HfApi(endpoint=server.endpoint, token=TOKEN), []
    for position in range(4):
        for text in (b"won", b"lost"):
            data = b"%d %s" % (position, text)
            place = f"{topic.name}/logs/main/{position:020}"
            # By its name the loser comes first and last in turn, however they are listed.
            nonce = f"{(text == b'won') ^ position % 2:016}"
            names.append((data, name_candidate(place, hashlib.sha256(data).hexdigest(), nonce)))
            api.batch_bucket_files(BUCKET, add=[names[-1]])
    async with topic.open() as transport:
        log = transport._logs
        written, listing = await transport.read("main"), await log._list("main")
        assert written == [(position, b"%d won" % position) for position in range(4)]
        taken = []
        remove = log._client.remove

        async def note(paths):
            taken.append(list(paths))
            await remove(paths)

        monkeypatch.setattr(log._client, "remove", note)
        await transport.trim("main", 3)
        assert await transport.read("main") == written[3:]
    places = {one.path: position for position, found in listing.items() for one in found}
    for earlier, later in itertools.pairwise(taken):
        assert places[earlier[-1]] < places[later[0]]
    winners, gone = trace_log(listing), set()
    for path in itertools.chain(*taken):
        gone.add(path)
        left = trace_log(
            {position: [one for one in found if one.path not in gone] for position, found in listing.items()}
        )
        assert left == {position: winners[position] for position in left}
        assert max(left) == 3


# Races

RACERS = 3
PLACES = 8


@pytest.mark.parametrize("delay", [0, 0.15])
async def test_of_many_processes_one_wins_each_place(server, topic, delay):
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
                server.fault("/batch$", delay=delay, times=1)
                server.fault("/tree/", delay=delay, times=1)
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
