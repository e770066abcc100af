"""Plays many worlds and sums up: `cd tests && ../.venv/bin/python -m simulation --seeds 10000`.

A seed that fails is printed with what happened; `--first SEED --seeds 1 --trace` plays it again, with what is logged.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from .mutants import MUTANTS
from .world import simulate

_BATCH = 50


def play(mutant: str | None, seeds: range) -> tuple[Counter[str], list[tuple[int, str]], float]:
    """Return the counts of some seeds, those that failed and why, and the virtual seconds they took."""
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    seconds = 0.0
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        for seed in seeds:
            try:
                report = simulate(seed)
            except Exception as error:
                failed.append((seed, f"{type(error).__name__}: {error}"))
            else:
                counts += Counter(report.counts)
                seconds += report.seconds
    return counts, failed, seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--mutant", choices=MUTANTS, help="a rule to break")
    parser.add_argument("--trace", action="store_true", help="show what is logged")
    options = parser.parse_args()
    if options.trace:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
        simulate(options.first)  # raises what it finds
        return 0
    logging.disable()
    last = options.first + options.seeds
    batches = [range(first, min(first + _BATCH, last)) for first in range(options.first, last, _BATCH)]
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    seconds, began = 0.0, time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        for more, failures, took in pool.map(partial(play, options.mutant), batches):
            counts += more
            failed += failures
            seconds += took
            for seed, why in failures:
                print(f"seed {seed} failed: {why}", flush=True)
    spent = time.monotonic() - began
    counts.pop("slowest", None)
    print(f"{options.seeds} worlds in {spent:.1f} s, {60 * options.seeds / spent:,.0f} a minute;", end=" ")
    print(f"{seconds / 3600:,.1f} virtual hours; {len(failed)} failed")
    for name, count in sorted(counts.items()):
        print(f"{name:>20} {count:>12,}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
