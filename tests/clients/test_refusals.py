"""On every backend, who may not publish or follow is told at once, with the place and the remedy, and no secret."""

import asyncio
import errno
import logging
import re
import time
import traceback

import pytest

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import (
    AccessDeniedError,
    PublishError,
    StorageFullError,
    TransportError,
    WaitTimeoutError,
)
from deltabus.transports import atomic, open_transport

from ..transports.nats_server import NatsServer
from ..transports.proxy import Proxy
from ..transports.seaweed import READER, WRITER
from .backends import (
    BACKENDS,
    HTTP_READER,
    HUB_READER,
    SECRETS,
    FileBackend,
    HubBackend,
    NatsBackend,
)
from .scenario import new_model
from .system import failing

SOON = 10.0
"""Seconds within which a refusal is told, on a busy machine too."""

WRONG = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def no_secret_in_logs(caplog):
    caplog.set_level(logging.DEBUG)
    yield
    for secret in (*SECRETS, WRONG):
        assert secret not in caplog.text


def publish(url):
    with Publisher(url, workers=1) as publisher:
        assert publisher.url == open_transport(url).url
        assert not any(secret in repr(publisher) for secret in (*SECRETS, WRONG))
        return publisher.publish(0, new_model()).result(SOON)


async def follow(url, **options):
    async with asyncio.timeout(SOON), Subscriber(url, **options) as subscriber:
        return (await anext(subscriber)).version


def check_told(error, url, kind, words, begun):
    """Check that an error says what, where and what to do, at once, and no secret anywhere."""
    assert time.monotonic() - begun < SOON
    cause = error.__cause__ if isinstance(error, PublishError) else error
    assert type(cause) is kind
    for told in {error, cause}:
        assert open_transport(url).url in str(told)
        assert re.search(words, str(told)), str(told)
    shown = "".join(traceback.format_exception(error))
    while error is not None:
        shown += f"{error} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__
    assert [secret for secret in (*SECRETS, WRONG) if secret in shown] == []


async def check_publisher(url, kind, words):
    begun = time.monotonic()
    with pytest.raises((kind, PublishError)) as caught:
        await asyncio.to_thread(publish, url)
    check_told(caught.value, url, kind, words, begun)


async def check_subscriber(url, kind, words):
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        await follow(url)
    check_told(caught.value, url, kind, words, begun)


async def check_both(url, kind, words):
    await check_publisher(url, kind, words)
    await check_subscriber(url, kind, words)


async def check_reader(backend, url):
    """Check that whoever may only read can follow, and is told when publishing."""
    topic = backend.new_topic()
    await asyncio.to_thread(publish, backend.url(topic))
    assert await follow(url(topic)) == 1
    await check_publisher(url(topic), AccessDeniedError, "allow|token|administrator")
    await check_publisher(url(backend.new_topic()), AccessDeniedError, "allow|token|administrator")
    assert await follow(url(topic)) == 1


# Wrong credentials


@pytest.mark.parametrize(
    ("scheme", "wrong", "words"),
    [
        ("s3", {"keys": (WRITER[0], WRONG)}, "check the secret key.*AWS_SECRET_ACCESS_KEY"),
        ("s3", {"keys": ("nobody", WRONG)}, "check the access key.*AWS_ACCESS_KEY_ID"),
        ("hf", {"token": f"hf_{WRONG}"}, "hf auth login.*HF_TOKEN"),
        ("nats", {"password": WRONG}, "check user and password"),
        ("nats", {"user": "nobody", "password": WRONG}, "check user and password"),
        ("http", {"token": WRONG}, "the token is not known.*DELTABUS_TOKEN"),
    ],
)
async def test_wrong_credentials(backends, scheme, wrong, words):
    backend = backends(scheme)
    await check_both(backend.url(backend.new_topic(), **wrong), AccessDeniedError, words)


async def test_a_directory_that_may_not_be_written(tmp_path, monkeypatch):
    backend = FileBackend(tmp_path)
    for number in (errno.EACCES, errno.EROFS, errno.EPERM):
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "os", failing(0, number, last=1 << 30))
            await check_publisher(backend.url(backend.new_topic()), AccessDeniedError, "permissions|read-only|write")


# What is not there


@pytest.mark.parametrize(
    ("scheme", "missing", "words"),
    [
        ("s3", {"bucket": "no-such-bucket"}, "create the bucket"),
        ("hf", {"bucket": "team/nowhere"}, "hf buckets create.*create=true"),
    ],
)
async def test_a_missing_bucket(backends, scheme, missing, words):
    backend = backends(scheme)
    url = backend.url(backend.new_topic(), **missing)
    for check in (check_publisher, check_subscriber):
        with pytest.raises(TransportError) as caught:
            await (asyncio.to_thread(publish, url) if check is check_publisher else follow(url))
        check_told(caught.value, url, type(caught.value), words, time.monotonic())


async def test_a_server_without_streams(tmp_path):
    with NatsServer(tmp_path, jetstream="") as server:
        await check_both(f"nats://{server.host}/run", TransportError, "start nats-server with -js")


async def test_a_directory_that_is_a_file(tmp_path):
    backend = FileBackend(tmp_path)
    (tmp_path / "file").write_text("not a topic")
    await check_both(backend.url("file"), TransportError, "directory")


@pytest.mark.parametrize("scheme", BACKENDS)
async def test_a_topic_that_nobody_wrote_is_waited_for_within_a_limit(backends, scheme):
    backend = backends(scheme)
    url = backend.url(backend.new_topic())
    with pytest.raises(WaitTimeoutError) as caught:
        await follow(url, idle_timeout=0.2)
    check_told(caught.value, url, WaitTimeoutError, "no update within 0.2 s", time.monotonic())


# Who may only read


async def test_a_key_that_may_only_read_a_bucket_of_s3(backends):
    backend = backends("s3")
    await check_reader(backend, lambda topic: backend.url(topic, keys=READER))


async def test_a_token_that_may_only_read_a_bucket_of_the_hub(backends):
    backend = backends("hf")
    await check_reader(backend, lambda topic: backend.url(topic, token=HUB_READER))


async def test_a_user_who_may_only_read_streams(backends):
    backend = backends("nats")
    await check_reader(backend, lambda topic: backend.url(topic, user="reader"))


async def test_a_token_that_may_only_read_a_service(backends):
    backend = backends("http")
    await check_reader(backend, lambda topic: backend.url(topic, token=HTTP_READER))


# Full stores


class FullServer(Proxy):
    """Answers to whoever stores a blob as a server does whose disk is full."""

    async def _pass_requests(self, line, reader, writer):
        while block := await reader.read(1 << 16):
            if block.startswith(b"PUT ") and b"/blobs/" in block:
                body = b"<Error><Code>InsufficientStorage</Code><Message>The disk is full.</Message></Error>"
                head = b"HTTP/1.1 507 Insufficient Storage\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                line.writers[0].write(head % len(body) + body)
                while await reader.read(1 << 16):
                    pass
                return
            writer.write(block)
            await writer.drain()


async def test_a_full_s3_server(backends):
    backend = backends("s3")
    async with FullServer(backend.port) as server:
        await check_publisher(backend.url(backend.new_topic(), port=server.port), StorageFullError, "free space")


async def test_a_full_namespace_of_the_hub(backends, tmp_path):
    backends("hf")  # its clients
    backend = HubBackend(tmp_path, "--quota", "100000")
    try:
        backend.start()
        await check_publisher(backend.url(backend.new_topic()), StorageFullError, "free space.*storage limit")
    finally:
        backend.kill()


async def test_a_full_stream(backends):
    backend = backends("nats")
    assert isinstance(backend, NatsBackend)
    url = backend.url(backend.new_topic(), max_bytes="100KiB")
    await check_publisher(url, StorageFullError, "delete blobs, or raise")


async def test_a_full_disk(tmp_path, monkeypatch):
    backend = FileBackend(tmp_path)
    monkeypatch.setattr(atomic, "os", failing(0, errno.ENOSPC, last=1 << 30))
    await check_publisher(backend.url(backend.new_topic()), StorageFullError, "free|space|room")
