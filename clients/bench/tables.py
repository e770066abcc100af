"""Tables of figures: on the terminal, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import rich.box
import rich.table
from rich.console import Group, RenderableType
from rich.text import Text

from .end_to_end import DISK, EndToEnd
from .timing import PairFigures

__all__ = [
    "Table",
    "backend_table",
    "formats_table",
    "machine_table",
    "memory_table",
    "ratio_text",
    "ratios_table",
    "stages_table",
]

_FORMAT_HEADS = (
    "format",
    "bytes",
    "bits/changed",
    "x independent",
    "x conditional",
    "encode",
    "decode",
    "encode memory",
    "decode memory",
    "exact",
)


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

    def rich(self) -> RenderableType:
        """Return it for the terminal, its title above it."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for cells in self.rows:
            table.add_row(*map(Text, cells))
        # A table's own title would be folded to the table's width.
        return Group(Text(self.title, style="bold"), table)

    def markdown(self, *, titled: bool = True) -> str:
        """Return it for a page, below a heading unless that is not wanted."""
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        heading = f"### {self.title}\n\n" if titled else ""
        return heading + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def ratio_text(part: float | None, whole: float | None, places: int = 2) -> str:
    """Return a quotient for people; nothing where it is not known, a dash where it has no meaning.

    >>> ratio_text(1, 3), ratio_text(None, 3), ratio_text(1, 0)
    ('0.33', '', '-')
    """
    if part is None or whole is None:
        return ""
    quotient = part / whole if whole else math.inf
    return f"{quotient:.{places}f}" if math.isfinite(quotient) else "-"


def formats_table(figures: PairFigures) -> Table:
    """Return what each format takes for one pair of states: bytes, times and memory."""
    rows: list[tuple[str, ...]] = [
        (
            each.name,
            f"{each.nbytes:,}",
            f"{figures.bits(each.nbytes):.2f}",
            ratio_text(each.nbytes * 8, figures.independent),
            ratio_text(each.nbytes * 8, figures.conditional),
            f"{each.encode:.1f}",
            f"{each.decode:.1f}",
            ratio_text(each.encode_memory, figures.model),
            ratio_text(each.decode_memory, figures.model),
            "yes" if each.exact else "**no**",
        )
        for each in figures.rows
    ]
    bounds = (("bound, independent", figures.independent), ("bound, tensor and exponent", figures.conditional))
    for name, bits in bounds:
        share = (ratio_text(bits, figures.independent), ratio_text(bits, figures.conditional))
        rows.append((name, f"{bits / 8:,.0f}", f"{bits / figures.changed:.2f}", *share, "", "", "", "", ""))
    return Table(
        f"{figures.label}: {figures.changed:,} of {figures.total:,} elements, {figures.density:.2%}",
        _FORMAT_HEADS,
        rows,
    )


def stages_table(way: EndToEnd, *, where: str) -> Table:
    """Return how long each stage from the trainer to the engine takes; `where` says between what."""
    seconds = {f"deltabus: {stage}": value for stage, value in way.stages.items()}
    seconds["deltabus: `publish` -> applied"] = way.applied
    for place, checkpoint in way.checkpoints.items():
        seconds |= {f"checkpoint {place}: {stage}": value for stage, value in checkpoint.stages.items()}
        seconds[f"checkpoint {place}: `save_file` -> copied"] = checkpoint.whole
    if way.reread is not None:
        seconds["files of a step, read from the disk"] = way.reread
    seconds["first state: `publish` -> durable"] = way.anchor_up
    seconds["first state: `publish` -> applied"] = way.newcomer
    seconds["a newcomer: opened -> applied"] = way.anchor_down
    seconds["memcpy, by one thread"] = way.memcpy
    seconds["memcpy, by as many threads as `publish` has"] = way.shared_memcpy
    rows = [(what, f"{value:.3f}", ratio_text(value, way.memcpy, 1)) for what, value in seconds.items()]
    exact = "exact" if way.exact else "NOT EXACT"
    title = f"{where}, {way.total / 1e6:.1f} M elements, {way.changed / way.total:.2%}, {exact}"
    return Table(f"{title}, {way.nbytes / 1e6:.2f} MB a step", ("stage", "seconds", "memcpys"), rows)


def ratios_table(way: EndToEnd) -> Table:
    """Return what deltabus takes of what the whole state takes."""
    rows = [
        ("bytes of a step / of the state", _percent(way.nbytes, way.model)),
        ("bytes of an anchor / of the state", _percent(way.anchor, way.model)),
    ]
    if way.cached is not None:
        rows.append(("`publish` blocks / saving the state", _percent(way.stages["blocked"], way.cached.stages["save"])))
    for place, checkpoint in way.checkpoints.items():
        pause = _percent(way.stages["apply"], checkpoint.loading)
        times = ratio_text(checkpoint.whole, checkpoint.applied, 1)
        rows.append((f"`apply` pauses the engine / loading a checkpoint {place}", pause))
        rows.append((f"checkpoint {place}: save to copied / `publish` to applied", f"{times} times"))
    if way.left_out:
        rows.append((f"checkpoint {DISK}: {way.left_out}", "left out"))
    if way.plain is not None:
        whole = way.model / way.plain.put + way.model / way.plain.get
        rows.append(
            ("plain put and get of the state / `publish` to applied", f"{ratio_text(whole, way.applied, 1)} times")
        )
    return Table("Compared with the whole state", ("what", "share"), rows)


def backend_table(way: EndToEnd) -> Table:
    """Return how fast whole states go up and down, and how fast plain bytes do."""
    rows = []
    plain = (None, None) if way.plain is None else (way.plain.put, way.plain.get)
    ways = (
        ("anchor up: `publish` -> durable", way.anchor_up, plain[0]),
        ("anchor down: opened -> applied", way.anchor_down, plain[1]),
    )
    for what, seconds, reference in ways:
        speed = way.anchor / seconds
        rows.append((what, f"{speed / 1e6:.1f}", f"{way.model / seconds / 1e6:.1f}", ratio_text(speed, reference)))
    if way.plain is not None:
        rows.append(("plain puts", f"{way.plain.put / 1e6:.1f}", "", "1.00"))
        rows.append(("plain gets", f"{way.plain.get / 1e6:.1f}", "", "1.00"))
    heads = ("what", "MB/s on the wire", "MB/s of weights", "x plain")
    return Table(f"Whole states of {way.anchor / 1e6:,.1f} MB through the backend", heads, rows)


def memory_table(way: EndToEnd) -> Table:
    """Return the most memory that either side held beside its model."""
    rows = [(who, f"{extra / 1e6:,.0f}", ratio_text(extra, way.model)) for who, extra in way.memory.items()]
    return Table(f"Most memory beside the model of {way.model / 1e6:,.0f} MB", ("who, while", "MB", "x model"), rows)


def machine_table(machine: dict[str, str], *, command: str, seconds: float) -> Table:
    """Return what figures depend on."""
    rows = [*machine.items(), ("command", f"`{command}`"), ("duration", f"{seconds:.0f} s")]
    return Table("Machine", ("", ""), rows)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "-"
