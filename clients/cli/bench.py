"""`deltabus bench`: what deltabus costs on one's own weights, machine and backend."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import msgspec
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from deltabus.bench.run import Plan, Report, run_bench
from deltabus.bench.source import Source
from deltabus.bus.errors import UsageError

from .output import Shown, console

__all__ = ["Steps", "command_of", "make_plan", "measure", "print_report"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as `push` takes them


class Steps(Shown):
    """A progress bar of steps.

    Args:
        total: How many steps there are.
    """

    def __init__(self, total: int) -> None:
        super().__init__(MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._progress.add_task("", total=total)
        self._begun = 0

    def begin(self, what: str) -> None:
        """Say that the next step begins, and that those before it are done."""
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += 1


def make_plan(
    *,
    url: str | None,
    shape: str | None,
    checkpoints: tuple[Path, Path] | None,
    density: float | None,
    dtype: str | None,
    repeats: int,
    formats: bool,
) -> Plan:
    """Return what to measure, from what the command line says; without a shape and checkpoints it is `minilm`.

    Raises:
        UsageError: If the arguments contradict each other, or one is out of range.
    """
    if checkpoints is not None and shape is not None:
        raise UsageError("--shape makes weights up, and --checkpoint takes yours; give one of the two")
    if checkpoints is not None and density is not None:
        raise UsageError("--density is that of made-up weights; two checkpoints have their own, so leave it out")
    if checkpoints is None and dtype is not None:
        raise UsageError("--dtype is for checkpoints; made-up weights are bf16")
    if checkpoints is None:
        source = Source(shape=shape or "minilm", density=0.01 if density is None else density)
    else:
        # Another process reads them, which may have another working directory one day.
        first, second = (str(path.absolute()) for path in checkpoints)
        source = Source(checkpoints=(first, second), dtype=None if dtype is None else _DTYPES.get(dtype, dtype))
    return Plan(source=source, url=url, repeats=repeats, formats=formats)


def command_of(plan: Plan) -> str:
    """Return the command that measures a plan, without the URL, which may hold secrets."""
    source = plan.source
    words = ["deltabus", "bench"]
    if source.checkpoints is not None:
        words += ["--checkpoint", *source.checkpoints]
        words += [] if source.dtype is None else ["--dtype", source.dtype]
    else:
        words += ["--shape", str(source.shape), "--density", f"{source.density:g}"]
    words += ["--repeats", str(plan.repeats)]
    return shlex.join(words if plan.formats else [*words, "--no-formats"])


def measure(plan: Plan, *, file: Path | None = None) -> Report:
    """Measure, with a progress bar; write all figures as JSON into a file if one is given.

    Raises:
        UsageError: If the file cannot be written to, or a checkpoint is not there.
        DeltabusError: As `run_bench` does.
    """
    if file is not None:
        _write(file, b"", "ab")  # whoever waits for minutes must not learn then that the place is wrong
    with Steps(plan.count()) as steps:
        report = run_bench(plan, progress=steps.begin)
    if file is not None:
        _write(file, msgspec.json.format(msgspec.json.encode(report)), "wb")
    return report


def print_report(report: Report, *, command: str) -> None:
    """Print the tables, and what could not be removed."""
    screen = console()
    for table in report.tables(command):
        screen.print(table.rich())
    if report.left:
        screen.print(f"left behind: {report.left}")


def _write(file: Path, content: bytes, mode: Literal["ab", "wb"]) -> None:
    try:
        with file.open(mode) as stream:
            stream.write(content)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error
