"""What figures depend on: the machine, and the versions of what runs on it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deltabus.workers import usable_cores

__all__ = ["machine"]

_PACKAGES = ("deltabus", "torch", "numpy", "numba", "zstandard", "safetensors")
_ANY_NUMBER = 1 << 16


def machine() -> dict[str, str]:
    """Return processor, memory, system, versions, and how much else the machine has to do."""
    found = {
        "cores": str(usable_cores(_ANY_NUMBER)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "processor": _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown",
    }
    memory = _line(Path("/proc/meminfo"), "MemTotal")
    if memory:
        found["memory"] = f"{int(memory.split()[0]) / (1 << 20):.0f} GiB"
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "from source"
    if hasattr(os, "getloadavg"):
        found["load before"] = f"{os.getloadavg()[0]:.1f}"
    return found


def _line(path: Path, key: str) -> str:
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else ()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
