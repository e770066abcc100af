"""Pictures of the figures, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import Results, published, row

from deltabus.bench.rows import AUTOMATIC, FULL

__all__ = ["draw"]

_REDS = (6, 7)
"""Places in the sequence of colors that are left to the automatic choice."""

_BOUND: dict[str, Any] = {"color": "black", "linewidth": 1.2}


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the pictures into a folder, and return their paths."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"bits": _bits(results), "times": _times(results)}
    if results.real:
        pictures["run"] = _run(results)
    paths = []
    for name, figure in pictures.items():
        path = folder / f"benchmark-{name}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
        paths.append(path)
    return paths


def _bits(results: Results) -> Figure:
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(
        color=[color for number, color in enumerate(mpl.color_sequences["tab20"]) if number not in _REDS]
    )
    densities = [100 * each.density for each in results.sweep]
    for first in results.sweep[0].rows:
        if "threads" in first.name or "anchor" in first.name or first.name.startswith(FULL):
            continue
        heights = [each.bits(row(each, first.name).nbytes) for each in results.sweep]
        ours = first.name.startswith("deltabus")
        style: dict[str, Any] = {"linewidth": 3, "color": "tab:red"} if first.name == AUTOMATIC else {"linewidth": 1.6}
        axes.plot(
            densities, heights, marker="o", markersize=3, linestyle="-" if ours else "--", label=first.name, **style
        )
    bounds = {"independent": ":", "conditional": "-."}
    for name, line in bounds.items():
        heights = [getattr(each, name) / each.changed for each in results.sweep]
        axes.plot(densities, heights, linestyle=line, label=f"bound, {name}", **_BOUND)
    settled = [run.settled() for run in results.real]
    if settled:
        places = [100 * each.density for each in settled]
        heights = [each.bits(row(each, AUTOMATIC).nbytes) for each in settled]
        axes.scatter(places, heights, marker="*", s=90, color="tab:red", zorder=5, label="deltabus, real checkpoints")
    axes.set(
        xscale="log", yscale="log", xlabel="changed elements, %", ylabel="bits per changed element", ylim=(3.5, 110)
    )
    axes.set_title(f"What a changed bf16 element costs ({results.sweep[0].total / 1e6:.0f} M made-up weights)")
    axes.set_yticks([4, 6, 8, 12, 16, 24, 32, 48, 96], ["4", "6", "8", "12", "16", "24", "32", "48", "96"], minor=False)
    axes.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _run(results: Results) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(results.real):
        steps = range(1, len(run.steps) + 1)
        color = f"C{number}"
        ours = [row(each, AUTOMATIC).nbytes / 1e3 for each in run.steps]
        best = [min(other.nbytes for other in published(each)) / 1e3 for each in run.steps]
        axes.plot(steps, ours, color=color, marker="o", markersize=3, label=f"deltabus, {run.label}")
        axes.plot(steps, best, color=color, linestyle="--", label=f"best published format, {run.label}")
    axes.axhline(results.real[0].steps[0].total * 2 / 1e3, label="full state", **_BOUND)
    axes.set(
        yscale="log", xlabel="step", ylabel="kB a step", title="A fine-tuning run of all-MiniLM-L6-v2 (22.7 M elements)"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _times(results: Results) -> Figure:
    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 3))
    way = results.end_to_end
    checkpoints = {f"checkpoint {place}": checkpoint.stages for place, checkpoint in reversed(way.checkpoints.items())}
    _stack(above, checkpoints | {"deltabus": way.stages})
    above.set(xlabel="seconds", title=f"Trainer to engine, {way.total / 1e6:.0f} M elements, two processes, local disk")
    stages = {each.name: each.stages for each in reversed(results.whole.rows)}
    _stack(below, stages)
    below.set(xlabel="memcpys of the tensors", title=f"{results.whole.label}: each format, in memory")
    return figure


def _stack(axes: Axes, bars: dict[str, dict[str, float]]) -> None:
    """Draw bars of stages; a stage has one color in all of them."""
    names = list(dict.fromkeys(stage for stages in bars.values() for stage in stages))
    for number, name in enumerate(names):
        lefts, widths = [], []
        for stages in bars.values():
            before = list(stages).index(name) if name in stages else 0
            lefts.append(sum(list(stages.values())[:before]))
            widths.append(stages.get(name, 0.0))
        axes.barh(list(bars), widths, left=lefts, label=name, color=f"C{number}")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
