"""Leases: what readers that follow a topic still need, so that retention leaves it alone.

    leases/<reader, 16 hex digits>/<number, 12 digits>    one MessagePack map: `reader`, `holds`, `seconds`, `protocol`

Blobs are write-once, so each renewal is a new one, and its holder removes the one before. A lease ends `seconds` after
the backend stored it, on the backend's own clock: neither the reader's clock nor that of whoever prunes decides. A
reader renews when half the time is over, so that it writes two small blobs in the time of a lease, and removes two;
where that fails it soon tries again, since the other half is there for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from .errors import KeyNotFoundError, TransportError, UsageError
from .retry import Retry
from .transport import StoredBlob, Transport

__all__ = ["FOLDER", "LONGEST", "HeldLease", "Lease", "LeaseKeeper", "read_leases"]

FOLDER = "leases"
"""Where leases lie in a topic."""

LONGEST = 7 * 86400.0
"""The longest time of a lease that is heeded, in seconds: a reader that died must not keep a topic for ever."""

_log = logging.getLogger("deltabus.leases")
_KEY = re.compile(rf"{FOLDER}/[0-9a-f]{{16}}/[0-9]{{12}}")
_MOST_BYTES = 1 << 18
_UNREADABLE_SECONDS = 3600.0
_AT_ONCE = 8
_RENEWAL = 1 / 2
_SOON = 1 / 16
_LONGEST_RETRY = 10.0
_ATTEMPTS = 5
_PROTOCOL = 1


class Lease(Struct, frozen=True, kw_only=True):
    """What a reader says.

    Attributes:
        reader: Its name, for people.
        holds: The version of each writer that it holds; it needs what leads beyond them. Writers that are missing count
            as version 0.
        seconds: How long the lease lasts from the moment that it was stored.
        protocol: The version of this form.
        writers: The writers that it reads; it needs nothing of others. Unset is all.
    """

    reader: Annotated[str, Meta(max_length=256)]
    holds: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(max_length=4096)]
    seconds: Annotated[float, Meta(gt=0)]
    protocol: int = _PROTOCOL
    writers: Annotated[tuple[str, ...], Meta(max_length=4096)] | UnsetType = UNSET


_decoder = msgspec.msgpack.Decoder(Lease)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease as it lies in the topic.

    Attributes:
        key: Where.
        reader: Whose, for people.
        holds: The versions that it holds; None when the lease cannot be read, so that it may need anything.
        ends: When it ends, on the backend's clock, in seconds.
        writers: The writers that are read; None is all.
    """

    key: str
    reader: str
    holds: Mapping[str, int] | None
    ends: float
    writers: frozenset[str] | None = None

    def is_live(self, now: float) -> bool:
        """Return whether it still counts at a time of the backend's clock, in seconds."""
        return now < self.ends

    def version_of(self, writer: str) -> int | None:
        """Return the version of a writer beyond which everything is needed; None when nothing of it is."""
        if self.writers is not None and writer not in self.writers:
            return None
        return self.holds.get(writer, 0) if self.holds is not None else 0


async def read_leases(transport: Transport, *, retry: Retry, now: float) -> list[HeldLease]:
    """Return all leases of a topic, dead ones too, by key.

    One that cannot be read counts for an hour as that of a reader that needs everything; so do, for a moment, leases
    that are renewed again and again while they are read.

    Args:
        transport: The topic, opened.
        retry: How long to try what may pass.
        now: On the backend's clock; what a lease without a time is taken to be stored at.

    Raises:
        TransportError: If they cannot be listed or fetched.
    """
    places = asyncio.Semaphore(_AT_ONCE)

    async def read(blob: StoredBlob) -> HeldLease | None:
        async with places:
            stored = now if blob.stored is None else blob.stored
            if stored + LONGEST <= now:  # dead, whatever it says
                return HeldLease(key=blob.key, reader="?", holds=None, ends=stored + LONGEST)
            try:
                data = await retry.call(
                    f"reading {blob.key} of {transport.url}", lambda: transport.get(blob.key, 0, _MOST_BYTES)
                )
            except KeyNotFoundError:
                return None
            return _held(blob.key, data, stored)

    for _ in range(_ATTEMPTS):
        listed = await retry.call(f"listing the leases of {transport.url}", lambda: transport.blobs(FOLDER))
        found = await asyncio.gather(*(read(blob) for blob in listed if _KEY.fullmatch(blob.key)))
        leases = [lease for lease in found if lease is not None]
        if len(leases) == len(found):
            return leases
        # One was given up, or renewed: then the new one is there by now, but was not listed.
    return [*leases, HeldLease(key=FOLDER, reader="readers that come and go", holds=None, ends=now + 1.0)]


def _held(key: str, data: bytes, stored: float) -> HeldLease:
    try:
        lease = _decoder.decode(data)
        known = lease.protocol == _PROTOCOL
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        known = False
    if not known:
        _log.warning("lease %s cannot be read; for an hour nothing is removed because of it", key)
        return HeldLease(key=key, reader=key, holds=None, ends=stored + _UNREADABLE_SECONDS)
    return HeldLease(
        key=key,
        reader=lease.reader,
        holds=lease.holds,
        ends=stored + min(lease.seconds, LONGEST),
        writers=None if lease.writers is UNSET else frozenset(lease.writers),
    )


class LeaseKeeper:
    """Writes a reader's lease and renews it, until it is ended.

    A backend that refuses, or does not answer, is no reason to stop reading: it is told once in the log, and tried
    again after a sixteenth of the lease. Renewals that are asked for beside each other wait for each other.

    Args:
        transport: The topic, opened.
        reader: The reader's name, for people.
        seconds: How long a lease lasts; it is renewed after half of that.
        holds: Tells what the reader holds now: the version of each writer.
        writers: The writers that it reads; None is all.
        retry: How long to try what may pass; None is a quarter of the lease, at most 10 s.
        draw: Returns so many random bytes, for the reader's folder.

    Raises:
        UsageError: If the time is not above 0, or over `LONGEST`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        reader: str,
        seconds: float,
        holds: Callable[[], Mapping[str, int]],
        writers: Collection[str] | None = None,
        retry: Retry | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        if not 0 < seconds <= LONGEST:
            raise UsageError(f"a lease of {seconds} s is not possible; use more than 0 and at most {LONGEST:g}")
        self._transport = transport
        self._reader = reader[:256]
        self._seconds = seconds
        self._holds = holds
        self._writers = UNSET if writers is None else tuple(sorted(writers))
        self._retry = retry or Retry(limit=min(seconds / 4, _LONGEST_RETRY))
        self._folder = f"{FOLDER}/{draw(8).hex()}"
        self._number = 0
        self._keys: list[str] = []
        self._lock = asyncio.Lock()
        self._due = asyncio.Event()
        self._stored = True
        self._told = False

    async def renew(self) -> None:
        """Write the lease anew, and remove those before."""
        async with self._lock:
            lease = Lease(reader=self._reader, holds=dict(self._holds()), seconds=self._seconds, writers=self._writers)
            data = _encoder.encode(lease)
            self._number += 1
            key = f"{self._folder}/{self._number:012}"
            # Before it is stored: whoever is cancelled meanwhile, or gets no answer, may have stored it.
            self._keys.append(key)
            self._stored = False
            try:
                await self._retry.call(
                    f"writing a lease to {self._transport.url}", lambda: self._transport.put(key, data)
                )
                self._stored = True
                await self._remove(self._keys[:-1])
            except TransportError as error:
                level = logging.DEBUG if self._told else logging.WARNING
                what = "an old lease was not removed" if self._stored else "retention does not know of this reader"
                _log.log(level, "%s: %s: %s", self._transport.url, what, error)
                self._told = True
            else:
                self._told = False

    def renew_soon(self) -> None:
        """Let `run` renew at once, without waiting for it."""
        self._due.set()

    async def run(self) -> None:
        """Renew for ever: when half of the lease is over, when asked to, and soon after a renewal that failed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds * (_RENEWAL if self._stored else _SOON)):
                    await self._due.wait()
            self._due.clear()
            await self.renew()

    async def end(self) -> None:
        """Give the lease up; what fails is left to end by itself."""
        async with self._lock:
            try:
                await self._remove(self._keys)
            except TransportError as error:
                _log.debug("the leases %s of %s end by themselves: %s", self._keys, self._transport.url, error)
                self._keys = []

    async def _remove(self, keys: Iterable[str]) -> None:
        if gone := list(keys):
            await self._transport.delete(gone)
            self._keys = [key for key in self._keys if key not in gone]
