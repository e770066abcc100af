"""The backends that are measured: each with its real server on this machine, and ways to count what is asked of it."""

from __future__ import annotations

import abc
import json
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

# The servers are those of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "transports"))

from hub_server import HubServer, small_clients
from nats_server import NatsServer, free_ports
from proxy import Proxy
from seaweed import Seaweed

__all__ = ["NAMES", "Backend", "Counted", "servers"]

_BUCKET, _TOKEN = "team/weights", "hf_writer_of_the_benchmark"
_METHODS = tuple(f"{method} /".encode() for method in ("GET", "PUT", "POST", "HEAD", "DELETE", "PATCH"))
_MONITOR_LIMIT = 10.0
_ROLES = ("writer", "reader")
_POLL = 30
"""Seconds between looks where a broker announces: what docs/transports.md advises."""

NAMES = ("file", "s3", "nats", "hf", "s3+notify")

Count = dict[str, int]
"""How much was sent so far, by what it is: requests, or messages to a broker."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A topic whose writer and reader are watched.

    Attributes:
        urls: The topic's URL for the `writer` and for the `reader`.
        count: Says what either has sent so far.
    """

    urls: dict[str, str]
    count: Callable[[str], Count]


class Backend(abc.ABC):
    """One row of the table.

    Attributes:
        name: Of the row.
        server: What answers.
        has_own_bytes: Whether bytes go another way than on the other rows.
    """

    name: str
    server: str
    has_own_bytes: bool = True

    @abc.abstractmethod
    def url(self) -> str:
        """Return the URL of a topic that does not exist yet."""

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Counted | None]:
        """Give a new topic on which requests are counted; None where there is nothing to count."""
        yield None


class FileBackend(Backend):
    name = "`file://`"
    server = "the disk of the sources"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def url(self) -> str:
        return (self.folder / _fresh()).as_uri()


class S3Backend(Backend):
    name = "`s3://`"
    server = "SeaweedFS"

    def __init__(self, seaweed: Seaweed) -> None:
        self.seaweed = seaweed
        self.bucket = seaweed.new_bucket()

    def url(self) -> str:
        return self._url(_fresh(), self.seaweed.endpoint)

    def _url(self, name: str, endpoint: str, **options: object) -> str:
        return f"s3://{self.bucket}/{name}?{urlencode(self.seaweed.options(endpoint=endpoint) | options)}"

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Counted | None]:
        name = _fresh()
        async with _two_proxies(self.seaweed.port) as proxies:
            urls = {role: self._url(name, _address(proxy)) for role, proxy in proxies.items()}
            yield Counted(urls, lambda role: _requests(proxies[role]))


class NatsBackend(Backend):
    name = "`nats://`"
    server = "nats-server, one, streams on disk"

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def url(self) -> str:
        return self.broker.url("plain", _fresh())

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Counted | None]:
        name = _fresh()
        yield Counted({role: self.broker.url(role, name) for role in _ROLES}, self.broker.messages)


class HubBackend(Backend):
    name = "`hf://`"
    server = "the stand-in of the tests"
    bucket, token = _BUCKET, _TOKEN

    def __init__(self, server: HubServer) -> None:
        self.server_address = server.endpoint

    def url(self) -> str:
        return self._url(_fresh(), self.server_address)

    def _url(self, name: str, endpoint: str) -> str:
        return f"hf://buckets/{_BUCKET}/{name}?{urlencode({'endpoint': endpoint, 'token': _TOKEN})}"

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Counted | None]:
        name = _fresh()
        # The stand-in names itself as it was called, so that what goes to its store of chunks is seen here as well.
        async with _two_proxies(int(self.server_address.rpartition(":")[2])) as proxies:
            urls = {role: self._url(name, _address(proxy)) for role, proxy in proxies.items()}
            yield Counted(urls, lambda role: _requests(proxies[role]))


class NotifiedBackend(S3Backend):
    name = f"`s3://`, `notify=nats://`, `poll={_POLL}`"
    server = "SeaweedFS and nats-server"
    has_own_bytes = False

    def __init__(self, seaweed: Seaweed, broker: Broker) -> None:
        super().__init__(seaweed)
        self.broker = broker

    def url(self) -> str:
        name = _fresh()
        return self._url(name, self.seaweed.endpoint, notify=self.broker.url("plain", name), poll=_POLL)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Counted | None]:
        name = _fresh()
        async with _two_proxies(self.seaweed.port) as proxies:
            urls = {
                role: self._url(name, _address(proxy), notify=self.broker.url(f"notified-{role}", name), poll=_POLL)
                for role, proxy in proxies.items()
            }
            yield Counted(urls, lambda role: _requests(proxies[role]) | self.broker.messages(f"notified-{role}"))


class Broker:
    """A NATS server whose users say who sent what."""

    users = ("plain", *_ROLES, *(f"notified-{role}" for role in _ROLES))

    def __init__(self, folder: Path) -> None:
        (self._monitor,) = free_ports(1)
        users = ", ".join(f'{{ user: "{user}", password: "password" }}' for user in self.users)
        config = f'http: "127.0.0.1:{self._monitor}"\nauthorization {{ users: [ {users} ] }}'
        self._server = NatsServer(folder, config, jetstream="max_file: 16GB")

    def __enter__(self) -> Broker:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()

    def url(self, user: str, name: str) -> str:
        """Return a topic's, or channel's, URL for a user."""
        return f"nats://{quote(user)}:password@{self._server.host}/{name}"

    def messages(self, user: str) -> Count:
        """Say how many messages a user has sent so far, over all connections, also those that are closed."""
        address = f"http://127.0.0.1:{self._monitor}/connz?auth=1&state=any&limit=4096"
        with urllib.request.urlopen(address, timeout=_MONITOR_LIMIT) as answer:
            connections = json.loads(answer.read())["connections"]
        sent = sum(each["in_msgs"] for each in connections if each.get("authorized_user") == user)
        return {"messages": sent}


@contextmanager
def servers(names: tuple[str, ...], folder: Path) -> Iterator[list[Backend]]:
    """Start what some of `NAMES` need, with all data in a folder, and give them; all servers end with the context."""
    found: list[Backend] = []
    with ExitStack() as stack:
        seaweed = None
        if {"s3", "s3+notify"} & set(names):
            seaweed = Seaweed(folder / "seaweed")
            stack.callback(seaweed.kill)
            seaweed.start()
        broker = stack.enter_context(Broker(folder / "nats")) if {"nats", "s3+notify"} & set(names) else None
        for name in names:
            if name == "file":
                found.append(FileBackend(folder / "file"))
            elif name == "s3":
                found.append(S3Backend(seaweed))
            elif name == "nats":
                assert broker is not None
                found.append(NatsBackend(broker))
            elif name == "hf":
                stack.enter_context(small_clients(folder / "home"))
                hub = HubServer(folder / "hub", "--token", _TOKEN, "--bucket", _BUCKET)
                found.append(HubBackend(stack.enter_context(hub)))
            else:
                assert broker is not None
                found.append(NotifiedBackend(seaweed, broker))
        yield found


@asynccontextmanager
async def _two_proxies(port: int) -> AsyncIterator[dict[str, Proxy]]:
    async with AsyncExitStack() as stack:
        yield {role: await stack.enter_async_context(Proxy(port)) for role in _ROLES}


def _address(proxy: Proxy) -> str:
    return f"http://127.0.0.1:{proxy.port}"


def _requests(proxy: Proxy) -> Count:
    return {"requests": sum(proxy.count(method) for method in _METHODS)}


def _fresh() -> str:
    return f"run-{uuid.uuid4().hex[:12]}"
