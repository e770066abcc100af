"""Changes: what differs between two states of one schema, element by element, with both bit patterns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .schema import Schema

__all__ = ["Bits", "Changes", "SegmentChanges"]

Bits = npt.NDArray[np.unsignedinteger]
"""Bit patterns of elements: uint8, uint16, uint32 or uint64, as the dtype is wide."""


@dataclass(frozen=True, slots=True)
class SegmentChanges:
    """The changed elements of one segment.

    Attributes:
        positions: Where, counted in the segment; uint32, strictly increasing, at least one.
        old: The bits before.
        new: The bits after; each differs from `old`.
    """

    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two states of one schema.

    Attributes:
        schema: Of both states.
        segments: Changed elements by segment index; segments without changes are left out.
    """

    schema: Schema
    segments: Mapping[int, SegmentChanges]

    @property
    def count(self) -> int:
        """Number of changed elements."""
        return sum(segment.positions.size for segment in self.segments.values())
