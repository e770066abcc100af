"""`deltabus status`: what a topic, or a service with all its topics, is like now."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import urlsplit

from deltabus.bus.errors import KeyNotFoundError
from deltabus.bus.leases import read_leases
from deltabus.bus.retry import Retry
from deltabus.bus.transport import Transport
from deltabus.transports import open_transport
from deltabus.transports.http import HttpTransport
from deltabus.transports.http.ledger import Ledger
from deltabus.transports.http.topics import below

from .output import age_text, console, count_text, plain_text, print_table, share_text, size_text

__all__ = ["print_status", "read_status", "watch_status"]

_RETRY_SECONDS = 10.0
_PAGE = 1024
_ANY = "any"


def read_status(url: str) -> dict[str, Any]:
    """Return the state of a topic, or of a service, ready for JSON.

    A service knows its readers; of other backends those are known that hold a lease.

    Args:
        url: A topic's, or `http://host:port`, which stands for all topics there.

    Raises:
        UsageError: If the URL is wrong.
        TransportError: If it cannot be reached.
    """
    return asyncio.run(_read(url))


async def _read(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    whole = parts.scheme in {"http", "https"} and parts.path in {"", "/"}
    async with open_transport(below(url, _ANY) if whole else url) as transport:
        if isinstance(transport, HttpTransport):
            found = await transport.status(whole=whole)
            return found if whole else {"now": time.time(), "topics": [found]}
        ledger = Ledger()
        await _fill(ledger, transport)
        return {"now": time.time(), "topics": [{"topic": transport.url, **ledger.as_json()}]}


async def _fill(ledger: Ledger, transport: Transport) -> None:
    """Read a topic's records and leases."""
    retry = Retry(limit=_RETRY_SECONDS)
    for log in await retry.call(f"listing the logs of {transport.url}", transport.logs):
        after = -1
        while records := await transport.read(log, after, _PAGE):
            for record in records:
                ledger.see(log, record)
            after = records[-1].position
    for key in ledger.schemas():
        with contextlib.suppress(KeyNotFoundError):
            ledger.learn_schema(key, await transport.get(key))
    now = time.time()
    for lease in await read_leases(transport, retry=retry, now=now):
        if lease.is_live(now):
            ledger.heard(lease.reader, holds=lease.holds)


def print_status(told: dict[str, Any]) -> None:
    """Print what `read_status` returned, for people."""
    if "upstream" in told:
        totals, errors = told["totals"], sum(told["errors"].values())
        rate = "" if told["hit_rate"] is None else f", {told['hit_rate']:.0%} of the blobs from the cache"
        print(
            f"serves {plain_text(told['upstream'])} for {age_text(told['uptime'])}: "
            f"{size_text(int(totals['sent_bytes']))} sent, "
            f"{size_text(int(totals['upstream_bytes']))} read from the backend{rate}; "
            f"{count_text(int(totals['followers']), 'line')} of followers, {count_text(int(errors), 'error')}"
        )
    logs = [_log_cells(topic["topic"], log, told["now"]) for topic in told["topics"] for log in topic["logs"]]
    if logs:
        columns = ("topic", "log", "version", "step", "age", "a step", "of the model", "density", "steps a minute")
        print_table(columns, logs, left=("topic", "log"))
    makers = [(topic["topic"], topic["transcoder"]) for topic in told["topics"] if topic.get("transcoder")]
    if makers:
        cells = [_maker_cells(name, maker) for name, maker in makers]
        print_table(("topic", "made of", "runs", "behind", "begun again", "failure"), cells, left=("topic", "failure"))
    readers = [_reader_cells(topic["topic"], reader) for topic in told["topics"] for reader in topic["readers"]]
    if readers:
        print_table(("topic", "reader", "version", "behind", "follows", "heard of"), readers, left=("topic", "reader"))
    if not logs and not readers and not makers:
        print("nothing was published there, and nobody reads there")


def watch_status(url: str, *, every: float) -> None:
    """Print the state again and again, until interrupted.

    Args:
        url: As for `read_status`.
        every: Seconds in between.

    Raises:
        UsageError: If the URL is wrong.
        TransportError: If it cannot be reached.
    """
    while True:
        told = read_status(url)
        if console().is_terminal:
            console().clear()
        print_status(told)
        time.sleep(every)


def _log_cells(topic: str, log: dict[str, Any], now: float) -> list[str]:
    messages = log["messages"]
    last = messages[-1]
    deltas = [message for message in messages if message["kind"] == "delta"]
    mean = sum(message["bytes"] for message in deltas) / len(deltas) if deltas else None
    span = deltas[-1]["created"] - deltas[0]["created"] if deltas else 0
    share = mean / log["model_bytes"] if mean is not None and log["model_bytes"] else None
    return [
        topic,
        log["log"],
        str(log["version"]),
        str(max(message["step"] for message in messages)),
        age_text(now - last["created"]),
        "" if mean is None else size_text(int(mean)),
        "" if share is None else share_text(share),
        share_text(deltas[-1]["changed"] / deltas[-1]["total"]) if deltas and deltas[-1]["total"] else "",
        f"{60 * (len(deltas) - 1) / span:.1f}" if span > 0 else "",
    ]


def _maker_cells(topic: str, maker: dict[str, Any]) -> list[str]:
    return [
        topic,
        maker["source"],
        "yes" if maker["running"] else "no",
        "" if maker["lag"] is None else str(maker["lag"]),
        str(maker["restarts"]),
        maker["failure"],
    ]


def _reader_cells(topic: str, reader: dict[str, Any]) -> list[str]:
    versions = reader["versions"].values()
    return [
        topic,
        reader["name"],
        str(max(versions)) if versions else "",
        "" if reader["lag"] is None else str(reader["lag"]),
        "yes" if reader["following"] else "no",
        f"{age_text(reader['idle'])} ago",
    ]
