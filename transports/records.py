"""A log as a directory of files, one for each record, named by its position: blocking functions.

Names have 20 digits, so that a listing sorts. A record is looked up by its name; a directory is listed only to find
where a log begins whose first records were removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Record

from .atomic import read_file, sync_directory
from .names import is_log
from .threads import Work

__all__ = ["find_first", "has_record", "list_logs", "read_records", "record_name", "take_back", "trim_records"]

_RECORD = re.compile(r"[0-9]{20}")
_ATTEMPTS = 5


def record_name(position: int) -> str:
    """Return the file name of a record.

    >>> record_name(7)
    '00000000000000000007'
    """
    return f"{position:020}"


def has_record(directory: str, position: int) -> bool:
    """Return whether there is a record at a position of the log in a directory."""
    with _opened(directory) as folder:
        return folder is not None and _has(folder, position)


def find_first(directory: str, after: int = -1) -> int | None:
    """Return the first position behind `after` that holds a record of the log in a directory, None if there is none."""
    with _opened(directory) as folder:
        return None if folder is None else _find_first(folder, after)


def read_records(directory: str, after: int, limit: int, work: Work) -> list[Record]:
    """Return the records behind a position without a hole between them, at most `limit`.

    Raises:
        OSError: If they cannot be read.
    """
    with _opened(directory) as folder:
        if folder is None:
            return []
        records = _run_from(folder, after + 1, limit, work)
        if records or (after >= 0 and _has(folder, after)):
            return records
        # The log ends before `after`, or its beginning was removed, perhaps by somebody who is still at it.
        for _ in range(_ATTEMPTS):
            first = _find_first(folder, after)
            if first is None:
                return []
            records = _run_from(folder, first, limit, work)
            if records:
                return records
        raise OSError(errno.EAGAIN, "the log's first records vanish while they are read")


def take_back(directory: str, position: int) -> bool:
    """Remove a record that was just written if it stands in front of the log in a directory; return whether it did.

    Raises:
        OSError: If that cannot be found out, or done.
    """
    with _opened(directory) as folder:
        if folder is None or (position and _has(folder, position - 1)):
            return False
        behind = _find_first(folder, position)
        # A log keeps its last record: with nothing behind, this is it. Nobody writes behind a hole, and position 0 may
        # well be followed already.
        if behind is None or (position == 0 and behind == 1):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(record_name(position), dir_fd=folder)
        sync_directory(folder)
        return True


def trim_records(directory: str, before: int, work: Work) -> None:
    """Remove the records in front of a position of the log in a directory, oldest first; the last one stays."""
    with _opened(directory) as folder:
        if folder is None:
            return
        with os.scandir(folder) as entries:
            positions = sorted(int(entry.name) for entry in entries if _RECORD.fullmatch(entry.name))
        if not positions:
            return
        # Each position in between, because a listing may miss one that is there, and it would stay as the first.
        for position in range(positions[0], min(before, positions[-1])):
            work.advance()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(record_name(position), dir_fd=folder)
        sync_directory(folder)


def list_logs(directory: str) -> list[str]:
    """Return the names of the directories that may be logs and hold at least one record."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if is_log(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if find_first(f"{directory}/{name}") is not None)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int | None]:
    """Give a descriptor of the directory, None if there is none.

    Opening it makes an NFS client ask the server whether it changed, and forget names that it believed to be missing;
    a look-up by path alone can miss a new file for half a minute.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def _has(folder: int, position: int) -> bool:
    try:
        os.stat(record_name(position), dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _find_first(folder: int, after: int) -> int | None:
    with os.scandir(folder) as entries:
        first = min((int(e.name) for e in entries if _RECORD.fullmatch(e.name) and int(e.name) > after), default=None)
    # A listing may miss a record that was appended meanwhile and show the next one; a look-up does not.
    while first is not None and first - 1 > after and _has(folder, first - 1):
        first -= 1
    return first


def _run_from(folder: int, position: int, limit: int, work: Work) -> list[Record]:
    records: list[Record] = []
    while len(records) < limit:
        work.advance()
        try:
            # One byte more than may be there shows a record that is too long, without taking memory for all of it.
            data = read_file(record_name(position), 0, MAX_RECORD_BYTES + 1, work, folder=folder)
        except FileNotFoundError:
            break
        if len(data) > MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"the record at position {position} is over {MAX_RECORD_BYTES} bytes")
        records.append(Record(position, data))
        position += 1
    return records
