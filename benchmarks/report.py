"""Tables of the whole run: on the terminal, and as Markdown for docs/benchmarks.md and README."""

from __future__ import annotations

from results import Results, goals, published, row

from deltabus.bench.rows import ANCHOR, AUTOMATIC, FULL_ZSTD
from deltabus.bench.tables import (
    Table,
    backend_table,
    formats_table,
    machine_table,
    memory_table,
    ratios_table,
    stages_table,
)
from deltabus.bench.timing import PairFigures

__all__ = ["fill_page", "fill_readme", "goals_table", "tables"]

_BEGIN, _END = "<!-- figures: written by `make bench` -->", "<!-- end of figures -->"


def tables(results: Results) -> list[Table]:
    """Return everything that was measured."""
    found = [
        goals_table(results),
        *(formats_table(run.settled()) for run in results.real),
        formats_table(results.whole),
    ]
    if results.real:
        found.append(_anchors(results))
    way = results.end_to_end
    found += [_sweep(results), _sweep_times(results), stages_table(way, where="Between two processes, over `file://`")]
    found += [ratios_table(way), backend_table(way), memory_table(way)]
    return [*found, machine_table(results.machine, command=results.command, seconds=results.seconds)]


def fill_page(page: str, results: Results) -> str:
    """Return docs/benchmarks.md with its figures replaced.

    Raises:
        ValueError: If the page has no place for them.
    """
    return _fill(page, "\n".join(table.markdown() for table in tables(results)))


def fill_readme(page: str, results: Results) -> str:
    """Return README with its goals replaced.

    Raises:
        ValueError: If the page has no place for them.
    """
    return _fill(page, goals_table(results).markdown(titled=False))


def _fill(page: str, figures: str) -> str:
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{figures}\n{_END}{after}"


def goals_table(results: Results) -> Table:
    """Return each goal, and what was reached."""
    rows = [(goal.what, goal.wanted, goal.reached, "yes" if goal.met else "**no**") for goal in goals(results)]
    return Table("Goals", ("what", "goal", "reached", "met"), rows)


def _anchors(results: Results) -> Table:
    rows = []
    for run in results.real:
        last = run.steps[-1]
        rows.append((run.label, *(f"{row(last, name).nbytes / (2 * last.total):.3f}" for name in (ANCHOR, FULL_ZSTD))))
    whole = results.whole
    shares = (f"{row(whole, name).nbytes / (2 * whole.total):.3f}" for name in (ANCHOR, FULL_ZSTD))
    rows.append(("made-up, Gaussian", *shares))
    return Table("The whole state, as share of raw bf16", ("weights", ANCHOR, "safetensors + zstd-1"), rows)


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
        ("format", *(f"{figures.density:.2%}" for figures in results.sweep)),
        rows,
    )


def _sweep_times(results: Results) -> Table:
    def cell(figures: PairFigures, name: str) -> str:
        measured = row(figures, name)
        return f"{measured.encode:.1f} + {measured.decode:.1f}"

    first = results.sweep[0]
    return Table(
        "Encode + decode by density, in memcpys of the tensors",
        ("format", *(f"{figures.density:.2%}" for figures in results.sweep)),
        [(each.name, *(cell(figures, each.name) for figures in results.sweep)) for each in first.rows],
    )
