"""Times as multiples of a memcpy in the same moment, memory, and what machine it was."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from bounds import bounds_of
from data import Pair, chunks
from rows import Row, Sent, all_rows

__all__ = ["Measured", "PairFigures", "machine", "measure", "memory_peak", "reset_memory_peak", "usable_cores"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one row.

    Attributes:
        name: The row's.
        nbytes: Bytes on the wire.
        encode: Finding and writing what changed, in memcpys of the tensors.
        decode: Reading it and writing it into the model, in memcpys of the tensors.
        stages: Duration of each stage, in memcpys of the tensors.
        exact: Whether every element came out with its bits, each time.
    """

    name: str
    nbytes: int
    encode: float
    decode: float
    stages: dict[str, float]
    exact: bool


@dataclass(frozen=True, slots=True)
class PairFigures:
    """The figures of all rows for one pair of states.

    Attributes:
        label: The pair's.
        total: Elements.
        changed: Elements that differ.
        independent: Least bits when nothing is known but how many change.
        conditional: Least bits when tensor and exponent of each element are known.
        memcpy: Duration of a memcpy of the tensors in seconds, median.
        rows: By row.
    """

    label: str
    total: int
    changed: int
    independent: float
    conditional: float
    memcpy: float
    rows: list[Measured]

    def bits(self, nbytes: int) -> float:
        """Return bits for each changed element."""
        return nbytes * 8 / self.changed


def measure(
    pair: Pair,
    *,
    repeats: int,
    pool: Executor | None = None,
    whole: bool = True,
    progress: Callable[[str], object] = lambda name: None,
) -> PairFigures:
    """Encode, decode and compare by every row, several times."""
    target = np.empty_like(pair.old)
    copy(pair, target)  # touches its pages
    results, copies = [], []
    for row in all_rows(pair, target, pool=pool, whole=whole):
        progress(row.name)
        measured, seconds = _measure_row(row, pair, target, repeats)
        results.append(measured)
        copies += seconds
    bounds = bounds_of(pair)
    return PairFigures(
        pair.label,
        pair.old.size,
        pair.changed,
        bounds.independent,
        bounds.conditional,
        statistics.median(copies),
        results,
    )


def copy(pair: Pair, target: np.ndarray) -> float:
    """Copy the old state into the target by one thread; returns the seconds it took."""
    start = time.perf_counter()
    np.copyto(target, pair.old)
    return time.perf_counter() - start


def _measure_row(row: Row, pair: Pair, target: np.ndarray, repeats: int) -> tuple[Measured, list[float]]:
    stages: dict[str, list[float]] = {}
    encode, decode, copies = [], [], []
    exact, nbytes = True, 0
    before = torch.get_num_threads()
    torch.set_num_threads(row.threads)
    try:
        for _ in range(repeats):
            # The yardstick is taken in the same moment, because other work on the machine comes and goes.
            yard = min(copy(pair, target) for _ in range(2))
            start = time.perf_counter()
            sent: Sent = row.encode()
            middle = time.perf_counter()
            inside = sent.seconds | row.decode(sent)
            end = time.perf_counter()
            digest = inside.get(
                "digest", 0.0
            )  # the digest belongs to the message, not to the codec; it has a column of its own
            encode.append((middle - start - digest) / yard)
            decode.append((end - middle) / yard)
            copies.append(yard)
            for stage, seconds in inside.items():
                stages.setdefault(stage, []).append(seconds / yard)
            nbytes = sent.nbytes
            exact = exact and all(np.array_equal(target[place], pair.new[place]) for place in chunks(target.size))
    finally:
        torch.set_num_threads(before)
    return (
        Measured(
            row.name,
            nbytes,
            statistics.median(encode),
            statistics.median(decode),
            {stage: statistics.median(values) for stage, values in stages.items()},
            exact,
        ),
        copies,
    )


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, str]:
    """Return what figures depend on: processor, memory, system, versions, and what else the machine has to do."""
    found = {
        "cores": str(usable_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
    }
    processor = _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown"
    found["processor"] = processor
    memory = _line(Path("/proc/meminfo"), "MemTotal")
    if memory:
        found["memory"] = f"{int(memory.split()[0]) / (1 << 20):.0f} GiB"
    for package in ("deltabus", "torch", "numpy", "numba", "zstandard", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "from source"
    found["revision"] = _revision()
    found["load before"] = f"{os.getloadavg()[0]:.1f}"
    return found


def _revision() -> str:
    """Return the commit of the sources, and whether they were changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _line(path: Path, key: str) -> str:
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else ()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def reset_memory_peak() -> None:
    """Let the peak begin anew at what this process holds now (Linux: `man 5 proc`, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_peak() -> int:
    """Return the most bytes that this process has held since the peak was reset."""
    return int(_line(Path("/proc/self/status"), "VmHWM").split()[0]) * 1024


def memory_now() -> int:
    """Return the bytes that this process holds."""
    return int(_line(Path("/proc/self/status"), "VmRSS").split()[0]) * 1024
