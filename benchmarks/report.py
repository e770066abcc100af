"""Tables: on the terminal, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.box
import rich.table
from results import Results, goals, published, row
from rows import ANCHOR, AUTOMATIC, FULL
from timing import PairFigures

__all__ = ["Table", "fill_page", "tables"]

_BEGIN, _END = "<!-- figures: written by `make bench` -->", "<!-- end of figures -->"


@dataclass(frozen=True, slots=True)
class Table:
    """Words in rows and columns; all columns but the first are numbers.

    Attributes:
        title: One line.
        columns: Heads.
        rows: Cells.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> rich.table.Table:
        """Return it for the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for cells in self.rows:
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        """Return it for a page."""
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def tables(results: Results) -> list[Table]:
    """Return everything that was measured."""
    found = [_goals(results), *(_formats(run.settled()) for run in results.real), _formats(results.whole)]
    if results.real:
        found.append(_anchors(results))
    return [*found, _sweep(results), _sweep_times(results), _way(results), _memory(results), _machine(results)]


def fill_page(page: str, results: Results) -> str:
    """Return a Markdown page with its figures replaced.

    Raises:
        ValueError: If the page has no place for them.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{chr(10).join(table.markdown() for table in tables(results))}\n{_END}{after}"


def _goals(results: Results) -> Table:
    rows = [(goal.what, goal.wanted, goal.reached, "yes" if goal.met else "**no**") for goal in goals(results)]
    return Table("Goals", ("what", "goal", "reached", "met"), rows)


def _formats(figures: PairFigures) -> Table:
    rows = [
        (
            each.name,
            f"{each.nbytes:,}",
            f"{figures.bits(each.nbytes):.2f}",
            f"{each.nbytes * 8 / figures.independent:.2f}",
            f"{each.nbytes * 8 / figures.conditional:.2f}",
            f"{each.encode:.1f}",
            f"{each.decode:.1f}",
            "yes" if each.exact else "**no**",
        )
        for each in figures.rows
    ]
    bounds = (("bound, independent", figures.independent), ("bound, tensor and exponent", figures.conditional))
    for name, bits in bounds:
        share = (f"{bits / figures.independent:.2f}", f"{bits / figures.conditional:.2f}")
        rows.append((name, f"{bits / 8:,.0f}", f"{bits / figures.changed:.2f}", *share, "", "", ""))
    heads = ("format", "bytes", "bits/changed", "x independent", "x conditional", "encode", "decode", "exact")
    density = figures.changed / figures.total
    return Table(f"{figures.label}: {figures.changed:,} of {figures.total:,} elements, {density:.2%}", heads, rows)


def _anchors(results: Results) -> Table:
    rows = []
    for run in results.real:
        last = run.steps[-1]
        rows.append(
            (run.label, *(f"{row(last, name).nbytes / (2 * last.total):.3f}" for name in (ANCHOR, _zstd(last))))
        )
    whole = results.whole
    shares = (f"{row(whole, name).nbytes / (2 * whole.total):.3f}" for name in (ANCHOR, _zstd(whole)))
    rows.append(("made-up, Gaussian", *shares))
    return Table("The whole state, as share of raw bf16", ("weights", ANCHOR, "safetensors + zstd-1"), rows)


def _zstd(figures: PairFigures) -> str:
    return next(each.name for each in figures.rows if each.name.startswith(FULL) and each.name != FULL)


def _sweep(results: Results) -> Table:
    first = results.sweep[0]
    rows = [
        (each.name, *(f"{figures.bits(row(figures, each.name).nbytes):.2f}" for figures in results.sweep))
        for each in first.rows
        if "threads" not in each.name
    ]
    rows.append(("bound, independent", *(f"{f.independent / f.changed:.2f}" for f in results.sweep)))
    rows.append(("bound, tensor and exponent", *(f"{f.conditional / f.changed:.2f}" for f in results.sweep)))
    smaller = (f"{min(e.nbytes for e in published(f)) / row(f, AUTOMATIC).nbytes:.2f}" for f in results.sweep)
    rows.append(("best published / automatic", *smaller))
    return Table(
        f"Bits per changed element by density, {first.total / 1e6:.0f} M made-up elements",
        ("format", *(f"{figures.changed / figures.total:.2%}" for figures in results.sweep)),
        rows,
    )


def _sweep_times(results: Results) -> Table:
    def cell(figures: PairFigures, name: str) -> str:
        measured = row(figures, name)
        return f"{measured.encode:.1f} + {measured.decode:.1f}"

    first = results.sweep[0]
    return Table(
        "Encode + decode by density, in memcpys of the tensors",
        ("format", *(f"{figures.changed / figures.total:.2%}" for figures in results.sweep)),
        [(each.name, *(cell(figures, each.name) for figures in results.sweep)) for each in first.rows],
    )


def _way(results: Results) -> Table:
    way = results.end_to_end
    seconds = {f"deltabus: {stage}": value for stage, value in way.stages.items()}
    seconds["deltabus: `publish` -> applied"] = way.applied
    seconds |= {f"checkpoint: {stage}": value for stage, value in way.full_stages.items()}
    seconds["checkpoint: `save_file` -> copied"] = way.full
    seconds["first state: `publish` -> applied"] = way.newcomer
    rows = [(what, f"{value:.3f}", f"{value / way.memcpy:.1f}") for what, value in seconds.items()]
    exact = "exact" if way.exact else "NOT EXACT"
    title = f"Between two processes, {way.total / 1e6:.0f} M elements, {way.changed / way.total:.2%}, {exact}"
    return Table(f"{title}, {way.nbytes / 1e6:.2f} MB a step", ("stage", "seconds", "memcpys"), rows)


def _memory(results: Results) -> Table:
    way = results.end_to_end
    rows = [(who, f"{extra / 1e6:,.0f}", f"{extra / way.model:.2f}") for who, extra in way.memory.items()]
    return Table(f"Most memory beside the model of {way.model / 1e6:,.0f} MB", ("who, while", "MB", "x model"), rows)


def _machine(results: Results) -> Table:
    rows = [(key, value) for key, value in results.machine.items()]
    rows += [("command", f"`{results.command}`"), ("duration", f"{results.seconds:.0f} s")]
    return Table("Machine", ("", ""), rows)
