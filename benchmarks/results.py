"""All figures of one run, and what they say about the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from deltabus.bench.end_to_end import EndToEnd
from deltabus.bench.rows import ANCHOR, AUTOMATIC, FULL
from deltabus.bench.timing import Measured, PairFigures

__all__ = ["Goal", "RealRun", "Results", "combine", "goals", "published", "row"]

_SETTLED = 2
"""Steps left out at the start: in Adam's first steps every update is as large as the learning rate."""

_OURS = "deltabus, "

_SPARSE = 0.0002
"""Where so few elements change, decoding that takes a share of all elements shows."""

_NO_PASS = 0.25
"""Memcpys: a single pass that only reads all elements takes more."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """A training run, step by step.

    Attributes:
        label: Its learning rate.
        steps: The figures of each step.
    """

    label: str
    steps: list[PairFigures]

    def settled(self) -> PairFigures:
        """Return all steps but the first two as one."""
        return combine(f"{self.label}, steps {_SETTLED + 1} to {len(self.steps)}", self.steps[_SETTLED:])


@dataclass(frozen=True, slots=True)
class Results:
    """What one run of the benchmark measured.

    Attributes:
        command: What was typed.
        quick: Whether the state was tiny, so that the figures mean nothing.
        machine: What figures depend on.
        real: Fine-tuning of the demo's model, by learning rate.
        sweep: A made-up state at each density.
        whole: A made-up state of full size.
        end_to_end: From `publish` to applied.
        seconds: Duration of everything.
    """

    command: str
    quick: bool
    machine: dict[str, str]
    real: list[RealRun]
    sweep: list[PairFigures]
    whole: PairFigures
    end_to_end: EndToEnd
    seconds: float


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal of docs/benchmarks.md.

    Attributes:
        what: In words.
        wanted: The limit, in words.
        reached: The figure, in words; that there is none, where it could not be measured.
        met: Whether there is a figure that keeps the limit.
    """

    what: str
    wanted: str
    reached: str
    met: bool


def row(figures: PairFigures, name: str) -> Measured:
    """Return the row of a name."""
    return next(each for each in figures.rows if each.name == name)


def combine(label: str, parts: list[PairFigures]) -> PairFigures:
    """Return several pairs as one: sums of bytes and bits, medians of times, most memory; rows that all have."""
    rows = []
    for first in parts[0].rows:
        same = [each for part in parts for each in part.rows if each.name == first.name]
        if len(same) == len(parts):
            rows.append(
                Measured(
                    first.name,
                    sum(each.nbytes for each in same),
                    statistics.median(each.encode for each in same),
                    statistics.median(each.decode for each in same),
                    {stage: statistics.median(each.stages[stage] for each in same) for stage in first.stages},
                    all(each.exact for each in same),
                    _most(each.encode_memory for each in same),
                    _most(each.decode_memory for each in same),
                )
            )
    return PairFigures(
        label,
        sum(part.total for part in parts),
        max(part.model for part in parts),
        sum(part.changed for part in parts),
        sum(part.independent for part in parts),
        sum(part.conditional for part in parts),
        statistics.median(part.memcpy for part in parts),
        rows,
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def goals(results: Results) -> list[Goal]:
    """Return each goal with the figure that was reached."""
    way, whole = results.end_to_end, results.whole
    ours = row(whole, AUTOMATIC)
    checkpoints = {"made durable and read from the disk": way.durable, "through the page cache": way.cached}
    found: list[Goal] = []

    def at_most(what: str, figure: float | None, limit: float, unit: str = "") -> None:
        met = figure is not None and figure <= limit
        found.append(Goal(what, f"<= {limit:g}{unit}", _reached(figure, unit), met))

    def at_least(what: str, figure: float | None, limit: float, unit: str = "") -> None:
        met = figure is not None and figure >= limit
        found.append(Goal(what, f">= {limit:g}{unit}", _reached(figure, unit), met))

    for run in results.real:
        settled = run.settled()
        if 0.005 <= settled.density <= 0.01:
            sent = row(settled, AUTOMATIC).nbytes
            at_most(f"real checkpoints, {run.label}: bits per changed element", settled.bits(sent), 6.9)
            at_most(
                f"real checkpoints, {run.label}: multiple of the conditional bound", sent * 8 / settled.conditional, 1.1
            )
        raw = run.steps[-1].total * 2
        if run is results.real[-1]:
            at_most("anchor of real weights: share of raw bf16", row(run.steps[-1], ANCHOR).nbytes / raw, 0.7)
    worst = max(row(each, AUTOMATIC).nbytes / _best_other(each) for each in results.sweep)
    at_most("any density: size as multiple of the best other row", worst, 1.0)
    at_most(f"{whole.label}: MB a step", ours.nbytes / 1e6, 5.5)
    at_most("detect + encode, one core: memcpys", ours.encode, 4.0)
    threads = [each for each in whole.rows if each.name.startswith(f"{AUTOMATIC}, ")]
    if threads:
        at_least(
            f"detect + encode, {threads[0].name.rpartition(', ')[2]}: times as fast",
            ours.encode / threads[0].encode,
            1.7,
        )
    at_most("decode + apply, one core: memcpys", ours.decode, 4.0)
    for each in results.sweep:
        if each.density <= _SPARSE:
            for name in ("step", "overwrite"):
                what = f"decode + apply of `{name}` at {each.density:.2%}, O(changed): memcpys"
                at_most(what, row(each, f"{_OURS}{name}").decode, _NO_PASS)
    blocked = way.stages["blocked"]
    at_most("`publish` blocks: memcpys by as many threads", blocked / way.shared_memcpy, 2.0)
    at_most(
        "`publish` blocks: memcpys by one thread, times cores",
        blocked * int(results.machine["cores"]) / way.memcpy,
        2.0,
    )
    for how, checkpoint in checkpoints.items():
        share = None if checkpoint is None else way.stages["apply"] / checkpoint.loading
        at_most(f"`apply`: share of loading a full checkpoint {how}", share, 0.05)
    for who, extra in way.memory.items():
        at_most(f"most memory beside the model, {who}: multiple of the model", extra / way.model, 1.1)
    for how, checkpoint in checkpoints.items():
        times = None if checkpoint is None else checkpoint.whole / checkpoint.applied
        at_least(f"publish -> applied: times as fast as a full checkpoint {how}", times, 10.0)
    return found


def _reached(figure: float | None, unit: str) -> str:
    return "not measured" if figure is None else f"{figure:.2f}{unit}"


def _best_other(figures: PairFigures) -> int:
    """Return the bytes of the smallest row that is neither the automatic choice nor the same one with threads."""
    return min(each.nbytes for each in figures.rows if not each.name.startswith(AUTOMATIC) and each.name != FULL)


def published(figures: PairFigures) -> list[Measured]:
    """Return the rows of other people's formats of changes."""
    return [each for each in figures.rows if not each.name.startswith(_OURS) and not each.name.startswith(FULL)]
