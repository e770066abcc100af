"""Version vectors: how far each writer of a topic has come.

A version vector maps a writer to its state counter; a writer that is missing counts as 0, "nothing yet". Vectors are
partially ordered (Fidge 1988, Mattern 1988): one is before another when no component is greater and one is less; two
vectors of which each is ahead somewhere are concurrent.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

from .errors import UsageError

__all__ = ["Ordering", "VersionVector"]


class Ordering(enum.Enum):
    """How one version vector stands to another."""

    EQUAL = "equal"
    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "concurrent"


class VersionVector(Mapping[str, int]):
    """An immutable, hashable map from writer to version; a writer that is missing is at 0.

    >>> VersionVector({"a": 2}).compare(VersionVector({"a": 2, "b": 1}))
    <Ordering.BEFORE: 'before'>
    >>> VersionVector({"a": 2}).merge({"b": 3})
    VersionVector({'a': 2, 'b': 3})

    Raises:
        UsageError: If a version is negative.
    """

    __slots__ = ("_versions",)

    def __init__(self, versions: Mapping[str, int] | None = None) -> None:
        versions = versions or {}
        for writer, version in versions.items():
            if version < 0:
                raise UsageError(f"version of writer {writer!r} is {version}; versions count from 1, and 0 is nothing")
        self._versions = {writer: versions[writer] for writer in sorted(versions) if versions[writer]}

    def __getitem__(self, writer: str) -> int:
        return self._versions[writer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    def __hash__(self) -> int:
        return hash(tuple(self._versions.items()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, VersionVector):
            return self._versions == other._versions
        if isinstance(other, Mapping):
            return self._versions == {writer: version for writer, version in other.items() if version}
        return NotImplemented

    def __repr__(self) -> str:
        return f"VersionVector({self._versions!r})"

    def __str__(self) -> str:
        return " ".join(f"{writer}@{version}" for writer, version in self._versions.items()) or "nothing"

    def of(self, writer: str) -> int:
        """Return the writer's version, 0 when it has none."""
        return self._versions.get(writer, 0)

    def merge(self, other: Mapping[str, int]) -> VersionVector:
        """Return the least vector that is not before either: the greater version of each writer."""
        return VersionVector({w: max(self.of(w), other.get(w, 0)) for w in {*self, *other}})

    def covers(self, other: Mapping[str, int]) -> bool:
        """Return whether no component of `other` is greater."""
        return all(self.of(writer) >= version for writer, version in other.items())

    def compare(self, other: VersionVector) -> Ordering:
        """Return how this vector stands to `other`."""
        here, there = self.covers(other), other.covers(self)
        if here and there:
            return Ordering.EQUAL
        if here:
            return Ordering.AFTER
        return Ordering.BEFORE if there else Ordering.CONCURRENT
