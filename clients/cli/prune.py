"""`deltabus prune`: what a topic no longer needs, and its removal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltabus.bus.message import Kind, Message
from deltabus.bus.pruner import Pruner, Pruning
from deltabus.bus.retention import Retention
from deltabus.bus.signing import KeyRing
from deltabus.transports import open_transport

from .output import age_text, count_text, plain_text, print_table, size_text
from .topic import nothing_published

__all__ = ["Pruned", "print_pruned", "prune_topic"]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went, or would go.

    Attributes:
        url: The topic, without secrets.
        dry: Whether nothing was removed.
        pruning: What it is.
    """

    url: str
    dry: bool
    pruning: Pruning

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON; sizes are in bytes, times in seconds."""
        removal = self.pruning.removal
        return {
            "url": self.url,
            "dry_run": self.dry,
            "logs": [_row_of(writer, gone, kept) for writer, gone, kept in self._logs()],
            "blobs": list(removal.blobs),
            "bytes": removal.nbytes,
            "garbage": [{"key": blob.key, "bytes": blob.size} for blob in self.pruning.garbage],
            "held_by": list(removal.held_by),
            "leases": [
                {"reader": lease.reader, "holds": lease.holds, "left": lease.ends - self.pruning.now}
                for lease in self.pruning.leases
            ],
        }

    def _logs(self) -> Iterable[tuple[str, list[Message], list[Message]]]:
        removal = self.pruning.removal
        for writer in sorted({message.writer for message in (*removal.kept, *removal.records)}):
            gone = [message for message in removal.records if message.writer == writer]
            yield writer, gone, [message for message in removal.kept if message.writer == writer]


def prune_topic(url: str, policy: Retention, *, dry: bool = False, keys: KeyRing | None = None) -> Pruned:
    """Remove from a topic what a policy lets go, and return what that was.

    Args:
        url: The topic.
        policy: What to keep.
        dry: Whether to remove nothing, and write nothing.
        keys: Whose messages are believed; None believes everybody.

    Raises:
        UsageError: If the URL is wrong.
        RetentionGapError: If nothing was published there.
        MessageFormatError: If a record cannot be read; nothing was removed.
        SignatureError: If keys are given, and a record does not show that it belongs where it stands; nothing was
            removed.
        ConflictError: If the topic's logs contradict themselves; nothing was removed.
        TransportError: If the topic cannot be reached, or not be written to; another run finishes what was begun.
    """
    return asyncio.run(_prune(url, policy, dry, keys))


async def _prune(url: str, policy: Retention, dry: bool, keys: KeyRing | None) -> Pruned:
    async with open_transport(url) as transport:
        pruner = Pruner(transport, policy, keys=keys)
        pruning = await (pruner.plan() if dry else pruner.prune())
        if not pruning.removal.kept:
            raise nothing_published(transport.url)
        return Pruned(transport.url, dry, pruning)


def _row_of(writer: str, gone: list[Message], kept: list[Message]) -> dict[str, Any]:
    return {
        "writer": writer,
        "removed": _figures(gone),
        "kept": _figures(kept),
        "first_position": kept[0].position if kept else None,
    }


def _figures(messages: list[Message]) -> dict[str, Any]:
    anchors = sum(message.kind is Kind.ANCHOR for message in messages)
    versions = [message.version for message in messages]
    return {
        "messages": len(messages),
        "anchors": anchors,
        "deltas": len(messages) - anchors,
        "first_version": min(versions, default=None),
        "last_version": max(versions, default=None),
        "bytes": sum({blob.key: blob.size for message in messages for blob in message.blobs}.values()),
    }


def print_pruned(pruned: Pruned) -> None:
    """Print what went, or would go, for people."""
    rows = []
    for row in pruned.as_json()["logs"]:
        for what in ("removed", "kept"):
            figures = row[what]
            name = {"removed": "would go" if pruned.dry else "removed", "kept": "kept"}[what]
            rows.append(
                [
                    row["writer"],
                    name,
                    _range(figures["first_version"], figures["last_version"]),
                    f"{figures['anchors']:,}",
                    f"{figures['deltas']:,}",
                    size_text(figures["bytes"]),
                ]
            )
    print_table(["writer", "", "versions", "anchors", "deltas", "size"], rows, left=("writer", ""))
    pruning = pruned.pruning
    live = [lease for lease in pruning.leases if lease.is_live(pruning.now)]
    for lease in live:
        keeps = ", which keeps more than you asked for" if lease.reader in pruning.removal.held_by else ""
        left = age_text(lease.ends - pruning.now)
        print(plain_text(f"lease of {lease.reader}: {_holds(lease.holds)}, {left} left{keeps}"))
    if pruning.garbage:
        size = sum(blob.size or 0 for blob in pruning.garbage)
        print(f"{count_text(len(pruning.garbage), 'blob')} that no message names: {size_text(size)}")
    verb = "would free" if pruned.dry else "freed"
    total = pruning.removal.nbytes + sum(blob.size or 0 for blob in pruning.garbage)
    print(f"{verb} {size_text(total)}; nothing was changed" if pruned.dry else f"{verb} {size_text(total)}")


def _holds(holds: Mapping[str, int] | None) -> str:
    if holds is None:
        return "cannot be read, and holds everything back"
    held = ", ".join(f"version {version} of {writer}" for writer, version in sorted(holds.items()))
    return f"holds {held or 'nothing'}"


def _range(first: int | None, last: int | None) -> str:
    if first is None:
        return "none"
    return f"{first}" if first == last else f"{first}-{last}"
