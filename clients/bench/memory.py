"""How much memory work takes, as the system counts it: resident pages of this process, its high-water mark.

That counts what numpy, torch, compiled loops and libraries allocate alike. Before a measurement what was freed goes
back to the system, so that no work is done in memory that an earlier one left behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["memory_now", "memory_peak", "peak_of", "reset_memory_peak"]

_Result = TypeVar("_Result")

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(work: Callable[[], _Result]) -> tuple[_Result, int | None]:
    """Do something; return what it returns, and the most bytes held meanwhile beyond those held before.

    None instead of bytes where the system does not tell (other than Linux).
    """
    if not reset_memory_peak():
        return work(), None
    before = memory_now()
    result = work()
    return result, max(0, memory_peak() - before)


def reset_memory_peak() -> bool:
    """Let the peak begin anew at what this process holds now, without what was freed; False where that cannot be done.

    Linux: `man 5 proc`, clear_refs; `man 3 malloc_trim` where the C library has it.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        pass  # another C library, which keeps what was freed: the peak is that much lower
    else:
        trim(0)
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return _STATUS.exists()


def memory_peak() -> int:
    """Return the most bytes that this process has held since the peak was reset."""
    return _kibibytes("VmHWM")


def memory_now() -> int:
    """Return the bytes that this process holds."""
    return _kibibytes("VmRSS")


def _kibibytes(key: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
