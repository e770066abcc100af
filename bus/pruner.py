"""Pruning: what `retention` decides, carried out on a topic that others write and read meanwhile.

    trims/<log>/<position, 20 digits>    says that retention removed, or was about to remove, what is in front of it
    marks/<16 hex digits>                asks the backend what time it is; removed at once

The mark of a log is stored before its records are removed, so that a log that begins later than its mark says, or has
none, lost its beginning in some other way. Then records go, oldest first, then their blobs, then garbage. Whatever is
interrupted is finished by the next run; runs beside each other do the same work twice, and no harm.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .leases import HeldLease, read_leases
from .message import Message
from .reader import TopicReader
from .retention import Removal, Retention, garbage, plan_removal
from .retry import Retry
from .signing import KeyRing
from .transport import StoredBlob, Transport

__all__ = ["Pruner", "Pruning", "trimmed_to"]

_TRIMS = "trims"
_MARKS = "marks"
_STALE_SECONDS = 3600.0
_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What a run removes, or would remove.

    Attributes:
        removal: Records, and the blobs that they alone name.
        garbage: Blobs that no record names.
        leases: Of all readers, by key, dead ones too.
        now: The time on the backend's clock, in seconds.
    """

    removal: Removal
    garbage: tuple[StoredBlob, ...]
    leases: tuple[HeldLease, ...]
    now: float

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove of what was published."""
        return not (self.removal.trims or self.garbage)


async def trimmed_to(transport: Transport, log: str, *, retry: Retry | None = None) -> int:
    """Return the position up to which retention says that it removed a log's records; 0 if it says nothing.

    Raises:
        TransportError: If the backend does not tell.
    """
    retry = retry or Retry()
    folder = f"{_TRIMS}/{log}"
    marks = await retry.call(f"listing {folder} of {transport.url}", lambda: transport.blobs(folder))
    return max(map(_position, marks), default=0)


class Pruner:
    """Removes from a topic what a policy lets go.

    Args:
        transport: The topic, opened.
        policy: What to keep.
        keys: Whose messages are believed; None believes everybody.
        retry: How long to try what may pass.
        clock: Tells seconds since 1970; used where the backend does not tell its own time, or is not to be written to.
        draw: Returns so many random bytes, for names.
    """

    def __init__(
        self,
        transport: Transport,
        policy: Retention,
        *,
        keys: KeyRing | None = None,
        retry: Retry | None = None,
        clock: Callable[[], float] = time.time,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._transport = transport
        self._policy = policy
        self._keys = keys
        self._retry = retry or Retry()
        self._clock = clock
        self._draw = draw

    async def plan(self) -> Pruning:
        """Return what `prune` would remove; write nothing.

        The time is this machine's, since asking the backend for its own takes a write.

        Raises:
            MessageFormatError: If a record cannot be read.
            SignatureError: If keys are given, and a record does not show that it belongs where it stands.
            ConflictError: If the topic's logs contradict themselves.
            TransportError: If the topic cannot be read.
        """
        return await self._plan(self._clock())

    async def prune(self) -> Pruning:
        """Remove what may go, and return what that was.

        Raises:
            MessageFormatError: If a record cannot be read; nothing was removed.
            SignatureError: If keys are given, and a record does not show that it belongs where it stands; nothing was
                removed.
            ConflictError: If the topic's logs contradict themselves; nothing was removed.
            TransportError: If the topic cannot be read, or not be written to; the next run finishes what was begun.
        """
        if not await self._retry.call(f"listing the logs of {self._transport.url}", self._transport.logs):
            # Nothing may go, and asking for the time would write where nobody ever published. By this machine's clock
            # a lease that lives may look dead, and so may what a writer that begins just now publishes.
            nothing = Removal(trims={}, records=(), blobs=(), nbytes=0, held_by=(), kept=())
            return Pruning(removal=nothing, garbage=(), leases=(), now=self._clock())
        pruning = await self._plan(await self._ask_time())
        for log, before in pruning.removal.trims.items():
            await self._trim(log, before)
        await self._delete(pruning.removal.blobs)
        await self._delete([blob.key for blob in pruning.garbage])
        await self._delete([lease.key for lease in pruning.leases if not lease.is_live(pruning.now)])
        return pruning

    async def _plan(self, now: float) -> Pruning:
        reader = TopicReader(self._transport, retry=self._retry, keys=self._keys)
        messages = await reader.load()
        blobs = await self._list("blobs")
        schemas = await self._list("schemas")
        others = await self._listed_elsewhere(messages)
        leases = await read_leases(self._transport, retry=self._retry, now=now)
        # What was published meanwhile names blobs that the listing may show.
        newer = await reader.load()
        # In a thread: a long log takes long, and a publisher prunes on the loop that it sends on.
        removal = await asyncio.to_thread(
            plan_removal,
            messages,
            stored={blob.key: blob for blob in (*blobs, *schemas, *others)},
            leases=leases,
            now=now,
            policy=self._policy,
            newer=newer,
            topic=self._transport.url,
        )
        left = await asyncio.to_thread(garbage, blobs, messages=[*messages, *newer], now=now, policy=self._policy)
        return Pruning(removal=removal, garbage=left, leases=tuple(leases), now=now)

    async def _listed_elsewhere(self, messages: Sequence[Message]) -> list[StoredBlob]:
        """Return what lies in the folders that only other implementations use."""
        keys = (blob.key for message in messages for blob in (message.schema, *message.blobs))
        folders = {key.partition("/")[0] for key in keys if "/" in key} - {"blobs", "schemas"}
        return [blob for folder in sorted(folders) for blob in await self._list(folder)]

    async def _list(self, folder: str) -> list[StoredBlob]:
        what = f"listing {folder} of {self._transport.url}"
        return await self._retry.call(what, lambda: self._transport.blobs(folder))

    async def _ask_time(self) -> float:
        """Return the time on the backend's clock, as it is told of a blob that is stored now."""
        key = f"{_MARKS}/{self._draw(8).hex()}"
        await self._put(key)
        marks = await self._list(_MARKS)
        now = next((mark.stored for mark in marks if mark.key == key and mark.stored is not None), self._clock())
        stale = [mark.key for mark in marks if mark.stored is not None and mark.stored < now - _STALE_SECONDS]
        await self._delete([key, *stale])
        return now

    async def _trim(self, log: str, before: int) -> None:
        await self._put(f"{_TRIMS}/{log}/{before:020}")
        what = f"trimming log {log!r} of {self._transport.url}"
        await self._retry.call(what, lambda: self._transport.trim(log, before))
        marks = await self._list(f"{_TRIMS}/{log}")
        await self._delete([mark.key for mark in marks if _position(mark) < before])

    async def _put(self, key: str) -> None:
        await self._retry.call(f"storing {key} in {self._transport.url}", lambda: self._transport.put(key, b""))

    async def _delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            what = f"removing {len(batch)} blobs of {self._transport.url}"
            await self._retry.call(what, partial(self._transport.delete, batch))


def _position(mark: StoredBlob) -> int:
    last = mark.key.rpartition("/")[2]
    return int(last) if last.isdecimal() else 0
