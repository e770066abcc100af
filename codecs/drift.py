"""Drift: where a model does not hold the bits that it is meant to hold, counted, or laid ready to be set right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .apply import Difference, Staged, Target
from .changes import Changes, SegmentChanges
from .held import Held
from .patches import Patch, patch_of
from .schema import Schema, TensorSpec
from .slices import overlapping_slices

__all__ = ["Meant", "count_drift", "overwriting", "stage_differences"]

Meant = tuple[Target, Callable[[int], Held]]
"""Tensors of a model, and what returns the bits of each segment that they are meant to hold."""


def overwriting(schemas: Sequence[Schema]) -> Sequence[Mapping[int, Sequence[TensorSpec]]]:
    """Return for each schema the tensors of which later ones have elements too, by number, and their entries there."""
    found: list[dict[int, list[TensorSpec]]] = [{} for _ in schemas]
    by_name: dict[str, list[tuple[int, int, TensorSpec]]] = {}
    for at, schema in enumerate(schemas):
        for number, spec in enumerate(schema.tensors):
            for name in (spec.name, *spec.aliases):
                by_name.setdefault(name, []).append((at, number, spec))
    for held in by_name.values():
        for one, other in overlapping_slices([spec for *_, spec in held]) if len(held) > 1 else ():
            at, number, _ = held[one]
            found[at].setdefault(number, []).append(held[other][2])
    return found


def count_drift(meant: Sequence[Meant], *, besides: Sequence[Changes | None] = ()) -> dict[str, int]:
    """Return how many elements of which tensors do not hold the bits that they are meant to; those of copies too.

    Args:
        meant: The states that make up what the model is meant to hold; where they have elements in common, those of
            the later one count.
        besides: For each of them, changes that lead to it; elements that hold the bits before are left out.

    Raises:
        BaseException: What reading the states raises.
    """
    counts: dict[str, int] = {}
    for at, target, found in _differences(meant):
        changes = besides[at] if besides else None
        known = None if changes is None else changes.segments.get(found.segment.index)
        wrong = found.change.positions.size - (0 if known is None else _common(found.change, known))
        if wrong:
            name = target.schema.tensors[found.piece.tensor].name
            counts[name] = counts.get(name, 0) + wrong
    return dict(sorted(counts.items()))


def stage_differences(meant: Sequence[Meant], *, limit: int) -> Staged | None:
    """Lay ready what leads from whatever the model holds to what it is meant to hold, to be written all or nothing.

    Args:
        meant: As in `count_drift`.
        limit: Bytes that the changes may take; beyond, None is returned.

    Raises:
        BaseException: What reading the states raises.
    """
    patches: dict[int, list[Patch]] = {at: [] for at in range(len(meant))}
    filled = 0
    for at, _, (segment, piece, place, change) in _differences(meant):
        filled += change.nbytes
        if filled > limit:
            return None
        patches[at].append(patch_of(place, segment, piece, change, slice(None)))
    return Staged([(target, patches[at]) for at, (target, _) in enumerate(meant)])


def _differences(meant: Sequence[Meant]) -> Iterator[tuple[int, Target, Difference]]:
    """Yield what differs, each with the place of its state, without what later states overwrite."""
    covered = overwriting([target.schema for target, _ in meant])
    for at, (target, read) in enumerate(meant):
        for found in target.differences(read):
            later = covered[at].get(found.piece.tensor, ())
            change = _outside(found, target.schema.tensors[found.piece.tensor], later) if later else found.change
            if change.positions.size:
                yield at, target, found._replace(change=change)


def _outside(found: Difference, spec: TensorSpec, others: Sequence[TensorSpec]) -> SegmentChanges:
    """Return the changes of those elements that are in none of the other entries of their tensor."""
    change = found.change
    elements = change.positions.astype(np.int64) + (found.piece.start - found.piece.offset)
    indices = np.unravel_index(elements, spec.shape) if spec.shape else ()
    places = [index + start for index, start in zip(indices, spec.start, strict=True)]
    outside = np.ones(elements.size, np.bool_)
    for other in others:
        outside &= ~_inside(places, other, elements.size)
    return SegmentChanges(change.positions[outside], change.old[outside], change.new[outside])


def _inside(places: Sequence[npt.NDArray[np.int64]], spec: TensorSpec, count: int) -> npt.NDArray[np.bool_]:
    inside = np.ones(count, np.bool_)
    for place, start, size in zip(places, spec.start, spec.shape, strict=True):
        inside &= (place >= start) & (place < start + size)
    return inside


def _common(found: SegmentChanges, known: SegmentChanges) -> int:
    """Return how many of the elements found hold the bits that a known change of theirs starts from."""
    _, ours, theirs = np.intersect1d(found.positions, known.positions, assume_unique=True, return_indices=True)
    return int(np.count_nonzero(found.old[ours] == known.old[theirs]))
