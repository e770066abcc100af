"""The rows of the tables: every way to bring a model from one state to the next, behind one small interface."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import zstandard
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from deltabus.bus.message import Blob, Kind, Message, Stats, encode_message
from deltabus.codecs.apply import Target
from deltabus.codecs.container import decode_anchor, decode_delta, encode_anchor, encode_delta
from deltabus.codecs.digest import digest_delta
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.shadow import capture
from deltabus.codecs.state import collect

from .formats import FORMATS, Format, size_of
from .states import Pair, Weights

__all__ = ["ANCHOR", "AUTOMATIC", "FULL", "FULL_ZSTD", "Row", "Sent", "all_rows", "count_rows", "record_bytes"]

AUTOMATIC = "deltabus, automatic"
"""The row where each segment takes its smallest encoding, by one thread."""

ANCHOR = "deltabus, anchor"
"""The row of the whole state, by one thread."""

FULL, FULL_ZSTD = "full safetensors", "full safetensors + zstd-1"
"""The rows of whole states as others send them."""

_KEY, _CHECKSUM = "blobs/trainer/000000000001/000000000123-delta-0000", b"\x80" * 32


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes over the wire for a step.

    Attributes:
        nbytes: How much it is, headers included where the format is ours.
        content: What `Row.decode` needs.
        seconds: Duration of stages inside `Row.encode`.
    """

    nbytes: int
    content: Any
    seconds: dict[str, float]


class Row(Protocol):
    """One way to send a step of one pair of states, and to write it into a target that holds the old state."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def threads(self) -> int:
        """How many it may use."""

    def encode(self) -> Sent:
        """Find what changed and write it down."""

    def decode(self, sent: Sent) -> dict[str, float]:
        """Write the new state into the target; returns the duration of stages."""


def all_rows(pair: Pair, target: Weights, *, pool: Executor | None = None, whole: bool = True) -> Iterator[Row]:
    """Yield every row: ours first, each encoding that is registered among them.

    Args:
        pair: What to send.
        target: Holds the old state whenever `decode` is called.
        pool: Given, there is a row that uses it.
        whole: Whether to have the rows that send the whole state.
    """
    yield _Deltabus(pair, target, AUTOMATIC, None, None)
    if pool is not None:
        yield _Deltabus(pair, target, f"{AUTOMATIC}, {torch.get_num_threads()} threads", None, pool)
    for name in ENCODINGS:
        yield _Deltabus(pair, target, f"deltabus, {name}", name, None)
    for each in FORMATS.values():
        yield _Published(pair, target, each)
    if whole:
        yield _Anchor(pair, target)
        yield _Full(pair, target, compressed=True)
        yield _Full(pair, target, compressed=False)


def count_rows(*, pool: bool, whole: bool = True) -> int:
    """Return how many rows `all_rows` yields with a pool or without, and with whole states or without."""
    return 1 + pool + len(ENCODINGS) + len(FORMATS) + 3 * whole


class _Deltabus:
    """What the publisher and the subscriber do, without the bus between them."""

    def __init__(self, pair: Pair, target: Weights, name: str, encoding: str | None, pool: Executor | None) -> None:
        self.name, self.threads = name, 1 if pool is None else torch.get_num_threads()
        self._encoding, self._pool = encoding, pool
        self._old = pair.old.shadow()
        self._new = collect(pair.new.tensors(), segment_elements=pair.schema.segment_elements)
        self._target = Target.bind(target.tensors(), pair.schema)

    def encode(self) -> Sent:
        start = time.perf_counter()
        changes = capture(self._new, self._old, pool=self._pool)
        found = time.perf_counter()
        delta = encode_delta(changes, base=self._old.read, encoding=self._encoding, pool=self._pool)
        parts = [part.data for part in delta]
        encoded = time.perf_counter()
        digest = digest_delta(changes)
        nbytes = sum(map(len, parts)) + record_bytes(parts, changes.count, pair_total=self._old.schema.total)
        seconds = {"detect": found - start, "encode": encoded - found, "digest": time.perf_counter() - encoded}
        return Sent(nbytes, (parts, digest), seconds)

    def decode(self, sent: Sent) -> dict[str, float]:
        parts, digest = sent.content
        start = time.perf_counter()
        changes = decode_delta(parts, self._old.schema, self._old.read, pool=self._pool)
        decoded = time.perf_counter()
        staged = self._target.stage(changes, digest_delta=digest)
        ready = time.perf_counter()
        staged.write()
        return {"decode": decoded - start, "stage": ready - decoded, "write": time.perf_counter() - ready}


class _Published:
    def __init__(self, pair: Pair, target: Weights, form: Format) -> None:
        self.name, self.threads = form.name, 1
        self._pair, self._target, self._format = pair, target, form

    def encode(self) -> Sent:
        start = time.perf_counter()
        both = zip(self._pair.old.arrays(), self._pair.new.arrays(), strict=True)
        sent = [self._format.encode(old, new) for old, new in both]
        return Sent(sum(map(size_of, sent)), sent, {"encode": time.perf_counter() - start})

    def decode(self, sent: Sent) -> dict[str, float]:
        start = time.perf_counter()
        for each, held in zip(sent.content, self._target.arrays(), strict=True):
            self._format.decode(each, held)
        return {"decode": time.perf_counter() - start}


class _Full:
    """The whole state as a safetensors file in memory."""

    def __init__(self, pair: Pair, target: Weights, *, compressed: bool) -> None:
        self.name, self.threads = FULL_ZSTD if compressed else FULL, 1
        self._compressed = compressed
        self._new, self._target = pair.new.tensors(aliases=False), target.tensors(aliases=False)

    def encode(self) -> Sent:
        start = time.perf_counter()
        data = save_safetensors(self._new)
        if self._compressed:
            data = zstandard.ZstdCompressor(level=1).compress(data)
        return Sent(len(data), data, {"encode": time.perf_counter() - start})

    def decode(self, sent: Sent) -> dict[str, float]:
        start = time.perf_counter()
        data: bytes = sent.content
        if self._compressed:
            data = zstandard.ZstdDecompressor().decompress(data)
        for name, tensor in load_safetensors(data).items():
            self._target[name].copy_(tensor)
        return {"decode": time.perf_counter() - start}


class _Anchor:
    """The whole state as a deltabus anchor."""

    name, threads = ANCHOR, 1

    def __init__(self, pair: Pair, target: Weights) -> None:
        self._new, self._target = pair.new.shadow(), list(target.segments())

    def encode(self) -> Sent:
        start = time.perf_counter()
        parts = [part.data for part in encode_anchor(self._new.schema, self._new.read)]
        total = self._new.schema.total
        return Sent(
            sum(map(len, parts)) + record_bytes(parts, total, pair_total=total),
            parts,
            {"encode": time.perf_counter() - start},
        )

    def decode(self, sent: Sent) -> dict[str, float]:
        start = time.perf_counter()
        for index, bits in decode_anchor(sent.content, self._new.schema):
            self._target[index][:] = bits
        return {"decode": time.perf_counter() - start}


def record_bytes(parts: Sequence[bytes], changed: int, *, pair_total: int) -> int:
    """Return the size of the log record that names these parts, every number in it being large."""
    message = Message(
        writer="trainer",
        position=1 << 20,
        epoch=1 << 10,
        kind=Kind.DELTA,
        step=1 << 20,
        base={"trainer": 1 << 20},
        version=(1 << 20) + 1,
        group=("trainer",),
        schema=Blob(key="schemas/" + "0" * 64, size=1 << 20, checksum=_CHECKSUM),
        digest_before=(1 << 64) - 1,
        digest_after=(1 << 64) - 1,
        blobs=tuple(Blob(key=_KEY, size=len(part), checksum=_CHECKSUM) for part in parts),
        stats=Stats(changed=changed, total=pair_total, encodings=dict.fromkeys(ENCODINGS, changed)),
        created=1.8e9,
    )
    return len(encode_message(message))
