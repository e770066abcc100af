"""How many threads work on bits."""

from __future__ import annotations

import os

__all__ = ["usable_cores"]


def usable_cores(most: int = 8) -> int:
    """Return how many threads to use for work on bits."""
    return max(1, min(most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
