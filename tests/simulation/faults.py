"""What goes wrong on the way to a simulated store."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

__all__ = ["CALM", "Faults", "storm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong.

    Attributes:
        latency: Seconds on the way to the store, or back, in the mean.
        fail: Chance that a request never arrives.
        lose: Chance that the answer to a write gets lost.
        late: Chance that a write arrives only after it was given up.
        twice: Chance that a write is carried out once more, later.
        stall: Chance that a process sleeps before it sends a request, as if it were stopped.
        hide: Chance that a blob which is there cannot be seen from where a process runs, for up to half a minute.
        deaf: Chance that a reader is not told of a record, and only finds it when it looks again.
        longest: Most seconds that a request is late.
        sleep: Most seconds that a process sleeps.
    """

    latency: float = 0.02
    fail: float = 0.0
    lose: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    stall: float = 0.0
    hide: float = 0.0
    deaf: float = 0.0
    longest: float = 15.0
    sleep: float = 5.0


CALM = Faults()


def storm(chance: random.Random) -> Faults:
    """Draw what goes wrong in a run."""
    some = chance.choice([0.0, 0.02, 0.05, 0.12])
    kinds = {name: some * chance.choice([0, 0.5, 1, 2]) for name in ("fail", "lose", "late", "twice")}
    return replace(
        CALM,
        latency=chance.choice([0.002, 0.02, 0.3]),
        stall=chance.choice([0.0, 0.005, 0.03]),
        hide=chance.choice([0.0, 0.0, 0.1, 0.4]),
        deaf=chance.choice([0.0, 0.0, 0.1, 0.6]),
        **kinds,
    )
