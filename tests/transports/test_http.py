"""`http://` against a real service before a directory, alone and behind a relay: the contract."""

import itertools

import pytest

from .conformance import Topic, TransportConformance
from .relay_server import RelayServer

counter = itertools.count()


class HttpTopic(Topic):
    """A topic of a service before a directory, with ways around it."""

    def __init__(self, server, root):
        self.name = f"team/run-{next(counter)}"
        super().__init__(f"{server.url}/{self.name}")
        self.root = root / self.name

    async def stored_blob(self, key):
        path = self.root / key
        return path.read_bytes() if path.exists() else None

    async def remove_records(self, log, before):
        for position in range(before):
            (self.root / "logs" / log / f"{position:020}").unlink()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def bus(tmp_path_factory, root):
    """A bus by itself."""
    with RelayServer(tmp_path_factory.mktemp("bus"), root.as_uri()) as server:
        yield server


@pytest.fixture(scope="module")
def relay(tmp_path_factory, bus):
    """A relay before another service."""
    with RelayServer(tmp_path_factory.mktemp("relay"), bus.url) as server:
        yield server


class TestHttpTransport(TransportConformance):
    """The contract, through a relay and the service behind it: two lines of HTTP, and a cache."""

    examples = 10
    many = 60

    @pytest.fixture
    def make_topic(self, relay, root):
        return lambda: HttpTopic(relay, root)
