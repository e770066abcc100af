"""`hf://buckets/...` where it refuses: tokens, buckets, a full store, malformed URLs; and what URLs tell."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import pytest

from deltabus.bus.errors import (
    AccessDeniedError,
    KeyNotFoundError,
    StorageFullError,
    TransportError,
    UnknownOptionError,
    UsageError,
)
from deltabus.transports import open_transport
from deltabus.transports.hub_errors import clean

from .conformance import LIMIT, fill
from .hub_server import HubServer
from .hub_topic import BUCKET, READ_TOKEN, TOKEN, HubTopic

pytestmark = pytest.mark.usefixtures("hub_clients")


@pytest.fixture
def make_topic(hub_topics):
    return lambda: hub_topics(settle=0.05)


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
    stranger = topic.options | {"token": "hf_stranger_of_the_tests"}
    async with open_transport(topic.url, **stranger) as transport:
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


async def test_a_missing_bucket_is_created_if_wanted(hub, topic):
    async with open_transport("hf://buckets/team/created/run?create=true", **topic.options) as transport:
        assert await transport.logs() == []
        await transport.put("key", b"x")
        assert await transport.get("key") == b"x"
    assert hub.call("GET", "/api/buckets/team/created", token=TOKEN)["private"] is True
    async with open_transport(
        "hf://buckets/team/refused/run?create=true", **topic.options | {"token": READ_TOKEN}
    ) as transport:
        with pytest.raises(AccessDeniedError, match="create bucket team/refused"):
            await transport.logs()


async def test_a_full_store_says_so_and_keeps_all(tmp_path):
    with HubServer(tmp_path, "--token", TOKEN, "--bucket", BUCKET, "--quota", "3000000") as hub:
        topic = HubTopic(hub, "full", settle=0.05)
        async with topic.open() as transport:
            await transport.put("there", os.urandom(2_000_000))
            await fill(transport, "main", 1)
            with pytest.raises(StorageFullError, match="storage limit"):
                await transport.put("key", os.urandom(2_000_000))
            with pytest.raises(KeyNotFoundError):
                await transport.get("key")
            await transport.append("main", 1, b"still")
            hub.fault("/batch$", status=403, message="Private repository storage limit reached", times=1)
            with pytest.raises(StorageFullError):
                await transport.append("main", 2, b"x")
            assert len(await transport.read("main")) == 2


async def test_what_is_no_hub_is_noticed(hub, topic):
    async with topic.open() as transport:
        hub.fault("/tree/", status=200)
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
    assert "hf_secret" not in str(caught.value)


def test_the_url_tells_no_secret():
    transport = open_transport(f"hf://buckets/team/weights/run?token={TOKEN}&endpoint=http://127.0.0.1:1/")
    assert transport.url == "hf://buckets/team/weights/run"
    assert open_transport("hf://buckets/team/weights").url == "hf://buckets/team/weights"
    with pytest.raises(UnknownOptionError, match="settle"):
        open_transport("hf://buckets/team/weights/run?tokn=x")


async def test_token_and_address_are_found_where_the_ecosystem_keeps_them(hub, topic):
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
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint}
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
