"""Hundreds of worlds that storms go over, on a virtual clock: nothing is lost, nothing mixed, and all readers arrive.

A world is made from its seed alone: trainers that die at any request and come back, two at a time now and then, readers
that come late or die, retention beside them, leases, and a network that delays, loses, repeats and cuts. `oracle.py`
says what must never happen; when the storm is over every reader must have the newest version within 100 s. Half of the
trainers are groups, which come back with more or fewer members.

A seed that fails is played again, with all that is logged, by

    cd tests && ../.venv/bin/python -m simulation --first SEED --trace

and many seeds by `make simulate SEEDS=100000`.

That it can fail is shown by `mutants.py`: each of its protocols has one rule broken, and is found out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .mutants import MUTANTS
from .world import simulate

pytestmark = pytest.mark.timeout(300)
SEEDS = 120
MOST_SEEDS = 400
"""Worlds within which a broken rule must show."""

SHOWN_BY = {"missing_is_not_avoided": 80, "any_anchor_will_do": 72, "whatever_was_staged": 15}
"""Worlds that showed it where few do, to be tried first."""


@pytest.fixture(scope="module")
def counts():
    """What happened in the worlds of this module's tests, all of which ended well."""
    found = Counter()
    for seed in range(SEEDS):
        try:
            found += Counter(simulate(seed).counts)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return found


def test_nothing_is_lost_or_mixed_and_all_readers_arrive(counts):
    assert counts["acknowledged"] > 10 * SEEDS
    assert counts["compared"] > 10 * SEEDS


@pytest.mark.parametrize(
    "what",
    [
        "fail",
        "lose",
        "late",
        "twice",
        "stall",
        "cut off",
        "crashes",
        "second trainers",
        "fenced",
        "overtaken",
        "resumed",
        "failed",
        "given up",
        "late anchors",
        "skips",
        "recognised",
        "detours",
        "missing",
        "removed records",
        "removed garbage",
        "held by leases",
    ],
)
def test_everything_that_may_go_wrong_went_wrong(counts, what):
    assert counts[what]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name):
    with MUTANTS[name]():
        for seed in (SHOWN_BY.get(name, 0), *range(MOST_SEEDS)):
            try:
                simulate(seed)
            except Exception as error:
                print(f"{name}: seed {seed}: {type(error).__name__}: {error}")
                return
    raise AssertionError(f"{MOST_SEEDS} worlds went well though {MUTANTS[name].__doc__}")


def test_a_seed_makes_the_same_world_in_every_process():
    seeds = range(6)
    here = [f"{report.trace} {report.turns}" for report in map(simulate, seeds)]
    script = "from simulation.world import simulate\nfor s in range(6): r = simulate(s); print(r.trace, r.turns)"
    for salt in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert there.stdout.split("\n")[:-1] == here
