"""Times as multiples of a memcpy in the same moment, sizes, memory, and whether every bit is right."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from deltabus.codecs.schema import Schema

from .bounds import bounds_of
from .memory import peak_of
from .rows import Row, Sent, all_rows
from .source import warm_pair
from .states import Pair, Weights

__all__ = ["Measured", "PairFigures", "measure", "warm_up"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one row.

    Attributes:
        name: The row's.
        nbytes: Bytes on the wire.
        encode: Finding and writing what changed, in memcpys of the tensors.
        decode: Reading it and writing it into the model, in memcpys of the tensors.
        stages: Duration of each stage, in memcpys of the tensors.
        exact: Whether every element came out with its bits, each time.
        encode_memory: The most bytes held while encoding, beyond both states; what is sent is among them. None where
            it was not measured.
        decode_memory: The most bytes held while decoding, beyond what was sent, the model, and the copy of its old bits
            that deltabus keeps beside it. None where it was not measured.
    """

    name: str
    nbytes: int
    encode: float
    decode: float
    stages: dict[str, float]
    exact: bool
    encode_memory: int | None = None
    decode_memory: int | None = None


@dataclass(frozen=True, slots=True)
class PairFigures:
    """The figures of all rows for one pair of states.

    Attributes:
        label: The pair's.
        total: Elements.
        model: Bytes of one state.
        changed: Elements that differ.
        independent: Least bits when nothing is known but how many change.
        conditional: Least bits when tensor and exponent of each element are known.
        memcpy: Duration of a memcpy of the tensors in seconds, median.
        rows: By row.
    """

    label: str
    total: int
    model: int
    changed: int
    independent: float
    conditional: float
    memcpy: float
    rows: list[Measured]

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.total

    def bits(self, nbytes: int) -> float:
        """Return bits for each changed element."""
        return nbytes * 8 / self.changed


def measure(
    pair: Pair,
    *,
    repeats: int,
    pool: Executor | None = None,
    whole: bool = True,
    memory: bool = True,
    progress: Callable[[str], object] = lambda name: None,
) -> PairFigures:
    """Encode, decode and compare by every row, several times.

    Call `warm_up` before: the first call of a loop compiles it.

    Args:
        pair: What to measure; at least one element differs.
        repeats: How often each row is timed; medians count.
        pool: Given, there is a row that uses it.
        whole: Whether to have the rows that send the whole state.
        memory: Whether to measure memory as well, in a run of its own before those that are timed.
        progress: Is told each row's name before its turn.
    """
    target = pair.old.copy()
    results, copies = [], []
    gc.collect()  # what was left behind must not be freed while memory is measured
    for row in all_rows(pair, target, pool=pool, whole=whole):
        progress(row.name)
        measured, seconds = _measure_row(row, pair, target, repeats, memory=memory)
        results.append(measured)
        copies += seconds
    bounds = bounds_of(pair)
    return PairFigures(
        pair.label,
        pair.old.size,
        pair.old.nbytes,
        pair.changed,
        bounds.independent,
        bounds.conditional,
        statistics.median(copies),
        results,
    )


def warm_up(schema: Schema, *, pool: Executor | None = None) -> None:
    """Let every loop that `measure` will need be compiled, by a small state of the same dtypes."""
    measure(warm_pair(schema), repeats=1, pool=pool, memory=False)


def _copy(pair: Pair, target: Weights) -> float:
    """Copy the old state into the target by one thread; returns the seconds it took."""
    start = time.perf_counter()
    target.take(pair.old)
    return time.perf_counter() - start


def _measure_row(row: Row, pair: Pair, target: Weights, repeats: int, *, memory: bool) -> tuple[Measured, list[float]]:
    stages: dict[str, list[float]] = {}
    encode, decode, copies = [], [], []
    exact, nbytes = True, 0
    peaks: tuple[int | None, int | None] = (None, None)
    before = torch.get_num_threads()
    torch.set_num_threads(row.threads)
    try:
        if memory:
            target.take(pair.old)
            peaks = _peaks(row)
            exact = target.same_as(pair.new)
        for _ in range(repeats):
            # The yardstick is taken in the same moment, because other work on the machine comes and goes.
            yard = min(_copy(pair, target) for _ in range(2))
            start = time.perf_counter()
            sent: Sent = row.encode()
            middle = time.perf_counter()
            inside = sent.seconds | row.decode(sent)
            end = time.perf_counter()
            # The digest belongs to the message, not to the codec; it has a stage of its own.
            digest = inside.get("digest", 0.0)
            encode.append((middle - start - digest) / yard)
            decode.append((end - middle) / yard)
            copies.append(yard)
            for stage, seconds in inside.items():
                stages.setdefault(stage, []).append(seconds / yard)
            nbytes = sent.nbytes
            exact = exact and target.same_as(pair.new)
    finally:
        torch.set_num_threads(before)
    return (
        Measured(
            row.name,
            nbytes,
            statistics.median(encode),
            statistics.median(decode),
            {stage: statistics.median(values) for stage, values in stages.items()},
            exact,
            *peaks,
        ),
        copies,
    )


def _peaks(row: Row) -> tuple[int | None, int | None]:
    sent, encoding = peak_of(row.encode)
    _, decoding = peak_of(lambda: row.decode(sent))
    return encoding, decoding
