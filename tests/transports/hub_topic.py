"""A topic of the stand-in Hub, as the tests of `hf://` use it."""

import json
import urllib.request
from urllib.parse import quote

from .topics import LIMIT, Topic

BUCKET = "team/weights"
TOKEN = "hf_writer_of_the_tests"
READ_TOKEN = "hf_reader_of_the_tests"


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
