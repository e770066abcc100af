"""How the demo looks: a live table on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deltabus.cli.output import size_text

from .ledger import Ledger, Totals
from .reports import Line, Ready, StepApplied, StepPublished
from .script import FOLLOWERS

__all__ = ["Display", "JsonDisplay", "LiveDisplay", "PlainDisplay", "choose_display", "summary_lines"]

_ROWS = 16
"""Rows that the live table shows; older ones scroll away."""


class Display(Protocol):
    """Shows the demo while it runs; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None:
        """Show that something happened."""

    def report(self, name: str, line: Line) -> None:
        """Show a process's report, which the ledger has taken down already."""

    def finish(self, totals: Totals, problems: list[str]) -> None:
        """Show how it ended."""


class _Quiet:
    """A display that needs no opening and closing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainDisplay(_Quiet):
    """One line of text for everything that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        """Show that something happened."""
        self._print(f"* {text}")

    def report(self, name: str, line: Line) -> None:
        """Show a process's report."""
        if isinstance(line, StepPublished):
            self._print(
                f"step {line.step:3d}  version {line.version:3d}  {line.kind:6}  {line.density:8.3%} changed  "
                f"{size_text(line.nbytes):>9} = {line.nbytes / line.full_nbytes:7.3%} of full  "
                f"blocked {_ms(line.blocked)}, encode {_ms(line.encode)}, upload {_ms(line.upload)}"
            )
        elif isinstance(line, StepApplied):
            self._print(
                f"  {name}: version {line.version:3d} applied in {_ms(line.apply)}, {_ms(line.latency)} after publish; "
                f"{line.differing} of {line.compared:,} elements differ; cosine {line.similarity:.4f}"
            )

    def finish(self, totals: Totals, problems: list[str]) -> None:
        """Show how it ended."""
        for text in summary_lines(totals, problems):
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class JsonDisplay(_Quiet):
    """One JSON object a line: the reports with the `name` of their process, notes, and at last the totals."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        """Show that something happened."""
        self._print({"event": "note", "text": text})

    def report(self, name: str, line: Line) -> None:
        """Show a process's report."""
        self._print({**msgspec.to_builtins(line), "name": name})

    def finish(self, totals: Totals, problems: list[str]) -> None:
        """Show how it ended."""
        self._print({"event": "end", "exact": not problems, "problems": problems, **msgspec.to_builtins(totals)})

    def _print(self, value: dict[str, Any]) -> None:
        self._console.file.write(msgspec.json.encode(value).decode() + "\n")
        self._console.file.flush()


class LiveDisplay:
    """A table that grows with every version, and what happened in lines above it."""

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self._console = console
        self._ledger = ledger
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._table)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """Show that something happened."""
        self._console.print(Text(f"* {text}", style="yellow"))

    def report(self, name: str, line: Line) -> None:
        """Show a process's report."""
        if not isinstance(line, Ready):
            self._live.refresh()

    def finish(self, totals: Totals, problems: list[str]) -> None:
        """Show how it ended."""
        self._live.stop()
        *lines, verdict = summary_lines(totals, problems)
        for text in lines:
            self._console.print(Text(text))
        self._console.print(Text(verdict, style="bold red" if problems else "bold green"))

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        for head in ("step", "ver", "kind", "changed", "bytes", "share", "publish ms\nblk/enc/up"):
            table.add_column(head, justify="left" if head == "kind" else "right", no_wrap=True)
        for name in FOLLOWERS:
            table.add_column(f"{name.removeprefix('follower-')}\nms/diff", justify="right", no_wrap=True)
        versions = {*self._ledger.published, *(v for held in self._ledger.applied.values() for v in held)}
        for version in sorted(versions)[-_ROWS:]:
            table.add_row(*self._published(version), *(self._applied(name, version) for name in FOLLOWERS))
        return table

    def _published(self, version: int) -> list[str]:
        line = self._ledger.published.get(version)
        if line is None:  # the trainer was killed between the commit and the report
            step = next(held[version].step for held in self._ledger.applied.values() if version in held)
            return [str(step), str(version), *[""] * 5]
        times = "/".join(f"{1000 * seconds:.0f}" for seconds in (line.blocked, line.encode, line.upload))
        share = line.nbytes / line.full_nbytes
        return [
            str(line.step),
            str(version),
            line.kind,
            f"{line.density:.2%}",
            size_text(line.nbytes),
            f"{share:.2%}",
            times,
        ]

    def _applied(self, name: str, version: int) -> Text:
        line = self._ledger.applied.get(name, {}).get(version)
        if line is None:
            return Text("")
        return Text(f"{1000 * line.apply:.0f}/{line.differing}", style="red" if line.differing else "green")


def choose_display(console: Console, ledger: Ledger, *, json: bool) -> Display:
    """Return the display that suits where the output goes."""
    if json:
        return JsonDisplay(console)
    return LiveDisplay(console, ledger) if console.is_terminal else PlainDisplay(console)


def summary_lines(totals: Totals, problems: list[str]) -> list[str]:
    """Return the end of the demo in lines; the last one is the verdict."""
    lines = [
        "",
        f"{totals.versions} versions published: {totals.anchors} whole, {totals.versions - totals.anchors} as deltas",
    ]
    if totals.full_nbytes:
        lines.append(
            f"shipped {size_text(totals.nbytes)}, of which anchors {size_text(totals.anchor_nbytes)}; as full "
            f"checkpoints {size_text(totals.full_nbytes)} ({totals.full_nbytes / totals.nbytes:.1f} x as much)"
        )
    if totals.bits_per_change is not None and totals.density is not None and totals.blocked is not None:
        lines.append(
            f"a delta changed {totals.density:.3%} of the elements and cost {totals.bits_per_change:.2f} bits each; "
            f"publish kept training {_ms(totals.blocked)} (median)"
        )
    for name, follower in totals.followers.items():
        assert follower.apply is not None
        assert follower.latency is not None
        lines.append(
            f"{name}: {follower.versions} versions, {follower.compared:,} elements compared as integers, "
            f"{follower.differing} differ; median apply {_ms(follower.apply)}, {_ms(follower.latency)} after publish"
        )
    lines += [f"PROBLEM: {problem}" for problem in problems]
    lines.append("NOT EXACT OR NOT COMPLETE" if problems else "EXACT: every follower holds the trainer's bits")
    return lines


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
