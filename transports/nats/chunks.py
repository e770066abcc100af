"""Bytes that are too large for one message: parts in a stream, and the manifest that names them.

Parts are stored several at a time, in any order, on one subject; each has a number that the stream gave it. They are
nothing to anybody until the manifest is stored, which is one message. So what is read was written whole, a reader
fetches only the parts that it needs, and a writer that died leaves parts that no one looks at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from typing import Self, TypeVar

import msgspec

from deltabus.bus.errors import TransientTransportError, TransportError
from deltabus.bus.message import MAX_BLOB_BYTES
from deltabus.bus.retry import Retry

from .faults import ApiError, translate
from .jetstream import JetStream, Stored

__all__ = ["MANIFEST", "Chunks", "GivenUpError", "Manifest", "PartsGoneError", "read_manifest", "run_windowed"]

MANIFEST = "Deltabus-Manifest"
"""The header of a message that is a manifest, not the bytes themselves; its value is the manifest's version."""

_CHUNK = 512 << 10
_HEADERS = 4 << 10
_LEAST = 1 << 10  # bytes of a part, so that the numbers of a blob's parts always fit in memory
_FETCHING = 16
_STORING = 8  # of each blob; publishers store several at a time
_Result = TypeVar("_Result")


class PartsGoneError(Exception):
    """A part that a manifest names is not in the stream: it was deleted or outlived the stream's limits."""


class GivenUpError(Exception):
    """Nobody wants any more what was to be stored."""


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What names the parts of a blob or record.

    Attributes:
        size: Bytes in all.
        chunk: Bytes of each part but the last.
        attempt: The last word of the parts' subject.
        runs: The parts' numbers in the stream, in order: (first, how many that follow each other).
    """

    size: int
    chunk: int
    attempt: str
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: int, chunk: int, attempt: str, sequences: Iterable[int]) -> Self:
        """Return the manifest of parts with these numbers, in order."""
        runs = []
        for _, group in groupby(enumerate(sequences), lambda item: item[1] - item[0]):
            members = [seq for _, seq in group]
            runs.append((members[0], len(members)))
        return cls(size, chunk, attempt, tuple(runs))

    def sequences(self) -> list[int]:
        """Return the parts' numbers, in order."""
        return [seq for first, count in self.runs for seq in range(first, first + count)]


def read_manifest(stored: Stored, *, url: str) -> Manifest | None:
    """Return the manifest that a message is; None if the message is the bytes themselves.

    Raises:
        TransportError: If it is a manifest that makes no sense.
    """
    version = stored.headers.get(MANIFEST)
    if version is None:
        return None
    try:
        manifest = msgspec.msgpack.decode(stored.data, type=Manifest)
        parts = sum(count for first, count in manifest.runs if first > 0 and count > 0)
        sound = manifest.chunk >= _LEAST and 0 <= manifest.size <= MAX_BLOB_BYTES and len(manifest.runs) <= parts
        sound = sound and parts == -(-manifest.size // manifest.chunk) and version == "1"
    except msgspec.MsgspecError:
        sound = False
    if not sound:
        raise TransportError(
            f"{url}: message {stored.seq} on {stored.subject} names parts in a way that this version does not know; "
            "update deltabus, or delete it if it is damaged",
            url=url,
        )
    return manifest


class Chunks:
    """Stores and fetches parts.

    Args:
        jetstream: To the servers.
        url: The topic's URL, for errors.
        timeout: Seconds in which a part must be stored, with all repetitions.
    """

    def __init__(self, jetstream: JetStream, *, url: str, timeout: float) -> None:
        self._jetstream = jetstream
        self._url = url
        # A part that is stored twice harms nobody, so it is simply sent again.
        self._retry = Retry(limit=timeout, pause=0.05, longest=1.0)

    @property
    def largest(self) -> int:
        """Bytes that one message can hold here; the server counts headers as well, which the library does not."""
        return max(self._jetstream.connection.max_payload - _HEADERS, _LEAST)

    @property
    def size(self) -> int:
        """Bytes of a part."""
        return min(self.largest, _CHUNK)

    async def store(
        self, subject: str, attempt: str, view: memoryview, *, given_up: asyncio.Event | None = None
    ) -> Manifest:
        """Store bytes as parts on a subject, and return what names them.

        Args:
            subject: Where.
            attempt: The subject's last word.
            view: What.
            given_up: Set to begin no more parts. Those under way are still waited for: cancelled, they would be stored
                after they were removed.

        Raises:
            GivenUpError: If it was given up.
            StorageFullError: If there is no room.
            TransportError: If a part cannot be stored.
        """
        chunk = self.size

        async def store_part(number: int) -> int:
            if given_up is not None and given_up.is_set():
                raise GivenUpError
            payload = view[number * chunk : (number + 1) * chunk]
            ack = await self._patiently(
                f"storing part {number} on {subject} of {self._url}",
                lambda: self._jetstream.publish(subject, payload, patient=True),
            )
            return ack.seq

        try:
            sequences = await run_windowed(-(-view.nbytes // chunk), store_part, width=_STORING)
        except ApiError as error:
            raise translate(error, f"store {view.nbytes} bytes on {subject}", url=self._url) from error
        return Manifest.of(view.nbytes, chunk, attempt, sequences)

    async def fetch(
        self, stream: str, subject: str, manifest: Manifest, start: int = 0, stop: int | None = None
    ) -> bytes:
        """Return bytes `start` to `stop` of what a manifest names, fetching only the parts that hold them.

        Raises:
            PartsGoneError: If one of them is missing.
            TransportError: If one cannot be fetched.
        """
        stop = manifest.size if stop is None else min(stop, manifest.size)
        if start >= stop:
            return b""
        first, last = start // manifest.chunk, (stop - 1) // manifest.chunk
        sequences = manifest.sequences()

        async def fetch_part(number: int) -> bytes:
            number += first
            part = await self._fetch_part(stream, subject, sequences[number])
            if len(part) != min(manifest.chunk, manifest.size - number * manifest.chunk):
                raise PartsGoneError
            at = number * manifest.chunk
            return part if start <= at and at + len(part) <= stop else part[max(start - at, 0) : stop - at]

        return b"".join(await run_windowed(last - first + 1, fetch_part))

    async def equal(self, stream: str, subject: str, manifest: Manifest, view: memoryview) -> bool:
        """Return whether what a manifest names are these bytes, with a few parts in memory at a time.

        Raises:
            PartsGoneError: If a part is missing.
            TransportError: If one cannot be fetched.
        """
        if manifest.size != view.nbytes:
            return False
        sequences = manifest.sequences()
        chunk = manifest.chunk

        async def compare_part(number: int) -> None:
            part = await self._fetch_part(stream, subject, sequences[number])
            if part != bytes(view[number * chunk : (number + 1) * chunk]):
                raise _OtherBytesError

        try:
            await run_windowed(len(sequences), compare_part)
        except _OtherBytesError:
            return False
        return True

    async def _patiently(self, what: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Return what `work` returns, doing it again after faults that may pass."""
        try:
            return await work()
        except TransientTransportError:  # only now, as preparing for it costs a tenth of the speed
            return await self._retry.call(what, work)

    async def _fetch_part(self, stream: str, subject: str, seq: int) -> bytes:
        what = f"fetching message {seq} of {stream} in {self._url}"
        try:
            stored = await self._patiently(what, lambda: self._jetstream.at(stream, seq))
        except ApiError as error:
            raise translate(error, what, url=self._url) from error
        if stored is None or stored.subject != subject:
            raise PartsGoneError
        return stored.data


class _OtherBytesError(Exception):
    """A part is not what it is compared with."""


async def run_windowed(
    count: int, work: Callable[[int], Awaitable[_Result]], *, width: int = _FETCHING
) -> list[_Result]:
    """Return what `work` returns for 0 to `count` - 1, running `width` at a time, begun in order.

    After a failure no more are begun, those that run are waited for, and the first error is raised: so nothing is under
    way any more when this returns. When cancelled, those that run are cancelled.

    Raises:
        Exception: The first that `work` raised.
    """
    results: list[_Result | None] = [None] * count
    numbers = iter(range(count))
    faults: list[Exception] = []

    async def take() -> None:
        for number in numbers:
            try:
                results[number] = await work(number)
            except Exception as error:
                faults.append(error)
            if faults:
                return

    if count == 1:
        return [await work(0)]
    async with asyncio.TaskGroup() as group:
        for _ in range(min(width, count)):
            group.create_task(take())
    if faults:
        raise faults[0]
    return results  # type: ignore[return-value] # each was set
