"""The benchmark: bytes, bits and times of deltabus beside every published format, as ratios in one run.

make bench                              # everything, about ten minutes
make bench ARGS="--quick"               # a tiny state, to see that it works
make bench ARGS="--json figures.json --docs docs"
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from data import real_runs
from report import fill_page, fill_readme, tables
from results import RealRun, Results
from rich.console import Console

from deltabus.bench import end_to_end
from deltabus.bench.machine import machine
from deltabus.bench.shapes import SHAPES, qwen3, synthetic
from deltabus.bench.source import Source
from deltabus.bench.timing import measure, warm_up
from deltabus.codecs.schema import Schema
from deltabus.workers import usable_cores

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_CACHE = _ROOT / ".cache" / "bench"
_RATES = (3e-7, 1e-6, 3e-6, 1e-5)
_DENSITIES = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.2, 0.5)
_STEPS = 12
_LABELS = {"tiny": "A tiny state at 1 %", "qwen3-0.6b": "Qwen3-0.6B's shapes at 1 %"}
_SWEEP_LAYERS, _SWEEP_WORDS = 4, 18_992


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to measure.

    Attributes:
        whole: The shape of full size.
        sweep: The one that is measured at each density: layers of the same shapes, fewer of them.
        densities: Shares of elements that change.
        rates: Learning rates of the real runs.
        repeats: Of each time.
        steps: Of the way from end to end.
    """

    whole: str
    sweep: Schema
    densities: tuple[float, ...]
    rates: tuple[float, ...]
    repeats: int
    steps: int


def main() -> int:
    """Measure, print, and write what was asked for; 1 when a single bit came out wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny state, no real checkpoints: shows that it works")
    parser.add_argument("--all-layers", action="store_true", help="every density at full size; takes about an hour")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="draw pictures there, and renew benchmarks.md in it, and README.md beside it",
    )
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="measure nothing: take the figures of an earlier --json"
    )
    options = parser.parse_args()
    if options.render is not None:
        results = msgspec.json.decode(options.render.read_bytes(), type=Results)
    else:
        log = Console(stderr=True)
        results = _measure(_plan(quick=options.quick, all_layers=options.all_layers), options.quick, log)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    console = Console() if sys.stdout.isatty() else Console(width=180)
    for table in tables(results):
        console.print(table.rich())
    if options.docs is not None:
        _write_docs(results, options.docs)
    return 0 if _exact(results) else 1


def _plan(*, quick: bool, all_layers: bool) -> _Plan:
    if quick:
        return _Plan("tiny", SHAPES["tiny"](), (0.0001, 0.01, 0.2), (), 3, 3)
    sweep = qwen3() if all_layers else qwen3(_SWEEP_LAYERS, vocabulary=_SWEEP_WORDS)
    return _Plan("qwen3-0.6b", sweep, _DENSITIES, _RATES, 5, 5)


def _measure(plan: _Plan, quick: bool, log: Console) -> Results:
    started = time.monotonic()
    about = machine() | {"revision": _revision()}  # now, because the sources may change meanwhile
    cores = usable_cores()

    def say(text: str) -> None:
        log.print(f"[dim]{time.monotonic() - started:6.0f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    torch.set_num_threads(cores)
    with ThreadPoolExecutor(cores) as pool:
        threads = pool if cores > 1 else None
        warm_up(plan.sweep, pool=threads)
        real = [] if not plan.rates else _real(plan, say)
        sweep = []
        for density in plan.densities:
            say(f"{plan.sweep.total / 1e6:.0f} M elements at {density:.2%}")
            sweep.append(measure(synthetic(plan.sweep, density, workers=cores), repeats=plan.repeats, whole=False))
        say(f"{plan.whole} at 1 %")
        made = replace(synthetic(SHAPES[plan.whole](), 0.01, workers=cores), label=_LABELS[plan.whole])
        whole = measure(made, repeats=plan.repeats, pool=threads)
        del made
    say("from end to end")
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        place = Path(folder)
        source = Source(shape=plan.whole, density=0.01)
        way = end_to_end.run(source, (place / "topic").as_uri(), steps=plan.steps, checkpoints=place, progress=say)
    command = f"make bench ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else "make bench"
    return Results(command, quick, about, real, sweep, whole, way, time.monotonic() - started)


def _real(plan: _Plan, say: Callable[[str], object]) -> list[RealRun]:
    found = []
    for run in real_runs(_CACHE, plan.rates, steps=_STEPS, log=say):
        say(f"real checkpoints, {run.label}")
        # Ten settled steps give ten times, so that one of each suffices.
        pairs = enumerate(run.pairs(), 1)
        # Memory and whole states change little from step to step.
        steps = [measure(pair, repeats=1, whole=number == _STEPS, memory=number == _STEPS) for number, pair in pairs]
        found.append(RealRun(run.label, steps))
    return found


def _write_docs(results: Results, folder: Path) -> None:
    from plots import draw

    draw(results, folder)
    page = folder / "benchmarks.md"
    page.write_text(fill_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    readme = folder.absolute().parent / "README.md"
    if readme.exists():
        readme.write_text(fill_readme(readme.read_text(encoding="utf-8"), results), encoding="utf-8")


def _revision() -> str:
    """Return the commit of the sources, and whether they were changed since."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _exact(results: Results) -> bool:
    figures = [*results.sweep, results.whole, *(step for run in results.real for step in run.steps)]
    return results.end_to_end.exact and all(row.exact for each in figures for row in each.rows)


if __name__ == "__main__":
    sys.exit(main())
