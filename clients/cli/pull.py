"""`deltabus pull`: one version of a topic as a checkpoint, resumable and all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import ClientError, RetentionGapError, UsageError
from deltabus.bus.message import Blob, Message
from deltabus.bus.planner import plan
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.signing import KeyRing
from deltabus.bus.transport import Transport
from deltabus.bus.version import VersionVector
from deltabus.codecs.assembly import assemble
from deltabus.codecs.changes import Bits
from deltabus.codecs.checkpoint import save_checkpoint
from deltabus.codecs.held import to_host
from deltabus.codecs.shadow import Shadow
from deltabus.codecs.state import State, collect
from deltabus.disk import disk_errors, sync_directory
from deltabus.fetching import in_thread
from deltabus.stager import Stager
from deltabus.transports import open_transport
from deltabus.workers import usable_cores

from .output import Meter, Silent
from .topic import Topic, read_topic, version_ranges

__all__ = ["Pulled", "pull_version"]

_DOWNLOADS = 4
_AGAIN = "then run the same command again: what was fetched is kept"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that now lies on disk.

    Attributes:
        url: The topic.
        writer: Whose version; the names of all where several make it together.
        version: Its number; of several writers the sum of theirs.
        step: The training step that it belongs to.
        directory: Where the checkpoint lies.
        files: Its files, the index included.
        nbytes: Their size in bytes.
        messages: How many messages it was rebuilt from.
        fetched: Bytes that were fetched now.
        kept: Bytes that an interrupted run had fetched.
    """

    url: str
    writer: str
    version: int
    step: int
    directory: Path
    files: tuple[Path, ...]
    nbytes: int
    messages: int
    fetched: int
    kept: int


def pull_version(
    url: str,
    directory: str | os.PathLike[str],
    *,
    version: int | None = None,
    writer: str | None = None,
    force: bool = False,
    keys: KeyRing | None = None,
    meter: Meter | None = None,
) -> Pulled:
    """Rebuild a version, check it against its digest, and write it as a checkpoint.

    The directory appears whole, by a rename. Until then what is fetched is kept beside it, in a hidden directory: a run
    that follows a failed one fetches only what is missing.

    Args:
        url: The topic.
        directory: Where the checkpoint is to lie; must not be there, or be empty.
        version: Which version; None is the newest. Of several writers' the sum of theirs, as `Update.version`.
        writer: Whose; None is the state that all make together.
        force: Whether to replace a directory that is not empty, with everything in it.
        keys: Whose messages are believed; None believes everybody.
        meter: Is told how far it is.

    Raises:
        UsageError: If an argument or the URL is wrong, or the directory is taken.
        RetentionGapError: If the version is not in the topic, or can no longer be rebuilt.
        MessageFormatError: If a record or schema cannot be read.
        SignatureError: If keys are given, and a record does not show that it belongs where it stands.
        CorruptPayloadError: If a payload is damaged, or does not lead to the digest that its message says.
        DivergedError: If the topic's history was changed.
        SchemaMismatchError: If what the writers hold makes no whole tensors.
        TransportError: If the topic cannot be reached, or the disk is full or refuses.
        ClientError: If another pull to this directory is running.
    """
    meter = meter or Silent()
    target = Path(os.path.realpath(directory))
    hidden = target.parent / f".{target.name}.deltabus-pull"
    with disk_errors(target, then=_AGAIN):
        _check_target(target, force=force)
        topic = read_topic(url, keys=keys)
        paths = _paths_to(topic, writer, version)
        _check_apart(topic.url, target)
        with _locked(hidden):
            _bring_back(target, hidden)
            _check_target(target, force=force)
            blobs = _KeptBlobs(hidden)
            with ThreadPoolExecutor(usable_cores(), thread_name_prefix="deltabus-decode") as pool:
                state = asyncio.run(_rebuild(url, paths, blobs, pool, meter))
            build = hidden / "checkpoint"
            shutil.rmtree(build, ignore_errors=True)
            meter.begin("writing", state.schema.nbytes)
            names = [file.name for file in save_checkpoint(build, state.schema, _metered(state, meter))]
            _put_in_place(build, target, hidden, force=force)
            shutil.rmtree(hidden)
    files = tuple(target / name for name in names)
    return Pulled(
        url=topic.url,
        writer=", ".join(path[-1].writer for path in paths),
        version=sum(path[-1].version for path in paths),
        step=max(path[-1].step for path in paths),
        directory=target,
        files=files,
        nbytes=sum(file.stat().st_size for file in files),
        messages=sum(map(len, paths)),
        fetched=blobs.fetched,
        kept=sum(blob.size for blob in _blobs_of(chain.from_iterable(paths))) - blobs.fetched,
    )


def _paths_to(topic: Topic, writer: str | None, version: int | None) -> list[tuple[Message, ...]]:
    """Return the messages that lead from nothing to the version, writer by writer."""
    if writer is not None or len({message.writer for message in topic.messages}) == 1:
        return [_path_to(topic, writer, version)]
    sequencer = Sequencer.of(topic.messages, topic=topic.url)
    target = sequencer.newest_cut()
    if version is not None:
        target, state = None, VersionVector()
        while (cut := sequencer.next_cut(state)) is not None and target is None:
            state = cut.state
            target = cut if sum(state.values()) == version else None
    if target is None:
        wanted = "no state that all writers have reached" if version is None else f"no version {version} of all writers"
        raise RetentionGapError(f"{topic.url} has {wanted}; choose one with --writer", topic=topic.url)
    return list(sequencer.plan(have=None, target=target.state).by_writer.values())


def _path_to(topic: Topic, writer: str | None, version: int | None) -> tuple[Message, ...]:
    """Return the messages that lead from nothing to a version of one writer."""
    log = topic.log_of(writer)
    if version is not None and all(message.version != version for message in log):
        raise RetentionGapError(
            f"{topic.url} does not hold version {version} of writer {log[0].writer}; it holds {version_ranges(log)}",
            topic=topic.url,
            writer=log[0].writer,
        )
    wanted = max(message.version for message in log) if version is None else version
    return plan(log, have=None, target=VersionVector({log[0].writer: wanted})).messages


def _blobs_of(path: Iterable[Message]) -> list[Blob]:
    """Return the blobs that messages name, schemas included, each once."""
    return list({blob.checksum: blob for message in path for blob in (message.schema, *message.blobs)}.values())


async def _rebuild(
    url: str, paths: Sequence[Sequence[Message]], blobs: _KeptBlobs, pool: ThreadPoolExecutor, meter: Meter
) -> Shadow | State:
    """Fetch what is missing, then go through the messages one by one."""
    async with open_transport(url) as transport:
        reader = _KeepingReader(transport, blobs)
        wanted = _blobs_of(chain.from_iterable(paths))
        meter.begin("fetching", sum(blob.size for blob in wanted))
        await _fetch_all(reader, wanted, meter)
        meter.begin("rebuilding", sum(message.nbytes for path in paths for message in path))
        shadows: list[Shadow] = []
        for path in paths:
            stager = Stager(reader, pool)
            for message in path:
                (await stager.stage(message)).release()
                meter.advance(message.nbytes)
            assert stager.shadow is not None
            shadows.append(stager.shadow)
    only = shadows[0]
    if len(shadows) == 1 and all(spec.whole == spec.shape for spec in only.schema.tensors):
        return only
    return collect(await in_thread(assemble, [(shadow.schema, shadow.read) for shadow in shadows]))


async def _fetch_all(reader: TopicReader, blobs: Sequence[Blob], meter: Meter) -> None:
    waiting = iter(blobs)

    async def work() -> None:
        for blob in waiting:  # shared, so that each blob is fetched by one of the tasks
            await reader.fetch(blob)
            meter.advance(blob.size)

    tasks = [asyncio.create_task(work()) for _ in range(_DOWNLOADS)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _KeptBlobs:
    """Blobs in a directory, named by their checksums."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.fetched = 0
        """Bytes that were added."""

    def find(self, blob: Blob) -> bytes | None:
        """Return the blob's bytes; None if they are not here, or damaged."""
        try:
            data = self._path(blob).read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).digest() == blob.checksum else None

    def add(self, blob: Blob, data: bytes) -> None:
        """Keep a blob."""
        path = self._path(blob)
        begun = path.with_suffix(".part")
        try:
            begun.write_bytes(data)
            begun.rename(path)
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
        self.fetched += len(data)

    def _path(self, blob: Blob) -> Path:
        return self._directory / f"{blob.checksum.hex()}.blob"


class _KeepingReader(TopicReader):
    """A reader that keeps what it fetches."""

    def __init__(self, transport: Transport, blobs: _KeptBlobs) -> None:
        super().__init__(transport)
        self._blobs = blobs

    async def fetch(self, blob: Blob) -> bytes:
        """Return a blob's bytes, checked, from where they were kept or else from the topic."""
        data = await in_thread(self._blobs.find, blob)
        if data is None:
            data = await super().fetch(blob)
            await in_thread(self._blobs.add, blob, data)
        return data


def _metered(state: Shadow | State, meter: Meter) -> Callable[[int], Bits]:
    def read(index: int) -> Bits:
        bits = to_host(state.read(index))
        meter.advance(bits.nbytes)
        return bits

    return read


def _check_target(target: Path, *, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; give the name of a directory")
    if target.parent == target:
        raise UsageError(f"{target} cannot be replaced; give the name of a directory in it")
    if not force and target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty; give another directory, or replace all that is in it with --force")


def _check_apart(url: str, target: Path) -> None:
    """Refuse to replace a directory that holds the topic itself."""
    if f"{url.partition('?')[0]}/".startswith(f"{target.as_uri()}/"):
        raise UsageError(f"{target} holds the topic {url} itself; give another directory")


@contextlib.contextmanager
def _locked(hidden: Path) -> Iterator[None]:
    """Hold the hidden directory for this process; leave it only if it holds something to go on with."""
    hidden.mkdir(parents=True, exist_ok=True)
    with (hidden / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClientError(f"another pull is at work in {hidden}; wait until it has ended") from error
        try:
            yield
        finally:
            if hidden.exists() and {entry.name for entry in hidden.iterdir()} == {"lock"}:
                shutil.rmtree(hidden)


def _bring_back(target: Path, hidden: Path) -> None:
    """Undo what a run left that was killed between the two renames."""
    replaced = hidden / "replaced"
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def _put_in_place(build: Path, target: Path, hidden: Path, *, force: bool) -> None:
    """Give the finished checkpoint its name; what had it before goes only then."""
    replaced = hidden / "replaced"
    swapped = force and target.exists()
    if swapped:
        target.rename(replaced)
    try:
        build.rename(target)
    except BaseException:
        if swapped:
            replaced.rename(target)
        raise
    sync_directory(target.parent)
