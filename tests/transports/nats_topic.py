"""A topic on a real NATS server, and ways around its transport."""

import contextlib
import itertools

from .conformance import Topic

CHUNK = 512 << 10
"""The most bytes of a blob in one message."""

_numbers = itertools.count()


class NatsTopic(Topic):
    """A topic on a server; its back doors ask the server without the transport's code for logs and blobs."""

    def __init__(self, server, name=None, **options):
        self.server = server
        self.name = name or f"test/run-{next(_numbers)}"
        self.stream = f"deltabus_{self.name.replace('/', '=')}"
        self.prefix = f"deltabus.{self.name.replace('/', '=')}"
        super().__init__(f"nats://{server.host}/{self.name}", **options)

    @contextlib.asynccontextmanager
    async def api(self):
        async with self.open() as transport:
            yield transport._jetstream

    async def call(self, action, body=None):
        async with self.api() as jetstream:
            return await jetstream.call(action, body)

    async def config(self, which):
        return (await self.call(f"STREAM.INFO.{self.stream}_{which}"))["config"]

    async def subjects(self, which):
        """How many messages there are on each subject of a stream, without the topic's prefix."""
        async with self.api() as jetstream:
            found = await jetstream.subjects(f"{self.stream}_{which}", ">")
        return {subject.removeprefix(f"{self.prefix}."): count for subject, count in found.items()}

    async def stored_blob(self, key):
        async with self.api() as jetstream:
            found = await jetstream.last(f"{self.stream}_blobs", f"{self.prefix}.blob.{key}.head")
        return found and found.data

    async def remove_records(self, log, before):
        """As retention would: the stream is purged up to the first record that stays."""
        async with self.api() as jetstream:
            stream, subject = f"{self.stream}_records", f"{self.prefix}.log.{log}.record"
            seq = 0
            while True:
                found = await jetstream.following(stream, subject, seq + 1)
                if int(found.headers["Deltabus-Position"]) >= before:
                    break
                seq = found.seq
            await jetstream.purge(stream, f"{self.prefix}.log.{log}.*", before=seq + 1)
