"""`deltabus log`: what was published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deltabus.bus.message import Kind, Message
from deltabus.bus.signing import KeyRing, seal_of

from .output import age_text, count_text, print_table, share_text, size_text
from .topic import read_topic

__all__ = ["print_log", "read_log", "row_of", "totals_of"]

_COLUMNS = ("writer", "version", "position", "step", "kind", "epoch", "size", "density", "bits", "encodings", "age")
_IF_ANY = ("held", "metadata", "key")


def read_log(
    url: str, *, writer: str | None = None, last: int | None = None, now: float, keys: KeyRing | None = None
) -> dict[str, Any]:
    """Return what a topic's logs say, ready for JSON.

    Args:
        url: The topic.
        writer: Whose log; None is all.
        last: How many of the newest messages of each log to list; None is all. Totals always cover all.
        now: The present, in seconds since 1970, for the age of messages.
        keys: Whose messages are believed; None believes everybody.

    Raises:
        UsageError: If the URL is wrong, or there is no such writer.
        RetentionGapError: If nothing was published there.
        MessageFormatError: If a record cannot be read.
        SignatureError: If keys are given, and a record does not show that it belongs where it stands.
        TransportError: If the topic cannot be reached.
    """
    topic = read_topic(url, keys=keys)
    messages = topic.messages if writer is None else topic.log_of(writer)
    logs: dict[str, list[Message]] = {}
    for message in messages:
        logs.setdefault(message.writer, []).append(message)
    shown = [message for log in logs.values() for message in (log if last is None else log[max(0, len(log) - last) :])]
    return {
        "url": topic.url,
        "messages": [row_of(message, now=now) for message in shown],
        "totals": totals_of(messages),
    }


def row_of(message: Message, *, now: float) -> dict[str, Any]:
    """Return what a message says of itself, ready for JSON.

    Sizes are in bytes, times in seconds, digests, checksums and the key's id (None when unsigned) in hexadecimal.
    """
    before, seal = message.digest_before, seal_of(message)
    return {
        "writer": message.writer,
        "position": message.position,
        "version": message.version,
        "base": dict(message.base),
        "step": message.step,
        "kind": str(message.kind),
        "epoch": message.epoch,
        "group": list(message.group),
        "ranks": message.ranks,
        "generation": message.generation,
        "bytes": message.nbytes,
        "parts": len(message.blobs),
        "changed": message.stats.changed,
        "total": message.stats.total,
        "held": message.stats.held,
        "density": message.stats.density,
        "encodings": dict(message.stats.encodings),
        "schema": message.schema.checksum.hex(),
        "digest_before": None if before is None else f"{before:016x}",
        "digest_after": f"{message.digest_after:016x}",
        "created": message.created,
        "age": now - message.created,
        "metadata": dict(message.metadata),
        "key": None if seal is None else seal.key_id.hex(),
    }


def totals_of(messages: Iterable[Message]) -> dict[str, Any]:
    """Return the sums over messages, ready for JSON; means are None where there is nothing to divide by."""
    messages = list(messages)
    deltas = [message for message in messages if message.kind is Kind.DELTA]
    delta_bytes = sum(message.nbytes for message in deltas)
    changed = sum(message.stats.changed for message in deltas)
    elements = sum(message.stats.total for message in deltas)
    return {
        "messages": len(messages),
        "versions": len({(message.writer, message.version) for message in messages}),
        "deltas": len(deltas),
        "delta_bytes": delta_bytes,
        "anchors": len(messages) - len(deltas),
        "anchor_bytes": sum(message.nbytes for message in messages) - delta_bytes,
        "density": changed / elements if elements else None,
        "bits_per_changed_element": 8 * delta_bytes / changed if changed else None,
    }


def print_log(log: dict[str, Any]) -> None:
    """Print what `read_log` returned, for people."""
    rows = log["messages"]
    columns = [*_COLUMNS, *(name for name in _IF_ANY if any(row[name] for row in rows))]
    cells = [_cells(row) for row in rows]
    print_table(
        columns,
        [[row[name] for name in columns] for row in cells],
        left=("writer", "kind", "encodings", "metadata", "key"),
    )
    totals = log["totals"]
    print(
        f"{count_text(totals['messages'], 'message')}, {count_text(totals['versions'], 'version')}: "
        f"{count_text(totals['deltas'], 'delta')} of {size_text(totals['delta_bytes'])}, "
        f"{count_text(totals['anchors'], 'anchor')} of {size_text(totals['anchor_bytes'])}"
    )
    if totals["bits_per_changed_element"] is not None:
        print(
            f"deltas: {share_text(totals['density'])} of the elements changed, at "
            f"{totals['bits_per_changed_element']:.2f} bits each"
        )


def _cells(row: dict[str, Any]) -> dict[str, str]:
    is_delta = row["kind"] == Kind.DELTA
    is_skip = is_delta and row["base"][row["writer"]] < row["version"] - 1
    return {
        "writer": row["writer"],
        "version": str(row["version"]),
        "position": str(row["position"]),
        "step": str(row["step"]),
        "kind": row["kind"] if not is_skip else f"delta from {row['base'][row['writer']]}",
        "epoch": str(row["epoch"]),
        "size": size_text(row["bytes"]),
        "density": share_text(row["density"]) if is_delta else "",
        "bits": f"{8 * row['bytes'] / row['changed']:.2f}" if is_delta and row["changed"] else "",
        "encodings": _encoding_shares(row["encodings"]),
        "age": age_text(row["age"]),
        "held": f"{row['held']:,}",
        "metadata": " ".join(f"{key}={value}" for key, value in sorted(row["metadata"].items())),
        "key": row["key"] or "",
    }


def _encoding_shares(encodings: dict[str, int]) -> str:
    total = sum(encodings.values())
    largest = sorted(encodings.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * size / total:.0f} %" for name, size in largest if size)
