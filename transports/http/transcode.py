"""Topics that the service makes of others: processes that transcode, started, watched and stopped.

`<topic>.overwrite` has the states of `<topic>` with deltas that need no copy of the weights. A process of its own makes
it, since this one loads no torch: it follows the topic through this service, so that its payloads come through the
cache, and publishes into a directory, which is served like any other topic.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import fnmatch
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from deltabus.bus.errors import TransientTransportError, UsageError

from .wire import is_topic

__all__ = ["SUFFIX", "Transcoder", "Transcoders", "Transcoding"]

SUFFIX = ".overwrite"
"""What the name of a topic that is made ends in."""

_log = logging.getLogger("deltabus.http")
_PATTERN = re.compile(r"[A-Za-z0-9._=/*?\[\]-]+")
_FOLDER = "transcoded"
_LOCK = "lock"
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_STEADY = 300.0
"""Seconds of running after which a failure counts as the first again."""

_MISUSED = 2
"""The exit status that says that the next attempt will fail as well."""

_CANNOT = "it cannot be made of this topic, or as this service is set up"
_END_SECONDS = 10.0
_MOST_LINE = 1 << 20
_SHOWN = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcoding:
    """Which topics are made, and how.

    Attributes:
        topics: Names, or shell patterns of names, of those that they are made of.
        command: What is run, with source and target behind it; each line that it prints is JSON, of one version. It
            ends with status 2 where the next attempt would fail as well.
        variables: Its environment besides this process's own.
        directory: Where the topics lie; None is in the cache's directory, if that was given.
        most: How many processes run at a time.
    """

    topics: tuple[str, ...]
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    directory: Path | None = None
    most: int = 4

    def __post_init__(self) -> None:
        for topic in self.topics:
            named = is_topic(topic) and is_topic(f"{topic}{SUFFIX}")
            if not (_PATTERN.fullmatch(topic) if _is_pattern(topic) else named):
                raise UsageError(
                    f"--transcode {topic[:80]!r} is neither the name of a topic nor a pattern such as 'team/*'"
                )


class _Line(msgspec.Struct):
    """What a process says of a version."""

    writer: str
    version: int
    sent: int
    received: int


_decode_line = msgspec.json.Decoder(_Line).decode


class Transcoder:
    """One process that makes a topic, started again whenever it ends.

    Args:
        source: The topic that it is made of.
        command: What is run.
        environment: Its variables.
        named: Whether it is to run for ever; else it rests when nobody asks, or it would fail again.
        changed: Is called when there is something new to show.

    Attributes:
        source: The topic that it is made of.
        writer: Whose log it is; empty before the first version.
        version: The newest version that it made; 0 before the first.
        running: Whether the process runs.
        restarts: How often it was started again.
        failure: How it failed, for everybody; empty once it has made a version again. Why is in the log alone, since
            it may tell of paths and backends.
        named: As given.
        asked: When somebody last asked for it, in seconds of a clock that never goes back.
        due: From when on one that would have failed again may be tried again; None while that is not the case.
    """

    def __init__(
        self,
        source: str,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        named: bool,
        changed: Callable[[], None],
    ) -> None:
        self.source = source
        self.named = named
        self.asked = time.monotonic()
        self.due: float | None = None
        self.writer = ""
        self.version = 0
        self.running = False
        self.restarts = 0
        self.failure = ""
        self._command = command
        self._environment = environment
        self._changed = changed
        self._said = ""

    @property
    def name(self) -> str:
        """The topic that it makes."""
        return f"{self.source}{SUFFIX}"

    def lag(self, newest: Mapping[str, int]) -> int | None:
        """Return how many versions it is behind the newest of its source; None when that is not known."""
        if self.writer in newest:
            return max(0, newest[self.writer] - self.version)
        return None

    async def run(self) -> None:
        """Run the process until it would fail again, if it is named for ever; wait longer and longer where it ends."""
        pause, self.due = _FIRST_PAUSE, None
        while True:
            begun = time.monotonic()
            self._said = ""
            try:
                status = await self._run_once()
                self.failure = _CANNOT if status == _MISUSED else f"it ended with status {status}"
            except OSError as error:
                self._said, self.failure = str(error), "it could not be started"
                status = -1
            if time.monotonic() - begun > _STEADY:
                pause = _FIRST_PAUSE
            if status == _MISUSED:
                pause = _LONGEST_PAUSE
            resting = status == _MISUSED and not self.named
            when = f"when somebody asks in {pause:g} s or later" if resting else f"in {pause:g} s"
            _log.error("transcoding %s failed, and begins again %s: %s", self.source, when, self._said or self.failure)
            self._changed()
            if resting:
                self.due = time.monotonic() + pause
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            self.restarts += 1

    async def _run_once(self) -> int:
        """Run the process until it ends, and return its exit status."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(self._environment), limit=_MOST_LINE
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.running = True
        self._changed()
        _log.info("transcoding %s: process %d", self.source, process.pid)
        try:
            await asyncio.gather(self._listen(process.stdout), self._relay(process.stderr))
            return await process.wait()
        finally:
            self.running = False
            await _end(process)

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for line in _lines(lines):
            try:
                told = _decode_line(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # whatever a library prints
            self.writer, self.version, self.failure = told.writer, told.version, ""
            self._changed()

    async def _relay(self, lines: asyncio.StreamReader) -> None:
        async for line in _lines(lines):
            text = line.decode("utf-8", "replace").strip()
            if text:
                self._said = text[:_SHOWN]
                _log.warning("transcoding %s: %s", self.source, text)


class Transcoders:
    """All topics that are made.

    Args:
        settings: Which, and how.
        cache: The directory of the cache; None where it has none that lasts.
        upstream: The URL that the topics of the backend lie below.
        changed: Is called with the name of a topic that has something new to show.

    Raises:
        UsageError: If there is no directory, or it cannot be used.
    """

    def __init__(
        self, settings: Transcoding, *, cache: Path | None, upstream: str, changed: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._made: dict[str, Transcoder] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._base, self._token = "", ""
        directory = settings.directory or (cache / _FOLDER if cache is not None else None)
        if directory is None:
            raise UsageError(
                "engines that follow a transcoded topic lose their place unless it outlasts this process; say where it "
                "may lie, with --transcode-dir (or --cache-dir)"
            )
        self._directory = directory
        place = urlsplit(upstream)
        if place.scheme == "file" and self._directory.absolute().is_relative_to(unquote(place.path)):
            raise UsageError(
                f"transcoded topics in {self._directory} would lie among those of {upstream}; choose another "
                "--transcode-dir"
            )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = (self._directory / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UsageError(
                f"another process transcodes into {self._directory}; choose another --transcode-dir"
            ) from None
        except OSError as error:
            raise UsageError(f"transcoded topics cannot be kept in {self._directory}: {error.strerror}") from error

    def __iter__(self) -> Iterator[Transcoder]:
        return iter(self._made[name] for name in sorted(self._made))

    def source_of(self, name: str) -> str | None:
        """Return the topic that a topic is made of; None for one that is not made."""
        source = name.removesuffix(SUFFIX)
        if source == name or source.endswith(SUFFIX):
            return None
        return source if any(fnmatch.fnmatchcase(source, topic) for topic in self._settings.topics) else None

    def find(self, name: str) -> Transcoder | None:
        """Return who makes a topic; None for one that nobody makes yet."""
        source = self.source_of(name)
        return None if source is None else self._made.get(source)

    def url_of(self, source: str) -> str:
        """Return where the topic lies that is made of one."""
        return (self._directory / f"{source}{SUFFIX}").absolute().as_uri()

    def ask(self, name: str) -> bool:
        """Take note that somebody asks for a topic, and return whether it is made, but not now: then `start` it."""
        source = self.source_of(name)
        if source is None:
            return False
        made = self._made.get(source)
        if made is None:
            return True
        made.asked = time.monotonic()
        return made.due is not None and made.asked >= made.due

    def begin(self, base: str, token: str) -> list[str]:
        """Start those that are named, and return the topics that they make; others begin when somebody asks.

        Args:
            base: Where this service can be reached from this machine.
            token: What to show there.
        """
        self._base, self._token = base, token
        named = [topic for topic in self._settings.topics if not _is_pattern(topic)]
        for topic in named:
            self.start(topic)
        return [f"{topic}{SUFFIX}" for topic in named]

    def start(self, source: str) -> None:
        """Start to make a topic, unless that has begun, or would fail again.

        Raises:
            TransientTransportError: If too many are made.
        """
        before = self._made.get(source)
        if not self._base or (before is not None and (before.due is None or time.monotonic() < before.due)):
            return
        if sum(made.due is None for made in self._made.values()) >= self._settings.most:
            raise TransientTransportError(
                f"{self._settings.most} topics are transcoded, which is the most here; raise --transcode-most"
            )
        command = (*self._settings.command, f"{self._base}/{source}?reader=transcoder", self.url_of(source))
        environment = {**os.environ, **self._settings.variables, "DELTABUS_TOKEN": self._token}
        named = source in self._settings.topics
        made = Transcoder(source, command, environment, named=named, changed=lambda: self._changed(f"{source}{SUFFIX}"))
        if before is not None:
            made.restarts = before.restarts + 1
        self._made[source] = made
        self._tasks[source] = asyncio.create_task(made.run())

    async def rest(self, unasked: float) -> None:
        """End the processes of topics that nobody asked for in so many seconds; they begin again when somebody does."""
        since = time.monotonic() - unasked
        resting = [made.source for made in self._made.values() if not made.named and made.asked < since]
        tasks = []
        for source in resting:
            del self._made[source]
            tasks.append(self._tasks.pop(source))
            tasks[-1].cancel()
            _log.info("transcoding %s: nobody asked for a while, and it rests", source)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all processes, and wait until they have ended."""
        self._base = ""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._lock.close()

    def as_json(self, name: str, newest: Mapping[str, int]) -> dict[str, Any] | None:
        """Return what people are shown of who makes a topic; None where nobody does.

        Args:
            name: The topic.
            newest: The newest version of each writer of its source.
        """
        made = self.find(name)
        if made is None:
            return None
        return {
            "source": made.source,
            "running": made.running,
            "version": made.version,
            "lag": made.lag(newest),
            "restarts": made.restarts,
            "failure": "" if made.running else made.failure,
        }


def _is_pattern(topic: str) -> bool:
    return any(sign in topic for sign in "*?[")


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # over the limit: it is left out
            continue
        if not line:
            return
        yield line


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process, gently first."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
