"""A directory that follows a topic: each update becomes a checkpoint, and a command hears of it.

For engines that load weights by path, and know nothing of deltabus.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from deltabus.bus.errors import SchemaMismatchError, UsageError
from deltabus.bus.message import Message
from deltabus.bus.sequencer import Sequencer
from deltabus.codecs.assembly import whole_tensors
from deltabus.codecs.checkpoint import SHARD_BYTES, Earlier, load_checkpoint, save_checkpoint
from deltabus.codecs.schema import Schema
from deltabus.codecs.state import collect

from .adapters import ADAPTER_CONFIG, config_in, split_adapter
from .cli.topic import read_topic
from .disk import write_durably
from .keys import Key, verify_keys
from .subscriber import Subscriber
from .update import Update
from .versions import KeptVersion, VersionDirectory

__all__ = ["Followed", "Form", "follow"]

_log = logging.getLogger("deltabus.following")

Form = Literal["checkpoint", "adapter"]
"""What a version is on disk: a whole checkpoint; or an adapter as PEFT lays it out, and in `base/` what else the topic
has."""

_BASE = "base"
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A version that is the current one now.

    Attributes:
        step: The training step.
        version: The writer's state counter; of several writers, the sum of theirs.
        directory: Where it lies.
        nbytes: Bytes downloaded for it.
        changed: Elements that changed.
        total: Elements in all.
        failure: What went wrong with the command; empty when it went well, or there is none.
    """

    step: int
    version: int
    directory: Path
    nbytes: int = 0
    changed: int = 0
    total: int = 0
    failure: str = ""


def follow(
    url: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    command: str | None = None,
    command_timeout: float = 600.0,
    keep: int = 3,
    form: Form = "checkpoint",
    once: bool = False,
    shard_bytes: int = SHARD_BYTES,
    keys: Key | Sequence[Key] | None = None,
    idle_timeout: float | None = None,
) -> Iterator[Followed]:
    """Keep a directory current, and yield each version when it is there and the command has been run.

    `DIRECTORY/<version>/` appears whole, then `DIRECTORY/current` leads to it. What the directory holds is recognised
    by its digest, so that a restart downloads what is missing alone. The process may be killed at any time. Takes
    memory for two copies of the weights.

    Args:
        url: The topic.
        directory: Of its own; made if it is not there.
        command: Run by the shell after each update, and at the start if it did not end well for the newest version
            before. It finds `DELTABUS_STEP`, `DELTABUS_VERSION` and `DELTABUS_DIR` (the version's directory) in its
            environment. Updates that arrive meanwhile become one. Where it fails that is told, and following goes on.
        command_timeout: Limit in seconds for the command; then it is killed, with all that it started.
        keep: How many versions stay.
        form: What a version is on disk.
        once: Whether to end when the newest version is there that the topic had at the beginning.
        shard_bytes: The size from which on a checkpoint is split. Files of which nothing changed are hard links.
        keys: Whose messages are believed, as `Subscriber` takes them.
        idle_timeout: Limit in seconds for the wait for an update; None waits for ever.

    Raises:
        UsageError: If an argument or the URL is wrong, or `form` is `"adapter"` and the topic has no configuration of
            one.
        ClientError: If another process keeps the directory current.
        RetentionGapError: If nothing was published, and `once` is set.
        SchemaMismatchError: If what the writers hold makes no whole tensors.
        CorruptPayloadError: If a manifest in the directory cannot be read.
        TransportError: If the topic or the disk fails.
        DeltabusError: As `Subscriber` raises it.
    """
    if form not in get_args(Form):
        raise UsageError(f"form={form!r} is not one of {', '.join(get_args(Form))}")
    if command_timeout <= 0:
        raise UsageError(f"command_timeout={command_timeout} leaves the command no time")
    if shard_bytes < 1:
        raise UsageError(f"a shard of {shard_bytes} bytes holds nothing; the usual size is {SHARD_BYTES}")
    url = os.fspath(url)
    return _follow(
        VersionDirectory(Path(directory), keep=keep),
        _Layout(form, shard_bytes),
        _Command(command, command_timeout),
        partial(Subscriber, url, keys=keys, idle_timeout=idle_timeout),
        partial(_Goal, url, keys) if once else None,
    )


def _follow(
    versions: VersionDirectory,
    layout: _Layout,
    command: _Command,
    subscribe: Callable[..., Subscriber],
    find_goal: Callable[[], _Goal] | None,
) -> Iterator[Followed]:
    goal = find_goal() if find_goal is not None else None
    with versions, contextlib.ExitStack() as stack:
        newest = versions.newest
        if newest is not None:
            told = Followed(step=newest.step, version=newest.version, directory=versions.where(newest))
            if command.given and not versions.told:
                yield command.after(told, versions)
            if goal is not None and goal.held_by(newest):
                return
        held = None if newest is None else layout.load(versions.where(newest))
        tensors = _Tensors(held)
        updates = _updates(subscribe, held)
        stack.callback(updates.close)
        del held
        for update in updates:
            tensors.apply(update)
            version = layout.add(update, tensors.by_name, versions)
            done = Followed(
                step=version.step,
                version=version.version,
                directory=versions.where(version),
                nbytes=update.nbytes,
                changed=update.changed,
                total=update.total,
            )
            yield command.after(done, versions)
            if goal is not None and goal.reached_by(version):
                return


def _updates(subscribe: Callable[..., Subscriber], held: dict[str, Tensor] | None) -> Generator[Update]:
    """Yield updates that lead on from what is held, or from nothing where the topic has other tensors by now."""
    begun = False
    try:
        for update in subscribe(have=held).sync():
            begun = True
            yield update
    except SchemaMismatchError as error:
        if begun or held is None:
            raise
        _log.warning("what the directory holds does not fit, and the whole state is fetched: %s", error)
        yield from subscribe().sync()


class _Tensors:
    """The state in memory that updates are written into."""

    def __init__(self, held: dict[str, Tensor] | None) -> None:
        self.by_name = held or {}
        self._schemas: tuple[Schema, ...] | None = None

    def apply(self, update: Update) -> None:
        if update.whole and self._schemas != update.schemas:
            self.by_name.clear()  # first, so that the memory is free
            self.by_name = whole_tensors(update.schemas)
        self._schemas = update.schemas
        update.apply(self.by_name)


class _Layout:
    """Writes a state as a version, and reads it again."""

    def __init__(self, form: Form, shard_bytes: int) -> None:
        self._form, self._shard_bytes = form, shard_bytes
        self._written: Path | None = None
        """The version that was written from the state before; None when that is not known."""

    def load(self, directory: Path) -> dict[str, Tensor]:
        """Return copies of the tensors of a version, tied ones as one."""
        found = load_checkpoint(directory)
        if (directory / _BASE).is_dir():
            found |= load_checkpoint(directory / _BASE)
        copies: dict[int, Tensor] = {}
        self._written = directory
        return {name: copies.setdefault(id(tensor), tensor.clone()) for name, tensor in found.items()}

    def add(self, update: Update, tensors: dict[str, Tensor], versions: VersionDirectory) -> KeptVersion:
        """Write the state after an update."""
        before = versions.newest
        metadata = dict(update.metadata)
        if self._form == "adapter":
            metadata[ADAPTER_CONFIG] = _config(update, before)
        digests = {} if before is None else {w: d for w, d in before.digests.items() if w in update.state}
        digests |= {message.writer: f"{message.digest_after:016x}" for message in update.messages}
        version = KeptVersion(
            name="",
            serial=0,
            step=update.step,
            version=update.version,
            state=dict(update.state),
            digests=digests,
            metadata=metadata,
        )
        touched = update.touched

        def write(place: Path) -> None:
            place.mkdir()
            if self._form == "checkpoint":
                self._save(place, tensors, touched, "model", self._shard_bytes)
                return
            adapter, base = split_adapter(sorted(tensors))
            # Whoever loads adapters knows no shards of them.
            self._save(place, {name: tensors[name] for name in adapter}, touched, "adapter_model", sys.maxsize)
            write_durably(place / _CONFIG, metadata[ADAPTER_CONFIG])
            if base:
                self._save(place / _BASE, {name: tensors[name] for name in base}, touched, "model", self._shard_bytes)

        kept = versions.add(version, write)
        self._written = versions.where(kept)
        return kept

    def _save(
        self, place: Path, tensors: dict[str, Tensor], touched: frozenset[str], stem: str, shard_bytes: int
    ) -> None:
        earlier = None
        if self._written is not None:
            inner = _BASE if place.name == _BASE else ""
            earlier = Earlier(self._written / inner, touched)
        state = collect(tensors)
        save_checkpoint(place, state.schema, state.read, stem=stem, shard_bytes=shard_bytes, earlier=earlier)


def _config(update: Update, before: KeptVersion | None) -> str:
    """Return the configuration of the adapter that an update carries, the newest that is known."""
    for metadata in (
        update.metadata,
        *(message.metadata for message in sorted(update.messages, key=lambda message: -message.step)),
        {} if before is None else before.metadata,
    ):
        found = config_in(metadata)
        if found is not None:
            return found
    raise UsageError(
        f"no message of the topic has {ADAPTER_CONFIG!r} in its metadata; publish with "
        "metadata=adapter_metadata(model), or follow with the form 'checkpoint'"
    )


class _Goal:
    """The state that a topic had at the beginning."""

    def __init__(self, url: str, keys: Key | Sequence[Key] | None) -> None:
        messages = read_topic(url, keys=verify_keys(keys)).messages
        self._of: dict[tuple[str, int], Message] = {(m.writer, m.version): m for m in messages}
        cut = Sequencer.of(messages, topic=url).newest_cut()
        self._state = {} if cut is None else dict(cut.state)

    def held_by(self, version: KeptVersion) -> bool:
        """Return whether a version, of whatever topic, has the bits of that state."""
        digests = {writer: self._of[writer, wanted].digest_after for writer, wanted in self._state.items()}
        return bool(digests) and {w: f"{digest:016x}" for w, digest in digests.items()} == version.digests

    def reached_by(self, version: KeptVersion) -> bool:
        """Return whether a version of this topic is that state, or came after it; of writers that left it did."""
        return all(version.state.get(writer, wanted) >= wanted for writer, wanted in self._state.items())


class _Command:
    """What is run after each update."""

    def __init__(self, command: str | None, timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self.given = command is not None

    def after(self, done: Followed, versions: VersionDirectory) -> Followed:
        """Run the command for a version, and return what is known of it then."""
        if self._command is None:
            return done
        failure = self._run(self._command, done)
        if not failure:
            versions.mark_told()
        return replace(done, failure=failure)

    def _run(self, command: str, done: Followed) -> str:
        said = {"STEP": done.step, "VERSION": done.version, "DIR": done.directory}
        process = subprocess.Popen(  # noqa: S602 - the command is the user's own
            command,
            shell=True,
            env=os.environ | {f"DELTABUS_{name}": str(value) for name, value in said.items()},
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,  # standard output is what we say
            start_new_session=True,
        )
        try:
            status = process.wait(self._timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"the command took longer than {self._timeout:g} s and was killed: {command}"
        return "" if status == 0 else f"the command failed with status {status}: {command}"
