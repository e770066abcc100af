"""Scratch memory: what work on a segment needs for a moment, kept by each thread for the next segment.

Fresh memory is cleared by the system, page by page, which takes as long as the work itself. And what is taken and given
back again and again leaves gaps between what is kept, so that a process holds more than it uses.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from .changes import Bits

__all__ = ["Scratch"]

_MOST_KEPT = 16 << 20
"""Bytes of an array up to which it is kept: those of a segment, or of what most steps change in it."""


class Scratch:
    """Arrays by name, in each thread its own; what they hold is good until the thread asks for the same name again."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def array(self, name: str, size: int, dtype: npt.DTypeLike, *, zeros: bool = False) -> npt.NDArray[Any]:
        """Return an array of one dimension that holds anything, or zeros."""
        kind = np.dtype(dtype)
        nbytes = size * kind.itemsize
        if nbytes > _MOST_KEPT:
            return np.zeros(size, kind) if zeros else np.empty(size, kind)
        room: npt.NDArray[np.uint8] | None = getattr(self._of_thread, name, None)
        if room is None or room.nbytes < nbytes:
            room = np.empty(nbytes, np.uint8)
            setattr(self._of_thread, name, room)
        place: npt.NDArray[Any] = room[:nbytes].view(kind)
        if zeros:
            place[:] = 0
        return place

    def copy(self, bits: Bits) -> Bits:
        """Return a copy of an array of one dimension."""
        place: Bits = self.array("copy", bits.size, bits.dtype)
        place[:] = bits
        return place
