"""`file:///directory`: topics in a directory, on a local disk or a network file system that all sides mount.

    <directory>/<key>                               a blob
    <directory>/logs/<log>/00000000000000000007     the record at position 7 of a log
    .../.tmp-<process>-<random>                     a file being written; readers ignore it

Whatever removes records must take the oldest first, and leave those that an append still under way may stand behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from deltabus.bus.errors import (
    AccessDeniedError,
    AppendUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    StorageFullError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.transport import Buffer, Guarantees, Record, StoredBlob

from . import atomic, records
from .names import (
    LOGS,
    byte_view,
    check_after,
    check_key,
    check_keys,
    check_log,
    check_position,
    check_range,
    check_record,
)
from .notifier import WakeableTransport
from .options import Option, parse_flag, parse_seconds
from .registry import Address
from .threads import NoProgressError, Work, run_in_thread
from .watch import Watcher

__all__ = ["FileTransport"]

_Result = TypeVar("_Result")

_POLL = 1.0
_FIRST_POLL = 0.05
_TIMEOUT = 60.0


class FileTransport(WakeableTransport):
    """A topic in a directory, which the first write creates.

    Args:
        directory: Where; a relative path starts from the working directory.
        poll: Seconds between two looks for new records, at most, while nothing happens. Notifications make this matter
            only where the file system gives none, such as NFS.
        timeout: Seconds after which an operation that makes no progress is given up.
        watch: Whether to use file-system notifications.
    """

    guarantees = Guarantees(
        conditional_append=True,
        push=True,
        durable=True,
        atomic_visibility=True,
        remark="Synced to disk before it is acknowledged; on network file systems readers ask again and again.",
    )
    options: ClassVar[Sequence[Option]] = (
        Option(name="poll", parse=parse_seconds, default=_POLL, help="most seconds between looks for new records"),
        Option(name="timeout", parse=parse_seconds, default=_TIMEOUT, help="seconds to wait for a disk that hangs"),
        Option(name="watch", parse=parse_flag, default=True, help="whether to use file-system notifications"),
    )

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        poll: float = _POLL,
        timeout: float = _TIMEOUT,
        watch: bool = True,
    ) -> None:
        path = Path(directory).absolute()
        self.url = path.as_uri()
        self._root = str(path)
        self._logs = str(path / LOGS)
        self._poll = poll
        self._timeout = timeout
        self._watch = watch
        self._watcher = Watcher(path / LOGS)
        self._ready: set[str] = set()
        self._tails: dict[asyncio.Event, str] = {}
        self._closed = False

    @classmethod
    def from_address(
        cls, address: Address, *, poll: float = _POLL, timeout: float = _TIMEOUT, watch: bool = True
    ) -> Self:
        """Return the topic in the directory that the URL names.

        Raises:
            UsageError: If the URL names another machine, a relative path, or the root directory.
        """
        if address.host not in ("", "localhost") or address.username is not None:
            raise UsageError(
                f"{address.text} is relative or on another machine; write file:///absolute/path, or the path alone"
            )
        if not address.path.strip("/"):
            raise UsageError(f"{address.text} names no directory; write one such as file:///data/run-7")
        return cls(address.path, poll=poll, timeout=timeout, watch=watch)

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        directory, name = os.path.split(f"{self._root}/{check_key(key)}")
        view = byte_view(data)
        what = f"store blob {key!r}"
        try:
            await self._run(lambda work: self._create(directory, name, view, work), what)
        except atomic.OtherBytesError:
            raise KeyExistsError(
                f"cannot {what} in {self.url}: other bytes are there, and keys are write-once", url=self.url
            ) from None
        except atomic.UncertainError as error:
            raise TransientTransportError(
                f"{self.url} lost the answer when told to {what}: {error.__cause__}; it may be done again", url=self.url
            ) from error

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        check_key(key)
        check_range(start, stop)
        return await self._run(lambda work: self._get(key, start, stop, work), f"read blob {key!r}")

    def _get(self, key: str, start: int, stop: int | None, work: Work) -> bytes:
        try:
            return atomic.read_file(f"{self._root}/{key}", start, stop, work)
        except (FileNotFoundError, IsADirectoryError):
            pass
        except NotADirectoryError:
            # A part of the key is a blob itself; or else the whole topic is no directory.
            if not Path(self._root).is_dir():
                raise
        raise KeyNotFoundError(f"{self.url} has no blob {key!r}", url=self.url)

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        checked = check_keys(keys)
        await self._run(lambda work: self._delete(checked, work), f"delete {len(checked)} blobs")

    def _delete(self, keys: list[str], work: Work) -> None:
        for key in keys:
            work.advance()
            path = Path(f"{self._root}/{key}")
            if not path.is_dir():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        check_key(folder)
        return await self._run(lambda work: self._blobs(folder, work), f"list the blobs in {folder!r}")

    def _blobs(self, folder: str, work: Work) -> list[StoredBlob]:
        found = [
            StoredBlob(f"{folder}/{name}", status.st_size, status.st_mtime)
            for name, status in atomic.walk_files(f"{self._root}/{folder}", work)
        ]
        return sorted(found)

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        check_log(log)
        check_position(position)
        view = check_record(record)
        what = f"append to log {log!r} at position {position}"
        try:
            await self._run(lambda work: self._append(log, position, view, work), what, unanswered=AppendUnknownError)
        except atomic.OtherBytesError:
            raise PositionTakenError(
                f"cannot {what} in {self.url}: another record is, or was, there", url=self.url
            ) from None
        except atomic.UncertainError as error:
            raise AppendUnknownError(
                f"{self.url} lost the answer when told to {what}: {error.__cause__}; read it to learn who won",
                url=self.url,
            ) from error

    def _append(self, log: str, position: int, record: memoryview, work: Work) -> None:
        directory = f"{self._logs}/{log}"
        held = records.has_record(directory, position)
        if not held:
            # A record that came here meanwhile may be the same; one that stands further on shows that this was removed.
            if position == 0 and (records.find_first(directory) or 0) > 0:
                raise atomic.OtherBytesError
            if position and not records.has_record(directory, position - 1):
                if (records.find_first(directory) or 0) > position:
                    raise atomic.OtherBytesError
                raise UsageError(f"position {position - 1} of log {log!r} in {self.url} is empty; append there first")
        self._create(directory, records.record_name(position), record, work)
        if held:
            return
        try:
            taken_back = records.take_back(directory, position)
        except OSError as error:
            raise atomic.UncertainError from error
        if taken_back:
            raise atomic.OtherBytesError

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        check_log(log)
        check_after(after, limit)
        directory = f"{self._logs}/{log}"
        return await self._run(
            lambda work: records.read_records(directory, after, limit, work), f"read log {log!r} after {after}"
        )

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        self._check_open()
        check_log(log)
        check_after(after)
        return self._tail(log, after)

    async def _tail(self, log: str, after: int) -> AsyncIterator[Record]:
        first_pause = pause = min(_FIRST_POLL, self._poll)
        with self._listening(log) as wake:
            while True:
                wake.clear()
                found = await self.read(log, after)
                for record in found:
                    yield record
                    after = record.position
                if found:
                    pause = first_pause
                    continue
                try:
                    async with asyncio.timeout(pause):
                        await wake.wait()
                except TimeoutError:
                    pause = min(2 * pause, self._poll)

    @contextlib.contextmanager
    def _listening(self, log: str) -> Iterator[asyncio.Event]:
        """Give an event that is set when the log may have changed, and when the transport is closed."""
        with contextlib.ExitStack() as stack:
            event = stack.enter_context(self._watcher.listening(log)) if self._watch else asyncio.Event()
            self._tails[event] = log
            stack.callback(self._tails.pop, event)
            yield event

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        check_log(log)
        check_position(before)
        directory = f"{self._logs}/{log}"
        await self._run(lambda work: records.trim_records(directory, before, work), f"trim log {log!r} before {before}")

    async def logs(self) -> list[str]:  # noqa: D102
        return await self._run(lambda work: records.list_logs(self._logs), "list the logs")

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        self.wake()

    def wake(self, log: str | None = None) -> None:  # noqa: D102
        for event, name in self._tails.items():
            if log in (None, name):
                event.set()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.url} is closed; open another", url=self.url)

    def _create(self, directory: str, name: str, data: memoryview, work: Work) -> None:
        if directory not in self._ready:
            atomic.make_directory(directory, self._root)
            atomic.remove_stale(directory)
            self._ready.add(directory)
        try:
            atomic.create_file(directory, name, data, work)
        except FileNotFoundError:
            self._ready.discard(directory)  # somebody removed it; the next attempt makes it again
            raise

    async def _run(
        self,
        function: Callable[[Work], _Result],
        what: str,
        *,
        unanswered: type[TransportError] = TransientTransportError,
    ) -> _Result:
        """Run blocking work in a thread, and turn the system's errors into ours."""
        self._check_open()
        try:
            return await run_in_thread(function, limit=self._timeout)
        except NoProgressError:
            raise unanswered(
                f"{self.url} did not answer within {self._timeout:g} s when told to {what}; look at the disk or mount, "
                "or raise the option 'timeout'",
                url=self.url,
            ) from None
        except OSError as error:
            kind, advice = _judge(error)
            reason = error.strerror or error
            raise kind(f"cannot {what} in {self.url}: {reason}; {advice}", url=self.url) from error


def _judge(error: OSError) -> tuple[type[TransportError], str]:
    """Return which of our errors an error of the system is, and what to do."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageFullError, "free space or raise the quota; nothing was left behind"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return AccessDeniedError, "check owner, permissions and mount options of the directory"
    if atomic.transient(error):
        return TransientTransportError, "it may be done again; if it goes on, look at the disk or mount"
    if error.errno in {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
        return (
            TransportError,
            "the file system has neither hard links nor exclusive renames; choose another for the topic",
        )
    return TransportError, "check that the path leads through directories, is not too long, and holds only this topic"
