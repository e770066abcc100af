"""One side of the way from end to end: a trainer or an engine, driven command by command.

`python -m deltabus.bench.peer` reads from standard input first one JSON object (`Setup`), then one JSON list
`[command, argument...]` a line, and answers each, the first line included, with one JSON object a line: what the
method of that name returns, or `{"error": ...}`. Times that both sides speak of are those of the system's monotonic
clock, in seconds.
"""

from __future__ import annotations

import gc
import hashlib
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deltabus.bridge import LoopThread
from deltabus.bus.errors import ClosedError, DeltabusError
from deltabus.codecs.changes import Bits
from deltabus.codecs.schema import Schema
from deltabus.publisher import Publisher
from deltabus.subscriber import Subscriber
from deltabus.transports.atomic import sync_directory
from deltabus.update import Update
from deltabus.workers import usable_cores

from .memory import memory_now, memory_peak, reset_memory_peak
from .page_cache import drop_pages, fetched
from .source import Source, load_pair, schema_of, warm_pair
from .states import Weights, chunks

__all__ = ["LIMIT", "Answer", "Engine", "Setup", "Side", "Trainer", "main", "make_side"]

LIMIT = 600.0
"""Seconds that any one step may take."""

Answer = dict[str, Any]
"""What a command answers, ready for JSON."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a side is told first.

    Attributes:
        role: Which side it is.
        source: The two states between which the trainer goes to and fro.
        url: The topic.
    """

    role: Literal["trainer", "engine"]
    source: Source
    url: str


class Side:
    """What both sides can do; a model, and how much memory is held beside it.

    Args:
        model: The model's bits.
    """

    def __init__(self, model: Weights) -> None:
        self.model = model
        self.tensors = model.tensors()
        gc.collect()
        self._counts_memory = reset_memory_peak()
        self._before = memory_now() if self._counts_memory else 0

    def memory(self) -> Answer:
        """Say how much more memory than at the start was held at most, since this was asked last; None if unknown."""
        if not self._counts_memory:
            return {"extra": None}
        extra = memory_peak() - self._before
        reset_memory_peak()
        return {"extra": extra}

    def digest(self) -> Answer:
        """Return a hash of all bits."""
        found = hashlib.sha256()
        for line in self.model.lines:
            found.update(line.data)
        return {"digest": found.hexdigest()}

    def close(self) -> Answer:
        """Release what was opened."""
        return {}


class Trainer(Side):
    """Holds a model, and takes it to and fro between two states that are one step apart."""

    def __init__(self, source: Source, url: str) -> None:
        self._url = url
        self._publisher: Publisher | None = None
        model, self._moves = _model_and_moves(source)
        super().__init__(model)

    def open(self) -> Answer:
        """Publish the whole state."""
        # To and fro cancels out, which no training does: a skip over two steps would be empty, and always pay.
        self._publisher = Publisher(self._url, anchor="never", skips="off", on_busy="wait", timeout=LIMIT)
        return self._publish(0)

    def step(self, number: int) -> Answer:
        """Take a step, and publish it."""
        self._move()
        return self._publish(number)

    def save(self, path: str) -> Answer:
        """Take a step, and write the model as others do."""
        self._move()
        tensors = self.model.tensors(aliases=False)
        start = time.monotonic()
        save_file(tensors, path)
        return {"called": start, "save": time.monotonic() - start}

    def flush(self, path: str) -> Answer:
        """Make a saved model durable, as deltabus does with all that it stores."""
        saved = Path(path)
        start = time.monotonic()
        with saved.open("rb") as file:
            os.fsync(file.fileno())
        folder = os.open(saved.parent, os.O_RDONLY)
        try:
            sync_directory(folder)
        finally:
            os.close(folder)
        return {"flush": time.monotonic() - start}

    def memcpy(self) -> Answer:
        """Copy the tensors by one thread, and by as many as a publisher has."""
        target, threads = self.model.copy(), usable_cores()
        places = [
            (here[part], there[part])
            for here, there in zip(target.lines, self.model.lines, strict=True)
            for part in chunks(here.size)
        ]
        alone: list[float] = []
        shared: list[float] = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(5):
                start = time.perf_counter()
                target.take(self.model)
                between = time.perf_counter()
                list(pool.map(lambda both: np.copyto(*both), places))
                alone.append(between - start)
                shared.append(time.perf_counter() - between)
        return {"memcpy": statistics.median(alone), "shared": statistics.median(shared)}

    def close(self) -> Answer:
        """Close the publisher."""
        if self._publisher is not None:
            self._publisher.close()
        return {}

    def _publish(self, number: int) -> Answer:
        assert self._publisher is not None
        called = time.monotonic()
        publication = self._publisher.publish(number, self.tensors)
        returned = time.monotonic()
        published = publication.result(LIMIT)
        return {
            "called": called,
            "blocked": returned - called,
            "durable": time.monotonic() - called,
            "nbytes": published.nbytes,
            "parts": [blob.size for blob in published.message.blobs],
            "keys": [blob.key for blob in published.message.blobs],
            "changed": published.changed,
            "seconds": dict(published.seconds),
        }

    def _move(self) -> None:
        for number, (line, (places, other)) in enumerate(zip(self.model.lines, self._moves, strict=True)):
            here = line[places]
            line[places] = other
            self._moves[number] = (places, here)


def _model_and_moves(source: Source) -> tuple[Weights, list[tuple[npt.NDArray[np.int64], Bits]]]:
    """Return the earlier state, and for each of its lines where the later one differs, and how."""
    pair = load_pair(source)
    moves = []
    for old, new in zip(pair.old.lines, pair.new.lines, strict=True):
        found = [np.flatnonzero(old[place] != new[place]) + place.start for place in chunks(old.size)]
        places = np.concatenate([np.empty(0, np.int64), *found])
        moves.append((places, new[places]))
    return pair.old, moves


class Engine(Side):
    """Holds a model, and follows."""

    def __init__(self, source: Source, url: str) -> None:
        model = Weights.empty(schema_of(source))
        for line in model.lines:
            line.fill(1)
        self._following = _Following(url)
        super().__init__(model)

    def next(self) -> Answer:
        """Wait for the next update, and apply it."""
        update = self._following.next()
        update.apply(self.tensors)
        return {"applied": time.monotonic(), "seconds": dict(update.seconds)}

    def join(self) -> Answer:
        """Open the subscriber, as an engine that just started, and follow until the model holds the newest state."""
        started = time.monotonic()
        update = self._following.next()
        update.apply(self.tensors)
        return {"seconds": time.monotonic() - started, "nbytes": update.nbytes}

    def load(self, path: str) -> Answer:
        """Read a checkpoint and copy it into the model, as others do."""
        start = time.monotonic()
        loaded = load_file(path)
        between = time.monotonic()
        with torch.no_grad():
            for name, tensor in loaded.items():
                self.tensors[name].copy_(tensor)
        return {"load": between - start, "copy": time.monotonic() - between, "applied": time.monotonic()}

    def load_from_disk(self, path: str) -> Answer:
        """Do the same with a checkpoint that is durable, and say whether it really came from the disk."""
        drop_pages(Path(path))
        answer, from_disk = fetched(lambda: self.load(path), Path(path).stat().st_size)
        return answer | {"from_disk": from_disk}

    def reread(self, *paths: str) -> Answer:
        """Read files that are durable again, from the disk, and say whether they really came from there."""
        files = [Path(path) for path in paths]
        for file in files:
            drop_pages(file)

        def read() -> float:
            start = time.monotonic()
            for file in files:
                file.read_bytes()
            return time.monotonic() - start

        seconds, from_disk = fetched(read, sum(file.stat().st_size for file in files))
        return {"reread": seconds, "from_disk": from_disk}

    def close(self) -> Answer:
        """Close the subscriber; another thread that waits in `next` for it gets an error."""
        self._following.close()
        return {}


class _Following:
    """A subscriber in synchronous code; other than the iterator that it offers, any thread may close it."""

    def __init__(self, url: str) -> None:
        self._subscriber = Subscriber(url, idle_timeout=LIMIT)
        self._loop: LoopThread | None = None
        self._closed = False
        # Whatever is begun on the loop is begun before it is closed, or not at all.
        self._turn = threading.Lock()

    def next(self) -> Update:
        """Wait for the next update; the first call opens the subscriber.

        Raises:
            ClosedError: If it was closed meanwhile.
            DeltabusError: As the subscriber does.
        """
        closed = ClosedError(f"the subscriber of {self._subscriber.url} was closed while it waited")
        with self._turn:
            if self._closed:
                raise closed
            if self._loop is None:
                self._loop = LoopThread(f"deltabus subscriber of {self._subscriber.url}")
                self._loop.run(self._subscriber.__aenter__(), timeout=LIMIT)
            coming = self._loop.submit(self._subscriber.__anext__())
        try:
            return coming.result(LIMIT)
        except StopAsyncIteration:
            raise closed from None

    def close(self) -> None:
        """Stop; may be called more than once."""
        with self._turn:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is not None:
            loop.run(self._subscriber.aclose(), timeout=LIMIT)
            loop.stop()


def make_side(setup: Setup) -> Trainer | Engine:
    """Return the side that a setup describes, with every loop compiled that it will need.

    Raises:
        DeltabusError: If the states cannot be loaded, or the URL is wrong.
    """
    _warm_up(schema_of(setup.source))
    kind = Trainer if setup.role == "trainer" else Engine
    return kind(setup.source, setup.url)


def _warm_up(schema: Schema) -> None:
    """Let every loop be compiled before anything is measured."""
    pair = warm_pair(schema)
    url = f"memory://warm-up-{uuid.uuid4().hex}"
    held = pair.old.copy()
    with Publisher(url) as publisher:
        following = _Following(url)
        for step, weights in enumerate((pair.old, pair.new, pair.old)):
            publisher.publish(step, weights.tensors()).result(LIMIT)
            following.next().apply(held.tensors())
        following.close()


def main() -> None:
    """Answer commands until there are none."""
    # What libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr

    def answer(work: Callable[[], Answer]) -> bool:
        try:
            said, well = work(), True
        except (DeltabusError, OSError, SafetensorError) as error:
            said, well = {"error": " ".join(str(error).split())}, False
        answers.write(msgspec.json.encode(said).decode() + "\n")
        answers.flush()
        return well

    sides: list[Trainer | Engine] = []

    def begin() -> Answer:
        sides.append(make_side(msgspec.json.decode(sys.stdin.readline(), type=Setup)))
        return {"ready": True}

    if not answer(begin):
        return
    for line in sys.stdin:
        command, *arguments = msgspec.json.decode(line)
        answer(lambda: getattr(sides[0], command)(*arguments))  # noqa: B023 - called at once


if __name__ == "__main__":
    main()
