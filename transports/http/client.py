"""`http://host:port/topic`: a topic on a service that `deltabus serve` runs, as a `Transport`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from deltabus.bus.errors import AppendUnknownError, TransportError
from deltabus.bus.message import MAX_BLOB_BYTES
from deltabus.bus.transport import Buffer, Guarantees, Record, StoredBlob, Transport

from ..names import (
    byte_view,
    check_after,
    check_key,
    check_keys,
    check_log,
    check_position,
    check_range,
    check_record,
)
from ..options import Option
from ..registry import Address
from .follow import follow
from .session import Answer, LostError, Session
from .settings import OPTIONS, Settings, read_settings
from .wire import MAX_DELETE, RECORDS, Deletion, Listing, Logs, RecordParser

__all__ = ["HttpTransport"]

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_MAX_LISTING = 256 << 20
_Value = TypeVar("_Value")


class HttpTransport(Transport):
    """A topic on a service that `deltabus serve` runs.

    Args:
        settings: Where, who and how; `read_settings` makes it from a URL.
    """

    guarantees = Guarantees(
        conditional_append=True,
        push=True,
        durable=True,
        atomic_visibility=True,
        remark="What the service serves is kept as its own backend keeps it: `memory://` is gone with the process.",
    )
    options: ClassVar[Sequence[Option]] = OPTIONS

    def __init__(self, settings: Settings) -> None:
        self.url = settings.url
        self._settings = settings
        self._session = Session(settings)

    @classmethod
    def from_address(cls, address: Address, **options: Any) -> Self:  # noqa: ANN401 - as declared in `options`
        """Return the topic that the URL names.

        Raises:
            UsageError: If the URL names no host or topic, or a user.
        """
        return cls(read_settings(address, **options))

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        self._session.check_open()
        check_key(key)
        async with self._session.request("PUT", f"blobs/{key}", what=f"store blob {key!r}", body=byte_view(data)):
            pass

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        self._session.check_open()
        check_key(key)
        check_range(start, stop)
        path, what = f"blobs/{key}", f"read blob {key!r}"
        if stop is not None and stop <= start:
            async with self._session.request("HEAD", path, what=what):
                return b""
        found: list[bytes] = []
        at = start
        while stop is None or at < stop:
            before = at
            headers = {} if at == 0 and stop is None else {"Range": f"bytes={at}-{'' if stop is None else stop - 1}"}
            try:
                async with self._session.request("GET", path, what=what, headers=headers, also=(416,)) as answer:
                    if answer.status == 416:
                        break
                    end = await self._take(answer, at, stop, found)
            except LostError:
                at = start + sum(map(len, found))
                if at == before:
                    raise
                continue  # the rest of it
            at = start + sum(map(len, found))
            if end is None or at >= end:
                break
        return b"".join(found)

    async def _take(self, answer: Answer, at: int, stop: int | None, found: list[bytes]) -> int | None:
        """Collect what an answer holds of the bytes behind `at`; return where the blob ends, None if it ended here."""
        skip, end = at, None
        if answer.status == 206:
            told = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if not told or int(told[1]) != at:
                raise TransportError(f"{self.url} answers with another range of bytes than was asked for", url=self.url)
            skip, end = 0, MAX_BLOB_BYTES if told[3] == "*" else int(told[3])
        size = sum(map(len, found))
        async for piece in answer.pieces():
            part = piece[skip:] if skip else piece
            skip = max(0, skip - len(piece))
            if stop is not None:
                part = part[: stop - at]
            at += len(part)
            size += len(part)
            if size > MAX_BLOB_BYTES:
                raise TransportError(f"{self.url} sends a blob of over {MAX_BLOB_BYTES} bytes", url=self.url)
            found.append(part)
        return end

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        self._session.check_open()
        checked = check_keys(keys)
        for first in range(0, len(checked), MAX_DELETE):
            body = msgspec.json.encode(Deletion(keys=checked[first : first + MAX_DELETE]))
            what = f"remove {len(checked)} blobs"
            async with self._session.request("POST", "delete", what=what, body=body):
                pass

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        self._session.check_open()
        check_key(folder)
        what = f"list the blobs below {folder!r}"
        async with self._session.request("GET", "blobs", what=what, query={"folder": folder}) as answer:
            listing = self._decode(await answer.read(_MAX_LISTING), Listing)
        return [StoredBlob(blob.key, blob.size, blob.stored) for blob in listing.blobs]

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        self._session.check_open()
        check_log(log)
        check_position(position)
        view = check_record(record)
        what = f"append at position {position} of log {log!r}"
        try:
            async with self._session.request("PUT", f"logs/{log}/{position}", what=what, body=view):
                pass
        except LostError as error:
            raise AppendUnknownError(str(error), url=self.url) from None

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        self._session.check_open()
        check_log(log)
        check_after(after, limit)
        found: list[Record] = []
        parser = RecordParser()
        what = f"read log {log!r} after {after}"
        query = {"after": after, "limit": limit}
        headers = {"Accept": RECORDS}
        async with self._session.request("GET", f"logs/{log}", what=what, query=query, headers=headers) as answer:
            try:
                async for piece in answer.pieces():
                    found += parser.feed(piece)
            except ValueError as error:
                raise TransportError(f"{self.url}: {error}", url=self.url) from None
        return found[:limit]

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        self._session.check_open()
        check_log(log)
        check_after(after)
        return follow(self._session, log, after, timeout=self._settings.timeout, poll=self._settings.poll)

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        self._session.check_open()
        check_log(log)
        check_position(before)
        what = f"trim log {log!r} before {before}"
        async with self._session.request("DELETE", f"logs/{log}", what=what, query={"before": before}):
            pass

    async def logs(self) -> list[str]:  # noqa: D102
        self._session.check_open()
        async with self._session.request("GET", "logs", what="list the logs") as answer:
            return self._decode(await answer.read(_MAX_LISTING), Logs).logs

    async def status(self, *, whole: bool = False) -> dict[str, Any]:
        """Return what the service knows of the topic, or of all that it serves, for people.

        Raises:
            TransportError: If it does not answer, or refuses.
        """
        path = "/-/status" if whole else "status"
        async with self._session.request("GET", path, what="ask for the state") as answer:
            return self._decode(await answer.read(_MAX_LISTING), dict[str, Any])

    async def close(self) -> None:  # noqa: D102
        await self._session.close()

    def _decode(self, data: bytes, kind: type[_Value]) -> _Value:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise TransportError(
                f"{self.url} does not answer as deltabus does; check host and port", url=self.url
            ) from None
