"""The threads that work on bits, and how many there are."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Workers", "usable_cores"]


def usable_cores(most: int = 8) -> int:
    """Return how many threads to use for work on bits."""
    return max(1, min(most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


class Workers:
    """The threads of a publisher.

    Args:
        count: How many work at a time at one thing; None is the number of usable cores, at most 8.

    Attributes:
        encoding: Those that encode.
        capturing: Those that compare; of their own, so that training never waits behind the encoding of a step before.
    """

    def __init__(self, count: int | None) -> None:
        count = count or usable_cores()
        self.encoding = ThreadPoolExecutor(count, thread_name_prefix="deltabus-encode")
        self.capturing = ThreadPoolExecutor(count, thread_name_prefix="deltabus-capture")

    def end(self) -> None:
        """Let the threads end; what was not begun is left out."""
        for pool in (self.encoding, self.capturing):
            pool.shutdown(cancel_futures=True)
