"""The logs of a topic in a bucket: who stands at which position, by the rule of `hub_rule.py`, as it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from deltabus.bus.errors import (
    AppendUnknownError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Record

from .hub_client import BATCH, HubClient
from .hub_errors import FileMissingError, UnansweredError
from .hub_feed import Feed
from .hub_rule import Candidate, Sightings, choose, name_candidate, trace_log
from .hub_store import HubStore
from .names import LOGS, is_log

__all__ = ["HubLogs"]

_FIRST_POLL = 0.1
_FEED_POLL = 30.0
"""Seconds between two looks for new records while the feed tells of them."""

_AT_ONCE = 16
_TAIL = 256  # records that a tail fetches at once
_POSITION = re.compile(r"[0-9]{20}")
_TEN, _THOUSAND = 1, 3  # digits that differ within a block of positions that is listed at once

_logger = logging.getLogger(__name__)


class HubLogs:
    """All logs of a topic; belongs to one event loop.

    Args:
        client: The bucket.
        store: What its files hold.
        root: What stands before all names of the topic.
        settle: Seconds after which a listing shows what was stored before, and until a record is decided.
        poll: Seconds between two looks without the feed, at most.
        timeout: Seconds after which an operation is given up.
    """

    def __init__(
        self, client: HubClient, store: HubStore, root: str, *, settle: float, poll: float, timeout: float
    ) -> None:
        self._client = client
        self._store = store
        self._root = f"{root}{LOGS}/"
        self._settle = settle
        self._poll = poll
        self._timeout = timeout
        self._url = client.url
        self._sightings = Sightings(settle)
        self._next: dict[str, int] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._feed = Feed(client.events, change=self._notice, gap=self._forget)
        self._following: asyncio.Task[None] | None = None
        self._listeners: dict[asyncio.Event, str] = {}
        self._names: list[str] | None = None
        self._changes = 0
        self._closed = asyncio.Event()

    async def append(self, log: str, position: int, record: memoryview) -> None:
        """Do what `Transport.append` does."""
        what = f"append to log {log!r} at position {position}"
        identity = hashlib.sha256(record).hexdigest()
        if self._next.pop(log, None) != position:  # else the position before it is ours, and decided
            held = await self._settled(log, position)
            if held is not None:
                self._compare(held, identity, what)
                self._next[log] = position + 1
                return
        content = await self._store.upload(record, what)
        path = name_candidate(self._place(log, position), identity, secrets.token_hex(8))
        try:
            await self._client.add(path, content)
        except UnansweredError as error:
            await self._find(path, what, error)
        self._sightings.note(log, position, path, asyncio.get_running_loop().time())
        try:
            held = await self._settled(log, position)
        except TransientTransportError as error:
            raise AppendUnknownError(
                f"cannot tell who won when told to {what} in {self._url}: {error}; read it to learn who did",
                url=self._url,
            ) from error
        except (PositionTakenError, UsageError):
            await self._withdraw(path)
            raise
        if held is None:
            raise AppendUnknownError(
                f"the Hub does not list what it stored when told to {what} in {self._url}; raise the option 'settle'",
                url=self._url,
            )
        if held.identity != identity:
            await self._withdraw(path)
        self._compare(held, identity, what)
        self._next[log] = position + 1

    async def read(self, log: str, after: int, limit: int) -> list[Record]:
        """Do what `Transport.read` does."""
        with self._limited(f"read log {log!r}"):
            async with asyncio.timeout(self._timeout):
                found, again = await self._look(log, after, limit)
                while again and len(found) < limit:
                    await self._rest(again)
                    more, again = await self._look(log, found[-1][0] if found else after, limit - len(found))
                    found += more
                    if more:  # what was there at the first look is decided; what came since need not be waited for
                        break
        return await self._fetch(log, found)

    async def trim(self, log: str, before: int) -> None:
        """Do what `Transport.trim` does."""
        listing = await self._list(log)
        before = min(before, max(trace_log(listing), default=0))
        gone: list[str] = []
        for place in sorted(place for place in listing if place < before):
            # The winner last, and all of a position in one go, so that a loser never becomes the winner.
            winner = choose(listing[place])
            paths = [one.path for one in listing[place] if one is not winner]
            paths += [] if winner is None else [winner.path]
            if gone and len(gone) + len(paths) > BATCH:
                await self._client.remove(gone)
                gone = []
            gone += paths
        if gone:
            await self._client.remove(gone)

    async def tail(self, log: str, after: int) -> AsyncIterator[Record]:
        """Do what `Transport.tail` does."""
        loop = asyncio.get_running_loop()
        first = pause = min(_FIRST_POLL, self._poll)
        async with self._listening(log) as wake:
            while True:
                wake.clear()
                with self._limited(f"read log {log!r}"):
                    async with asyncio.timeout(self._timeout):
                        found, again = await self._look(log, after, _TAIL)
                for record in await self._fetch(log, found):
                    yield record
                    after = record.position
                if len(found) == _TAIL:
                    continue
                if found:
                    pause = first
                quiet = again - loop.time() if again else _FEED_POLL if self._feed.live else pause
                try:
                    async with asyncio.timeout(quiet):
                        await wake.wait()
                    pause = first
                except TimeoutError:
                    pause = pause if again else min(2 * pause, self._poll)
                # Looking sooner would show what cannot be decided yet, and cost one more look.
                await self._rest(max(again, self._sightings.expect(log)))

    async def names(self) -> list[str]:
        """Do what `Transport.logs` does; while the feed tells of every change, it is asked for only once."""
        if self._names is None or not self._feed.live:
            before, self._names = self._changes, None
            found = sorted(filter(is_log, await self._client.folders(self._root)))
            if not self._feed.live or self._changes != before:
                return found
            self._names = found
        return list(self._names)

    async def close(self) -> None:
        """Stop following, and let all who wait find out."""
        self._closed.set()
        for event in self._listeners:
            event.set()
        await self._stop_following()

    async def _settled(self, log: str, position: int) -> Candidate | None:
        """Return the decided record at a position; None if it is free and the position before it is decided.

        Raises:
            PositionTakenError: If the log begins behind it.
            UsageError: If the position before it is empty.
        """
        loop = asyncio.get_running_loop()
        with self._limited(f"look at position {position} of log {log!r}"):
            async with asyncio.timeout(self._timeout):
                while True:
                    await self._rest(self._sightings.ready(log, position))
                    began = loop.time()
                    run = trace_log(await self._around(log, max(0, position - 1), position + 1))
                    if position - 1 not in run:
                        # Where the log begins decides whether what is here belongs to it.
                        run = trace_log(await self._list(log))
                    if run and next(iter(run)) > position:
                        raise PositionTakenError(
                            f"log {log!r} of {self._url} begins behind position {position}: another record was there",
                            url=self._url,
                        )
                    last = max(run, default=-1)
                    if last < position - 1:
                        raise UsageError(
                            f"position {position - 1} of log {log!r} in {self._url} is empty; append there first"
                        )
                    if last > position or last == -1:
                        return run.get(position)
                    if self._sightings.decide(log, last, run[last].path, began=began, now=loop.time()):
                        return run.get(position)
                    await self._rest(self._sightings.ready(log, last))

    async def _look(self, log: str, after: int, limit: int) -> tuple[list[tuple[int, Candidate]], float]:
        """Return decided records behind a position, and from when on one more look decides another; 0 if none waits."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        run: dict[int, Candidate] = {}
        if after >= 0:
            listing = await self._around(log, after, after + 1)
            run, end = trace_log(listing), _block_end(after + 1, _TEN)
            while after in run and max(run) == end and len(run) <= limit + 10:
                listing |= await self._block(log, end + 1, _THOUSAND)
                end = _block_end(end + 1, _THOUSAND)
                run = trace_log({position: found for position, found in listing.items() if position >= after})
        if after not in run:
            # The log ends before, or its beginning was removed.
            run = trace_log(await self._list(log))
        found = [(position, candidate) for position, candidate in run.items() if position > after]
        if len(found) > limit:
            return found[:limit], 0.0
        if not found:
            return [], 0.0
        position, last = found[-1]
        if self._sightings.decide(log, position, last.path, began=began, now=loop.time()):
            return found, 0.0
        return found[:-1], self._sightings.ready(log, position)

    async def _fetch(self, log: str, found: Sequence[tuple[int, Candidate]]) -> list[Record]:
        """Return the bytes of records, checked; those that were removed meanwhile are left out."""
        data = await asyncio.gather(*(self._record(log, position, candidate) for position, candidate in found))
        records = [Record(position, part) for (position, _), part in zip(found, data, strict=True) if part is not None]
        if len(records) < len(found) and (not records or records[-1].position - records[0].position >= len(records)):
            raise TransientTransportError(
                f"records of log {log!r} in {self._url} vanish while they are read; it may be read again", url=self._url
            )
        return records

    async def _record(self, log: str, position: int, candidate: Candidate) -> bytes | None:
        if candidate.size > MAX_RECORD_BYTES:
            raise TransportError(
                f"the record at position {position} of log {log!r} in {self._url} has {candidate.size} bytes; a record "
                f"has at most {MAX_RECORD_BYTES}",
                url=self._url,
            )
        for _ in range(2):  # a second look heals a fault on the way, not one at rest
            try:
                async with self._turns:
                    data = await self._client.fetch(candidate.path)
            except FileMissingError:
                return None
            if hashlib.sha256(data).hexdigest() == candidate.identity:
                return data
        raise TransportError(
            f"the record at position {position} of log {log!r} in {self._url} has other bytes than its name "
            f"{candidate.path!r} says; restore it from a copy",
            url=self._url,
        )

    async def _list(self, log: str) -> dict[int, list[Candidate]]:
        return _by_position(await self._client.candidates(f"{self._root}{log}/"))

    async def _block(self, log: str, position: int, digits: int) -> dict[int, list[Candidate]]:
        """Return the candidates at the positions that differ from this one in the last digits only."""
        return _by_position(await self._client.candidates(self._place(log, position)[:-digits]))

    async def _around(self, log: str, first: int, last: int) -> dict[int, list[Candidate]]:
        """Return the candidates at positions that are close to each other, and at some beside them."""
        blocks = {_block_end(position, _TEN) for position in (first, last)}
        found = await asyncio.gather(*(self._block(log, position, _TEN) for position in sorted(blocks)))
        return {position: candidates for listing in found for position, candidates in listing.items()}

    def _place(self, log: str, position: int) -> str:
        return f"{self._root}{log}/{position:020}"

    async def _find(self, path: str, what: str, lost: UnansweredError) -> None:
        """Find out whether a file was added although the answer was lost."""
        try:
            await self._rest(asyncio.get_running_loop().time() + self._settle)
            if await self._client.candidates(path):
                return
        except TransientTransportError as error:
            _logger.debug("nor was it answered whether %s is there: %s", path, error)
        raise AppendUnknownError(f"{lost}; read the position to learn who won", url=self._url) from lost

    async def _withdraw(self, path: str) -> None:
        """Remove a candidate that lost; if that fails, it stays, and harms nobody."""
        try:
            await self._client.remove([path])
        except TransportError as error:
            _logger.debug("left %s behind: %s", path, error)

    def _compare(self, held: Candidate, identity: str, what: str) -> None:
        if held.identity != identity:
            raise PositionTakenError(f"cannot {what} in {self._url}: another record is, or was, there", url=self._url)

    @contextlib.asynccontextmanager
    async def _listening(self, log: str) -> AsyncIterator[asyncio.Event]:
        """Give an event that is set when the log may have changed, and when the transport is closed."""
        self._client.check_open()
        event = asyncio.Event()
        self._listeners[event] = log
        if self._following is None:
            self._following = asyncio.create_task(self._feed.run())
        try:
            yield event
        finally:
            del self._listeners[event]
            if not self._listeners:
                await self._stop_following()

    async def _stop_following(self) -> None:
        task, self._following = self._following, None
        if task is not None:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(outcome, asyncio.CancelledError):
                _logger.warning("the change feed of %s failed, and was polled instead", self._url, exc_info=outcome)

    def _notice(self, path: str, added: bool) -> None:
        """Take in that a file came or went."""
        log, _, name = path.removeprefix(self._root).partition("/")
        if not path.startswith(self._root) or not is_log(log):
            return
        if not added or (self._names is not None and log not in self._names):
            self._names = None
        self._changes += 1
        match = _POSITION.match(name)
        if added and match is not None:
            self._sightings.note(log, int(match[0]), path, asyncio.get_running_loop().time())
        for event, listened in self._listeners.items():
            if listened == log:
                event.set()

    def _forget(self) -> None:
        """Take in that changes may have been missed."""
        self._names = None
        self._changes += 1
        for event in self._listeners:
            event.set()

    async def _rest(self, until: float) -> None:
        """Wait until a time of the loop's clock, unless the transport is closed before."""
        pause = until - asyncio.get_running_loop().time()
        if pause > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._closed.wait()
        self._client.check_open()

    @contextlib.contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise TransientTransportError(
                f"{self._url} took more than {self._timeout:g} s when told to {what}; raise the option 'timeout'",
                url=self._url,
            ) from None


def _block_end(position: int, digits: int) -> int:
    """Return the last of the positions that differ from this one in the last digits only."""
    block: int = 10**digits
    return position // block * block + block - 1


def _by_position(candidates: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    found: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        name = candidate.place.rpartition("/")[2]
        if _POSITION.fullmatch(name):
            found.setdefault(int(name), []).append(candidate)
    return found
