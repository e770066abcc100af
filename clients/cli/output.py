"""How commands speak: tables and JSON on standard output, progress bars and errors on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = [
    "Bar",
    "Meter",
    "Shown",
    "Silent",
    "age_text",
    "console",
    "count_text",
    "plain_text",
    "print_error",
    "print_json",
    "print_table",
    "share_text",
    "size_text",
]

_WIDE = 240
"""Columns where there is no terminal, so that tables in files and pipes are not folded."""


class Meter(Protocol):
    """Is told how long work goes on."""

    def begin(self, what: str, total: int) -> None:
        """Say that work begins that takes so many bytes."""

    def advance(self, nbytes: int) -> None:
        """Say that so many more bytes of it are done."""


class Silent:
    """A meter that shows nothing."""

    def begin(self, what: str, total: int) -> None:
        """Say that work begins."""

    def advance(self, nbytes: int) -> None:
        """Say that more of it is done."""


class Shown:
    """A progress bar on standard error, if that is a terminal; a context manager.

    Args:
        columns: What stands behind the bar.
    """

    def __init__(self, *columns: ProgressColumn) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *columns,
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Bar(Shown):
    """A meter that shows a progress bar."""

    def __init__(self) -> None:
        super().__init__(DownloadColumn(), TimeRemainingColumn())
        self._task: TaskID | None = None

    def begin(self, what: str, total: int) -> None:
        """Say that work begins that takes so many bytes."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def advance(self, nbytes: int) -> None:
        """Say that so many more bytes of it are done."""
        if self._task is not None:
            self._progress.advance(self._task, nbytes)


def console() -> Console:
    """Return the console of standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDE, markup=False, highlight=False)


def print_json(document: object) -> None:
    """Print one JSON document on standard output; paths become text."""
    sys.stdout.write(json.dumps(document, indent=2, default=_as_json) + "\n")


def _as_json(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(Path(value))
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """Print a table; columns are aligned to the right unless they are among `left`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain_text(cell)) for cell in row))
    console().print(table)


def print_error(error: BaseException | str) -> None:
    """Print an error as one line on standard error."""
    words = str(error) or type(error).__name__
    sys.stderr.write(f"error: {plain_text(' '.join(words.split()))}\n")


def plain_text(text: str) -> str:
    r"""Return text that does nothing to a terminal: what cannot be printed is escaped.

    >>> print(plain_text(chr(27) + "[2J"))
    \x1b[2J
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def size_text(nbytes: float) -> str:
    """Return a number of bytes for people.

    >>> size_text(999), size_text(130_500), size_text(14_000_000_000)
    ('999 B', '130.5 kB', '14.0 GB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} TB"


def share_text(share: float) -> str:
    """Return a share of 1 in percent, for people.

    >>> share_text(0.00561)
    '0.561 %'
    """
    return f"{100 * share:.3f} %"


def count_text(count: int, noun: str) -> str:
    """Return a number and what it counts.

    >>> count_text(1, "delta"), count_text(12_000, "delta")
    ('1 delta', '12,000 deltas')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age_text(seconds: float) -> str:
    """Return how long ago something was, for people.

    >>> age_text(12.3), age_text(240), age_text(8000), age_text(200_000)
    ('12 s', '4 min', '2.2 h', '2.3 d')
    """
    seconds = max(0.0, seconds)  # clocks of two machines differ
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
