"""`deltabus verify`: whether all of a topic is there, whole, and what it says it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from deltabus.bridge import LoopThread
from deltabus.bus.core import TopicReader
from deltabus.bus.errors import CodecError, CorruptPayloadError, KeyNotFoundError, MessageFormatError, UsageError
from deltabus.bus.message import Blob, Message
from deltabus.bus.pruner import trimmed_to
from deltabus.bus.retry import Retry
from deltabus.bus.signing import KeyRing
from deltabus.bus.transport import Record, Transport
from deltabus.codecs.container import open_part
from deltabus.codecs.schema import Schema
from deltabus.transports import open_transport
from deltabus.workers import usable_cores

from .history import Problem, check_log, decode_log
from .output import Meter, Silent, count_text, plain_text, size_text
from .replay import Replay
from .topic import choose_writer, nothing_published

__all__ = ["Report", "print_report", "read_records", "verify_topic"]

_PAGE = 1024


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        url: The topic.
        writers: Whose logs were looked at.
        records: Records read.
        blobs: Blobs whose size and checksum were compared, schemas included.
        nbytes: Their bytes.
        replayed: Messages whose payload was decoded, and led to the digest that they say.
        unreachable: Messages whose payload is as it was stored, but whose base could not be rebuilt: because of a
            problem before them, or because retention removed it.
        problems: Everything that is wrong.
    """

    url: str
    writers: tuple[str, ...]
    records: int
    blobs: int
    nbytes: int
    replayed: int
    unreachable: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        problems = [{"writer": p.writer, "position": p.position, "key": p.key, "what": p.what} for p in self.problems]
        return {
            "url": self.url,
            "ok": self.ok,
            "writers": list(self.writers),
            "records": self.records,
            "blobs": self.blobs,
            "bytes": self.nbytes,
            "replayed": self.replayed,
            "unreachable": self.unreachable,
            "problems": problems,
        }


def verify_topic(
    url: str, *, writer: str | None = None, keys: KeyRing | None = None, meter: Meter | None = None
) -> Report:
    """Read all of a topic and compare everything that can be compared.

    It takes the memory of one state, and of what changed since the versions that skip deltas to come start from.

    Every record is decoded; positions, epochs, versions and digests are held against each other; every blob is compared
    with its size and SHA-256; every payload is decoded. From the first anchor on, each delta is applied, and each
    anchor and skip delta compared, by digest, with the state that the deltas led to; so are deltas before the first
    anchor that lead on from it.

    Args:
        url: The topic.
        writer: Whose log; None is all.
        keys: Whose messages are believed; what others wrote is a problem, and not followed. None believes everybody.
        meter: Is told how far it is.

    Raises:
        UsageError: If the URL is wrong, or there is no such writer.
        RetentionGapError: If nothing was published there.
        TransportError: If the topic cannot be read. What it has and should not have is in the report instead.
    """
    loop = LoopThread(f"deltabus verify {url}")
    try:
        transport = open_transport(url)
        loop.run(transport.__aenter__())
        try:
            with ThreadPoolExecutor(usable_cores(), thread_name_prefix="deltabus-decode") as pool:
                return _Inspection(transport, loop, pool, meter or Silent()).run(writer, keys)
        finally:
            loop.run(transport.close())
    finally:
        loop.stop()


async def read_records(transport: Transport, log: str, *, retry: Retry | None = None) -> list[Record]:
    """Return all records of a log, those behind a hole too.

    Raises:
        TransportError: If they cannot be read.
    """
    retry = retry or Retry()
    records: list[Record] = []

    async def page(after: int) -> list[Record]:
        return await retry.call(f"reading log {log!r} of {transport.url}", lambda: transport.read(log, after, _PAGE))

    while True:
        last = records[-1].position if records else -1
        found = await page(last)
        if not found and records:
            # A transport shows a log up to its first hole; what lies behind it shows when it is asked for. What was
            # appended just now shows in the second look.
            behind = await page(last + 1)
            found = (await page(last) or behind) if behind else []
        if not found:
            return records
        records += found


class _Inspection:
    """One run over a topic."""

    def __init__(self, transport: Transport, loop: LoopThread, pool: ThreadPoolExecutor, meter: Meter) -> None:
        self._transport = transport
        self._reader = TopicReader(transport)
        self._loop = loop
        self._pool = pool
        self._meter = meter
        self._schemas: dict[Blob, Schema | None] = {}
        self._problems: list[Problem] = []
        self._blobs = self._nbytes = self._replayed = self._unreachable = 0

    def run(self, writer: str | None, keys: KeyRing | None) -> Report:
        url = self._transport.url
        names = self._loop.run(Retry().call(f"listing the logs of {url}", self._transport.logs))
        if not names:
            raise nothing_published(url)
        writers = names if writer is None else [choose_writer(url, set(names), writer)]
        logs: list[list[Message]] = []
        count = 0
        for name in writers:
            records = self._loop.run(read_records(self._transport, name))
            messages, problems = decode_log(url, name, records, keys=keys)
            whole = not problems and records[0].position == 0
            self._problems += problems + check_log(messages, whole=whole)
            self._check_beginning(name, records[0].position)
            logs.append(messages)
            count += len(records)
        self._meter.begin("verifying", sum(message.nbytes for log in logs for message in log))
        for log in logs:
            replay = Replay(self._pool, log)
            waiting: dict[int, deque[Message]] = {}
            for message in log:
                if self._check(message, replay, waiting):
                    self._catch_up(replay, waiting)
            for message in chain.from_iterable(waiting.values()):
                self._check_unreachable(message)
        return Report(
            url=url,
            writers=tuple(writers),
            records=count,
            blobs=self._blobs,
            nbytes=self._nbytes,
            replayed=self._replayed,
            unreachable=self._unreachable,
            problems=tuple(sorted(self._problems, key=lambda p: (p.writer, p.position))),
        )

    def _check_beginning(self, log: str, first: int) -> None:
        """Check that retention removed what is not there any more in front of a log."""
        if first == 0:
            return
        said = self._loop.run(trimmed_to(self._transport, log))
        if said < first:
            missing = f"{said}" if first == said + 1 else f"{said} to {first - 1}"
            self._problems.append(
                Problem(
                    log,
                    said,
                    None,
                    f"position {missing} is missing, and it was not `deltabus prune` that removed it: restore it from "
                    "a copy, or publish to a new topic",
                )
            )

    def _check(self, message: Message, replay: Replay, waiting: dict[int, deque[Message]]) -> bool:
        """Check a message, and replay it or let it wait for the state that it starts from; return whether it was."""
        schema = self._schema(message)
        if schema is None:
            self._check_unreachable(message)
            return False
        if not replay.can_take(message, schema):
            waiting.setdefault(message.base[message.writer], deque()).append(message)
            return False
        parts = deque(message.blobs)
        try:
            replay.take(message, schema, self._taken(message, parts))
        except _UnreadablePartError:
            self._check_parts(message, parts)
        except CodecError as error:
            key = message.blobs[0].key if len(message.blobs) == 1 else None
            self._problem(message, key, str(error))
            self._check_parts(message, parts)
        else:
            self._replayed += 1
        return True

    def _check_unreachable(self, message: Message) -> None:
        before = len(self._problems)
        self._check_parts(message, deque(message.blobs))
        self._unreachable += len(self._problems) == before

    def _catch_up(self, replay: Replay, waiting: dict[int, deque[Message]]) -> None:
        """Replay what waited for a state that is there now: retention may leave deltas before their anchor."""
        found = True
        while found:
            found = False
            for base in replay.bases & waiting.keys():
                message = waiting[base][0]
                schema = self._schema(message)
                if schema is not None and replay.can_take(message, schema):
                    waiting[base].popleft()
                    if not waiting[base]:
                        del waiting[base]
                    found = self._check(message, replay, waiting)

    def _schema(self, message: Message) -> Schema | None:
        """Return a message's schema; None when it cannot be read: a problem of the first message that names it."""
        blob = message.schema
        if blob not in self._schemas:
            data = self._fetch(message, blob)
            self._schemas[blob] = None
            if data is not None:
                try:
                    self._schemas[blob] = Schema.decode(data)
                except MessageFormatError as error:
                    self._problem(message, blob.key, str(error))
        return self._schemas[blob]

    def _taken(self, message: Message, parts: deque[Blob]) -> Iterator[bytes]:
        """Yield a payload's parts, taking them away; the first that cannot be had is a problem, and the end."""
        while parts:
            data = self._fetch_part(message, parts.popleft())
            if data is None:
                raise _UnreadablePartError
            yield data

    def _check_parts(self, message: Message, parts: deque[Blob]) -> None:
        """Check parts that are not decoded, each by itself."""
        while parts:
            blob = parts.popleft()
            data = self._fetch_part(message, blob)
            if data is not None:
                try:
                    open_part(data, expect_schema=message.schema.checksum).verify()
                except CodecError as error:
                    self._problem(message, blob.key, str(error))

    def _fetch_part(self, message: Message, blob: Blob) -> bytes | None:
        data = self._fetch(message, blob)
        self._meter.advance(blob.size)
        return data

    def _fetch(self, message: Message, blob: Blob) -> bytes | None:
        """Return a blob's bytes; None when it is not there, damaged, or named as no blob is, which is a problem."""
        self._blobs += 1
        self._nbytes += blob.size
        try:
            return self._loop.run(self._reader.fetch(blob))
        except (CorruptPayloadError, KeyNotFoundError, UsageError) as error:
            self._problem(message, blob.key, str(error))
            return None

    def _problem(self, message: Message, key: str | None, what: str) -> None:
        self._problems.append(Problem(message.writer, message.position, key, what))


class _UnreadablePartError(Exception):
    """A part cannot be had; the problem is noted already."""


def print_report(report: Report) -> None:
    """Print a report for people: problems first, then what was looked at."""
    for problem in report.problems:
        print(plain_text(str(problem)))
    print(
        f"{count_text(report.records, 'record')} and {count_text(report.blobs, 'blob')} ({size_text(report.nbytes)}) "
        f"read; {count_text(report.replayed, 'message')} decoded to the digests that they say, "
        f"{report.unreachable} not reachable"
    )
    print("the topic is whole" if report.ok else f"{count_text(len(report.problems), 'problem')} found")
