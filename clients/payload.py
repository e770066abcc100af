"""How a payload gets from the encoder into the topic: part by part, a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltabus.bus.core import LogWriter
from deltabus.bus.message import Blob
from deltabus.codecs.container import Part

__all__ = ["Payload", "store_payload"]

_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class Payload:
    """A stored payload.

    Attributes:
        blobs: Its parts, in order.
        encodings: Encoded bytes by name of encoding.
        encode: How long encoding took, in seconds.
        upload: How long it took until everything was durable, in seconds.
    """

    blobs: tuple[Blob, ...]
    encodings: Mapping[str, int]
    encode: float
    upload: float


async def store_payload(writer: LogWriter, parts: Iterator[Part], *, name: str) -> Payload:
    """Encode and upload a payload part by part; when it returns, all parts are durable.

    Args:
        writer: Stores them.
        parts: Worked on in a thread, one part at a time, while the parts before it are uploaded.
        name: Begins the names of the parts' blobs.

    Raises:
        CodecError: If encoding fails.
        FencedError: If another process took the log over.
        TransportError: If a part cannot be stored.
    """
    encodings: dict[str, int] = {}
    uploads: list[asyncio.Task[Blob]] = []
    slots = asyncio.Semaphore(_UPLOADS)
    started = time.monotonic()
    encoding = 0.0

    async def upload(part: Part, number: int) -> Blob:
        try:
            return await writer.store(part.data, name=f"{name}-{number:04d}")
        finally:
            slots.release()

    # One thread for all parts, because each that made one would keep as much memory for the next.
    thread = ThreadPoolExecutor(1, thread_name_prefix="deltabus-part")
    try:
        while True:
            before = time.monotonic()
            part = await asyncio.get_running_loop().run_in_executor(thread, next, parts, None)
            encoding += time.monotonic() - before
            if part is None:
                break
            for encoding_name, size in part.encodings.items():
                encodings[encoding_name] = encodings.get(encoding_name, 0) + size
            await slots.acquire()
            uploads.append(asyncio.create_task(upload(part, len(uploads))))
            del part  # not kept while the next one is encoded
        blobs = tuple(await asyncio.gather(*uploads))
    except BaseException:
        for task in uploads:
            task.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)
        raise
    finally:
        thread.shutdown(wait=False)
    return Payload(blobs, encodings, encoding, time.monotonic() - started)
