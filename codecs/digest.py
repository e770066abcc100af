"""Digests: a 64-bit fingerprint of a state that changes update in O(changed).

The digest of a state is the sum, modulo 2^64, of one term for each element of each tensor. Element `i` (row-major, from
0) of a tensor with seed `s`, whose bit pattern read as an unsigned integer is `b`, has the term

    k = s + i * 0x9E3779B97F4A7C15                    every step modulo 2^64
    x = k ^ b
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 + k
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    term = x ^ (x >> 31)

The seed is the first 8 bytes, little endian, of the SHA-256 of `name NUL dtype NUL shape`, the shape in decimal,
joined by commas. A state without elements has digest 0.

This is the generator SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
with the finalizer "Mix13" of Stafford): `k` is its i-th state, the bits are mixed into it. The key is added once more
between the two multiplications; without that, `k ^ b` alone would decide the term, and two elements could trade
patterns whose difference equals that of their keys without any trace in the sum. It finds faults, not forgers: what
keeps those out are signatures and checksums.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from .ahead import in_order
from .changes import Changes, parts_of
from .held import Held, sum_run
from .kernels import mix
from .schema import Piece, Schema

__all__ = ["advanced", "digest_delta", "digest_of"]

_AHEAD = 64  # results are single numbers or small, so that this bounds nothing but the queue
_GAMMA = 0x9E3779B97F4A7C15


def _key(schema: Schema, piece: Piece, element: int) -> int:
    return (schema.seeds[piece.tensor] + element * _GAMMA) & mix.MASK


def digest_of(schema: Schema, read: Callable[[int], Held], pool: Executor | None = None) -> int:
    """Return the digest of a state, given by a function from segment index to that segment's bits."""

    def summed(index: int) -> int:
        bits = read(index)
        return sum(
            sum_run(bits[piece.offset : piece.offset + piece.stop - piece.start], _key(schema, piece, piece.start))
            for piece in schema.segments[index].pieces
        )

    return sum(in_order(summed, range(len(schema.segments)), pool=pool, ahead=_AHEAD)) & mix.MASK


def digest_delta(changes: Changes) -> int:
    """Return what the changes add to the digest, modulo 2^64: the terms of the new bits minus those of the old."""
    schema, total = changes.schema, 0
    for index, change in changes.segments.items():
        for piece, part in parts_of(schema.segments[index], change):
            origin = np.uint64(_key(schema, piece, piece.start - piece.offset))
            total += int(mix.sum_changed(change.positions[part], change.old[part], change.new[part], origin))
    return total & mix.MASK


def advanced(digest: int, delta: int) -> int:
    """Return the digest of the state that changes lead to.

    Args:
        digest: Of the state that they start from.
        delta: What they add, as `digest_delta` returns it.
    """
    return (digest + delta) & mix.MASK
