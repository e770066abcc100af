"""What an update changes, tensor by tensor, for engines that lay weights out in a way of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from deltabus.codecs.changes import Bits, parts_of
from deltabus.codecs.held import to_host
from deltabus.codecs.schema import TensorSpec

from .staged import Staged

__all__ = ["TensorPatch", "patches_of"]


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """New bits for some elements of one tensor.

    Attributes:
        spec: The tensor, or the slice of it that a writer owns.
        positions: Where, counted row-major in the whole tensor; int64, strictly increasing.
        old: The bits that must be there before; None where the whole state is written, whatever was there.
        new: The bits to write.
    """

    spec: TensorSpec
    positions: npt.NDArray[np.int64]
    old: Bits | None
    new: Bits


def patches_of(staged: Staged) -> Iterator[TensorPatch]:
    """Yield what one writer's way changes, in runs of a segment at most; one tensor may come several times."""
    schema = staged.schema
    for segment in schema.segments:
        if staged.base is None:
            bits = to_host(staged.read(segment.index))
            for piece in segment.pieces:
                spec, count = schema.tensors[piece.tensor], piece.stop - piece.start
                run = bits[piece.offset : piece.offset + count]
                yield TensorPatch(spec, _in_whole(spec, np.arange(piece.start, piece.stop)), None, run)
            continue
        change = None if staged.changes is None else staged.changes.segments.get(segment.index)
        if change is not None:
            for piece, part in parts_of(segment, change):
                spec = schema.tensors[piece.tensor]
                inner = change.positions[part].astype(np.int64) + (piece.start - piece.offset)
                yield TensorPatch(spec, _in_whole(spec, inner), change.old[part], change.new[part])


def _in_whole(spec: TensorSpec, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return positions in a slice as positions in the tensor that it is a part of."""
    if spec.slice is UNSET:
        return positions
    indices = np.unravel_index(positions, spec.shape)
    moved = tuple(index + start for index, start in zip(indices, spec.start, strict=True))
    return np.asarray(np.ravel_multi_index(moved, spec.whole), np.int64)
