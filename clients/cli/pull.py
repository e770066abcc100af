"""`deltabus pull`: one version of a topic as a checkpoint, resumable and all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import (
    AccessDeniedError,
    ClientError,
    DeltabusError,
    RetentionGapError,
    StorageFullError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import Blob, Message
from deltabus.bus.planner import plan
from deltabus.bus.transport import Transport
from deltabus.bus.version import VersionVector
from deltabus.codecs.changes import Bits
from deltabus.codecs.checkpoint import save_checkpoint
from deltabus.codecs.shadow import Shadow
from deltabus.stager import Stager, in_thread
from deltabus.transports import open_transport
from deltabus.workers import usable_cores

from .output import Meter, Silent
from .topic import Topic, read_topic, version_ranges

__all__ = ["Pulled", "pull_version"]

_DOWNLOADS = 4


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that now lies on disk.

    Attributes:
        url: The topic.
        writer: Whose version.
        version: Its number.
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
    meter: Meter | None = None,
) -> Pulled:
    """Rebuild a version, check it against its digest, and write it as a checkpoint.

    The directory appears whole, by a rename. Until then what is fetched is kept beside it, in a hidden directory: a run
    that follows a failed one fetches only what is missing.

    Args:
        url: The topic.
        directory: Where the checkpoint is to lie; must not be there, or be empty.
        version: Which version; None is the newest.
        writer: Whose; needed where a topic has several writers.
        force: Whether to replace a directory that is not empty, with everything in it.
        meter: Is told how far it is.

    Raises:
        UsageError: If an argument or the URL is wrong, or the directory is taken.
        RetentionGapError: If the version is not in the topic, or can no longer be rebuilt.
        MessageFormatError: If a record or schema cannot be read.
        CorruptPayloadError: If a payload is damaged, or does not lead to the digest that its message says.
        DivergedError: If the topic's history was changed.
        TransportError: If the topic cannot be reached, or the disk is full or refuses.
        ClientError: If another pull to this directory is running.
    """
    meter = meter or Silent()
    target = Path(os.path.realpath(directory))
    hidden = target.parent / f".{target.name}.deltabus-pull"
    with _disk_errors(target):
        _check_target(target, force=force)
        topic = read_topic(url)
        path = _path_to(topic, writer, version)
        _check_apart(topic.url, target)
        with _locked(hidden):
            _bring_back(target, hidden)
            _check_target(target, force=force)
            blobs = _KeptBlobs(hidden)
            with ThreadPoolExecutor(usable_cores(), thread_name_prefix="deltabus-decode") as pool:
                shadow = asyncio.run(_rebuild(url, path, blobs, pool, meter))
            build = hidden / "checkpoint"
            shutil.rmtree(build, ignore_errors=True)
            meter.begin("writing", shadow.schema.nbytes)
            names = [file.name for file in save_checkpoint(build, shadow.schema, _metered(shadow, meter))]
            _put_in_place(build, target, hidden, force=force)
            shutil.rmtree(hidden)
    files = tuple(target / name for name in names)
    return Pulled(
        url=topic.url,
        writer=path[-1].writer,
        version=path[-1].version,
        step=path[-1].step,
        directory=target,
        files=files,
        nbytes=sum(file.stat().st_size for file in files),
        messages=len(path),
        fetched=blobs.fetched,
        kept=sum(blob.size for blob in _blobs_of(path)) - blobs.fetched,
    )


def _path_to(topic: Topic, writer: str | None, version: int | None) -> tuple[Message, ...]:
    """Return the messages that lead from nothing to the version."""
    log = topic.log_of(writer)
    if version is not None and all(message.version != version for message in log):
        raise RetentionGapError(
            f"{topic.url} does not hold version {version} of writer {log[0].writer}; it holds {version_ranges(log)}",
            topic=topic.url,
            writer=log[0].writer,
        )
    wanted = max(message.version for message in log) if version is None else version
    return plan(log, have=None, target=VersionVector({log[0].writer: wanted})).messages


def _blobs_of(path: Sequence[Message]) -> list[Blob]:
    """Return the blobs that messages name, schemas included, each once."""
    return list({blob.checksum: blob for message in path for blob in (message.schema, *message.blobs)}.values())


async def _rebuild(
    url: str, path: Sequence[Message], blobs: _KeptBlobs, pool: ThreadPoolExecutor, meter: Meter
) -> Shadow:
    """Fetch what is missing, then go through the messages one by one."""
    async with open_transport(url) as transport:
        reader = _KeepingReader(transport, blobs)
        wanted = _blobs_of(path)
        meter.begin("fetching", sum(blob.size for blob in wanted))
        await _fetch_all(reader, wanted, meter)
        meter.begin("rebuilding", sum(message.nbytes for message in path))
        stager = Stager(reader, pool)
        for message in path:
            (await stager.stage([message])).release()
            meter.advance(message.nbytes)
        assert stager.shadow is not None
        return stager.shadow


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


def _metered(shadow: Shadow, meter: Meter) -> Callable[[int], Bits]:
    def read(index: int) -> Bits:
        bits = shadow.read(index)
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
    _sync(target.parent)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Turn errors of the disk that is written to into ours."""
    try:
        yield
    except DeltabusError:
        raise
    except OSError as error:
        failed = f"cannot write {target}: {error.strerror or error}"
        url = target.as_uri()
        again = "then run the same command again: what was fetched is kept"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFullError(f"{failed}; make room there, {again}", url=url) from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise AccessDeniedError(f"{failed}; choose a directory that may be written, {again}", url=url) from error
        raise TransportError(f"{failed}; look at the disk, {again}", url=url) from error
