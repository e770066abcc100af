"""Buckets: which name leads to which content. Every change is a line of a journal, which is read again at the start."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["Bucket", "Buckets", "timestamp"]


def timestamp(seconds: float | None = None) -> str:
    """Return a time as the Hub writes it, to the millisecond; now, unless one is given."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class Bucket:
    """One bucket.

    Attributes:
        id: `namespace/name`.
        private: Whether it is shown to its owner alone.
        created: When.
        files: What is known of each file, by path.
        changes: All that ever happened to files, oldest first; the place behind a change is its cursor.
        followers: An event for each who follows.
    """

    id: str
    private: bool
    created: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    followers: set[asyncio.Event] = field(default_factory=set)

    def wake(self) -> None:
        """Let all who follow look for changes."""
        for event in self.followers:
            event.set()

    def as_json(self) -> dict[str, Any]:
        """Return what the Hub tells of a bucket."""
        return {
            "id": self.id,
            "private": self.private,
            "createdAt": self.created,
            "updatedAt": self.changes[-1]["uploadedAt"] if self.changes else self.created,
            "size": sum(file["size"] for file in self.files.values()),
            "totalFiles": len(self.files),
        }


class Buckets:
    """All buckets.

    Args:
        root: The directory that holds the journal.
    """

    def __init__(self, root: Path) -> None:
        self.by_id: dict[str, Bucket] = {}
        path = root / "journal.jsonl"
        if path.exists():
            whole, _, cut_short = path.read_bytes().rpartition(b"\n")
            for line in whole.splitlines():
                self._apply(json.loads(line))
            if cut_short:  # by a process that was killed; nobody was told that it happened
                path.write_bytes(whole + b"\n" if whole else b"")
        self._journal = path.open("ab", buffering=0)

    def record(self, **entry: Any) -> None:
        """Make a change, and make it last."""
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._apply(entry)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _apply(self, entry: dict[str, Any]) -> None:
        name = entry["bucket"]
        match entry["what"]:
            case "create":
                self.by_id[name] = Bucket(name, entry["private"], entry["at"])
            case "remove":
                self.by_id.pop(name, None)
            case "settings":
                self.by_id[name].private = entry["private"]
            case "move":
                bucket = self.by_id.pop(name)
                bucket.id = entry["to"]
                self.by_id[bucket.id] = bucket
            case "files":
                bucket = self.by_id[name]
                for change in entry["changes"]:
                    known = {key: value for key, value in change.items() if key not in ("op", "path")}
                    if change["op"] == "delete":
                        bucket.files.pop(change["path"], None)
                    else:
                        bucket.files[change["path"]] = known
                bucket.changes.extend(entry["changes"])
