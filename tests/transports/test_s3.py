"""`s3://` against a real server: the contract, and what only it has."""

import asyncio
import json
import logging
import sys
import traceback
from pathlib import Path
from urllib.parse import urlencode

import pytest
from aiohttp import web
from botocore.exceptions import ClientError

from deltabus.bus.errors import (
    AccessDeniedError,
    StorageFullError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.transports import open_transport
from deltabus.transports.objects import UncertainError
from deltabus.transports.s3_errors import explain

from .conformance import TransportConformance, collected
from .seaweed import READER, REGION, WRITER

SECRET = "hunter2-hunter2"


def without_credentials(monkeypatch, directory):
    """As if this machine had neither credentials nor a place to get some."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class TestS3Transport(TransportConformance):
    rounds = 2  # of those who ask at once for one key the server lets some wait for whole seconds
    examples = 8
    many = 50

    @pytest.fixture
    def make_topic(self, s3_topics):
        return s3_topics


# Addresses and secrets


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://host:9000/bucket/run", "option 'endpoint'"),
        (f"s3://key:{SECRET}@bucket/run", "access_key"),
        (f"s3://bucket/run?secret_key={SECRET}", "access_key and secret_key together"),
        (f"s3://bucket/run?access_key={SECRET}", "access_key and secret_key together"),
        (f"s3://bucket/run?session_token={SECRET}", "together"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/a/../b", "prefix"),
        ("s3://bucket/a%0Ab", "prefix"),
        ("s3://bucket/a%FFb", "UTF-8"),
        (f"s3://bucket/{'p' * 512}", "prefix"),
        (f"s3://bucket/run?endpoint=http://me:{SECRET}@host", r"endpoint.*'http://\*\*\*@host'"),
        (f"s3://bucket/run?endpoint=me:{SECRET}@host", "endpoint"),
        (f"s3://bucket/run?endpoint=http://me:/@{SECRET}/@host", "endpoint"),
        ("s3://bucket/run?endpoint=host:9000", "endpoint.*http://127.0.0.1:9000"),
        ("s3://bucket/run?endpoint=http://host:port", "endpoint"),
        ("s3://bucket/run?addressing=dns", "addressing.*'path', 'virtual' and 'auto'"),
        ("s3://bucket/run?timeout=0", "timeout"),
    ],
)
def test_a_malformed_address_says_what_to_write(url, words):
    with pytest.raises(UsageError, match=words) as caught:
        open_transport(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/run 7/", "s3://bucket/run%207"),
        ("s3://bucket/team/run-7?poll=2&addressing=auto", "s3://bucket/team/run-7"),
        (
            f"s3://b/r?endpoint=http://h:1/&region=x&access_key=a&secret_key={SECRET}",
            "s3://b/r?endpoint=http://h:1&region=x",
        ),
        ("s3://b/r?profile=lab&addressing=virtual", "s3://b/r?profile=lab&addressing=virtual"),
    ],
)
def test_a_transport_shows_where_it_is_and_no_secret(url, shown):
    transport = open_transport(url)
    assert transport.url == shown
    assert open_transport(transport.url).url == shown
    assert SECRET not in f"{transport!r}{transport._store._client._settings!r}"


async def test_wrong_credentials_are_told_at_once_without_showing_them(seaweed, bucket, caplog):
    caplog.set_level(logging.DEBUG)
    for keys, words in (
        (("writer-key", SECRET), "check the secret key"),
        (("nobody-key", SECRET), "check the access key"),
    ):
        async with seaweed.open(bucket, keys=keys) as transport:
            for call in (
                lambda: transport.put("key", b"x"),
                lambda: transport.get("key"),
                lambda: transport.append("main", 0, b"x"),
                lambda: transport.read("main"),
                lambda: anext(transport.tail("main")),
                lambda: transport.logs(),
            ):
                with pytest.raises(AccessDeniedError, match=words) as caught:
                    await call()
                assert transport.url in str(caught.value)
                assert caught.value.url == transport.url
                assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in caplog.text


async def test_no_credentials_are_told_with_the_ways_to_give_them(seaweed, bucket, monkeypatch, tmp_path):
    without_credentials(monkeypatch, tmp_path)
    async with open_transport(f"s3://{bucket}/run?endpoint={seaweed.endpoint}") as transport:
        with pytest.raises(AccessDeniedError, match=r"AWS_ACCESS_KEY_ID.*profile"):
            await transport.get("key")


async def test_credentials_and_endpoint_come_from_the_environment(seaweed, bucket, monkeypatch, tmp_path):
    without_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", WRITER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRITER[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweed.endpoint)
    async with open_transport(f"s3://{bucket}/environment") as transport:
        await transport.put("key", b"x")
        assert await transport.get("key") == b"x"


async def test_credentials_and_endpoint_come_from_a_profile(seaweed, bucket, monkeypatch, tmp_path):
    without_credentials(monkeypatch, tmp_path)
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = {REGION}\nendpoint_url = {seaweed.endpoint}\n"
        f"aws_access_key_id = {WRITER[0]}\naws_secret_access_key = {WRITER[1]}\n"
    )
    async with open_transport(f"s3://{bucket}/profile?profile=lab") as transport:
        await transport.put("key", b"x")
        assert await transport.get("key") == b"x"
    async with open_transport(f"s3://{bucket}/profile?profile=nobody") as transport:
        with pytest.raises(TransportError, match=r"nobody.*AWS_PROFILE"):
            await transport.get("key")


async def test_a_missing_bucket_is_told_with_what_to_do(seaweed):
    async with seaweed.open("no-such-bucket") as transport:
        for call in (
            lambda: transport.put("key", b"x"),
            lambda: transport.get("key"),
            lambda: transport.append("main", 0, b"x"),
            lambda: transport.read("main"),
            lambda: transport.logs(),
        ):
            with pytest.raises(TransportError, match="create the bucket") as caught:
                await call()
            assert not isinstance(caught.value, TransientTransportError)
            assert transport.url in str(caught.value)


async def test_a_read_only_key_reads_and_changes_nothing(seaweed, s3_topics):
    topic = s3_topics()
    async with topic.open() as writer:
        await writer.put("key", b"x")
        await writer.append("main", 0, b"x")
    async with seaweed.open(topic.bucket, topic.prefix, keys=READER) as reader:
        assert await reader.get("key") == b"x"
        assert await reader.read("main") == await collected(reader, "main", -1, 1) == [(0, b"x")]
        assert await reader.logs() == ["main"]
        for call in (
            lambda: reader.put("other", b"x"),
            lambda: reader.append("main", 1, b"x"),
            lambda: reader.delete(["key"]),
        ):
            with pytest.raises(AccessDeniedError, match="policy"):
                await call()
    async with topic.open() as writer:
        assert await writer.get("key") == b"x"
        assert len(await writer.read("main")) == 1


# Servers and clients at their limits


async def test_a_server_that_overwrites_is_found_out_before_it_harms():
    stored = {}

    async def serve(request):
        """An S3 server that knows no conditions, as there are some."""
        if request.method == "PUT":
            stored[request.path] = await request.read()
            return web.Response(headers={"ETag": '"x"'})
        if request.method == "GET" and "list-type" in request.query:
            return web.Response(text="<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        return web.Response(status=404)

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
            for call in (lambda: transport.put("key", b"x"), lambda: transport.append("main", 0, b"x")):
                with pytest.raises(TransportError, match=r"ignores 'If-None-Match.*conditional writes"):
                    await call()
    finally:
        await runner.cleanup()
    assert list(stored) == ["/bucket/run/.conditional-writes"]


def answer_of(status, code):
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (301, "PermanentRedirect", TransportError, "another region"),
        (400, "AuthorizationHeaderMalformed", TransportError, "another region"),
        (400, "ExpiredToken", AccessDeniedError, "renew"),
        (403, "RequestTimeTooSkewed", AccessDeniedError, "clock"),
        (403, "AccessDenied", AccessDeniedError, "policy"),
        (409, "ConditionalRequestConflict", TransientTransportError, "done again"),
        (400, "RequestTimeout", TransientTransportError, "done again"),
        (503, "SlowDown", TransientTransportError, "done again"),
        (500, "InternalError", UncertainError, "InternalError"),
        (501, "NotImplemented", TransportError, "conditional writes"),
        (507, "InsufficientStorage", StorageFullError, "free space"),
        (400, "QuotaExceeded", StorageFullError, "raise the quota"),
        (418, "Teapot", TransportError, "speaks S3"),
    ],
)
def test_what_a_server_answers_becomes_our_error(status, code, kind, words):
    error = explain(answer_of(status, code), "store 'key'", "s3://bucket/run", timeout=1, write=True)
    assert type(error) is kind
    assert words in str(error)
    reading = explain(answer_of(status, code), "read 'key'", "s3://bucket/run", timeout=1, write=False)
    assert type(reading) is (TransientTransportError if kind is UncertainError else kind)
    assert "s3://bucket/run" in str(reading)


def test_a_program_may_use_one_event_loop_after_another(s3_topics):
    topic = s3_topics()

    async def step(number):
        async with topic.open() as transport:
            await transport.append("main", number, b"%d" % number)
            return await transport.read("main")

    assert [asyncio.run(step(number)) for number in range(2)][-1] == [(0, b"0"), (1, b"1")]


async def test_of_many_processes_one_wins_each_place(s3_topics):
    topic = s3_topics()
    names, count = ("writer-0", "writer-1"), 5
    url = f"{topic.url}?{urlencode(topic.options)}"
    program = str(Path(__file__).with_name("racing_writer.py"))
    async with asyncio.timeout(60), topic.open() as transport:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                program,
                url,
                name,
                str(count),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for name in names
        ]
        for process in processes:
            assert await process.stdout.readline() == b"ready\n"
        for process in processes:
            process.stdin.write(b"go\n")
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        won = {name: json.loads(output) for name, (output, _) in zip(names, outputs, strict=True)}
        seen = await transport.read("main")
        for place in ("positions", "keys"):
            assert sorted(number for wins in won.values() for number in wins[place]) == list(range(count))
        for name, wins in won.items():
            assert [seen[number].data for number in wins["positions"]] == [
                f"{name}:{n}".encode() for n in wins["positions"]
            ]
            for number in wins["keys"]:
                assert await transport.get(f"blobs/{number}") == name.encode() * 10_000
