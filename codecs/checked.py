"""Whether changes and bits fit the segment that they are said to be of; what every encoding asks before it begins."""

from __future__ import annotations

import numpy as np

from deltabus.bus.errors import SchemaMismatchError, UsageError

from .changes import SegmentChanges
from .held import Held, fits
from .kernels import compare
from .schema import Segment

__all__ = ["check_base", "check_changes"]


def check_changes(segment: Segment, changes: SegmentChanges) -> None:
    """Check that changes can be written.

    Raises:
        UsageError: If they are none, out of order or of the segment, of other types, or change nothing somewhere.
    """
    positions, old, new = changes.positions, changes.old, changes.new
    fits = positions.dtype == np.dtype(np.uint32) and old.dtype == new.dtype == segment.dtype.bits
    if not fits or not 0 < positions.size == old.size == new.size or positions[-1] >= segment.size:
        raise UsageError(
            f"the changes of segment {segment.index} ({segment.size} elements of {segment.dtype.bits}) must be uint32 "
            "positions inside it and equally many bits, old and new, not "
            f"{', '.join(f'{each.dtype} {each.shape}' for each in (positions, old, new))}"
        )
    wrong = compare.first_malformed(positions, old, new, segment.size)
    if wrong >= 0:
        if old[wrong] == new[wrong]:
            raise UsageError(f"an element among the changes of segment {segment.index} does not change; leave it out")
        raise UsageError(f"the changes of segment {segment.index} are not in order of position; sort them")


def check_base(segment: Segment, base: Held) -> None:
    """Check that bits can be those of a whole segment.

    Raises:
        SchemaMismatchError: If they are not of its size and dtype.
    """
    if not fits(segment, base):
        raise SchemaMismatchError(
            f"segment {segment.index} has {segment.size} elements of {segment.dtype.bits}, not "
            f"{tuple(base.shape)} of {base.dtype}; the state read is not of this schema"
        )
