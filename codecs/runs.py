"""Runs: the changes of several deltas in a row, composed segment by segment when they are asked for.

A run ends in a state of which there is a snapshot. Its halves are what a ladder of skip deltas joins: the left one was
kept while the right one came to be, `Kept` small in memory; the right one is a run itself. So composing, encoding and
keeping a run of any length takes memory for a few segments, and what is kept about a byte for each changed element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .changes import Changes, SegmentChanges, compose_in_segment, reversed_in_segment
from .digest import advanced, digest_delta
from .encodings import ENCODINGS, choose
from .held import Held
from .schema import Schema
from .shadow import Snapshot

__all__ = ["Kept", "Run"]


class Kept:
    """A run's changes while the one behind it comes to be.

    Changes are written backwards, by what they leave: their end is the state that the next run starts from, and so is
    there when they are read again, while the state that they start from is not.

    Attributes:
        nbytes: Bytes of memory that it takes, about.
    """

    def __init__(
        self, schema: Schema, plain: Mapping[int, SegmentChanges], packed: Mapping[int, tuple[str, bytes]]
    ) -> None:
        """Use `Run.kept`."""
        self._schema = schema
        self._plain = plain
        self._packed = packed
        self.nbytes = sum(each.nbytes for each in plain.values()) + sum(len(data) for _, data in packed.values())

    @property
    def indices(self) -> frozenset[int]:
        """The segments that it changes."""
        return frozenset(self._plain) | frozenset(self._packed)

    def read(self, index: int, after: Callable[[], Held]) -> SegmentChanges | None:
        """Return the changes of a segment; None where there are none.

        Args:
            index: Which segment.
            after: Returns the bits of the segment that the changes lead to.
        """
        if index not in self._packed:
            return self._plain.get(index)
        name, data = self._packed[index]
        return reversed_in_segment(ENCODINGS[name].decode(self._schema.segments[index], data, after()))


@dataclass(frozen=True, slots=True)
class _Found:
    indices: tuple[int, ...]
    count: int
    digest_delta: int
    nbytes: int


class Run:
    """The changes that lead from an earlier state to that of a snapshot; one thread at a time uses it.

    Args:
        view: The state that it ends in.
        right: The last changes of the run.
        left: What comes before them; None is nothing.
    """

    def __init__(self, view: Snapshot, right: Changes | Run, left: Kept | None = None) -> None:
        self.schema = view.schema
        self._view = view
        self._right = right
        self._left = left
        self._last: tuple[int, SegmentChanges | None] = (-1, None)
        self._found: _Found | None = None

    @property
    def count(self) -> int:
        """Number of changed elements."""
        return self._measured().count

    def measure(self) -> int:
        """Compose everything once, and return the number of changed elements; later figures then take no time.

        Raises:
            DivergedError: If the halves do not follow one another.
            CodecError: If what was kept cannot be read against the snapshot.
            UsageError: If the snapshot was released.
        """
        return self._measured().count

    @property
    def digest_delta(self) -> int:
        """What the changes add to the digest, modulo 2^64."""
        return self._measured().digest_delta

    @property
    def changes(self) -> Changes:
        """The changes, of which each segment is composed when it is looked up."""
        return Changes(self.schema, _Segments(self, self._measured().indices))

    def read(self, index: int) -> SegmentChanges | None:
        """Return the changes of a segment; None where there are none.

        Raises:
            DivergedError: If the halves do not follow one another.
            CodecError: If what was kept cannot be read against the snapshot.
            UsageError: If the snapshot was released.
        """
        at, change = self._last
        if at != index:
            change = self._compose(index)
            self._last = (index, change)
        return change

    def before(self, index: int) -> Held:
        """Return a copy of the bits of a segment that the run starts from.

        Raises:
            DivergedError: If the halves do not follow one another.
            CodecError: If what was kept cannot be read against the snapshot.
            UsageError: If the snapshot was released.
        """
        change = self.read(index)
        return self._view.read(index) if change is None else self._view.read_before(index, change)

    def kept(self, *, plain: int) -> Kept:
        """Return the changes as they are kept for later.

        Args:
            plain: Bytes of memory up to which they are kept as they are; beyond that they are encoded, which takes
                about as long as a delta, and takes a byte for each changed element or less.

        Raises:
            DivergedError: If the halves do not follow one another.
            CodecError: If what was kept cannot be read against the snapshot.
            UsageError: If the snapshot was released.
        """
        found = self._measured()
        if found.nbytes <= plain:
            return Kept(self.schema, dict(self.changes.segments), {})
        packed: dict[int, tuple[str, bytes]] = {}
        for index, change in self.changes.segments.items():
            segment, back, after = self.schema.segments[index], reversed_in_segment(change), self._view.read(index)
            way = choose(segment, back, after)
            packed[index] = (way.name, way.encode(segment, back, after))
        return Kept(self.schema, {}, packed)

    def _compose(self, index: int) -> SegmentChanges | None:
        right = self._right.read(index) if isinstance(self._right, Run) else self._right.segments.get(index)
        if self._left is None:
            return right

        def between() -> Held:
            return self._view.read(index) if right is None else self._view.read_before(index, right)

        return compose_in_segment(self.schema, index, self._left.read(index, between), right)

    def _indices(self) -> frozenset[int]:
        """Return the segments that may change."""
        right = self._right._indices() if isinstance(self._right, Run) else frozenset(self._right.segments)
        return right if self._left is None else right | self._left.indices

    def _measured(self) -> _Found:
        """Return the run's figures, which takes one pass over its segments."""
        if self._found is None:
            indices, count, total, nbytes = [], 0, 0, 0
            for index in sorted(self._indices()):
                change = self.read(index)
                if change is not None:
                    indices.append(index)
                    count += change.positions.size
                    total = advanced(total, digest_delta(Changes(self.schema, {index: change})))
                    nbytes += change.nbytes
            self._found = _Found(tuple(indices), count, total, nbytes)
        return self._found


class _Segments(Mapping[int, SegmentChanges]):
    """The segments of a run that change."""

    def __init__(self, run: Run, indices: tuple[int, ...]) -> None:
        self._run = run
        self._indices = dict.fromkeys(indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> SegmentChanges:
        change = self._run.read(index) if index in self._indices else None
        if change is None:
            raise KeyError(index)
        return change
