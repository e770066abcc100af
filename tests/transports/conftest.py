import itertools

import pytest
import pytest_asyncio

from .hub_server import HubServer, small_clients
from .hub_topic import BUCKET, READ_TOKEN, TOKEN, HubTopic
from .nats_server import NatsServer
from .proxy import Proxy
from .s3_topic import S3Topic
from .seaweed import Seaweed

_hub_runs = itertools.count()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    """A real S3 server for the whole session; tests take a bucket or prefix of their own."""
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def bucket(seaweed):
    """A bucket that tests share, each below prefixes of its own."""
    return seaweed.new_bucket()


@pytest.fixture(scope="session")
def s3_topics(seaweed, bucket):
    """Makes fresh topics."""
    runs = itertools.count()
    return lambda: S3Topic(seaweed, bucket, f"team/run-{next(runs)}")


@pytest_asyncio.fixture
async def s3_proxy(seaweed):
    """What makes the way to the S3 server go wrong."""
    async with Proxy(seaweed.port) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def through(seaweed, s3_topics, s3_proxy):
    """A transport of a new topic, with the proxy in between."""
    topic = s3_topics()
    endpoint = f"http://127.0.0.1:{s3_proxy.port}"
    async with seaweed.open(topic.bucket, topic.prefix, endpoint=endpoint, timeout=5) as transport:
        transport.topic = topic
        yield transport


@pytest.fixture
def topic(make_topic):
    """A fresh topic of the kind that a test file makes."""
    return make_topic()


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    """A real NATS server without JetStream for the whole session; tests take a channel of their own."""
    with NatsServer(tmp_path_factory.mktemp("broker"), jetstream=None) as server:
        yield server


@pytest.fixture(scope="session")
def nats(tmp_path_factory):
    """A real NATS server with JetStream for the whole session; tests take topics of their own."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="module")
def hub_clients(tmp_path_factory):
    """Lets the clients of the Hub keep their things in a directory of the tests, for all tests of a file."""
    with small_clients(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="session")
def running_hub(tmp_path_factory):
    """A stand-in Hub for the whole session; tests take topics of their own."""
    with HubServer(
        tmp_path_factory.mktemp("hub"), "--token", TOKEN, "--read-token", READ_TOKEN, "--bucket", BUCKET
    ) as server:
        yield server


@pytest.fixture
def hub(running_hub):
    """The stand-in Hub; what a test lets go wrong goes well again behind it."""
    yield running_hub
    running_hub.heal()


@pytest.fixture
def hub_topics(hub):
    """Makes fresh topics of the stand-in Hub."""
    return lambda **options: HubTopic(hub, f"runs/{next(_hub_runs)}", **options)
