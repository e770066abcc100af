"""`nats://` and who may do what: passwords, tokens, keys, credentials, permissions, accounts, TLS."""

import asyncio
import base64
import json
import os
import time
from pathlib import Path

import nkeys
import pytest
from nats.aio.client import Client

from deltabus.bus.errors import AccessDeniedError, KeyNotFoundError, TransportError
from deltabus.bus.retry import Retry
from deltabus.transports import open_transport

from .conformance import LIMIT, collected, fill
from .nats_server import NatsServer, told_by_libraries
from .nats_topic import CHUNK
from .proxy import Proxy

SECRET = "hunter2"
TLS = Path(__file__).with_name("nats_tls")
TLS_CONFIG = f'cert_file: "{TLS}/server.pem", key_file: "{TLS}/server_key.pem"'


@pytest.fixture(autouse=True)
def quiet(caplog):
    yield
    assert told_by_libraries(caplog) == []


USERS = f"""
authorization {{
  users: [
    {{ user: admin, password: {SECRET} }}
    {{ user: reader, password: {SECRET}, permissions: {{
        publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.DIRECT.GET.>",
                  "$JS.API.CONSUMER.>"], subscribe: ["_INBOX.>"] }} }}
    {{ user: writer, password: {SECRET}, permissions: {{
        publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.STREAM.PURGE.>", "$JS.API.DIRECT.GET.>",
                  "$JS.API.CONSUMER.>", "deltabus.run.>"], subscribe: ["_INBOX.>"] }} }}
    {{ user: narrow, password: {SECRET}, permissions: {{ publish: [">"], subscribe: ["_INBOX_narrow.>"] }} }}
    {{ user: nobody, password: {SECRET}, permissions: {{ publish: {{ deny: [">"] }} }} }}
  ]
}}
"""


async def told(url, kind, match, **options):
    """Every call fails at once, with this error, and without a secret."""
    for call in (
        lambda t: t.put("key", b"x"),
        lambda t: t.append("main", 0, b"x"),
        lambda t: t.read("main"),
        lambda t: t.get("key"),
        lambda t: t.logs(),
        lambda t: anext(t.tail("main")),
    ):
        async with open_transport(url, **options) as transport:
            begun = time.monotonic()
            with pytest.raises(kind, match=match) as caught:
                await call(transport)
            assert time.monotonic() - begun < 3
            assert type(caught.value) is kind
            assert transport.url in str(caught.value)
            error = caught.value
            while error is not None:
                assert SECRET not in f"{error} {error!r}"
                error = error.__cause__ or error.__context__


async def test_wrong_passwords_are_refused(tmp_path):
    with NatsServer(tmp_path, USERS) as server:
        for user in ("admin:wrong@", f"stranger:{SECRET}@", f"{SECRET}@", ""):
            await told(
                f"nats://{user}{server.host}/run", AccessDeniedError, "refuses who logs in.*check user and password"
            )
        async with open_transport(f"nats://admin:{SECRET}@{server.host}/run") as transport:
            await transport.put("key", b"x")
            assert await transport.get("key") == b"x"


async def test_a_token(tmp_path):
    with NatsServer(tmp_path, f"authorization {{ token: {SECRET} }}") as server:
        await told(f"nats://{server.host}/run?token=wrong", AccessDeniedError, "refuses")
        for url in (f"nats://{server.host}/run?token={SECRET}", f"nats://{SECRET}@{server.host}/run"):
            async with open_transport(url) as transport:
                await transport.put("key", b"x")


async def test_a_reader_without_rights_to_write(tmp_path):
    with NatsServer(tmp_path, USERS) as server:
        reader = f"nats://reader:{SECRET}@{server.host}/run"
        async with open_transport(reader) as transport:
            # Nothing is there yet: an empty topic for whoever may only read.
            assert await transport.read("main") == []
            assert await transport.logs() == []
            with pytest.raises(KeyNotFoundError):
                await transport.get("key")
            with pytest.raises(AccessDeniedError, match=r"stream.create.*administrator"):
                await transport.put("key", b"x")
        async with open_transport(f"nats://admin:{SECRET}@{server.host}/run") as writer:
            written = await fill(writer, "main", 20)
            await writer.put("small", b"x")
            await writer.put("large", bytes(3 * CHUNK))
            async with open_transport(reader) as transport:
                assert await transport.read("main") == written
                assert await transport.logs() == ["main"]
                assert await transport.get("small") == b"x"
                assert await transport.get("large") == bytes(3 * CHUNK)
                task = asyncio.create_task(collected(transport, "main", 17, 3))
                written += await fill(writer, "main", 1, start=20)
                assert await task == written[18:]
                begun = time.monotonic()
                for call in (
                    lambda: transport.put("other", b"x"),
                    lambda: transport.put("other", bytes(3 * CHUNK)),
                    lambda: transport.append("main", 21, b"x"),
                    lambda: transport.delete(["small"]),
                ):
                    with pytest.raises(AccessDeniedError, match=r"permissions violation.*administrator"):
                        await call()
                assert time.monotonic() - begun < 5
                assert await transport.read("main") == written  # the connection is still good


async def test_a_writer_of_one_topic_whose_streams_were_made_by_others(tmp_path):
    with NatsServer(tmp_path, USERS) as server:
        writer = f"nats://writer:{SECRET}@{server.host}"
        async with open_transport(f"{writer}/run") as transport:
            with pytest.raises(AccessDeniedError, match=r"stream.create.*administrator"):
                await transport.append("main", 0, b"x")
        for topic in ("run", "other"):
            async with open_transport(f"nats://admin:{SECRET}@{server.host}/{topic}") as admin:
                await admin.put("first", b"x")
        async with open_transport(f"{writer}/run") as transport:
            written = await fill(transport, "main", 3)
            await transport.put("large", bytes(3 * CHUNK))
            await transport.put("small", b"x")
            assert await collected(transport, "main", -1, 3) == written
            await transport.delete(["large", "small"])
        async with open_transport(f"{writer}/other") as transport:
            with pytest.raises(AccessDeniedError, match=r"deltabus\.other"):
                await transport.append("main", 0, b"x")


async def test_answers_that_may_not_come(tmp_path):
    with NatsServer(tmp_path, USERS) as server:
        await told(f"nats://narrow:{SECRET}@{server.host}/run", AccessDeniedError, "inbox_prefix")
        async with open_transport(f"nats://narrow:{SECRET}@{server.host}/run?inbox_prefix=_INBOX_narrow") as transport:
            written = await fill(transport, "main", 3)
            assert await collected(transport, "main", -1, 3) == written
        await told(f"nats://nobody:{SECRET}@{server.host}/run", AccessDeniedError, "permissions violation")


async def test_a_user_who_is_locked_out_meanwhile(tmp_path):
    with NatsServer(tmp_path, USERS) as server:
        async with open_transport(f"nats://admin:{SECRET}@{server.host}/run") as transport:
            await fill(transport, "main", 1)
            server.configure(USERS.replace(f"admin, password: {SECRET}", "admin, password: changed"))
            server.reload()
            with pytest.raises(AccessDeniedError, match="refuses who logs in"):
                await locked_out(transport)
            with pytest.raises(AccessDeniedError, match="refuses who logs in"):
                await transport.read("main")


async def locked_out(transport):
    """Follow as the core does: again after a fault that may pass, such as the loss of the connection."""
    retry = Retry(limit=LIMIT, pause=0.02, longest=0.2)
    await retry.call("a test", lambda: anext(transport.tail("main", 0)))


async def test_an_nkey(tmp_path):
    pair = new_key(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "seed").write_bytes(pair.seed + b"\n")
    (tmp_path / "other").write_bytes(new_key(nkeys.PREFIX_BYTE_USER).seed)
    (tmp_path / "damaged").write_text(SECRET)
    config = f"authorization {{ users: [ {{ nkey: {pair.public_key.decode()} }} ] }}"
    with NatsServer(tmp_path / "server", config) as server:
        url = f"nats://{server.host}/run?nkey_file={tmp_path}"
        async with open_transport(f"{url}/seed") as transport:
            await transport.put("key", b"x")
        await told(f"{url}/other", AccessDeniedError, "refuses who logs in")
        await told(f"{url}/damaged", AccessDeniedError, "no nkey seed")
        await told(f"{url}/missing", AccessDeniedError, "cannot be read")


async def test_credentials_of_an_operator(tmp_path):
    operator, system = new_key(nkeys.PREFIX_BYTE_OPERATOR), new_key(nkeys.PREFIX_BYTE_ACCOUNT)
    account, user = new_key(nkeys.PREFIX_BYTE_ACCOUNT), new_key(nkeys.PREFIX_BYTE_USER)
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    operator_jwt = new_jwt(operator, operator, {"type": "operator"})
    system_jwt = new_jwt(operator, system, {"type": "account", "limits": unlimited | {"wildcards": True}})
    account_jwt = new_jwt(operator, account, {"type": "account", "limits": unlimited | storage | {"wildcards": True}})
    user_jwt = new_jwt(account, user, {"type": "user", "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}})
    (tmp_path / "creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    (tmp_path / "half").write_text(f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n")
    key, system_key = account.public_key.decode(), system.public_key.decode()
    config = f"""
        operator: {operator_jwt}
        system_account: {system_key}
        resolver: MEMORY
        resolver_preload: {{ {key}: {account_jwt}, {system_key}: {system_jwt} }}
    """
    with NatsServer(tmp_path / "server", config) as server:
        url = f"nats://{server.host}/run?creds_file={tmp_path}"
        async with open_transport(f"{url}/creds") as transport:
            await transport.put("key", b"x")
        await told(f"{url}/half", AccessDeniedError, "lacks a user JWT or a user nkey seed")
        await told(f"nats://{server.host}/run", AccessDeniedError, "refuses who logs in")


def new_key(prefix):
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix=prefix)))


def new_jwt(issuer, subject, claims):
    """A token as NATS has them, signed by the issuer."""

    def encode(data):
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    body = {
        "jti": os.urandom(8).hex(),
        "iat": int(time.time()),
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": claims["type"],
        "nats": claims | {"version": 2},
    }
    text = b".".join(encode(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    return (text + b"." + encode(issuer.sign(text))).decode()


async def test_no_jetstream(tmp_path):
    with NatsServer(tmp_path, jetstream="") as server:
        await told(f"nats://{server.host}/run", TransportError, "JetStream is not enabled.*-js")


async def test_no_jetstream_for_this_account(tmp_path):
    config = f"accounts {{ a {{ users: [ {{ user: ann, password: {SECRET} }} ] }} }}"
    with NatsServer(tmp_path, config) as server:
        await told(f"nats://ann:{SECRET}@{server.host}/run", TransportError, "JetStream.*not enabled")


# TLS


async def test_tls(tmp_path):
    with NatsServer(tmp_path, f"tls {{ {TLS_CONFIG} }}") as server:
        port = server.port
        trusted = f"ca_file={TLS}/authority.pem"
        for url in (f"tls://127.0.0.1:{port}/run?{trusted}", f"nats://localhost:{port}/other?tls=true&{trusted}"):
            async with open_transport(url) as transport:
                await transport.put("large", bytes(3 * CHUNK))
                assert await transport.get("large") == bytes(3 * CHUNK)
                written = await fill(transport, "main", 2)
                assert await collected(transport, "main", -1, 2) == written
        await told(f"tls://127.0.0.1:{port}/run", TransportError, "no TLS.*ca_file")
        await told(f"nats://127.0.0.1:{port}/run", TransportError, "no TLS.*ca_file")
        await told(f"tls://127.0.0.1:{port}/run?{trusted}&tls_hostname=other", TransportError, "no TLS.*tls_hostname")
        await told(f"tls://127.0.0.1:{port}/run?ca_file={tmp_path}/none", AccessDeniedError, "ca_file")


async def test_tls_that_comes_first_and_certificates_of_clients(tmp_path):
    with NatsServer(
        tmp_path, f'tls {{ {TLS_CONFIG}, ca_file: "{TLS}/authority.pem", verify: true, handshake_first: true }}'
    ) as server:
        url = f"tls://127.0.0.1:{server.port}/run?tls_first=true&ca_file={TLS}/authority.pem"
        own = f"certificate_file={TLS}/server.pem&private_key_file={TLS}/server_key.pem"
        async with open_transport(f"{url}&{own}") as transport:
            await transport.put("key", b"x")
        async with open_transport(url) as transport:
            with pytest.raises(TransportError, match=r"127\.0\.0\.1"):
                await transport.read("main")


async def test_a_password_is_not_sent_where_tls_is_asked_for_and_there_is_none(tmp_path):
    with NatsServer(tmp_path) as server:
        async with Proxy(server.port) as proxy:
            await told(f"tls://ann:{SECRET}@127.0.0.1:{proxy.port}/run", TransportError, "does not ask for TLS")
            assert proxy.requests == []


@pytest.mark.parametrize("asking", [1, 0])
async def test_a_password_is_not_sent_to_a_server_that_asks_for_tls_only_at_first(asking):
    """Whatever was seen on another connection, what counts is the one that logs in."""
    seen, count = [], 0

    async def serve(reader, writer):
        nonlocal count
        count += 1
        info = {"server_id": "x", "version": "2.10.0", "max_payload": 1 << 20, "headers": True, "auth_required": True}
        info |= {"tls_required": True} if count <= asking else {}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        try:
            async with asyncio.timeout(LIMIT):
                seen.append(await reader.read(1 << 16))
        finally:
            writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with open_transport(f"tls://ann:{SECRET}@127.0.0.1:{port}/run?timeout=1") as transport:
            for _ in range(asking + 1):
                with pytest.raises(TransportError):
                    await transport.logs()
            with pytest.raises(TransportError, match="does not ask for TLS"):
                await transport.logs()
    assert count == asking + 2
    assert not any(SECRET.encode() in data or b"CONNECT" in data for data in seen)


async def test_a_library_that_cannot_be_held_to_tls_is_not_used(monkeypatch):
    monkeypatch.delattr(Client, "_connect_command")
    async with open_transport("tls://127.0.0.1:1/run") as transport:
        with pytest.raises(TransportError, match="cannot be held to TLS"):
            await transport.logs()
