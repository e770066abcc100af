"""A stand-in for the codec: states of a few numbers, their digests, and payloads that hold what changed.

A delta says by how much each number changed. So one that is applied twice, or to another state than its base, leads
to a state that nobody ever had.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

__all__ = ["SIZE", "State", "apply", "changed", "digest", "encode"]

SIZE = 6
"""Numbers in a state."""

_MASK = (1 << 64) - 1
State = tuple[int, ...]


def changed(state: State, chance: random.Random) -> State:
    """Return a state with some numbers changed, or none."""
    numbers = list(state)
    for _ in range(chance.randint(0, 3)):
        numbers[chance.randrange(SIZE)] = chance.getrandbits(32)
    return tuple(numbers)


def digest(state: State) -> int:
    """Return 64 bits that no other state has."""
    total = 0
    for place, number in enumerate(state):
        mixed = (number + place * 0x9E3779B97F4A7C15 + 1) * 0xBF58476D1CE4E5B9 & _MASK
        total += (mixed ^ mixed >> 27) * 0x94D049BB133111EB
    return total & _MASK


def encode(state: State, *, base: State | None, parts: int, filler: int) -> list[bytes]:
    """Return the payload of a delta from `base`, or of a whole state, in so many parts, and so many bytes longer."""
    if base is None:
        told: list[tuple[int, int]] = list(enumerate(state))
    else:
        told = [(place, new - old) for place, (old, new) in enumerate(zip(base, state, strict=True)) if new != old]
    if base is not None and not told:
        return []
    payload = [told[part::parts] for part in range(parts)]
    return [msgspec.msgpack.encode([part, bytes(filler)]) for part in payload]


def apply(parts: Sequence[bytes], *, base: State | None) -> State:
    """Return the state that a payload leads to, from nothing or from a state."""
    numbers = list(base or (0,) * SIZE)
    for part in parts:
        for place, number in msgspec.msgpack.decode(part)[0]:
            numbers[place] += number
    return tuple(numbers)
