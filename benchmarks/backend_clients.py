"""What a server's own client does with plain calls: what a transport's speed is held against."""

from __future__ import annotations

import abc
import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from aiobotocore.client import AioBaseClient
from backend_kinds import Backend, FileBackend, HubBackend, NatsBackend, S3Backend
from huggingface_hub import HfApi
from nats.js.api import AckPolicy, ConsumerConfig, StorageType

__all__ = ["AT_ONCE", "Parts", "PlainClient", "at_once", "plain_client"]

AT_ONCE = 4
"""Parts under way at once, as publisher and subscriber have them."""

_MESSAGE = 512 << 10
_WINDOW = 16
_LIMIT = 120.0

Parts = dict[str, bytes]
"""Parts by name."""


class PlainClient(abc.ABC):
    """Stores and fetches parts; those of one call are all stored, or fetched, when it returns."""

    @abc.abstractmethod
    async def put(self, parts: Parts) -> None:
        """Store parts."""

    @abc.abstractmethod
    async def get(self, names: Iterable[str]) -> Parts:
        """Fetch parts into memory; a client that can only write files leaves them for `read`."""

    @abc.abstractmethod
    async def clear(self) -> None:
        """Remove everything."""

    async def read(self, parts: Parts) -> Parts:
        """Return the bytes of what `get` gave; not timed."""
        return parts


async def at_once(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Make calls, four at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        async with slots:
            await call()

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))


@asynccontextmanager
async def plain_client(backend: Backend) -> AsyncIterator[PlainClient]:
    """Give the plain client of a backend that has bytes of its own."""
    async with AsyncExitStack() as stack:
        if isinstance(backend, FileBackend):
            yield _Files(backend.folder / f"plain-{uuid.uuid4().hex}")
        elif isinstance(backend, S3Backend):
            yield _S3(await stack.enter_async_context(backend.seaweed.client()), backend.bucket)
        elif isinstance(backend, NatsBackend):
            connection = await nats.connect(backend.broker.url("plain", ""))
            stack.push_async_callback(connection.close)
            client = _Nats(connection)
            await client.open()
            yield client
        elif isinstance(backend, HubBackend):
            with tempfile.TemporaryDirectory() as folder:
                yield _Hub(HfApi(endpoint=backend.server_address, token=backend.token), backend.bucket, Path(folder))


class _Files(PlainClient):
    """`write`, `fsync` and `read`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)

    async def put(self, parts: Parts) -> None:
        def write(name: str, data: bytes) -> None:
            with (self._folder / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        await at_once(lambda item=item: asyncio.to_thread(write, *item) for item in parts.items())

    async def get(self, names: Iterable[str]) -> Parts:
        found: Parts = {}

        async def one(name: str) -> None:
            found[name] = await asyncio.to_thread((self._folder / name).read_bytes)

        await at_once(lambda name=name: one(name) for name in names)
        return found

    async def clear(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder)
        self._folder.mkdir()


class _S3(PlainClient):
    """`put_object` and `get_object` of aiobotocore."""

    def __init__(self, client: AioBaseClient, bucket: str) -> None:
        self._client, self._bucket = client, bucket
        self._stored: list[str] = []

    async def put(self, parts: Parts) -> None:
        async def one(name: str, data: bytes) -> None:
            await self._client.put_object(Bucket=self._bucket, Key=f"plain/{name}", Body=data)

        self._stored += parts
        await at_once(lambda item=item: one(*item) for item in parts.items())

    async def get(self, names: Iterable[str]) -> Parts:
        found: Parts = {}

        async def one(name: str) -> None:
            answer = await self._client.get_object(Bucket=self._bucket, Key=f"plain/{name}")
            async with answer["Body"] as body:
                found[name] = await body.read()

        await at_once(lambda name=name: one(name) for name in names)
        return found

    async def clear(self) -> None:
        for name in self._stored:
            await self._client.delete_object(Bucket=self._bucket, Key=f"plain/{name}")
        self._stored.clear()


class _Nats(PlainClient):
    """`publish_async` into a stream, 16 messages of 512 KiB under way, and a pull consumer's `fetch`."""

    def __init__(self, connection: nats.NATS) -> None:
        self._jetstream = connection.jetstream(timeout=_LIMIT, publish_async_max_pending=_WINDOW)

    async def open(self) -> None:
        """Make the stream."""
        await self._jetstream.add_stream(name="plain", subjects=["plain.>"], storage=StorageType.FILE)

    async def put(self, parts: Parts) -> None:
        acknowledgements = []
        for name, data in parts.items():
            view = memoryview(data)
            for start in range(0, len(data), _MESSAGE):
                message = bytes(view[start : start + _MESSAGE])
                acknowledgements.append(
                    await self._jetstream.publish_async(f"plain.{name}", message, wait_stall=_LIMIT)
                )
        async with asyncio.timeout(_LIMIT):
            await asyncio.gather(*acknowledgements)

    async def get(self, names: Iterable[str]) -> Parts:
        state = (await self._jetstream.stream_info("plain")).state
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        consumer = await self._jetstream.pull_subscribe("plain.>", stream="plain", config=config)
        pieces: dict[str, list[bytes]] = {name: [] for name in names}
        left = state.messages
        while left:
            for message in await consumer.fetch(min(_WINDOW, left), timeout=_LIMIT):
                pieces[message.subject.removeprefix("plain.")].append(message.data)
                left -= 1
        await consumer.unsubscribe()
        return {name: b"".join(found) for name, found in pieces.items()}

    async def clear(self) -> None:
        await self._jetstream.purge_stream("plain")


class _Hub(PlainClient):
    """`batch_bucket_files` and `download_bucket_files` of huggingface_hub, each called once for all parts."""

    def __init__(self, api: HfApi, bucket: str, folder: Path) -> None:
        self._api, self._bucket, self._folder = api, bucket, folder
        self._stored: list[str] = []

    async def put(self, parts: Parts) -> None:
        adding: list[tuple[str | Path | bytes, str]] = [(data, f"plain/{name}") for name, data in parts.items()]
        self._stored += [path for _, path in adding]
        await asyncio.to_thread(self._api.batch_bucket_files, self._bucket, add=adding)

    async def get(self, names: Iterable[str]) -> Parts:
        files: list[tuple[Any, str | Path]] = [(f"plain/{name}", self._folder / name) for name in names]
        await asyncio.to_thread(self._api.download_bucket_files, self._bucket, files, raise_on_missing_files=True)
        return dict.fromkeys(names, b"")

    async def read(self, parts: Parts) -> Parts:
        return {name: (self._folder / name).read_bytes() for name in parts}

    async def clear(self) -> None:
        await asyncio.to_thread(self._api.batch_bucket_files, self._bucket, delete=self._stored)
        self._stored.clear()
        for path in self._folder.iterdir():
            path.unlink()
