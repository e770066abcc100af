"""What clients that write checkpoints share: errors of the disk as ours, and names that outlive a crash."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from deltabus.bus.errors import AccessDeniedError, DeltabusError, StorageFullError, TransportError

__all__ = ["disk_errors", "sync_directory", "write_durably"]


@contextlib.contextmanager
def disk_errors(target: Path, *, then: str) -> Iterator[None]:
    """Turn errors of the disk that is written to into ours.

    Args:
        target: What is being written.
        then: What to do when the cause is mended.

    Raises:
        StorageFullError: If it is full.
        AccessDeniedError: If it may not be written.
        TransportError: If something else is wrong with it.
    """
    try:
        yield
    except DeltabusError:
        raise
    except OSError as error:
        failed = f"cannot write {target}: {error.strerror or error}"
        url = target.as_uri()
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFullError(f"{failed}; make room there, {then}", url=url) from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise AccessDeniedError(f"{failed}; choose a directory that may be written, {then}", url=url) from error
        raise TransportError(f"{failed}; look at the disk, {then}", url=url) from error


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk.

    Raises:
        OSError: If that fails.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Write a file, and force what is in it to disk.

    Raises:
        OSError: If that fails.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
