"""The rates that docs/benchmarks.md tells, read from its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["Rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What docs/benchmarks.md says was measured; see `read`.

    Attributes:
        bits: For each changed element, at 1 %.
        anchor: Bytes of an anchor over those of the raw state.
        elements: Of the state that went between two processes.
        cores: That it had.
        seconds: What each stage of a step took.
        requests: For each backend, those of the writer and of a reader for a step, and of a waiting reader in a minute.
    """

    bits: float
    anchor: float
    elements: float
    cores: int
    seconds: Mapping[str, float]
    requests: Mapping[str, tuple[float, float, float]]

    @classmethod
    def read(cls, page: str) -> Self:
        """Return the rates that a page tells.

        Raises:
            LookupError: If it lacks one.
        """
        whole = _section(page, "Qwen3-0.6B's shapes at 1 %")
        way = _section(page, "Between two processes")
        asked = _section(page, "What is asked of a server")
        heading = next(line for line in page.splitlines() if line.startswith("### Between two processes"))
        requests = {}
        for name, *cells in asked:
            writer, reader, waiting = (0.0 if cell == "none" else float(cell.split()[0]) for cell in cells)
            if "notify" not in name:
                requests[name.strip("`")] = writer, reader, waiting
        return cls(
            bits=float(_cell(whole, "deltabus, automatic", 2)),
            anchor=float(_cell(_section(page, "The whole state, as share"), "made-up, Gaussian", 1)),
            elements=1e6 * float(heading.split(" M elements")[0].rpartition(" ")[2]),
            cores=int(_cell(_section(page, "Machine"), "cores", 1)),
            seconds={row[0].removeprefix("deltabus: "): float(row[1]) for row in way if row[0].startswith("deltabus")},
            requests=requests,
        )


def _section(page: str, title: str) -> list[list[str]]:
    """Return the rows of the table under a heading."""
    _, found, rest = page.partition(f"### {title}")
    if not found:
        raise LookupError(f"docs/benchmarks.md has no table {title!r}")
    lines = rest.partition("\n### ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
    return rows[2:]


def _cell(rows: Iterable[Sequence[str]], name: str, column: int) -> str:
    for row in rows:
        if row[0] == name:
            return row[column]
    raise LookupError(f"docs/benchmarks.md has no row {name!r}")
