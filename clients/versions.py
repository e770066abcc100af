"""A directory of checkpoints, version by version, of which `current` is the newest.

    DIR/17/            a version: complete, and never changed
    DIR/18/
    DIR/current -> 18  switched by a rename, when the version is on disk
    DIR/.told          the version that a command was last run for

A version is built in a hidden directory and gets its name by a rename. So a process may be killed at any moment: what
has a name is whole, and the next one removes the rest.
"""

from __future__ import annotations

import fcntl
import json
import operator
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from deltabus.bus.errors import ClientError, CorruptPayloadError, UsageError

from .disk import disk_errors, sync_directory, write_durably

__all__ = ["CURRENT", "MANIFEST", "KeptVersion", "VersionDirectory"]

CURRENT = "current"
"""The link to the newest version."""

MANIFEST = "deltabus.json"
"""The file in each version that says what it is."""

_BUILDING, _REMOVING, _LINKING, _TOLD, _LOCK = ".building", ".removing", ".linking", ".told", ".lock"
_THEN = "then start again: it goes on from what is there"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    """A version in the directory, as its manifest describes it.

    Attributes:
        name: What its directory is called: the version, followed by a number where another one had that name.
        serial: Grows from one to the next; versions of a topic that was begun anew start over.
        step: The training step.
        version: The writer's state counter; of several writers, the sum of theirs.
        state: The version of each writer.
        digests: The digest of each writer's state, in hexadecimal.
        metadata: The publisher's pairs of text.
    """

    name: str
    serial: int
    step: int
    version: int
    state: Mapping[str, int]
    digests: Mapping[str, str]
    metadata: Mapping[str, str]


class VersionDirectory:
    """Adds versions to a directory, one process at a time; a context manager.

    Args:
        path: The directory; made if it is not there.
        keep: How many versions stay, the newest ones.

    Raises:
        UsageError: If `keep` is not positive.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} leaves no version; keep=1 leaves the newest alone")
        self.path = path.absolute()
        self._keep = keep
        self._lock: int | None = None
        self._kept: list[KeptVersion] = []

    def __enter__(self) -> Self:
        """Take the directory, and tidy up what a killed process left.

        Raises:
            UsageError: If it is a file, or holds something else under the name `current`.
            ClientError: If another process is at work in it.
            CorruptPayloadError: If a version's manifest cannot be read.
            TransportError: If the disk refuses.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give the name of a directory")
        with disk_errors(self.path, then=_THEN):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._take()
            except BaseException:
                self._release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _take(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"another process keeps {self.path} current; end it, or give another directory"
            raise ClientError(text) from error
        link = self.path / CURRENT
        if link.exists() and not link.is_symlink():
            raise UsageError(f"{link} is there and is no link; give a directory of its own")
        (self.path / _LINKING).unlink(missing_ok=True)
        for entry in self.path.iterdir():
            if entry.name == _BUILDING or entry.name.startswith(_REMOVING):
                shutil.rmtree(entry)
        found = [
            _read(entry) for entry in self.path.iterdir() if not entry.is_symlink() and (entry / MANIFEST).exists()
        ]
        self._kept = sorted(found, key=lambda version: version.serial)
        if self._kept:
            self._switch()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def newest(self) -> KeptVersion | None:
        """The newest version; None when there is none."""
        return self._kept[-1] if self._kept else None

    def where(self, version: KeptVersion) -> Path:
        """Return the directory of a version."""
        return self.path / version.name

    def add(self, version: KeptVersion, write: Callable[[Path], object]) -> KeptVersion:
        """Add a version, make it the current one, and remove those that are too many.

        Args:
            version: What it is; its name and serial are given here.
            write: Writes its files into a directory, durably.

        Raises:
            StorageFullError: If the disk is full.
            AccessDeniedError: If it may not be written.
            TransportError: If something else is wrong with it.
        """
        serial = 1 if self.newest is None else self.newest.serial + 1
        building = self.path / _BUILDING
        with disk_errors(self.path, then=_THEN):
            try:
                write(building)
                version = replace(version, name=self._free_name(version.version), serial=serial)
                write_durably(building / MANIFEST, json.dumps(asdict(version), indent=2))
                sync_directory(building)
                building.rename(self.where(version))
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
            self._kept.append(version)
            self._switch()
        return version

    def _free_name(self, version: int) -> str:
        name, number = str(version), 1
        while os.path.lexists(self.path / name):
            number += 1
            name = f"{version}-{number}"
        return name

    def _switch(self) -> None:
        """Let `current` lead to the newest version, and remove those that are too many."""
        sync_directory(self.path)  # the version's name first
        link, newest = self.path / _LINKING, self._kept[-1]
        if not (self.path / CURRENT).is_symlink() or (self.path / CURRENT).readlink() != Path(newest.name):
            link.symlink_to(newest.name)
            link.rename(self.path / CURRENT)
            sync_directory(self.path)
        while len(self._kept) > self._keep:
            old = self.where(self._kept[0])
            gone = self.path / f"{_REMOVING}-{old.name}"
            old.rename(gone)
            del self._kept[0]
            shutil.rmtree(gone)

    @property
    def told(self) -> bool:
        """Whether the command has been run for the newest version."""
        try:
            return self.newest is None or (self.path / _TOLD).read_text(encoding="utf-8") == str(self.newest.serial)
        except (FileNotFoundError, UnicodeDecodeError):
            return False

    def mark_told(self) -> None:
        """Remember that the command was run for the newest version.

        Raises:
            TransportError: If the disk refuses.
        """
        if self.newest is not None:
            with disk_errors(self.path, then=_THEN):
                (self.path / _TOLD).write_text(str(self.newest.serial), encoding="utf-8")


def _read(directory: Path) -> KeptVersion:
    try:
        found = json.loads((directory / MANIFEST).read_bytes())
        version = KeptVersion(**found)
        state, digests, metadata = (dict(found[field]) for field in ("state", "digests", "metadata"))
        serial = operator.index(version.serial)
        return replace(version, name=directory.name, serial=serial, state=state, digests=digests, metadata=metadata)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        text = f"{directory / MANIFEST} does not describe a version ({error}); remove {directory}, and start again"
        raise CorruptPayloadError(text) from error
