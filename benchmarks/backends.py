"""The benchmark of backends: each against its real server on this machine, and against the server's own client.

make bench-backends                              # everything, about five minutes
make bench-backends ARGS="--quick"               # tiny sizes, to see that it works
make bench-backends ARGS="--json figures.json --docs docs"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from backend_kinds import NAMES, Backend, servers
from backend_measures import count_requests, measure_speed, measure_steps
from backend_results import BackendFigures, BackendResults, Requests, fill_page, tables
from rich.console import Console

from deltabus.bench.machine import machine
from deltabus.bench.source import Source

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_CACHE = _ROOT / ".cache" / "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to measure.

    Attributes:
        source: The two states between which steps go to and fro.
        steps: How many are timed, and how many are counted.
        apart: Whether trainer and engine have a process of their own while they are timed.
        parts: How many parts are moved at a time.
        size: Bytes of each.
        rounds: How often.
        settle: Seconds that a reader waits before it is watched.
        idle: Seconds for which it is watched.
    """

    source: Source
    steps: int
    apart: bool
    parts: int
    size: int
    rounds: int
    settle: float
    idle: float


# About 5 MB a step, as one of Qwen3-0.6B at 1 % has, without its anchor of 790 MB: fewer weights, of which more change.
_FULL = _Plan(
    source=Source(shape="minilm", density=0.42),
    steps=7,
    apart=True,
    parts=15,
    size=32 << 20,
    rounds=3,
    settle=5.0,
    idle=60.0,
)
_QUICK = _Plan(
    source=Source(shape="tiny", density=0.01),
    steps=2,
    apart=False,
    parts=5,
    size=300_000,
    rounds=1,
    settle=0.2,
    idle=1.0,
)


def main() -> int:
    """Measure, print, and write what was asked for; 1 when a single bit came out wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works")
    parser.add_argument("--only", action="append", choices=NAMES, help="a backend; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="renew benchmarks.md in it")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="measure nothing: take the figures of an earlier --json"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no server is left
    if options.render is not None:
        results = msgspec.json.decode(options.render.read_bytes(), type=BackendResults)
    else:
        names = tuple(name for name in NAMES if not options.only or name in options.only)
        results = _measure(_QUICK if options.quick else _FULL, names, quick=options.quick)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    console = Console() if sys.stdout.isatty() else Console(width=180)
    for table in tables(results):
        console.print(table.rich())
    if options.docs is not None:
        page = options.docs / "benchmarks.md"
        page.write_text(fill_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0 if results.exact else 1


def _measure(plan: _Plan, names: tuple[str, ...], *, quick: bool) -> BackendResults:
    started = time.monotonic()
    about = machine()
    log = Console(stderr=True)

    def say(text: str) -> None:
        log.print(f"[dim]{time.monotonic() - started:6.0f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    # On the disk of the sources, because a temporary directory may lie in memory.
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder, servers(names, Path(folder)) as backends:
        found = _measure_each(plan, backends, say)
    about["load after"] = f"{os.getloadavg()[0]:.1f}"
    command = "make bench-backends"
    if sys.argv[1:]:
        command += f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"
    return BackendResults(
        command=command,
        quick=quick,
        label=plan.source.label,
        moved=plan.parts * plan.size,
        idle=plan.idle,
        machine=about,
        backends=found,
        seconds=time.monotonic() - started,
    )


def _measure_each(plan: _Plan, backends: list[Backend], say: Callable[[str], object]) -> list[BackendFigures]:
    steps, speeds = [], []
    for backend in backends:
        say(f"{backend.name}: steps")
        steps.append(measure_steps(backend, plan.source, steps=plan.steps, apart=plan.apart))
        say(f"{backend.name}: plain bytes")
        speeds.append(asyncio.run(measure_speed(backend, parts=plan.parts, size=plan.size, rounds=plan.rounds)))
    say("requests")
    requests = asyncio.run(_count(plan, backends))
    return [
        BackendFigures(name=backend.name, server=backend.server, steps=way, speed=speed, requests=asked)
        for backend, way, speed, asked in zip(backends, steps, speeds, requests, strict=True)
    ]


async def _count(plan: _Plan, backends: list[Backend]) -> list[Requests | None]:
    turn = asyncio.Lock()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                count_requests(backend, plan.source, steps=plan.steps, settle=plan.settle, idle=plan.idle, turn=turn)
            )
            for backend in backends
        ]
    return [task.result() for task in tasks]


if __name__ == "__main__":
    sys.exit(main())
