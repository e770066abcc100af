"""`hf://buckets/namespace/name/prefix`: topics in storage buckets of the Hugging Face Hub.

    <prefix>/<key>~<SHA-256>-<nonce>                                     a blob
    <prefix>/logs/<log>/00000000000000000007~<SHA-256>-<nonce>           the record at position 7 of a log

The Hub takes every write, so that several files may want to stand at one place; `hub_rule.py` says which one does.
Bytes go through Xet's store and are checked against the hash in the name, except ranges of large blobs, which only who
reads all of them can check.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import ClassVar, Self

from huggingface_hub import constants

from deltabus.bus.errors import KeyExistsError, KeyNotFoundError, TransportError, UsageError
from deltabus.bus.transport import Buffer, Guarantees, Record, StoredBlob, Transport

from .hub_client import HubClient
from .hub_errors import FileMissingError
from .hub_log import HubLogs
from .hub_rule import Candidate, choose, name_candidate
from .hub_store import HubStore
from .names import (
    byte_view,
    check_after,
    check_key,
    check_keys,
    check_log,
    check_position,
    check_range,
    check_record,
)
from .options import Option, parse_flag, parse_seconds
from .registry import Address

__all__ = ["HubTransport", "parse_endpoint"]

_POLL = 2.0
_SETTLE = 0.5
_TIMEOUT = 60.0
_SMALL = 1 << 20
"""Bytes up to which one request to the Hub is faster than the three that Xet takes."""

_WHOLE = 8 << 20
"""Bytes up to which a blob is read whole, so that also a part of it is checked."""

_MOMENT = 0.002
"""Seconds that are longer than the steps in which the Hub counts time."""

_AT_ONCE = 16
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_EXAMPLE = "write one such as hf://buckets/namespace/name/run-7"


def parse_endpoint(text: str) -> str:
    """Return the address of a Hub; empty is the one that `huggingface_hub` uses.

    Raises:
        ValueError: If it is none, or holds a user name or password.
    """
    if text and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", text):
        raise ValueError("not an address such as https://huggingface.co, without user name and query")
    return text.rstrip("/")


class HubTransport(Transport):
    """A topic in a bucket of the Hugging Face Hub.

    Args:
        bucket: `namespace/name`.
        prefix: What stands before all names of the topic, written like a key; empty for a bucket of its own.
        token: A token of the Hub; empty is the one that `huggingface_hub` finds (HF_TOKEN, or that of a login).
        endpoint: The Hub's address; empty is the one that `huggingface_hub` uses (HF_ENDPOINT).
        create: Whether to create the bucket, as a private one, when it is missing.
        settle: Seconds within which the Hub's clocks agree and a listing shows what was stored; a record is
            acknowledged, and delivered, no sooner.
        poll: Seconds between two looks for new records, at most, while the change feed is not available.
        timeout: Seconds after which an operation that makes no progress is given up.

    Raises:
        UsageError: If the bucket or prefix is malformed.
    """

    guarantees = Guarantees(
        conditional_append=False,
        push=True,
        durable=True,
        atomic_visibility=True,
        remark="Of racing writers the one wins whose record the Hub stored first, decided after the time `settle`.",
    )
    options: ClassVar[Sequence[Option]] = (
        Option(name="token", parse=str, default="", help="a token of the Hub, instead of HF_TOKEN", secret=True),
        Option(name="endpoint", parse=parse_endpoint, default="", help="the Hub's address, instead of HF_ENDPOINT"),
        Option(name="create", parse=parse_flag, default=False, help="whether to create a bucket that is missing"),
        Option(name="settle", parse=parse_seconds, default=_SETTLE, help="seconds until a record counts as decided"),
        Option(name="poll", parse=parse_seconds, default=_POLL, help="most seconds between looks without a feed"),
        Option(name="timeout", parse=parse_seconds, default=_TIMEOUT, help="seconds to wait for a Hub that hangs"),
    )

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        token: str = "",
        endpoint: str = "",
        create: bool = False,
        settle: float = _SETTLE,
        poll: float = _POLL,
        timeout: float = _TIMEOUT,
    ) -> None:
        namespace, _, name = bucket.partition("/")
        if not _BUCKET.fullmatch(namespace) or not _BUCKET.fullmatch(name):
            raise UsageError(f"bucket {bucket[:80]!r} is not namespace/name; {_EXAMPLE}")
        try:
            self._root = f"{check_key(prefix)}/" if prefix else ""
        except UsageError as error:
            raise UsageError(f"what stands behind the bucket is written like a key: {error}") from error
        self.url = f"hf://buckets/{bucket}/{prefix}".rstrip("/")
        self._client = HubClient(
            bucket,
            endpoint=endpoint or constants.ENDPOINT,
            token=token or None,
            timeout=timeout,
            create=create,
            url=self.url,
        )
        self._store = HubStore(self._client, timeout=timeout)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._logs = HubLogs(self._client, self._store, self._root, settle=settle, poll=poll, timeout=timeout)
        self._closed = False

    @classmethod
    def from_address(cls, address: Address, **options: object) -> Self:
        """Return the topic that the URL names.

        Raises:
            UsageError: If the URL names no bucket, or holds a user name or password.
        """
        if address.username is not None:
            raise UsageError(f"{address.text} holds a user name; log in with HF_TOKEN or the option 'token' instead")
        parts = address.path.strip("/").split("/", 2)
        if address.host != "buckets" or len(parts) < 2:
            raise UsageError(f"{address.text} names no bucket; {_EXAMPLE}")
        return cls("/".join(parts[:2]), "/".join(parts[2:]), **options)  # type: ignore[arg-type]

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        self._client.check_open()
        place, view = self._root + check_key(key), byte_view(data)
        what = f"store blob {key!r}"
        identity = (await asyncio.to_thread(hashlib.sha256, view)).hexdigest()
        held = choose(await self._candidates(place))
        if held is None:
            path = name_candidate(place, identity, secrets.token_hex(8))
            await self._client.add(path, await self._store.upload(view, what))
            # Whoever adds another from now on is later, and that is all it takes: keys name their content.
            await asyncio.sleep(_MOMENT)
            held = choose(await self._candidates(place))
            if held is not None and held.identity != identity:
                await self._client.remove([path])
        if held is not None and held.identity != identity:
            raise KeyExistsError(
                f"cannot {what} in {self.url}: other bytes are there, and keys are write-once", url=self.url
            )

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        self._client.check_open()
        check_key(key)
        check_range(start, stop)
        held = choose(await self._candidates(self._root + key))
        missing = KeyNotFoundError(f"{self.url} has no blob {key!r}", url=self.url)
        if held is None:
            raise missing
        end = held.size if stop is None else min(stop, held.size)
        try:
            if start >= end:
                return b""
            if start == 0 and end == held.size:
                return await self._whole(held, f"read blob {key!r}")
            if held.size <= _WHOLE:
                return (await self._whole(held, f"read blob {key!r}"))[start:end]
            return await self._part(held, start, end, f"read blob {key!r}")
        except FileMissingError:
            raise missing from None  # it was removed meanwhile

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        self._client.check_open()
        places = [self._root + key for key in check_keys(keys)]
        found = await asyncio.gather(*(self._candidates(place) for place in places))
        await self._client.remove([one.path for candidates in found for one in candidates])

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        self._client.check_open()
        by_place: dict[str, list[Candidate]] = {}
        for one in await self._client.candidates(f"{self._root}{check_key(folder)}/"):
            by_place.setdefault(one.place, []).append(one)
        held = [choose(by_place[place]) for place in sorted(by_place)]
        return [
            StoredBlob(one.place.removeprefix(self._root), one.size, one.stored.timestamp())
            for one in held
            if one is not None
        ]

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        self._client.check_open()
        check_log(log)
        check_position(position)
        await self._logs.append(log, position, check_record(record))

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        self._client.check_open()
        check_log(log)
        check_after(after, limit)
        return await self._logs.read(log, after, limit)

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        self._client.check_open()
        check_log(log)
        check_after(after)
        return self._logs.tail(log, after)

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        self._client.check_open()
        check_log(log)
        check_position(before)
        await self._logs.trim(log, before)

    async def logs(self) -> list[str]:  # noqa: D102
        self._client.check_open()
        return await self._logs.names()

    async def close(self) -> None:  # noqa: D102
        if not self._closed:
            self._closed = True
            self._client.shut()
            await self._logs.close()
            await self._client.close()

    async def _candidates(self, place: str) -> list[Candidate]:
        async with self._turns:
            return await self._client.candidates(f"{place}~")

    async def _whole(self, held: Candidate, what: str) -> bytes:
        """Return all bytes of a blob, checked."""
        found = ""
        for _ in range(2):  # a second look heals a fault on the way, not one at rest
            if held.size <= _SMALL:
                data = await self._client.fetch(held.path)
                found = hashlib.sha256(data).hexdigest()
            else:
                data, found = await self._store.download(held.content, held.size, 0, held.size, what)
            if found == held.identity:
                return data
        raise TransportError(
            f"cannot {what} in {self.url}: its bytes have the hash {found[:16]}..., not that of its name "
            f"{held.path!r}; restore it from a copy, or let the publisher publish an anchor",
            url=self.url,
        )

    async def _part(self, held: Candidate, start: int, end: int, what: str) -> bytes:
        """Return a range of a large blob, as long as it should be."""
        if end - start <= _SMALL:
            data = await self._client.fetch(held.path, start, end)
        else:
            data, _ = await self._store.download(held.content, held.size, start, end, what)
        if len(data) != end - start:
            raise TransportError(
                f"cannot {what} in {self.url}: the Hub gave {len(data)} of {end - start} bytes", url=self.url
            )
        return data
