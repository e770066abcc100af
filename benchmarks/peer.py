"""One process of the end-to-end measurement: `peer.py trainer ...` or `peer.py engine ...`, driven line by line.

It reads one JSON list `[command, argument...]` a line from standard input, and answers with one JSON object a line.
Times that both processes speak of are those of the system's monotonic clock, in seconds.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from data import Line, chunks, synthetic, tensors
from safetensors.torch import load_file, save_file
from timing import memory_now, memory_peak, reset_memory_peak

from deltabus import Publisher, Subscriber
from deltabus.codecs.schema import Schema

_LIMIT = 600.0
Answer = dict[str, object]


class Trainer:
    """Holds a model, and takes it to and fro between two states that are one step apart."""

    def __init__(self, schema: Schema, url: str, density: float) -> None:
        pair = synthetic(schema, density)
        self._model = pair.old
        found = [np.flatnonzero(pair.old[s] != pair.new[s]) + s.start for s in chunks(pair.old.size)]
        self._places = np.concatenate(found).astype(np.uint32)
        self._other = pair.new[self._places]
        self._tensors = tensors(schema, self._model)
        self._url = url
        del pair, found
        gc.collect()
        self._before = memory_now()
        reset_memory_peak()

    def open(self) -> Answer:
        """Publish the whole state."""
        self._publisher = Publisher(self._url, anchor="never", on_busy="wait", timeout=_LIMIT)
        return self.publish(0)

    def step(self, number: int) -> Answer:
        """Take a step, and publish it."""
        here = self._model[self._places]
        self._model[self._places] = self._other
        self._other = here
        return self.publish(number)

    def publish(self, number: int) -> Answer:
        """Publish the model as it is."""
        called = time.monotonic()
        publication = self._publisher.publish(number, self._tensors)
        returned = time.monotonic()
        published = publication.result(_LIMIT)
        return {
            "called": called,
            "blocked": returned - called,
            "durable": time.monotonic() - called,
            "nbytes": published.nbytes,
            "changed": published.changed,
            "seconds": dict(published.seconds),
        }

    def save(self, path: str) -> Answer:
        """Write the model as others do."""
        start = time.monotonic()
        save_file(self._tensors, path)
        return {"called": start, "save": time.monotonic() - start}

    def memcpy(self) -> Answer:
        """Copy the tensors by one thread."""
        target = self._model.copy()
        found = []
        for _ in range(5):
            start = time.perf_counter()
            np.copyto(target, self._model)
            found.append(time.perf_counter() - start)
        return {"memcpy": statistics.median(found)}

    def memory(self) -> Answer:
        """Say how much more memory than before was held at most, since this was asked last."""
        peak = memory_peak() - self._before
        reset_memory_peak()
        return {"extra": peak, "model": self._model.nbytes}

    def digest(self) -> Answer:
        """Return a hash of all bits."""
        return {"digest": hashlib.sha256(self._model.data).hexdigest()}


class Engine:
    """Holds a model, and follows."""

    def __init__(self, schema: Schema, url: str) -> None:
        self._model: Line = np.full(schema.total, 1, np.uint16)
        self._tensors = tensors(schema, self._model)
        self._updates = Subscriber(url, idle_timeout=_LIMIT).sync()
        gc.collect()
        self._before = memory_now()
        reset_memory_peak()

    def next(self) -> Answer:
        """Wait for the next update, and apply it."""
        update = next(self._updates)
        ready = time.monotonic()
        update.apply(self._tensors)
        return {"ready": ready, "applied": time.monotonic(), "seconds": dict(update.seconds), "version": update.version}

    def load(self, path: str) -> Answer:
        """Read a checkpoint and copy it into the model, as others do."""
        start = time.monotonic()
        loaded = load_file(path)
        between = time.monotonic()
        with torch.no_grad():
            for name, tensor in loaded.items():
                self._tensors[name].copy_(tensor)
        return {"load": between - start, "copy": time.monotonic() - between, "applied": time.monotonic()}

    memory = Trainer.memory
    digest = Trainer.digest


def warm_up() -> None:
    """Let every loop be compiled before anything is measured."""
    state = {"a": torch.zeros(4096, dtype=torch.bfloat16)}
    held = {"a": torch.ones(4096, dtype=torch.bfloat16)}
    with Publisher("memory://warm-up") as publisher:
        updates = Subscriber("memory://warm-up", idle_timeout=_LIMIT).sync()
        for step in range(3):
            state["a"][: 1 + 40 * step] += 0.5
            publisher.publish(step, state).result(_LIMIT)
            next(updates).apply(held)
        updates.close()  # type: ignore[attr-defined]


def main() -> None:
    """Answer commands until there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["trainer", "engine"])
    parser.add_argument("--schema", required=True, type=Path, help="a file with the schema's bytes")
    parser.add_argument("--url", required=True)
    parser.add_argument("--density", required=True, type=float)
    options = parser.parse_args()
    schema = Schema.decode(options.schema.read_bytes())
    warm_up()
    trains = options.role == "trainer"
    peer = Trainer(schema, options.url, options.density) if trains else Engine(schema, options.url)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        method: Callable[..., Answer] = getattr(peer, command)
        print(json.dumps(method(*arguments)), flush=True)


if __name__ == "__main__":
    main()
