"""Blobs on disk, within a limit: those that nobody used for the longest time go first.

    <directory>/<2 hex digits>/<64 hex digits of topic and key>-<64 hex digits of the bytes>

Only what is named by its content is kept, so that it never becomes wrong. A file that an earlier process left is
read once more before it is believed. All functions block, but for a moment; those that read or write much are run in
threads by their callers, so a lock guards what is counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deltabus.bus.errors import UsageError

__all__ = ["Cache", "CacheFullError", "Draft", "make_temporary", "place_of"]

_log = logging.getLogger("deltabus.http")
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})")
_TEMPORARY = ".tmp-"
_TEMPORARY_CACHE = "deltabus-cache-"
_LOCK = "lock"


class CacheFullError(Exception):
    """There is no room for a blob; for the callers here, which go on without the cache."""


@dataclass(slots=True)
class _Entry:
    digest: str
    size: int
    believed: bool


def make_temporary() -> Path:
    """Return a new directory for a cache that goes with its process; those of killed processes are removed first."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY_CACHE}*"):
        with contextlib.suppress(OSError), (path / _LOCK).open("rb") as lock:
            if path.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY_CACHE))


def place_of(topic: str, key: str) -> str:
    """Return the name under which a blob is kept."""
    return hashlib.sha256(f"{topic}\0{key}".encode()).hexdigest()


class Draft:
    """A file that is being written; it counts towards the limit from the first byte on."""

    def __init__(self, cache: Cache, path: Path) -> None:
        self._cache = cache
        self._path = path
        self.file: BinaryIO = path.open("x+b", buffering=0)
        self.size = 0
        self._hash = hashlib.sha256()
        self._settled = False

    @property
    def digest(self) -> str:
        """SHA-256 of what was written, in hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Write more, all of it or nothing that counts.

        Raises:
            CacheFullError: If there is no room.
        """
        self._cache.reserve(len(data))
        at, view = self.size, memoryview(data)
        try:
            while view:
                # Not at the file's own place: whoever sends from it moves that.
                count = os.pwrite(self.file.fileno(), view, at)
                view, at = view[count:], at + count
        except OSError as error:
            self._cache.release(len(data))
            raise CacheFullError(error.strerror) from error
        self.size += len(data)
        self._hash.update(data)

    def keep(self, place: str) -> None:
        """Make it an entry of the cache, unless there is one; the file stays open."""
        if not self._settled and self._cache.adopt(self._path, place, self.digest, self.size):
            self._settled = True
        else:
            self.drop()

    def drop(self) -> None:
        """Remove it, unless it is kept; whoever has the file open may read on."""
        if not self._settled:
            self._settled = True
            self._cache.release(self.size)
            with contextlib.suppress(OSError):
                self._path.unlink()


class Cache:
    """Blobs on disk.

    Args:
        directory: Where; it is created. Another process must not use it.
        limit: Bytes that it may take.

    Raises:
        UsageError: If the directory cannot be used.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self.limit = limit
        self.used = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._turn = threading.RLock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UsageError(f"another process uses the cache in {directory}; choose another directory") from None
        except OSError as error:
            raise UsageError(f"the cache cannot be kept in {directory}: {error.strerror}") from error
        self._find()

    def __len__(self) -> int:
        return len(self._entries)

    def _find(self) -> None:
        """Take over what an earlier process left."""
        found = []
        for path in self._directory.glob("[0-9a-f][0-9a-f]/*"):
            named = _NAME.fullmatch(path.name)
            with contextlib.suppress(OSError):
                if not named:
                    path.unlink()
                    continue
                status = path.stat()
                found.append((status.st_mtime, named[1], _Entry(named[2], status.st_size, believed=False)))
        for _, place, entry in sorted(found, key=lambda one: one[:2]):
            if place not in self._entries:
                self._entries[place] = entry
                self.used += entry.size
        self._make_room(0)

    def open(self, place: str) -> tuple[BinaryIO, int] | None:
        """Return a blob's file, opened, and its size; None when it is not there.

        It may read all of the file, once.
        """
        with self._turn:
            entry = self._entries.get(place)
        if entry is None:
            return None
        try:
            file = self._path(place, entry).open("rb", buffering=0)
        except OSError:
            self.remove(place)
            return None
        if not entry.believed:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.digest:
                _log.warning("a file in the cache was damaged, and is fetched again: %s", place)
                file.close()
                self.remove(place)
                return None
            entry.believed = True
        with self._turn:
            if place in self._entries:
                self._entries.move_to_end(place)
        return file, entry.size

    def is_believed(self, place: str) -> bool:
        """Whether a blob is there that `open` need not read."""
        entry = self._entries.get(place)
        return entry is not None and entry.believed

    def draft(self) -> Draft:
        """Return a new file.

        Raises:
            CacheFullError: If it cannot be made.
        """
        folder = self._directory / "00"
        try:
            folder.mkdir(exist_ok=True)
            return Draft(self, folder / f"{_TEMPORARY}{secrets.token_hex(12)}")
        except OSError as error:
            raise CacheFullError(error.strerror) from error

    def reserve(self, size: int) -> None:
        """Count bytes that are about to be written, and let old blobs go for them.

        Raises:
            CacheFullError: If there is no room.
        """
        with self._turn:
            self._make_room(size)
            self.used += size

    def release(self, size: int) -> None:
        """Count bytes no more."""
        with self._turn:
            self.used -= size

    def adopt(self, draft: Path, place: str, digest: str, size: int) -> bool:
        """Make a file that was counted an entry; return whether it is one now."""
        entry = _Entry(digest, size, believed=True)
        path = self._path(place, entry)
        with self._turn:
            if place in self._entries:
                return False
            try:
                path.parent.mkdir(exist_ok=True)
                draft.replace(path)
            except OSError as error:
                _log.warning("the cache in %s cannot keep a blob: %s", self._directory, error.strerror)
                return False
            self._entries[place] = entry
            return True

    def remove(self, place: str) -> None:
        """Remove a blob; whoever has it open may read on."""
        with self._turn:
            entry = self._entries.pop(place, None)
            if entry is not None:
                self.used -= entry.size
                with contextlib.suppress(OSError):
                    self._path(place, entry).unlink()

    def close(self) -> None:
        """Let another process use the directory."""
        self._lock.close()

    def _make_room(self, size: int) -> None:
        while self.used + size > self.limit and self._entries:
            self.remove(next(iter(self._entries)))
        if self.used + size > self.limit:
            raise CacheFullError(f"the cache may take {self.limit} bytes")

    def _path(self, place: str, entry: _Entry) -> Path:
        return self._directory / place[:2] / f"{place}-{entry.digest}"
