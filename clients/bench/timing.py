"""Times as multiples of a memcpy in the same moment, sizes, memory, and whether every bit is right."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
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
        repeats: How often each row is timed; medians count. Rows take turns, since machines are slower at times.
        pool: Given, there is a row that uses it.
        whole: Whether to have the rows that send the whole state.
        memory: Whether to measure memory as well, in a run of its own before those that are timed.
        progress: Is told a row's name before each of its turns, of which there is one more for memory.
    """
    target = pair.old.copy()
    gc.collect()  # what was left behind must not be freed while memory is measured
    turns = [_Turns(row, pair, target) for row in all_rows(pair, target, pool=pool, whole=whole)]
    if memory:
        for each in turns:
            progress(each.name)
            each.measure_memory()
    for _ in range(repeats):
        for each in turns:
            progress(each.name)
            each.take()
    bounds = bounds_of(pair)
    return PairFigures(
        pair.label,
        pair.old.size,
        pair.old.nbytes,
        pair.changed,
        bounds.independent,
        bounds.conditional,
        statistics.median(seconds for each in turns for seconds in each.copies),
        [each.measured() for each in turns],
    )


def warm_up(schema: Schema, *, pool: Executor | None = None) -> None:
    """Let every loop that `measure` will need be compiled, by a small state of the same dtypes."""
    measure(warm_pair(schema), repeats=1, pool=pool, memory=False)


def _copy(pair: Pair, target: Weights) -> float:
    """Copy the old state into the target by one thread; returns the seconds it took."""
    start = time.perf_counter()
    target.take(pair.old)
    return time.perf_counter() - start


class _Turns:
    """What the turns of a row took."""

    def __init__(self, row: Row, pair: Pair, target: Weights) -> None:
        self.name = row.name
        self.copies: list[float] = []
        self._row, self._pair, self._target = row, pair, target
        self._encode: list[float] = []
        self._decode: list[float] = []
        self._stages: dict[str, list[float]] = {}
        self._peaks: tuple[int | None, int | None] = (None, None)
        self._exact, self._nbytes = True, 0

    def measure_memory(self) -> None:
        """Encode and decode once, and note how much memory that takes."""
        with _threads(self._row.threads):
            self._target.take(self._pair.old)
            self._peaks = _peaks(self._row)
        self._compare()

    def take(self) -> None:
        """Encode and decode once, and note the time."""
        with _threads(self._row.threads):
            # The yardstick is taken in the same moment, because other work on the machine comes and goes.
            yard = min(_copy(self._pair, self._target) for _ in range(2))
            start = time.perf_counter()
            sent: Sent = self._row.encode()
            middle = time.perf_counter()
            inside = sent.seconds | self._row.decode(sent)
            end = time.perf_counter()
        # The digest belongs to the message, not to the codec; it has a stage of its own.
        digest = inside.get("digest", 0.0)
        self._encode.append((middle - start - digest) / yard)
        self._decode.append((end - middle) / yard)
        self.copies.append(yard)
        for stage, seconds in inside.items():
            self._stages.setdefault(stage, []).append(seconds / yard)
        self._nbytes = sent.nbytes
        self._compare()

    def _compare(self) -> None:
        self._exact = self._exact and self._target.same_as(self._pair.new)

    def measured(self) -> Measured:
        """Return the medians."""
        return Measured(
            self.name,
            self._nbytes,
            statistics.median(self._encode),
            statistics.median(self._decode),
            {stage: statistics.median(values) for stage, values in self._stages.items()},
            self._exact,
            *self._peaks,
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch have so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _peaks(row: Row) -> tuple[int | None, int | None]:
    sent, encoding = peak_of(row.encode)
    _, decoding = peak_of(lambda: row.decode(sent))
    return encoding, decoding
