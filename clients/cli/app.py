"""The commands as a terminal sees them: arguments, options, exit statuses."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from deltabus.bus.errors import DeltabusError, UsageError

from .drive_app import drive
from .interrupts import INTERRUPTED, importing
from .options import FAILED, MISUSED, Keys
from .output import Bar, print_error, print_json
from .serve_app import serve, transcode

__all__ = [
    "app",
    "bench",
    "demo",
    "follow",
    "inspect",
    "keygen",
    "log",
    "prune",
    "pull",
    "push",
    "status",
    "verify",
]


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
            raise typer.Exit(MISUSED if isinstance(error, UsageError) else FAILED) from None


app = typer.Typer(
    cls=_Group,
    help="Model weights from a trainer to inference engines as tiny, lossless, versioned deltas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(drive, name="drive")
app.command()(serve)
app.command()(transcode)

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
    url: Annotated[
        str | None, typer.Option(help="The backend: a topic is made below it, and removed. By default a local disk.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 12,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the topic and all files where they are.")] = False,
    json: _Json = False,
) -> None:
    """Fine-tune a real model, follow it, kill things, and compare every bit."""
    with importing():
        from deltabus.demo import run_demo

    raise typer.Exit(run_demo(url, steps, json=json, keep=keep))


@app.command()
def bench(
    *,
    url: Annotated[
        str | None, typer.Option(help="The backend: a topic is made below it, and removed. By default a local disk.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Whose tensors to make weights for: minilm (unless you say), qwen3-0.6b or tiny."),
    ] = None,
    checkpoint: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Your own weights: two consecutive safetensors files or directories of them."),
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of made-up weights that change; 0.01 unless you say.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Take floats of checkpoints in this dtype, such as bf16.")] = None,
    repeats: Annotated[int, typer.Option(help="How often each time is taken; medians count.")] = 3,
    formats: Annotated[bool, typer.Option(help="Whether to compare formats in memory, or the backend alone.")] = True,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Measure bytes, times and memory on your weights, machine and backend; 1 if a bit comes out wrong."""
    with importing():
        from .bench import command_of, make_plan, measure, print_report

    plan = make_plan(
        url=url,
        shape=shape,
        checkpoints=checkpoint,
        density=density,
        dtype=dtype,
        repeats=repeats,
        formats=formats,
    )
    report = measure(plan, file=json)
    print_report(report, command=command_of(plan))
    raise typer.Exit(0 if report.exact else FAILED)


@app.command()
def log(
    url: _Url,
    json: _Json = False,
    writer: Annotated[str | None, typer.Option(help="Whose log; by default all.")] = None,
    last: Annotated[int | None, typer.Option(min=0, help="Show so many of the newest messages of each log.")] = None,
    keys: Keys = None,
) -> None:
    """Show what was published."""
    with importing():
        from deltabus.keys import verify_keys

        from .log import print_log, read_log

    found = read_log(url, writer=writer, last=last, now=time.time(), keys=verify_keys(keys or None))
    (print_json if json else print_log)(found)


@app.command()
def prune(
    url: _Url,
    *,
    keep_anchors: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of the newest anchors of each log, and what follows them.")
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="TIME", help="Let go what is older, such as 7d, 12h or 30m.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Let the oldest go until the rest fits, such as 100GB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and change nothing.")] = False,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long a write may be under way; 0 says that nobody writes.")
    ] = "10m",
    garbage_age: Annotated[
        str, typer.Option(metavar="TIME", help="How old a blob must be that no message names.")
    ] = "1d",
    keys: Keys = None,
    json: _Json = False,
) -> None:
    """Remove what is old; the newest anchor, what follows it, and what a live reader needs stay."""
    with importing():
        from deltabus.bus.retention import Retention, parse_duration, parse_size
        from deltabus.keys import verify_keys

        from .prune import print_pruned, prune_topic

    policy = Retention(
        keep_anchors=keep_anchors,
        max_age=None if max_age is None else parse_duration(max_age),
        max_bytes=None if max_bytes is None else parse_size(max_bytes),
        grace=parse_duration(grace),
        garbage_age=parse_duration(garbage_age),
    )
    pruned = prune_topic(url, policy, dry=dry_run, keys=verify_keys(keys or None))
    if json:
        print_json(pruned.as_json())
    else:
        print_pruned(pruned)


@app.command()
def pull(
    url: _Url,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the checkpoint.")],
    *,
    version: Annotated[int | None, typer.Option(min=1, help="Which version; by default the newest.")] = None,
    writer: _Writer = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR and everything in it.")] = False,
    keys: Keys = None,
    json: _Json = False,
) -> None:
    """Write a version as a safetensors checkpoint; a repeated call goes on where the last one failed."""
    with importing():
        from dataclasses import asdict

        from deltabus.keys import verify_keys

        from .output import size_text
        from .pull import pull_version

    ring = verify_keys(keys or None)
    with Bar() as bar:
        pulled = pull_version(url, directory, version=version, writer=writer, force=force, keys=ring, meter=bar)
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
    key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Sign with the key in this file. By default that in DELTABUS_SIGNING_KEY."),
    ] = None,
    keys: Keys = None,
    json: _Json = False,
) -> None:
    """Publish existing checkpoints, in the order of their steps."""
    with importing():
        from .log import print_log
        from .output import count_text
        from .push import find_steps, push_checkpoints

    found = find_steps(checkpoints, step)
    with Bar() as bar:
        pushed = push_checkpoints(
            url, found, writer=writer, dtype=dtype, anchor=anchor, key=key, keys=keys or None, meter=bar
        )
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
def follow(
    url: _Url,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Keeps versions; DIR/current leads to the newest.")],
    *,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run by the shell after each update, with DELTABUS_STEP, DELTABUS_VERSION and DELTABUS_DIR set.",
        ),
    ] = None,
    run_timeout: Annotated[float, typer.Option(help="Most seconds for the command; then it is killed.")] = 600.0,
    keep: Annotated[int, typer.Option(help="How many versions stay.")] = 3,
    form: Annotated[
        str, typer.Option("--format", help="checkpoint; or adapter: as PEFT lays it out, a base model in base/.")
    ] = "checkpoint",
    once: Annotated[bool, typer.Option("--once", help="End when the newest version is there.")] = False,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Where checkpoints are split.")] = "5GB",
    keys: Keys = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each version.")] = False,
) -> None:
    """Keep a directory of safetensors current, and run a command after each update; 1 if --once and that failed."""
    with importing():
        from deltabus import following
        from deltabus.bus.retention import parse_size

        from .follow import report

    followed = following.follow(
        url,
        directory,
        command=run,
        command_timeout=run_timeout,
        keep=keep,
        form=cast(following.Form, form),  # it is checked there
        once=once,
        shard_bytes=parse_size(shard_size),
        keys=keys or None,
    )
    raise typer.Exit(0 if report(followed, as_json=json) else FAILED)


@app.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="A topic, or http://host:port for all of a service.")],
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds in between.")] = 2.0,
    json: _Json = False,
) -> None:
    """Show what is there now: versions, sizes, rates, and how far readers have come."""
    with importing():
        from .status import print_status, read_status, watch_status

    if watch and not json:
        watch_status(url, every=every)
    told = read_status(url)
    (print_json if json else print_status)(told)


@app.command()
def verify(
    url: _Url,
    json: _Json = False,
    writer: Annotated[str | None, typer.Option(help="Whose log; by default all.")] = None,
    keys: Keys = None,
) -> None:
    """Check that all of a topic is there, whole, and what it says it is."""
    with importing():
        from deltabus.keys import verify_keys

        from .verify import print_report, verify_topic

    ring = verify_keys(keys or None)
    with Bar() as bar:
        report = verify_topic(url, writer=writer, keys=ring, meter=bar)
    if json:
        print_json(report.as_json())
    else:
        print_report(report)
    raise typer.Exit(0 if report.ok else FAILED)


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
    raise typer.Exit(0 if found["valid"] else FAILED)


@app.command()
def keygen(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Where to write the secret key; the public one goes to FILE.pub."),
    ] = None,
    *,
    hmac: Annotated[
        bool, typer.Option("--hmac", help="Make one shared secret, for writers and readers alike, instead of a pair.")
    ] = False,
    json: _Json = False,
) -> None:
    """Make a key to sign messages with: into FILE, or onto the screen."""
    with importing():
        from .keygen import generate_key, print_key

    made = generate_key(file, hmac=hmac)
    (print_json if json else print_key)(made)
