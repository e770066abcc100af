"""Blobs and records on their way out: ranges, files sent by the system, and clients that are too slow."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import BinaryIO, NamedTuple

from aiohttp import web

from deltabus.bus.errors import DeltabusError
from deltabus.bus.transport import Record

from .flights import Content
from .limits import Limits
from .metrics import Metrics
from .wire import RECORDS, encode_record

__all__ = ["CutOffError", "Range", "RangeError", "parse_range", "send_content", "send_pages", "write"]

_PIECE = 4 << 20
_COPIED = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,15})?-([0-9]{1,15})?")
_BINARY = "application/octet-stream"


class CutOffError(Exception):
    """An answer that had begun cannot be ended; the connection is closed, so that nobody takes it for whole."""


class RangeError(Exception):
    """A range begins behind the end of its blob.

    Attributes:
        size: Of the blob; None if it is not known.
    """

    def __init__(self, size: int | None) -> None:
        super().__init__("the range begins behind the end of the blob")
        self.size = size


class Range(NamedTuple):
    """What part of a blob is asked for; a first byte of None asks for the last ones."""

    first: int | None
    last: int | None

    @property
    def span(self) -> tuple[int, int] | None:
        """First byte and end, where both are said."""
        return None if self.first is None or self.last is None else (self.first, self.last + 1)


def parse_range(text: str | None) -> Range | None:
    """Return the range that a header asks for; None for the whole, also where it makes no sense.

    >>> parse_range("bytes=5-9")
    Range(first=5, last=9)
    """
    match = _RANGE.fullmatch(text or "")
    if not match or (match[1] is None and match[2] is None):
        return None
    first, last = (None if part is None else int(part) for part in match.groups())
    if first is not None and last is not None and last < first:
        return None
    return Range(first, last)


async def write(response: web.StreamResponse, data: bytes, limits: Limits) -> None:
    """Write, within the time that a client has.

    Raises:
        CutOffError: If it takes nothing for too long.
    """
    try:
        async with asyncio.timeout(limits.stall):
            await response.write(data)
    except TimeoutError:
        raise CutOffError(f"took nothing for {limits.stall:g} s") from None


async def send_content(
    request: web.Request, content: Content, wanted: Range | None, *, limits: Limits, metrics: Metrics
) -> web.StreamResponse:
    """Answer with a blob, or a part of it.

    Where the size is not known yet, a part is as much of it as is there, which an answer with status 206 may be.

    Raises:
        RangeError: If the part begins behind the end.
        DeltabusError: If the blob cannot be had, before the answer has begun.
        CutOffError: If it cannot be had, or taken, after that.
    """
    first, last = 0, None
    if wanted is not None and wanted.first is None:
        size = await _whole_size(content)
        first = max(0, size - (wanted.last or 0))
        if not wanted.last:
            raise RangeError(size)
    elif wanted is not None:
        first, last = wanted.first or 0, wanted.last
    end = await content.extent(first)
    if wanted is not None and end <= first:
        raise RangeError(content.size)

    response = web.StreamResponse(headers={"Accept-Ranges": "bytes", "Cache-Control": "no-store"})
    response.content_type = _BINARY
    stop: int | None = content.size
    if wanted is not None:
        stop = min(s for s in (content.size or end, None if last is None else last + 1) if s is not None)
        response.set_status(206)
        total = "*" if content.size is None else content.size
        response.headers["Content-Range"] = f"bytes {first}-{stop - 1}/{total}"
    if stop is None:
        response.enable_chunked_encoding()
    else:
        response.content_length = stop - first
    await response.prepare(request)
    try:
        await _send(request, response, content, first, stop, limits=limits, metrics=metrics)
    except DeltabusError as error:
        raise CutOffError(str(error)) from error
    await response.write_eof()
    return response


async def _whole_size(content: Content) -> int:
    """Return a blob's size, waiting for all of it where that is the only way to know."""
    at = 0
    while content.size is None:
        end = await content.extent(at)
        if end == at:
            return at
        at = end
    return content.size


async def _send(
    request: web.Request,
    response: web.StreamResponse,
    content: Content,
    at: int,
    stop: int | None,
    *,
    limits: Limits,
    metrics: Metrics,
) -> None:
    """Send what there is, up to `stop` or the end."""
    while stop is None or at < stop:
        there = await content.extent(at)
        if there <= at:
            if stop is not None:
                raise CutOffError("the blob is shorter than was said")
            return
        end = there if stop is None else min(there, stop)
        # What is sent in chunks needs marks in between.
        if stop is not None and content.file is not None:
            end = min(end, at + _PIECE)
            sent = await _send_file(request, content.file, at, end - at, limits)
        else:
            sent = False
        if not sent:
            end = min(end, at + _COPIED)
            await write(response, await content.read(at, end), limits)
        metrics.sent_bytes.inc(end - at)
        at = end


async def _send_file(request: web.Request, file: BinaryIO, at: int, count: int, limits: Limits) -> bool:
    """Let the system send a part of a file; return whether it did, all of it or nothing.

    Without it asyncio would read at the file's own place, which several readers share.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise CutOffError("the client left")
    if transport.get_extra_info("sslcontext") is not None:
        return False
    try:
        async with asyncio.timeout(limits.stall):
            await asyncio.get_running_loop().sendfile(transport, file, at, count, fallback=False)
    except TimeoutError:
        raise CutOffError(f"took too little for {limits.stall:g} s") from None
    except (asyncio.SendfileNotAvailableError, NotImplementedError):
        return False
    return True


async def send_pages(
    request: web.Request, pages: AsyncIterator[list[Record]], *, limits: Limits, metrics: Metrics
) -> web.StreamResponse:
    """Answer with records, page by page.

    Raises:
        DeltabusError: If the first page cannot be had, before the answer has begun.
        CutOffError: If it cannot be taken.
    """
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = RECORDS
    try:
        async for page in pages:
            data = b"".join(map(encode_record, page))
            if not response.prepared:
                await response.prepare(request)
            await write(response, data, limits)
            metrics.sent_bytes.inc(len(data))
    except DeltabusError as error:
        if response.prepared:
            raise CutOffError(str(error)) from error
        raise
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response
