"""The commands below `deltabus drive`, one for each kind of engine."""

from __future__ import annotations

from typing import Annotated

import typer

from .interrupts import importing
from .options import FAILED, Keys

__all__ = ["drive", "drive_vllm"]

drive = typer.Typer(
    help="Keep inference engines at a topic's newest state: tell them when to write.", no_args_is_help=True
)


@drive.callback()
def _engines() -> None:
    pass  # so that the engine is named though there is one kind


@drive.command("vllm")
def drive_vllm(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="The servers: http://host:8000.")],
    *,
    follow: Annotated[str, typer.Option(metavar="TOPIC", help="The topic's URL.")],
    engine_topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Its URL as the servers see it, if that is another.")
    ] = None,
    pause: Annotated[
        str, typer.Option(metavar="MODE", help="What becomes of running requests: keep, wait or abort.")
    ] = "keep",
    timeout: Annotated[float, typer.Option(help="Seconds for a request, and for getting ready.")] = 60.0,
    once: Annotated[
        bool, typer.Option("--once", help="End when each server has the newest state; 1 if one has not.")
    ] = False,
    shadow: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where each worker keeps its copy of the weights, if not in RAM.")
    ] = None,
    constant: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Weights of the engine that are not trained; may be repeated."),
    ] = None,
    keys: Keys = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each update.")] = False,
) -> None:
    """Have vLLM servers follow a topic, and write each update into them."""
    with importing():
        from deltabus.integrations.vllm.driver import DriveSettings
        from deltabus.keys import verify_keys

        from .drive import drive_servers

    settings = DriveSettings(
        topic=follow,
        engine_topic=engine_topic,
        init={"keys": keys or None, "shadow": shadow, "constants": constant or []},
        keys=verify_keys(keys or None),
        mode=pause,
        timeout=timeout,
        once=once,
    )
    raise typer.Exit(0 if drive_servers(urls, settings, as_json=json) else FAILED)
