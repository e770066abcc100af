"""What happened in the demo, and whether it was right. Pure bookkeeping over the reports of its processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from .reports import Line, StepApplied, StepPublished

__all__ = ["FollowerTotals", "Ledger", "Totals"]


class FollowerTotals(Struct, frozen=True, kw_only=True):
    """What one follower did.

    Attributes:
        versions: Versions that it applied and compared.
        newest: The newest of them; 0 for none.
        compared: Elements compared, over all versions.
        differing: Elements whose bits differed.
        nbytes: Bytes downloaded.
        apply: Median seconds of the write into the model; None without versions.
        latency: Median seconds from `publish` until the weights stood in the model; None without versions.
        similarity: Cosine of the two fixed sentences with the newest weights; None without versions.
    """

    versions: int
    newest: int
    compared: int
    differing: int
    nbytes: int
    apply: float | None
    latency: float | None
    similarity: float | None


class Totals(Struct, frozen=True, kw_only=True):
    """The demo in figures.

    Attributes:
        versions: Versions that the trainer published.
        anchors: How many of them are whole states.
        nbytes: Bytes of all messages, records included.
        anchor_nbytes: Of these, anchors.
        full_nbytes: Bytes of as many full bf16 checkpoints.
        bits_per_change: Bits that one changed element cost, over all deltas; None when nothing changed.
        density: Mean share of the elements that a delta changed; None without deltas.
        blocked: Median seconds that `publish` kept the training thread, over all deltas; None without deltas.
        followers: By name.
    """

    versions: int
    anchors: int
    nbytes: int
    anchor_nbytes: int
    full_nbytes: int
    bits_per_change: float | None
    density: float | None
    blocked: float | None
    followers: Mapping[str, FollowerTotals]


@dataclass(slots=True)
class Ledger:
    """Every version that was published, and every one that was applied.

    Attributes:
        published: By version.
        applied: By follower and version; what a follower applied twice counts once, unless the first time differed.
    """

    published: dict[int, StepPublished] = field(default_factory=dict)
    applied: dict[str, dict[int, StepApplied]] = field(default_factory=dict)
    _references: dict[int, str] = field(default_factory=dict)

    def record(self, name: str, line: Line) -> None:
        """Take down a process's report."""
        if isinstance(line, StepPublished):
            self.published[line.version] = line
            self._references[line.version] = line.reference
        elif isinstance(line, StepApplied):
            versions = self.applied.setdefault(name, {})
            before = versions.get(line.version)
            if before is None or not before.differing:
                versions[line.version] = line

    def spent_references(self, followers: Iterable[str]) -> list[str]:
        """Return the reference files that nobody will read any more, each once.

        Args:
            followers: All that were started. One that starts later asks for nothing before the newest version.
        """
        floor = min((max(self.applied.get(name, {}), default=0) for name in followers), default=0)
        floor = min(floor, max(self.published, default=0))
        return [self._references.pop(version) for version in sorted(self._references) if version < floor]

    def differences(self) -> list[str]:
        """Return every version at which a follower did not hold the trainer's bits, as sentences."""
        found = []
        for name, versions in self.applied.items():
            for version, line in versions.items():
                if line.differing:
                    found.append(f"{name} differs from the trainer in {line.differing} elements of version {version}")
                if not line.compared:
                    found.append(f"{name} compared nothing of version {version}")
        return found

    def gaps(self, followers: Iterable[str], *, steps: int) -> list[str]:
        """Return who did not reach the end, as sentences.

        Args:
            followers: Who must have the last version.
            steps: The step that the last version must have.
        """
        found = []
        newest = max(self.published, default=0)
        if not newest or self.published[newest].step != steps:
            found.append(f"the trainer did not publish step {steps}")
        for name in followers:
            versions = self.applied.get(name, {})
            if not newest or max(versions, default=0) < newest:
                found.append(f"{name} stopped at version {max(versions, default=0)}, the last is {newest}")
        return found

    def totals(self) -> Totals:
        """Return the figures of the demo so far."""
        lines = list(self.published.values())
        deltas = [line for line in lines if line.kind == "delta"]
        changed = sum(line.changed for line in deltas)
        return Totals(
            versions=len(lines),
            anchors=len(lines) - len(deltas),
            nbytes=sum(line.nbytes for line in lines),
            anchor_nbytes=sum(line.nbytes for line in lines if line.kind != "delta"),
            full_nbytes=sum(line.full_nbytes for line in lines),
            bits_per_change=8 * sum(line.nbytes for line in deltas) / changed if changed else None,
            density=statistics.fmean(line.density for line in deltas) if deltas else None,
            blocked=_median(line.blocked for line in deltas),
            followers={name: _follower_totals(versions) for name, versions in sorted(self.applied.items())},
        )


def _follower_totals(versions: Mapping[int, StepApplied]) -> FollowerTotals:
    newest = max(versions, default=0)
    lines = versions.values()
    return FollowerTotals(
        versions=len(lines),
        newest=newest,
        compared=sum(line.compared for line in lines),
        differing=sum(line.differing for line in lines),
        nbytes=sum(line.nbytes for line in lines),
        apply=_median(line.apply for line in lines),
        latency=_median(line.latency for line in lines),
        similarity=versions[newest].similarity if versions else None,
    )


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None
