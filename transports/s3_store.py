"""Objects in a bucket of Amazon S3, or of any server that speaks its protocol and refuses to overwrite when told so.

A write carries `If-None-Match: *`. A refusal says nothing about who was first, because the answer to an earlier attempt
may have been lost on the way, also to the HTTP client itself, which sends again over a fresh connection; so whoever is
refused compares what is there with what was to be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from deltabus.bus.errors import TransientTransportError, TransportError
from deltabus.bus.retry import Retry
from deltabus.bus.transport import StoredBlob

from .objects import ObjectStore
from .parallel import run_parallel
from .probe import refuses_to_overwrite
from .s3_client import S3Client, S3Settings, md5
from .s3_errors import status_of

__all__ = ["S3Store"]

_PART = 32 << 20
"""Bytes of a part of a large object; four of them are under way at a time."""

_WHOLE = 48 << 20
"""Up to this many bytes go in one request: a part of a payload and a little more."""

_WIDTH = 4
_MAX_PARTS = 10_000
_SMALL = 256 << 10
"""Up to this many bytes an object is compared by fetching it; of a larger one its size and checksum are asked first."""

_DELETIONS = 16


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of an object, with the size and the tag of the whole."""

    data: bytes
    total: int
    tag: str


class S3Store(ObjectStore):
    """The objects below a prefix of a bucket.

    Args:
        settings: Where, and who asks.
        url: The topic's URL, without secrets, for errors.
    """

    def __init__(self, settings: S3Settings, *, url: str) -> None:
        self._bucket = settings.bucket
        self._prefix = settings.prefix
        self._url = url
        self._client = S3Client(settings, url=url)
        self._conditional = False
        self._retry = Retry(limit=settings.timeout)

    async def fetch(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:  # noqa: D102
        if stop is not None and stop <= start:
            return b"" if await self.exists(name) else None
        if stop is not None and stop - start <= _WHOLE:
            piece = await self._fetch_piece(name, start, stop)
            return None if piece is None else piece.data
        # The first answer tells how large the object is.
        first = await self._fetch_piece(name, start, start + _PART)
        if first is None:
            return None
        end = first.total if stop is None else min(stop, first.total)
        pieces = await run_parallel(
            [
                partial(self._fetch_later_piece, name, at, min(at + _PART, end), first.tag)
                for at in range(start + _PART, end, _PART)
            ],
            width=_WIDTH,
        )
        return b"".join([first.data, *pieces])

    async def exists(self, name: str) -> bool:  # noqa: D102
        return await self._head(name) is not None

    async def create(self, name: str, data: memoryview) -> bool:  # noqa: D102
        await self._check_conditional()
        if data.nbytes <= _WHOLE:
            return await self._create_whole(name, data)
        # Neither do all servers heed the condition when parts are put together, nor need what is there be sent again.
        return not await self.exists(name) and await self._create_in_parts(name, data)

    async def holds(self, name: str, data: memoryview) -> bool | None:  # noqa: D102
        if data.nbytes <= _SMALL:
            held = await self.fetch(name, 0, data.nbytes + 1)
            return None if held is None else held == bytes(data)
        head = await self._head(name)
        if head is None:
            return None
        if head["ContentLength"] != data.nbytes:
            return False
        tag = str(head.get("ETag", "")).strip('"')
        if tag == await asyncio.to_thread(_tag_of, data, in_parts="-" in tag):
            return True
        # The tag of an encrypted object, or of one written by another program, says nothing about its bytes.
        same = await run_parallel(
            [partial(self._holds_piece, name, data[at : at + _PART], at) for at in range(0, data.nbytes, _PART)],
            width=_WIDTH,
        )
        return all(same)

    async def remove(self, names: Sequence[str]) -> None:  # noqa: D102
        if names:
            await run_parallel([partial(self._remove, name) for name in names], width=_DELETIONS)

    async def find_names(self, folder: str, after: str, limit: int) -> list[str]:  # noqa: D102
        prefix = f"{self._prefix}{folder}/"
        options: dict[str, Any] = {"StartAfter": prefix + after} if after else {}
        found: list[str] = []
        while True:
            answer = await self._client.call(
                "list_objects_v2",
                {"Bucket": self._bucket, "Prefix": prefix, "MaxKeys": limit - len(found), **options},
                what=f"list {folder!r}",
            )
            found += [entry["Key"].removeprefix(prefix) for entry in answer.get("Contents", ())]
            # A server may end a page sooner than told, even without a name in it.
            if len(found) >= limit or not answer.get("IsTruncated"):
                return found
            options = {"ContinuationToken": answer["NextContinuationToken"]}

    async def find_all(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        options: dict[str, str] = {}
        found: list[StoredBlob] = []
        while True:
            answer = await self._client.call(
                "list_objects_v2",
                {"Bucket": self._bucket, "Prefix": f"{self._prefix}{folder}/", **options},
                what=f"list {folder!r}",
            )
            found += [
                StoredBlob(entry["Key"].removeprefix(self._prefix), entry["Size"], entry["LastModified"].timestamp())
                for entry in answer.get("Contents", ())
                if not entry["Key"].endswith("/")
            ]
            if not answer.get("IsTruncated"):
                return found
            options = {"ContinuationToken": answer["NextContinuationToken"]}

    async def find_folders(self, folder: str) -> list[str]:  # noqa: D102
        prefix = f"{self._prefix}{folder}/"
        found: list[str] = []
        options: dict[str, str] = {}
        while True:
            answer = await self._client.call(
                "list_objects_v2",
                {"Bucket": self._bucket, "Prefix": prefix, "Delimiter": "/", **options},
                what=f"list {folder!r}",
            )
            found += [entry["Prefix"].removeprefix(prefix).rstrip("/") for entry in answer.get("CommonPrefixes", ())]
            if not answer.get("IsTruncated"):
                return found
            options = {"ContinuationToken": answer["NextContinuationToken"]}

    async def close(self) -> None:  # noqa: D102
        await self._client.close()

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    async def _head(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._client.call(
            "head_object", self._at(name), what=f"look for {name!r}", missing=True
        )
        return found

    async def _remove(self, name: str) -> None:
        await self._client.call("delete_object", self._at(name), what=f"delete {name!r}", missing=True)

    async def _fetch_piece(self, name: str, start: int, stop: int) -> _Piece | None:
        """Return bytes of an object, none of them where it ends before; None if there is no such object."""

        async def receive(client: Any, extend: Callable[[], None]) -> _Piece:  # noqa: ANN401 - it has no types
            try:
                answer = await client.get_object(**self._at(name), Range=f"bytes={start}-{stop - 1}")
            except ClientError as error:
                if status_of(error) == 416:
                    return _Piece(b"", 0, "")
                raise
            data = await self._client.receive(answer["Body"], extend)
            _, _, total = answer.get("ContentRange", "").rpartition("/")
            if not total:  # a server that gives the whole object in any case
                return _Piece(data[start:stop], len(data), answer.get("ETag", ""))
            return _Piece(data, int(total), answer.get("ETag", ""))

        return await self._client.run(receive, what=f"read {name!r}", missing=True)

    async def _fetch_later_piece(self, name: str, start: int, stop: int, tag: str) -> bytes:
        """Return bytes of an object whose first were fetched already."""
        what = f"reading bytes {start} to {stop} of {name!r} from {self._url}"
        piece = await self._retry.call(what, partial(self._fetch_piece, name, start, stop))
        if piece is None or piece.tag != tag or len(piece.data) != stop - start:
            raise TransientTransportError(
                f"{name!r} in {self._url} was replaced or removed while it was read; read it again", url=self._url
            )
        return piece.data

    async def _holds_piece(self, name: str, data: memoryview, start: int) -> bool:
        piece = await self._fetch_piece(name, start, start + data.nbytes)
        return piece is not None and piece.data == bytes(data)  # views compare item by item, bytes at once

    async def _create_whole(self, name: str, data: memoryview) -> bool:
        arguments = {**self._at(name), "IfNoneMatch": "*"}
        answer = await self._client.send("put_object", arguments, data, what=f"store {name!r}", write=True)
        return answer is not None

    async def _create_in_parts(self, name: str, data: memoryview) -> bool:
        size = _part_size(data.nbytes)
        begun = await self._client.call("create_multipart_upload", self._at(name), what=f"begin to store {name!r}")
        upload = {**self._at(name), "UploadId": begun["UploadId"]}

        async def send_part(number: int) -> dict[str, Any]:
            part = data[(number - 1) * size : number * size]
            what = f"store part {number} of {name!r}"
            answer = await self._retry.call(
                f"{what} in {self._url}",
                lambda: self._client.send("upload_part", {**upload, "PartNumber": number}, part, what=what),
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            count = -(-data.nbytes // size)
            parts = await run_parallel([partial(send_part, number + 1) for number in range(count)], width=_WIDTH)
            done = await self._client.call(
                "complete_multipart_upload",
                {**upload, "MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*"},
                what=f"put the parts of {name!r} together",
                write=True,
            )
        except BaseException:
            await self._abort(upload)
            raise
        if done is None:
            await self._abort(upload)
        return done is not None

    async def _abort(self, upload: dict[str, str]) -> None:
        """Remove the parts of an upload that was given up, as far as that is possible."""
        with contextlib.suppress(TransportError):  # the fault that led here is told; a server expires what is left
            await self._client.call("abort_multipart_upload", upload, what="give up an upload", missing=True)

    async def _check_conditional(self) -> None:
        """Make sure, once, that the server refuses to overwrite; one that does not would lose what others wrote."""
        self._conditional = self._conditional or await refuses_to_overwrite(self._create_whole, url=self._url)
        if self._conditional:
            return
        raise TransportError(
            f"{self._url} is on a server that ignores 'If-None-Match: *', so that two writers would destroy what the "
            "other wrote; nothing was written but a probe. Use a server that knows conditional writes",
            url=self._url,
        )


def _tag_of(data: memoryview, *, in_parts: bool) -> str:
    """Return the tag that a server gives to an object written by this module, unless it encrypts it."""
    if not in_parts:
        return md5(data).hex()
    size = _part_size(data.nbytes)
    digests = [md5(data[at : at + size]) for at in range(0, data.nbytes, size)]
    return f"{md5(b''.join(digests)).hex()}-{len(digests)}"


def _part_size(nbytes: int) -> int:
    return max(_PART, -(-nbytes // _MAX_PARTS))
