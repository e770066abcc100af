"""The commands of a site: `deltabus serve`, and `deltabus transcode`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deltabus.bus.errors import UsageError

from .interrupts import importing
from .options import Keys

__all__ = ["serve", "transcode"]


def serve(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="What the topics lie below: file:///var/lib/deltabus, s3://bucket/runs."),
    ],
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 is any that is free.")] = 8700,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who may do what, as TOML or JSON; without it, everybody here.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Be reached from other machines without tokens.")
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the certificate, for https.")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of its key, if not in the same file.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to keep blobs; by default a temporary place.")
    ] = None,
    cache_size: Annotated[
        str, typer.Option(metavar="SIZE", help="What they may take, such as 50GB; 0 keeps none.")
    ] = "4GiB",
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The largest blob that is taken.")] = "1GiB",
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at a time.")] = 4096,
    rate: Annotated[float, typer.Option(help="Requests a second of one address; ten times as many at once.")] = 2000,
    stall: Annotated[float, typer.Option(help="Seconds in which a client must take or give something.")] = 60,
    heartbeat: Annotated[float, typer.Option(help="Seconds between signs of life to those who follow.")] = 10,
    drain: Annotated[float, typer.Option(help="Seconds that those have who are being served when it stops.")] = 30,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log each request.")] = False,
    transcodes: Annotated[
        list[str] | None,
        typer.Option(
            "--transcode",
            metavar="TOPIC",
            help="Serve TOPIC.overwrite too, for engines that keep no copy of the weights; a pattern such as 'team/*' "
            "begins when somebody asks. May be repeated.",
        ),
    ] = None,
    transcode_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where these topics lie; needed without --cache-dir.")
    ] = None,
    transcode_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sign them with the key in this file, of this site.")
    ] = None,
    transcode_accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY|FILE",
            help="Go on behind messages that these signed; the old key after a change; may be repeated.",
        ),
    ] = None,
    transcode_keys: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY|FILE", help="Make them of messages signed by these keys alone; may be repeated."),
    ] = None,
    transcode_most: Annotated[
        int, typer.Option(min=1, help="How many at a time; each takes memory for up to twice the weights.")
    ] = 4,
    trace: Annotated[
        bool, typer.Option("--trace", help="Export OpenTelemetry spans of requests, as OTEL_* variables say.")
    ] = False,
) -> None:
    """Serve topics over HTTP: as a bus by itself, or as a relay with a cache before any backend."""
    with importing():
        from deltabus.bus.retention import parse_size
        from deltabus.tracing import export_spans
        from deltabus.transports.http.access import Access, read_access
        from deltabus.transports.http.limits import Limits
        from deltabus.transports.http.service import ServiceSettings
        from deltabus.transports.http.transcode import Transcoding

        from .serve import serve as run
        from .serve import set_up_logs, transcoder

    if log_format not in {"text", "json"}:
        raise UsageError(f"--log-format {log_format!r} is neither text nor json")
    command, variables = transcoder(key=transcode_key, keys=transcode_keys or (), accepted=transcode_accept or ())
    settings = ServiceSettings(
        upstream=url,
        host=host,
        port=port,
        access=Access() if token_file is None else read_access(token_file),
        insecure=insecure,
        cache_dir=cache_dir,
        cache_size=0 if cache_size == "0" else parse_size(cache_size),
        certificate=certificate,
        private_key=private_key,
        limits=Limits(
            body=parse_size(max_body), rate=rate, connections=max_connections, stall=stall, heartbeat=heartbeat
        ),
        drain=drain,
        transcoding=None
        if not transcodes
        else Transcoding(
            topics=tuple(transcodes),
            command=command,
            variables=variables,
            directory=transcode_dir,
            most=transcode_most,
        ),
        tracer=export_spans("deltabus serve") if trace else None,
    )
    set_up_logs(as_json=log_format == "json", requests=log_requests)
    run(settings, announce=sys.stdout)


def transcode(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The topic that is followed.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The topic that is written, by this command alone.")],
    *,
    writer: Annotated[str | None, typer.Option(help="Whose log; needed where the source has several writers.")] = None,
    encoding: Annotated[str, typer.Option(help="The encoding of every delta.")] = "overwrite",
    anchor: Annotated[
        str, typer.Option(help="When to publish whole states besides: adaptive, every:N or never.")
    ] = "adaptive",
    retention: Annotated[
        str, typer.Option(help="What of TARGET to keep, such as anchors:2, age:7d, or all.")
    ] = "anchors:2",
    key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Sign with the key in this file. By default that in DELTABUS_SIGNING_KEY."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY|FILE",
            help="Go on in TARGET behind messages that these keys signed: the old one, after a change. May be "
            "repeated. By default those in DELTABUS_ACCEPTED_KEYS.",
        ),
    ] = None,
    keys: Keys = None,
    shadow: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep the copy of the weights in a file there, not in RAM.")
    ] = None,
    attended: Annotated[
        bool, typer.Option("--attended", help="End when standard input ends: when whoever started this has ended.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each version.")] = False,
) -> None:
    """Publish a topic again, state by state, with deltas that engines can apply without a copy of the weights."""
    with importing():
        from functools import partial

        from deltabus.transcoding import transcode as run

        from .transcode import accepted_keys, attend

    work = partial(
        run,
        source,
        target,
        writer=writer,
        encoding=encoding,
        anchor=anchor,
        retention=None if retention == "all" else retention,
        key=key,
        keys=keys or None,
        accepted=accept or accepted_keys(),
        shadow=shadow,
    )
    attend(work, attended=attended, as_json=json)
