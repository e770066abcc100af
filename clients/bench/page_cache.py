"""Files that are on the disk alone: dropped from the system's memory, and shown to have been read from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["can_drop_pages", "drop_pages", "fetched"]

_Result = TypeVar("_Result")

_COUNTERS = Path("/proc/self/io")

_MOST = 0.99
"""What must come from the disk of a file that does: a few pages may be in use when the others are dropped."""


def can_drop_pages() -> bool:
    """Return whether this system can be asked to; whether it does so depends on the file system as well."""
    return hasattr(os, "posix_fadvise")


def drop_pages(path: Path) -> None:
    """Ask that a file's pages leave memory; those that are not on the disk yet stay.

    Raises:
        OSError: If the file cannot be opened.
    """
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fetched(work: Callable[[], _Result], nbytes: int) -> tuple[_Result, bool]:
    """Do something; return what it returns, and whether the system counted that disks gave so many bytes meanwhile.

    It does not for file systems that live in memory, such as tmpfs. Only other files that are read at the same time
    can feign it: code that runs for the first time, where a file is small.

    Linux: `man 5 proc_pid_io`, read_bytes.
    """
    before = _read_bytes()
    result = work()
    after = _read_bytes()
    return result, before is not None and after is not None and after - before >= _MOST * nbytes


def _read_bytes() -> int | None:
    """Return how many bytes disks gave to this process; None where the system does not tell."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)
