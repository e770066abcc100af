"""The backends that the clients are tested on: how to start and kill each one's server, and the URLs of its topics.

A URL may lead through a proxy, and carries what a user would write, secrets included.
"""

import contextlib
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlencode

from ..transports.hub_server import HubServer, small_clients
from ..transports.nats_server import NatsServer
from ..transports.relay_server import RelayServer
from ..transports.seaweed import READER, REGION, WRITER, Seaweed

__all__ = [
    "BACKENDS",
    "SECRETS",
    "Backend",
    "FileBackend",
    "HttpBackend",
    "HubBackend",
    "NatsBackend",
    "S3Backend",
    "open_backend",
]

BUCKET = "team/weights"
HUB_WRITER, HUB_READER = "hf_writer_of_the_scenario", "hf_reader_of_the_scenario"
SETTLE = 0.05
NATS_SECRET = "correct-horse-battery-staple"
HTTP_WRITER, HTTP_READER = "a-token-that-may-write", "a-token-that-may-read"
SECRETS = (WRITER[1], READER[1], HUB_WRITER, HUB_READER, NATS_SECRET, HTTP_WRITER, HTTP_READER, "hunter2")

_NATS_USERS = f"""
authorization {{
  users: [
    {{ user: writer, password: {NATS_SECRET} }}
    {{ user: reader, password: {NATS_SECRET}, permissions: {{
        publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.DIRECT.GET.>",
                  "$JS.API.CONSUMER.>"], subscribe: ["_INBOX.>"] }} }}
  ]
}}
"""


class Backend:
    """One server, started.

    Attributes:
        scheme: Of its URLs.
        kills: How many times the scenario kills it; a slow one once.
    """

    scheme = ""
    kills = 2

    def __init__(self, directory):
        self.directory = directory
        self._names = itertools.count()

    def new_topic(self):
        """The name of a topic that nobody has used."""
        return f"run-{next(self._names)}"

    @property
    def port(self):
        """Where the server listens; None where there is none."""
        return None

    def url(self, topic, *, port=None):
        """The URL of a topic, for whoever may write; through a proxy that listens on `port`."""
        raise NotImplementedError

    def writes(self, topic):
        """What a proxy looks for to lose answers to writes: bytes of a blob's, or record's, and bytes of its answer."""
        return []

    def start(self):
        """Start the server, and wait until it serves."""

    def kill(self):
        """End it at once, as a crash would."""


class FileBackend(Backend):
    scheme = "file"
    kills = 0

    def url(self, topic, *, port=None):
        return (self.directory / topic).as_uri()


class S3Backend(Backend):
    scheme = "s3"
    kills = 1

    def __init__(self, directory):
        super().__init__(directory)
        self.server = Seaweed(directory)
        self.bucket = ""

    @property
    def port(self):
        return self.server.port

    def url(self, topic, *, port=None, keys=WRITER, bucket=None, **options):
        endpoint = f"http://127.0.0.1:{port or self.port}"
        given = {"endpoint": endpoint, "region": REGION, "access_key": keys[0], "secret_key": keys[1], **options}
        return f"s3://{bucket or self.bucket}/{topic}?{urlencode(given)}"

    def writes(self, topic):
        place = f"PUT /{self.bucket}/{topic}/"
        return [(f"{place}{part}/".encode(), b"HTTP/1.1 200") for part in ("blobs", "logs")]

    def start(self):
        # In a thread, because it runs event loops, and a test may have one.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.server.start).result()
            self.bucket = self.bucket or thread.submit(self.server.new_bucket).result()

    def kill(self):
        self.server.kill()


class HubBackend(Backend):
    scheme = "hf"

    def __init__(self, directory, *arguments):
        super().__init__(directory)
        access = ["--token", HUB_WRITER, "--read-token", HUB_READER, "--bucket", BUCKET]
        self.server = HubServer(directory, *access, *arguments)

    @property
    def port(self):
        return int(self.server.endpoint.rpartition(":")[2])

    def url(self, topic, *, port=None, token=HUB_WRITER, bucket=BUCKET, **options):
        endpoint = f"http://127.0.0.1:{port or self.port}"
        given = {"endpoint": endpoint, "token": token, "settle": SETTLE, **options}
        return f"hf://buckets/{bucket}/{topic}?{urlencode(given)}"

    def writes(self, topic):
        # Whatever is added to a bucket, by a request of its own.
        return [(f"POST /api/buckets/{BUCKET}/batch".encode(), b"HTTP/1.1 200")]

    def start(self):
        self.server.start()

    def kill(self):
        self.server.kill()


class NatsBackend(Backend):
    scheme = "nats"

    def __init__(self, directory, **options):
        super().__init__(directory)
        self.server = NatsServer(directory, _NATS_USERS, **options)

    @property
    def port(self):
        return self.server.port

    def url(self, topic, *, port=None, user="writer", password=NATS_SECRET, **options):
        query = f"?{urlencode(options)}" if options else ""
        return f"nats://{user}:{quote(password, safe='')}@127.0.0.1:{port or self.port}/{topic}{query}"

    def writes(self, topic):
        return [(f"PUB deltabus.{topic}.{part}.".encode(), b'"seq"') for part in ("blob", "log")]

    def start(self):
        self.server.start()

    def kill(self):
        self.server.kill()


class HttpBackend(Backend):
    scheme = "http"

    def __init__(self, directory):
        super().__init__(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tokens = directory / "tokens.toml"
        tokens.write_text(
            f'[[tokens]]\nname = "trainer"\ntoken = "{HTTP_WRITER}"\nscope = "admin"\n'
            f'[[tokens]]\nname = "engine"\ntoken = "{HTTP_READER}"\nscope = "read"\n'
        )
        self.server = RelayServer(directory, (directory / "topics").as_uri(), "--token-file", str(tokens))

    @property
    def port(self):
        return self.server.port

    def url(self, topic, *, port=None, token=HTTP_WRITER, **options):
        return f"http://127.0.0.1:{port or self.port}/{topic}?{urlencode({'token': token, **options})}"

    def writes(self, topic):
        return [(f"PUT /{topic}/-/{part}/".encode(), b"HTTP/1.1 204") for part in ("blobs", "logs")]

    def start(self):
        self.server.start()

    def kill(self):
        self.server.kill()


BACKENDS = {kind.scheme: kind for kind in (FileBackend, S3Backend, HubBackend, NatsBackend, HttpBackend)}


@contextlib.contextmanager
def open_backend(scheme, directory):
    """Start a backend with its data in a directory, or in memory where that survives a process as well; and end it."""
    with contextlib.ExitStack() as stack:
        memory = Path("/dev/shm")
        if scheme == "file" and os.access(memory, os.W_OK):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        if scheme == "hf":
            stack.enter_context(small_clients(directory / "home"))
        backend = BACKENDS[scheme](directory)
        stack.callback(backend.kill)
        backend.start()
        yield backend
