"""`hf://buckets/...` against the stand-in Hub, through the real clients: the contract."""

import itertools
import json
import urllib.request
from urllib.parse import quote

import pytest

from .conformance import LIMIT, Topic, TransportConformance
from .hub_server import HubServer, small_clients

BUCKET = "team/weights"
TOKEN = "hf_writer_of_the_tests"


class HubTopic(Topic):
    """A topic of the stand-in Hub, with ways around its transport."""

    def __init__(self, server, name, **options):
        super().__init__(f"hf://buckets/{BUCKET}/{name}", endpoint=server.endpoint, token=TOKEN, **options)
        self.server = server
        self.name = name

    def files(self, below=""):
        """The paths of the topic's files that begin so, sorted, without the topic's own part."""
        head = quote(f"{self.name}/{below}", safe="")
        found = self.server.call("GET", f"/api/buckets/{BUCKET}/tree/{head}?recursive=true", token=TOKEN)
        return [file["path"].removeprefix(f"{self.name}/") for file in found]

    def stored(self, file):
        """The bytes of one of the topic's files."""
        url = f"{self.server.endpoint}/buckets/{BUCKET}/resolve/{self.name}/{file}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return answer.read()

    def remove(self, files):
        lines = [json.dumps({"type": "deleteFile", "path": f"{self.name}/{file}"}) for file in files]
        self.server.call("POST", f"/api/buckets/{BUCKET}/batch", text="\n".join(lines), token=TOKEN)

    async def stored_blob(self, key):
        found = self.files(f"{key}~")
        return self.stored(found[0]) if found else None

    async def remove_records(self, log, before):
        head = f"logs/{log}/"
        self.remove([file for file in self.files(head) if int(file.removeprefix(head)[:20]) < before])


@pytest.fixture(scope="module", autouse=True)
def clients(tmp_path_factory):
    with small_clients(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with HubServer(tmp_path_factory.mktemp("hub"), "--token", TOKEN, "--bucket", BUCKET) as server:
        yield server


counter = itertools.count()


@pytest.fixture
def make_topic(server):
    def make():
        return HubTopic(server, f"runs/{next(counter)}", settle=0.03)

    return make


class TestHubTransport(TransportConformance):
    rounds = 4  # each append takes a while, so that nobody decides too soon
    examples = 10
    many = 60

    @pytest.fixture
    def make_topic(self, make_topic):
        return make_topic
