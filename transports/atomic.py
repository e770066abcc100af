"""Files that appear whole or not at all, and never change: blocking functions on a POSIX file system.

A file is written under a hidden temporary name in the directory where it will stand, forced to disk, and then given its
real name by a hard link, which fails if the name is taken: the one operation that is atomic and exclusive on local
file systems and on NFS alike. Where there are no hard links, Linux can rename without replacing. Then the directory is
forced to disk, so that the name survives as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator

from .threads import Work

__all__ = [
    "CHUNK",
    "OtherBytesError",
    "UncertainError",
    "create_file",
    "make_directory",
    "read_file",
    "remove_stale",
    "sync_directory",
    "transient",
    "walk_files",
]

CHUNK = 8 << 20
"""Bytes that are written or read between two reports of progress."""

_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600.0

_RENAME_NOREPLACE = 1  # linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOENT,
    errno.ENOLCK,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

_logger = logging.getLogger(__name__)


class OtherBytesError(Exception):
    """A file with other bytes has the name."""


class UncertainError(Exception):
    """The file may stand under its name, now or after a crash, or may not; the reason is its `__cause__`."""


def transient(error: OSError) -> bool:
    """Return whether the same call may succeed later, without anybody mending something."""
    return error.errno in _TRANSIENT


def create_file(directory: str, name: str, data: memoryview, work: Work) -> None:
    """Write a file, unless a file with these bytes has the name already; return when it would survive a crash.

    Raises:
        OtherBytesError: If a file with other bytes has the name.
        UncertainError: If it is not known whether the file stands.
        OSError: If anything else goes wrong; then the file was not written.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _stands(folder, name, data, work):
            _write_and_name(folder, name, data, work)
        try:
            sync_directory(folder)
        except OSError as error:
            raise UncertainError from error
    finally:
        os.close(folder)


def _stands(folder: int, name: str, data: memoryview, work: Work) -> bool:
    """Return whether the name is taken, by a file with these bytes."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return False
    try:
        same = os.fstat(file).st_size == data.nbytes
        start = 0
        while same and start < data.nbytes:
            work.advance()
            held = os.pread(file, min(CHUNK, data.nbytes - start), start)
            # A view compares item by item, bytes at once.
            same = bool(held) and held == bytes(data[start : start + len(held)])
            start += len(held)
    finally:
        os.close(file)
    if not same:
        raise OtherBytesError
    return True


def _write_and_name(folder: int, name: str, data: memoryview, work: Work) -> None:
    temporary = f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        try:
            written = 0
            while written < data.nbytes:
                work.advance()
                begun, written = written, written + os.write(file, data[written : written + CHUNK])
                if written < data.nbytes:
                    _begin_sync(file, begun, written)
            os.fsync(file)
        finally:
            os.close(file)
        work.advance()
        try:
            _give_name(folder, temporary, name)
        except FileExistsError:
            # Another writer won; or we did, and NFS lost the answer and asked again.
            _stands(folder, name, data, work)
    finally:
        try:
            os.unlink(temporary, dir_fd=folder)
        except FileNotFoundError:
            pass  # renamed, not linked
        except OSError as error:
            # The outcome is decided without it: readers do not see it, and a later writer removes it.
            _logger.debug("left %s behind: %s", temporary, error)


def _begin_sync(file: int, start: int, stop: int) -> None:
    """Let the disk begin with some bytes while the next are copied, by sync_file_range(2), which Python does not offer.

    What goes wrong with them `os.fsync` reports, and without them it does all by itself.
    """
    if _sync_file_range is not None:
        size = ctypes.c_int64(stop - start)
        _sync_file_range(file, ctypes.c_int64(start), size, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _give_name(folder: int, temporary: str, name: str) -> None:
    """Give a file its name if that is free.

    Raises:
        FileExistsError: If it is not.
        UncertainError: If the fault is one after which it may have happened.
    """
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            _rename_exclusively(folder, temporary, name, error)
        elif error.errno != errno.ENOENT and transient(error):
            raise UncertainError from error
        else:
            raise


def _rename_exclusively(folder: int, temporary: str, name: str, refused: OSError) -> None:
    """Rename without replacing, by renameat2(2), which Python does not offer."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    missing = OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    if rename is None:
        raise missing from refused
    if rename(folder, os.fsencode(temporary), folder, os.fsencode(name), ctypes.c_uint(_RENAME_NOREPLACE)) != 0:
        number = ctypes.get_errno()
        if number in {errno.EINVAL, errno.ENOSYS}:
            raise missing from refused
        raise OSError(number, os.strerror(number))


def sync_directory(folder: int) -> None:
    """Force the names in an open directory to disk, where the file system has anything to force."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some network file systems have nothing to force
            raise


def make_directory(path: str, top: str) -> None:
    """Make a directory and its parents, and force all their names from that of `top` downwards to disk.

    Also names that were there before are forced: whoever made them may have died, or failed, before that.
    """
    made = True
    try:
        os.mkdir(path)  # noqa: PTH102 - all of this module goes through `os`, so that tests can put faults there
    except FileExistsError:
        made = False
    except FileNotFoundError:
        make_directory(os.path.dirname(path), top)  # noqa: PTH120
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)  # noqa: PTH102
    parent = os.path.dirname(path)  # noqa: PTH120
    inside = path.startswith(top.rstrip("/") + "/")
    if inside:
        make_directory(parent, top)
    # The topic may be all that we have access to.
    if inside or made or (path == top and os.access(parent, os.R_OK)):
        folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_directory(folder)
        finally:
            os.close(folder)


def remove_stale(directory: str) -> None:
    """Remove temporary files that a killed writer left, once they are an hour old."""
    oldest = time.time() - _STALE_SECONDS
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(_TEMPORARY):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)  # noqa: PTH108
            except OSError as error:
                # Another writer was faster, or we may not: nothing depends on it.
                _logger.debug("left %s in place: %s", entry.path, error)


def walk_files(directory: str, work: Work) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a directory by their paths from there, without hidden ones; none if it is not there."""
    try:
        with os.scandir(directory) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        work.advance()
        if entry.is_dir(follow_symlinks=False):
            for name, status in walk_files(entry.path, work):
                yield f"{entry.name}/{name}", status
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                yield entry.name, status


def read_file(path: str, start: int, stop: int | None, work: Work, *, folder: int | None = None) -> bytes:
    """Return the bytes `start` to `stop` of a file, fewer where it ends sooner; `folder` is what `path` starts from.

    Raises:
        OSError: If it is not there, cannot be read, or is no regular file (`IsADirectoryError`).
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        end = status.st_size if stop is None else min(stop, status.st_size)
        parts = []
        while start < end:
            work.advance()
            part = os.pread(file, min(CHUNK * 8, end - start), start)
            if not part:
                break
            parts.append(part)
            start += len(part)
    finally:
        os.close(file)
    return parts[0] if len(parts) == 1 else b"".join(parts)
