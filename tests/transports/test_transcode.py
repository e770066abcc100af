"""Topics that a service makes of others: made, served, guarded, watched, begun again and ended."""

import asyncio
import re
import shutil
import time

import psutil
import pytest
from typer.testing import CliRunner

from deltabus import Publisher
from deltabus.bus.core import TopicReader
from deltabus.bus.errors import TransientTransportError, TransportError, UsageError
from deltabus.bus.group import Group
from deltabus.bus.message import Kind
from deltabus.cli.app import app
from deltabus.direct import DirectSubscriber
from deltabus.transports import open_transport
from deltabus.transports.http.feeds import Feed
from deltabus.transports.http.metrics import Metrics
from deltabus.transports.http.topics import Topics
from deltabus.transports.http.transcode import Transcoders, Transcoding
from deltabus.transports.http.wire import GoneError

from ..clients.support import bits, small_model, train
from .relay_server import RelayServer

LIMIT = 60.0
TEAM, OTHERS = "team-token-0123456789", "others-token-0123456789"
TOKENS = f"""
[[tokens]]
name = "watcher"
token = "watch-token-0123456789"
scope = "admin"
[[tokens]]
name = "team"
token = "{TEAM}"
scope = "write"
topics = ["team/*"]
[[tokens]]
name = "others"
token = "{OTHERS}"
scope = "read"
topics = ["others/*"]
"""
WATCH = "watch-token-0123456789"
MADE = "team/run-7.overwrite"


def until(condition):
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.05)
    return found


def workers(server):
    return [child for child in psutil.Process(server.process.pid).children() if child.is_running()]


def shown(server, name):
    topics = server.get("/-/status", token=WATCH)["topics"]
    return next((topic["transcoder"] for topic in topics if topic["topic"] == name), None)


def figure(server, name, topic):
    _, _, body = server.call("GET", "/metrics", token=WATCH)
    start = f'{name}{{topic="{topic}"}} '
    return next((float(line[len(start) :]) for line in body.decode().splitlines() if line.startswith(start)), None)


async def test_what_cannot_be_made_leaves_its_place_to_others(tmp_path, caplog):
    news = asyncio.Event()

    async def failures(count):
        while caplog.text.count("begins again when somebody asks in 60 s or later: no room") < count:
            news.clear()
            await news.wait()

    made = make(tmp_path, "*", command=FAILS, most=1, changed=lambda name: news.set())
    made.begin("http://127.0.0.1:1", "secret")
    made.start("a")
    async with asyncio.timeout(LIMIT):
        await failures(1)
        (failed,) = made
        assert not made.ask("a.overwrite")  # it would fail again
        made.start("b")
        failed.due = 0.0  # a minute later
        assert made.ask("a.overwrite")
        with pytest.raises(TransientTransportError, match="--transcode-most"):
            made.start("a")
        await failures(2)
        made.start("a")
        await failures(3)
    assert [each.restarts for each in made] == [1, 0]
    await made.rest(0)
    assert list(made) == []
    await made.close()


@pytest.mark.timeout(4 * LIMIT)
async def test_engines_that_keep_no_shadow_follow_a_topic_that_the_service_makes(tmp_path):
    upstream, tokens = tmp_path / "topics", tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    for name in ("a", "b"):
        with Publisher(upstream / "grouped", writer=name, group=Group(("a", "b"), generation=1), workers=1) as group:
            group.publish(1, {f"{name}.weight": small_model().inner.weight.detach()}).result(LIMIT)
    arguments = ["--token-file", str(tokens), "--cache-dir", str(tmp_path / "cache"), "--transcode", "team/*"]
    arguments += ["--transcode", "grouped"]
    model, engine = small_model(), small_model(5)
    with (
        RelayServer(tmp_path, upstream.as_uri(), *arguments) as server,
        Publisher(f"{server.url}/team/run-7?token={TEAM}", on_busy="wait", skips="off", workers=1) as publisher,
    ):
        # Nobody asked for it yet, and what nobody published is made of nothing.
        until(lambda: len(workers(server)) == 1)
        assert server.get(f"/{MADE}/-/logs", token=TEAM) == {"logs": []}
        assert shown(server, MADE) is None
        await publisher.publish(1, model)

        url = f"{server.url}/{MADE}?token={TEAM}"
        async with DirectSubscriber(url, engine, idle_timeout=LIMIT, workers=1) as subscriber:
            await (await anext(subscriber)).apply()
            train(model, 2)
            published = await publisher.publish(2, model)
            update = await anext(subscriber)
            assert [set(message.stats.encodings) for message in update.messages] == [{"overwrite"}]
            await update.apply()
            assert bits(engine) == bits(model)
            assert update.messages[-1].digest_after == published.message.digest_after

            # It is as new as its source, and shows that.
            told = {"source": "team/run-7", "running": True, "version": 2, "lag": 0, "restarts": 0, "failure": ""}
            await asyncio.to_thread(until, lambda: shown(server, MADE) == told)
            assert figure(server, "deltabus_transcoder_up", MADE) == 1
            assert figure(server, "deltabus_transcoder_lag_versions", MADE) == 0
            printed = await asyncio.to_thread(CliRunner().invoke, app, ["status", url])
            assert re.search(r"overwrite +team/run-7 +yes +0 +0", printed.output), printed.output
            # Its payloads came through the cache: what others fetch now is read from the backend no more.
            before = server.call("GET", "/metrics", token=WATCH)[2]
            async with open_transport(f"{server.url}/team/run-7?token={TEAM}") as transport:
                for blob in published.message.blobs:
                    await transport.get(blob.key)
            line = b"deltabus_upstream_bytes_total"
            after = server.call("GET", "/metrics", token=WATCH)[2]
            assert [x for x in before.splitlines() if x.startswith(line)] == [
                x for x in after.splitlines() if x.startswith(line)
            ]

            # Who may read the source may read it, others not, and nobody writes to it.
            for token, status in ((TEAM, 200), (OTHERS, 403), (None, 401)):
                assert server.call("GET", f"/{MADE}/-/status", token=token)[0] == status
            key = "blobs/trainer/000000000009-delta-0000-0123456789abcdef"
            for method, path, body in (
                ("PUT", f"/-/blobs/{key}", b"x"),
                ("PUT", "/-/blobs/-/delete", b"x"),
                ("PUT", "/-/logs/trainer/9", b"x"),
                ("DELETE", "/-/logs/trainer?before=1", None),
                ("POST", "/-/delete", b'{"keys": ["schemas/x.json"]}'),
            ):
                assert server.call(method, f"/{MADE}{path}", body, token=WATCH)[0] == 403
            assert (
                server.call("PUT", f"/{MADE}/-/blobs/leases/0123456789abcdef/000000000001", b"x", token=TEAM)[0] == 204
            )

            # One that fails is shown, told in the log, and tried again; the service goes on.
            failed = await asyncio.to_thread(until, lambda: (f := shown(server, "grouped.overwrite"))["failure"] and f)
            assert failed["failure"].startswith("it cannot be made")
            assert figure(server, "deltabus_transcoder_up", "grouped.overwrite") is not None
            assert re.search("transcoding grouped failed.* writers ", server.log.read_text())
            assert server.call("GET", "/readyz")[0] == 200

            # One that is killed is begun again, and goes on where it was, without a whole state.
            (worker,) = [w for w in workers(server) if any("/team/run-7?" in part for part in w.cmdline())]
            worker.kill()
            train(model, 3)
            await publisher.publish(3, model)
            update = await anext(subscriber)
            assert not update.whole
            await update.apply()
            assert bits(engine) == bits(model)
            assert figure(server, "deltabus_transcoder_restarts_total", MADE) == 1

            # So does the engine when the service is restarted.
            server.arguments = arguments[:-2]  # the one that fails was seen
            assert await asyncio.to_thread(server.stop) == 0
            await asyncio.to_thread(server.start)
            train(model, 4)
            await publisher.publish(4, model)
            update = await anext(subscriber)
            assert not update.whole
            await update.apply()
            assert bits(engine) == bits(model)
            async with open_transport(url) as transport:
                log = await TopicReader(transport).load()
            kinds = [Kind.ANCHOR, Kind.DELTA, Kind.DELTA, Kind.DELTA]
            assert [(m.kind, m.version) for m in log] == list(zip(kinds, (1, 2, 3, 4), strict=True))

            # Where what was made is removed meanwhile, it is told so instead of waiting for ever.
            assert await asyncio.to_thread(server.stop) == 0
            shutil.rmtree(tmp_path / "cache" / "transcoded" / MADE)
            await asyncio.to_thread(server.start)
            with pytest.raises(TransportError, match=r"begun anew.*does not reach position 3.*new subscriber"):
                await anext(subscriber)
        async with DirectSubscriber(url, engine, idle_timeout=LIMIT, workers=1) as subscriber:
            train(model, 5)
            await publisher.publish(5, model)
            while subscriber.version != 5:
                await (await anext(subscriber)).apply()
            assert bits(engine) == bits(model)

        # With the service end its processes.
        left = workers(server)
        publisher.close()
        assert server.stop() == 0
        assert psutil.wait_procs(left, 1)[1] == []


LINE = '{"writer": "trainer", "version": 3, "sent": 1, "received": 1}'
TELLS = ("sh", "-c", f"echo noise; echo '{LINE}'; echo trouble >&2; exec cat >/dev/null")
FAILS = ("sh", "-c", "echo no room >&2; exit 2")


def make(place, *topics, command=TELLS, most=4, changed=lambda name: None):
    settings = Transcoding(topics=topics, command=command, directory=place, most=most)
    return Transcoders(settings, cache=None, upstream="s3://bucket/runs", changed=changed)


async def test_what_is_transcoded_is_named_well_and_in_a_place_of_its_own(tmp_path):
    for name in ("../x", "a b", "blobs", "x" * 195):
        with pytest.raises(UsageError, match="--transcode"):
            Transcoding(topics=(name,), command=TELLS)
    made = make(tmp_path, "team/*", "run")
    assert made.source_of("team/x.overwrite") == "team/x"
    assert made.source_of("run.overwrite") == "run"
    for name in ("run", "team/x", "else.overwrite", "team/x.overwrite.overwrite"):
        assert made.source_of(name) is None
    with pytest.raises(UsageError, match="another process transcodes"):
        make(tmp_path, "run")
    await made.close()
    with pytest.raises(UsageError, match="--transcode-dir"):
        make(None, "run")
    settings = Transcoding(topics=("run",), command=TELLS, directory=tmp_path / "topics" / "made")
    with pytest.raises(UsageError, match="among those of"):
        Transcoders(settings, cache=None, upstream=(tmp_path / "topics").as_uri(), changed=lambda name: None)


async def test_processes_are_as_many_as_allowed_and_rest_when_nobody_asks(tmp_path):
    news = asyncio.Event()
    made = make(tmp_path, "team/*", "run", most=2, changed=lambda name: news.set())
    assert made.begin("http://127.0.0.1:1", "secret") == ["run.overwrite"]
    made.start("team/a")
    made.start("team/a")
    with pytest.raises(TransientTransportError, match="--transcode-most"):
        made.start("team/b")
    async with asyncio.timeout(LIMIT):
        while [each.version for each in made] != [3, 3]:
            news.clear()
            await news.wait()
    told = made.as_json("team/a.overwrite", {"trainer": 5})
    expected = {"source": "team/a", "running": True, "version": 3, "lag": 2, "restarts": 0, "failure": ""}
    assert told == expected
    await made.rest(LIMIT)
    assert len(list(made)) == 2
    await made.rest(0)
    assert [each.source for each in made] == ["run"]  # that was named
    assert made.as_json("team/a.overwrite", {}) is None
    made.start("team/b")
    await made.close()
    assert not any(each.running for each in made)


async def test_whether_the_backend_answers_is_not_asked_of_what_the_service_makes_itself(tmp_path):
    made = make(tmp_path, "run")
    made.begin("http://127.0.0.1:1", "secret")
    topics = Topics("http://127.0.0.1:1", cache=None, metrics=Metrics(), changed=lambda name: None, transcoders=made)
    for _ in range(2):
        async with topics.use("run.overwrite") as topic:
            assert topic.made
        with pytest.raises(TransientTransportError, match="no connection"):
            await topics.check()
    (asked,) = [topic for topic in topics if not topic.made]
    before = asked.used
    with pytest.raises(TransientTransportError):
        await topics.check()
    assert asked.used == before
    await topics.close()
    await made.close()


async def test_who_follows_a_log_that_is_removed_is_told(tmp_path):
    async with open_transport(tmp_path.as_uri()) as transport, asyncio.timeout(LIMIT):
        for position in range(2):
            await transport.append("trainer", position, b"x")
        feed = Feed(transport, "trainer", seen=lambda log, record: None, renewed=True)
        with pytest.raises(GoneError, match="begun anew"):
            await anext(feed.follow(2, beat=0.01))
        following = feed.follow(1, beat=0.01)
        for _ in range(3):
            assert await anext(following) == []
        shutil.rmtree(tmp_path / "logs")
        with pytest.raises(GoneError, match="position 1"):
            while True:
                await anext(following)
        await feed.close()


async def test_one_that_cannot_be_is_tried_again_in_a_minute(tmp_path, caplog):
    news = asyncio.Event()
    made = make(tmp_path, "run", command=FAILS, changed=lambda name: news.set())
    made.begin("http://127.0.0.1:1", "secret")
    async with asyncio.timeout(LIMIT):
        while "begins again in 60 s: no room" not in caplog.text:
            news.clear()
            await news.wait()
    told = made.as_json("run.overwrite", {"trainer": 5})
    assert (told["running"], told["lag"], told["failure"]) == (
        False,
        None,
        "it cannot be made of this topic, or as this service is set up",
    )
    await made.close()
