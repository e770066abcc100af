"""The commands as a terminal sees them: arguments, options, exit statuses."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deltabus.bus.errors import DeltabusError, UsageError

from .interrupts import INTERRUPTED, importing
from .output import Bar, print_error, print_json

__all__ = ["app", "demo", "inspect", "log", "pull", "push", "verify"]

_FAILED, _MISUSED = 1, 2


class _Group(TyperGroup):
    """Turns errors into one line and an exit status, for every command."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as in the base class
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except DeltabusError as error:
            if ctx.params.get("debug"):
                raise
            print_error(error)
            raise typer.Exit(_MISUSED if isinstance(error, UsageError) else _FAILED) from None


app = typer.Typer(
    cls=_Group,
    help="Model weights from a trainer to inference engines as tiny, lossless, versioned deltas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Url = Annotated[str, typer.Argument(metavar="URL", help="The topic, such as file:///data/run-7, or a directory.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else.")]
_Writer = Annotated[str | None, typer.Option(help="Whose log; needed where a topic has several writers.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"deltabus {importlib.metadata.version('deltabus')}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo("deltabus, not installed: this is a source tree")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command()
def demo(
    *,
    url: Annotated[str | None, typer.Option(help="The topic; by default a temporary directory.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 12,
    keep: Annotated[bool, typer.Option("--keep", help="Leave all files where they are.")] = False,
    json: _Json = False,
) -> None:
    """Fine-tune a real model, follow it, kill things, and compare every bit."""
    with importing():
        from deltabus.demo import run_demo

    raise typer.Exit(run_demo(url, steps, json=json, keep=keep))


@app.command()
def log(
    url: _Url,
    json: _Json = False,
    writer: Annotated[str | None, typer.Option(help="Whose log; by default all.")] = None,
    last: Annotated[int | None, typer.Option(min=0, help="Show so many of the newest messages of each log.")] = None,
) -> None:
    """Show what was published."""
    with importing():
        from .log import print_log, read_log

    found = read_log(url, writer=writer, last=last, now=time.time())
    (print_json if json else print_log)(found)


@app.command()
def pull(
    url: _Url,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the checkpoint.")],
    *,
    version: Annotated[int | None, typer.Option(min=1, help="Which version; by default the newest.")] = None,
    writer: _Writer = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR and everything in it.")] = False,
    json: _Json = False,
) -> None:
    """Write a version as a safetensors checkpoint; a repeated call goes on where the last one failed."""
    with importing():
        from dataclasses import asdict

        from .output import size_text
        from .pull import pull_version

    with Bar() as bar:
        pulled = pull_version(url, directory, version=version, writer=writer, force=force, meter=bar)
    if json:
        print_json(asdict(pulled))
    else:
        typer.echo(
            f"version {pulled.version} (step {pulled.step}) is in {pulled.directory}: {size_text(pulled.nbytes)}, "
            f"verified; {size_text(pulled.fetched)} fetched, {size_text(pulled.kept)} kept from before"
        )


@app.command()
def push(
    url: _Url,
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT...", help="safetensors files, or directories of them.")
    ],
    *,
    step: Annotated[
        int | None, typer.Option(help="Step of the first; the others count on. By default from names.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Publish floats in this dtype, such as bf16.")] = None,
    anchor: Annotated[str, typer.Option(help="When to publish whole states: adaptive, every:N or never.")] = "adaptive",
    writer: Annotated[str, typer.Option(help="The name of the log.")] = "trainer",
    json: _Json = False,
) -> None:
    """Publish existing checkpoints, in the order of their steps."""
    with importing():
        from .log import print_log
        from .output import count_text
        from .push import find_steps, push_checkpoints

    found = find_steps(checkpoints, step)
    with Bar() as bar:
        pushed = push_checkpoints(url, found, writer=writer, dtype=dtype, anchor=anchor, meter=bar)
    if json:
        print_json(pushed.as_json())
        return
    if pushed.held:
        typer.echo(
            f"left out {count_text(len(pushed.held), 'checkpoint')}: the topic ends with step {pushed.held[-1].step}"
        )
    if pushed.messages:
        print_log(pushed.as_json())


@app.command()
def verify(
    url: _Url,
    json: _Json = False,
    writer: Annotated[str | None, typer.Option(help="Whose log; by default all.")] = None,
) -> None:
    """Check that all of a topic is there, whole, and what it says it is."""
    with importing():
        from .verify import print_report, verify_topic

    with Bar() as bar:
        report = verify_topic(url, writer=writer, meter=bar)
    if json:
        print_json(report.as_json())
    else:
        print_report(report)
    raise typer.Exit(0 if report.ok else _FAILED)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A payload part, a record or a schema.")],
    json: _Json = False,
) -> None:
    """Show what one file of a topic holds, and whether it is whole."""
    with importing():
        from .inspect import inspect_file, print_inspection

    found = inspect_file(file)
    (print_json if json else print_inspection)(found)
    raise typer.Exit(0 if found["valid"] else _FAILED)
