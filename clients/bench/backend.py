"""The backend under a measurement: a fresh topic on it, its own speed, and leaving it as it was found."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import CorruptPayloadError
from deltabus.bus.transport import Transport
from deltabus.transports import open_transport

__all__ = ["Plain", "directory_of", "plain_speed", "remove_topic", "topic_below"]

_AT_ONCE = 4
"""Parts under way at once, as publisher and subscriber have them."""

_MOST_BYTES = 256 << 20

_FOLDERS = ("blobs", "schemas")
"""Where writers store, whether a message names it or not."""


@dataclass(frozen=True, slots=True)
class Plain:
    """What the backend does when nothing but bytes is asked of it, in bytes a second.

    Attributes:
        put: Storing parts of an anchor's sizes, of random bytes, four at once; durable.
        get: Fetching them.
    """

    put: float
    get: float


def topic_below(url: str, *, purpose: str = "bench") -> str:
    """Return the URL of a topic that does not exist yet, below a URL or a local path; options stay.

    Args:
        url: Below which.
        purpose: Stands in the topic's name.

    Raises:
        UsageError: If the URL is wrong.
    """
    name = f"deltabus-{purpose}-{uuid.uuid4().hex[:12]}"
    if "://" not in url:
        open_transport(url)  # says what is wrong with it, and connects to nothing yet
        return (Path(url).expanduser().absolute() / name).as_uri()
    try:
        parts = urlsplit(url)
    except ValueError:
        open_transport(url)  # has the words for it, without secrets
        raise
    topic = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))
    open_transport(topic)
    return topic


def directory_of(url: str) -> Path | None:
    """Return the directory that a `file://` URL names; None for every other URL."""
    parts = urlsplit(url)
    return Path(os.fsdecode(unquote(parts.path, errors="surrogateescape"))) if parts.scheme == "file" else None


def plain_speed(url: str, sizes: Sequence[int], *, repeats: int) -> Plain:
    """Measure plain puts and gets through the transport of a topic, and delete what was stored.

    Args:
        url: The topic.
        sizes: Bytes of each part; no more than the first 256 MiB are stored.
        repeats: How often; medians count.

    Raises:
        CorruptPayloadError: If other bytes come back.
        TransportError: If the backend fails.
    """
    return asyncio.run(_plain_speed(url, sizes, repeats))


async def _plain_speed(url: str, sizes: Sequence[int], repeats: int) -> Plain:
    kept: list[int] = []
    for size in sizes:
        kept.append(min(size, _MOST_BYTES - sum(kept)))
        if sum(kept) >= _MOST_BYTES:
            break
    total = sum(kept)
    puts, gets = [], []
    async with open_transport(url) as transport:
        for _ in range(repeats):
            # New bytes each time, so that no store recognises what it has.
            parts = {f"blobs/plain/{uuid.uuid4().hex}": np.random.default_rng().bytes(size) for size in kept}
            try:
                puts.append(total / await _timed(transport.put, list(parts.items())))
                gets.append(total / await _timed(_getter(transport, parts), [(key,) for key in parts]))
            finally:
                await transport.delete(parts)
    return Plain(statistics.median(puts), statistics.median(gets))


def _getter(transport: Transport, parts: dict[str, bytes]) -> Callable[[str], Awaitable[None]]:
    async def get(key: str) -> None:
        if await transport.get(key) != parts[key]:
            raise CorruptPayloadError(f"{transport.url} gave other bytes for {key} than were stored; do not trust it")

    return get


async def _timed(call: Callable[..., Awaitable[None]], arguments: Sequence[tuple[object, ...]]) -> float:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(each: tuple[object, ...]) -> None:
        async with slots:
            await call(*each)

    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for each in arguments:
                group.create_task(one(each))
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None  # one says it all
    return max(time.perf_counter() - start, 1e-9)


def remove_topic(url: str) -> str:
    """Remove a topic of a measurement or demo as far as its transport can; return in words what is left, or nothing.

    A directory goes as a whole. Elsewhere all blobs and records go but the last record of each log, which transports
    keep.

    Raises:
        TransportError: If the backend fails.
        MessageFormatError: If a record cannot be read.
    """
    directory = directory_of(url)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        return f"{directory} could not be removed" if directory.exists() else ""
    return asyncio.run(_remove_topic(url))


async def _remove_topic(url: str) -> str:
    async with open_transport(url) as transport:
        ends: dict[str, int] = {}
        for message in await TopicReader(transport).load():
            ends[message.writer] = max(message.position, ends.get(message.writer, 0))
        for log, end in ends.items():
            await transport.trim(log, end)
        for folder in _FOLDERS:
            await transport.delete([blob.key for blob in await transport.blobs(folder)])
        if not ends or url.lower().startswith("memory:"):
            return ""
        records = "1 log record" if len(ends) == 1 else f"{len(ends)} log records"
        return f"{records} of {transport.url}, which transports cannot remove"
