"""Bodies on their way in: within limits of size and patience, large ones on disk."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from aiohttp import web

from deltabus.bus.errors import DeltabusError, StorageFullError, TransientTransportError, UsageError
from deltabus.bus.transport import Buffer

from .cache import Cache, CacheFullError, Draft
from .limits import Limits

__all__ = ["Body", "SlowClientError", "TooLargeError", "take_json", "take_small"]

_SMALL = 1 << 20
_Value = TypeVar("_Value")


class TooLargeError(UsageError):
    """A body is over the limit."""


class SlowClientError(TransientTransportError):
    """A client brings its body too slowly."""


class _Reader:
    """Reads a body, and watches its size and speed."""

    def __init__(self, request: web.Request, limits: Limits, most: int) -> None:
        self._content = request.content
        self._limits = limits
        self._most = most
        self._begun = asyncio.get_running_loop().time()
        self._count = 0
        if (request.content_length or 0) > most:
            raise TooLargeError(f"a body of {request.content_length} bytes is over the limit of {most}")

    async def piece(self) -> bytes:
        """Return what comes next; nothing at the end."""
        loop, stall = asyncio.get_running_loop(), self._limits.stall
        try:
            async with asyncio.timeout(stall):
                data = await self._content.readany()
        except TimeoutError:
            raise SlowClientError(f"nothing of the body came for {stall:g} s") from None
        self._count += len(data)
        if self._count > self._most:
            raise TooLargeError(f"a body is over the limit of {self._most} bytes")
        late = loop.time() - self._begun - stall
        if late > 0 and self._count < late * self._limits.slowest:
            raise SlowClientError(f"the body comes at less than {self._limits.slowest:g} bytes a second")
        return data


async def take_small(request: web.Request, limits: Limits, most: int) -> bytes:
    """Return a small body.

    Raises:
        TooLargeError: If it has more than `most` bytes.
        SlowClientError: If it comes too slowly.
    """
    reader = _Reader(request, limits, most)
    found = bytearray()
    while piece := await reader.piece():
        found += piece
    return bytes(found)


async def take_json(request: web.Request, limits: Limits, kind: type[_Value], *, most: int = _SMALL) -> _Value:
    """Return a body that is JSON.

    Raises:
        UsageError: If it is not, or not of this kind.
        TooLargeError: If it has more than `most` bytes.
        SlowClientError: If it comes too slowly.
    """
    try:
        return msgspec.json.decode(await take_small(request, limits, most), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the body is not the JSON that is wanted here: {error}") from None


class Body:
    """A body of any size, as one buffer: in memory where it is small, otherwise in a file that goes with it.

    Attributes:
        data: All of it.
        draft: The file in the cache that holds it; None if there is none.
    """

    def __init__(self) -> None:
        self.data: Buffer = b""
        self.draft: Draft | None = None
        self._file: BinaryIO | None = None
        self._map: mmap.mmap | None = None

    async def take(self, request: web.Request, limits: Limits, *, cache: Cache | None, spool: Path | None) -> None:
        """Read it.

        Args:
            request: Whose.
            limits: Of size and patience.
            cache: Where it goes if it may be kept there.
            spool: Where a large one goes otherwise; None is the system's place for temporary files.

        Raises:
            TooLargeError: If it is too large.
            SlowClientError: If it comes too slowly.
            StorageFullError: If there is no room for it.
        """
        reader = _Reader(request, limits, limits.body)
        held = bytearray()
        if cache is not None:
            self._try_cache(cache)
        try:
            while piece := await reader.piece():
                held += piece
                if len(held) > _SMALL and (self._file is None and self.draft is None):
                    self._file = tempfile.TemporaryFile(dir=spool)  # noqa: SIM115 - closed with the body
                if len(held) > _SMALL:
                    await asyncio.to_thread(self._write, bytes(held))
                    held.clear()
            if self.draft is not None or self._file is not None:
                await asyncio.to_thread(self._write, bytes(held))
                file = self.draft.file if self.draft is not None else self._file
                assert file is not None
                self.data = self._mapped(file)
            else:
                self.data = bytes(held)
        except OSError as error:
            if isinstance(error, DeltabusError):
                raise
            raise StorageFullError(f"the service has no room for a body under way: {error.strerror}") from error

    def close(self) -> None:
        """Release its file; a draft that was not kept is removed."""
        self.data = b""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # something still looks at it, and it goes with that
                self._map = None
        if self.draft is not None:
            self.draft.drop()
            self.draft.file.close()
        if self._file is not None:
            self._file.close()

    def _try_cache(self, cache: Cache) -> None:
        try:
            self.draft = cache.draft()
        except CacheFullError:
            self.draft = None

    def _write(self, data: bytes) -> None:
        if self.draft is not None:
            try:
                self.draft.write(data)
            except CacheFullError:
                self._leave_cache(data)
        elif self._file is not None:
            self._file.write(data)

    def _leave_cache(self, data: bytes) -> None:
        """Go on in a temporary file: the cache has no room."""
        assert self.draft is not None
        draft, self.draft = self.draft, None
        size = draft.size
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the body
        draft.file.seek(0)
        while size > 0 and (piece := draft.file.read(min(size, _SMALL))):
            self._file.write(piece)
            size -= len(piece)
        self._file.write(data)
        draft.drop()
        draft.file.close()

    def _mapped(self, file: BinaryIO) -> Buffer:
        file.flush()
        file.seek(0, 2)
        if not file.tell():
            return b""
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)
