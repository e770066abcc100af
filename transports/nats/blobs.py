"""Blobs: one message each, or parts and a manifest; the first to store that message has written the blob."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine

import msgspec

from deltabus.bus.errors import KeyExistsError, KeyNotFoundError, TransientTransportError, TransportError
from deltabus.bus.retry import Retry
from deltabus.bus.transport import StoredBlob

from .chunks import MANIFEST, Chunks, Manifest, PartsGoneError, read_manifest, run_windowed
from .faults import WRONG_LAST, ApiError, translate
from .jetstream import Head, JetStream, LostPlaceError, Stored
from .session import UnansweredError
from .streams import Streams, make_attempt

__all__ = ["Blobs"]

_log = logging.getLogger("deltabus.nats")
_ATTEMPTS = 5
_ABANDONED = 24 * 3600
_WHOLE_HEADERS = {MANIFEST: "1"}


class _OvertakenError(Exception):
    """Another message was stored first."""


class Blobs:
    """The blobs of a topic.

    Args:
        jetstream: To the servers.
        streams: Where the blobs are.
        chunks: Stores and fetches parts.
        url: The topic's URL, for errors.
        timeout: Seconds in which the message of a blob must be stored, with all repetitions.
    """

    def __init__(self, jetstream: JetStream, streams: Streams, chunks: Chunks, *, url: str, timeout: float) -> None:
        self._jetstream = jetstream
        self._streams = streams
        self._chunks = chunks
        self._url = url
        self._retry = Retry(limit=timeout, pause=0.05, longest=1.0)
        self._tidy = False
        self._cleaning: set[asyncio.Task[None]] = set()

    async def put(self, key: str, view: memoryview) -> None:
        """Store a blob, write-once; see `Transport.put` for its errors."""
        await self._streams.ensure()
        subject = self._streams.blob_subject(key)
        what = f"store blob {key!r} of {view.nbytes} bytes"
        expected = 0
        # A large blob is first looked for; a small one costs no more than the look.
        small = view.nbytes <= self._chunks.size
        try:
            there = None if small else await self._jetstream.last(self._streams.blobs, subject)
            for _ in range(_ATTEMPTS):
                if there is not None:
                    if await self._holds(key, there, view):
                        return
                    expected = there.seq
                try:
                    if small:
                        await self._publish(subject, bytes(view), {}, expected)
                    else:
                        await self._put_parts(key, view, expected)
                except _OvertakenError:
                    there = await self._jetstream.last(self._streams.blobs, subject)
                    expected = 0
                else:
                    return
        except ApiError as error:
            self._streams.forget()
            raise translate(error, what, url=self._url) from error
        except TransientTransportError:
            self._streams.forget()
            raise
        raise TransientTransportError(f"cannot {what} in {self._url}: others write and delete it", url=self._url)

    async def get(self, key: str, start: int, stop: int | None) -> bytes:
        """Return bytes of a blob; see `Transport.get` for its errors."""
        stream, subject = self._streams.blobs, self._streams.blob_subject(key)
        what = f"read blob {key!r}"
        try:
            # What a replica has is right, as blobs do not change; what it lacks the leader may have.
            there = await self._jetstream.nearby_last(stream, subject)
            for _ in range(2):
                there = there or await self._jetstream.last(stream, subject)
                if there is None:
                    break
                manifest = read_manifest(there, url=self._url)
                if manifest is None:
                    return there.data[start:stop]
                with contextlib.suppress(PartsGoneError):
                    return await self._chunks.fetch(stream, self._parts(key, manifest), manifest, start, stop)
                there = None
        except ApiError as error:
            raise translate(error, what, url=self._url) from error
        raise KeyNotFoundError(
            f"{self._url} has no blob {key!r}, or no longer all of it: it was never stored, or was deleted by "
            "retention or the stream's max_age",
            url=self._url,
        )

    async def delete(self, keys: list[str]) -> None:
        """Remove blobs with all that belongs to them; see `Transport.delete` for its errors."""

        async def remove(number: int) -> None:
            await self._jetstream.purge(self._streams.blobs, self._streams.blob_parts_subject(keys[number], "*"))

        try:
            await run_windowed(len(keys), remove)
        except ApiError as error:
            raise translate(error, f"delete {len(keys)} blobs", url=self._url) from error

    async def find(self, folder: str) -> list[StoredBlob]:
        """Return the blobs in a folder; see `Transport.blobs` for its errors."""

        async def list_heads() -> list[Head]:
            return await self._jetstream.heads(self._streams.blobs, self._streams.blob_subject("*"))

        try:
            heads = await self._retry.call(f"listing the blobs of {self._url}", list_heads, on=(LostPlaceError,))
        except ApiError as error:
            raise translate(error, f"list the blobs in {folder!r}", url=self._url) from error
        return sorted(
            StoredBlob(key, None if MANIFEST in head.headers else head.size, head.stored)
            for head in heads
            if (key := self._streams.key_of(head.subject)).startswith(f"{folder}/")
        )

    async def settle(self, limit: float) -> None:
        """Wait until what was left by cancelled calls is removed, at most `limit` seconds."""
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=limit)
        for task in list(self._cleaning):
            task.cancel()

    async def _holds(self, key: str, there: Stored, view: memoryview) -> bool:
        """Return whether these bytes are stored, to stay; otherwise they are to be written once more.

        Raises:
            KeyExistsError: If others are.
        """
        manifest = read_manifest(there, url=self._url)
        try:
            if manifest is None:
                equal = there.data == bytes(view)
            else:
                equal = await self._chunks.equal(self._streams.blobs, self._parts(key, manifest), manifest, view)
        except PartsGoneError:
            return False
        if not equal:
            raise KeyExistsError(f"{self._url} holds other bytes under key {key!r}; keys are write-once", url=self._url)
        # Whoever puts it counts on it: it must not be removed soon because it was put before.
        return not self._streams.max_age or there.age(time.time()) < self._streams.max_age / 2

    async def _put_parts(self, key: str, view: memoryview, expected: int) -> None:
        await self._remove_abandoned()
        attempt = make_attempt(time.time())
        parts = self._streams.blob_parts_subject(key, attempt)
        given_up = asyncio.Event()
        # On its own: when the call is cancelled, the parts under way are to be waited for before they are removed.
        storing = asyncio.ensure_future(self._chunks.store(parts, attempt, view, given_up=given_up))
        try:
            manifest = await asyncio.shield(storing)
        except asyncio.CancelledError:
            given_up.set()
            self._clean(self._remove_after(storing, parts))
            raise
        except (ApiError, TransportError):
            await self._remove(parts)
            raise
        payload = msgspec.msgpack.encode(manifest)
        if len(payload) > self._chunks.largest:
            await self._remove(parts)
            raise TransportError(
                f"{self._url}: the list of parts of blob {key!r} does not fit into a message; raise max_payload in the "
                "server's configuration",
                url=self._url,
            )
        try:
            await self._publish(self._streams.blob_subject(key), payload, _WHOLE_HEADERS, expected, attempt)
        except (_OvertakenError, ApiError):
            await self._remove(parts)
            raise
        # Where the answer was lost, the parts stay: the manifest may be there.
        there = await self._jetstream.subjects(self._streams.blobs, parts)
        if there.get(parts, 0) < len(manifest.sequences()):
            # Removed before the manifest was there: taken for abandoned after a long pause, or outlived by max_age.
            await self._remove(parts)
            raise _OvertakenError

    async def _publish(
        self, subject: str, payload: bytes, headers: dict[str, str], expected: int, attempt: str = ""
    ) -> None:
        """Store the message that makes a blob visible.

        Raises:
            _OvertakenError: If another one is there.
        """
        lost = False

        async def publish() -> None:
            nonlocal lost
            try:
                await self._jetstream.publish(subject, payload, headers=headers, expected=expected)
            except UnansweredError:
                lost = True
                raise
            except ApiError as error:
                if error.number not in WRONG_LAST:
                    raise
                # A repetition finds what it stored when the answer was lost.
                there = await self._jetstream.last(self._streams.blobs, subject) if lost and attempt else None
                if there is None or there.data != payload:
                    raise _OvertakenError from error

        await self._retry.call(f"storing {subject} in {self._url}", publish)

    async def _remove_abandoned(self) -> None:
        """Remove, once, what writers left behind that died while they stored a blob.

        Whether it is old is told by the server's clock alone, and whether it was finished is asked again at the end.
        """
        if self._tidy:
            return
        self._tidy = True
        stream = self._streams.blobs
        try:
            now = await self._jetstream.clock(stream)
            if now is None:
                return
            heads = await self._jetstream.heads(stream, self._streams.blob_parts_subject("*", "*"))
            stored = {head.subject: head.stored for head in heads}
            for parts in self._streams.abandoned_parts(stored, now - _ABANDONED):
                if await self._jetstream.last(stream, self._streams.head_of(parts)) is not None:
                    continue
                _log.info("removing %s of %s, which was never finished", parts, self._url)
                await self._jetstream.purge(stream, parts)
        except (ApiError, TransportError) as error:
            _log.info("what was left behind in %s is not removed now: %s", self._url, error)

    def _parts(self, key: str, manifest: Manifest) -> str:
        return self._streams.blob_parts_subject(key, manifest.attempt)

    def _clean(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _remove_after(self, storing: asyncio.Future[Manifest], parts: str) -> None:
        try:
            await asyncio.wait((storing,))
        finally:
            if not storing.cancel() and not storing.cancelled():
                storing.exception()
        await self._remove(parts)

    async def _remove(self, parts: str) -> None:
        """Remove parts that no manifest will name; they harm nobody where that fails."""
        try:
            await self._jetstream.purge(self._streams.blobs, parts)
        except (ApiError, TransportError) as error:
            _log.info("parts on %s of %s are left behind: %s", parts, self._url, error)
