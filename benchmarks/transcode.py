"""Transcoding: bytes before and behind a site's service, and how long a step takes to an engine without a shadow.

python benchmarks/transcode.py                         # Qwen3-0.6B's shapes, 1 % changed; 6 GB of memory, minutes
python benchmarks/transcode.py --shape tiny --steps 2  # short, to see that it works
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from torch import Tensor

from deltabus import DirectSubscriber, Publisher
from deltabus.bench.shapes import SHAPES, synthetic
from deltabus.bench.states import Weights

__all__ = ["main"]

_LIMIT = 600.0


@dataclass(slots=True)
class _Figures:
    """What each step took: bytes, and seconds from when the trainer's message was durable."""

    before: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    made: list[float] = field(default_factory=list)
    handed: list[float] = field(default_factory=list)
    applied: list[float] = field(default_factory=list)
    memory: float = 0.0
    exact: bool = True


def main() -> int:
    """Print a table as Markdown; 1 when the engine reached other bits than the trainer's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    pair = synthetic(SHAPES[given.shape](), given.density)
    with tempfile.TemporaryDirectory() as place:
        figures = asyncio.run(_measure([pair.old, pair.new], Path(place), given.steps))
    print(f"{given.shape}, {given.density:.1%} changed, {given.steps} steps, load {os.getloadavg()[0]:.1f}:\n")
    print("| what | median | most |\n| --- | ---: | ---: |")
    for what, values in (
        ("a step before the service, MB", [size / 1e6 for size in figures.before]),
        ("a step behind the service, MB", [size / 1e6 for size in figures.behind]),
        ("bits for each changed element, before", _bits(figures.before, figures.changed)),
        ("bits for each changed element, behind", _bits(figures.behind, figures.changed)),
        ("from durable at the trainer's to durable behind the service, s", figures.made),
        ("from there to an engine's hands, s", figures.handed),
        ("its `apply`, decoding included, s", figures.applied),
    ):
        print(f"| {what} | {statistics.median(values):.3g} | {max(values):.3g} |")
    print(f"| memory of the process that transcodes, of the weights' | | {figures.memory / pair.schema.nbytes:.3g} |")
    print(f"\nThe engine reached the trainer's bits: {'yes' if figures.exact else 'no'}.")
    return 0 if figures.exact else 1


def _bits(sizes: list[int], changed: list[int]) -> list[float]:
    return [8 * size / count for size, count in zip(sizes, changed, strict=True)]


async def _measure(states: list[Weights], place: Path, steps: int) -> _Figures:
    figures = _Figures()
    engine = Weights.empty(states[0].schema)
    for line in engine.lines:
        line[:] = 0
    upstream, model = (place / "upstream").as_uri(), engine.tensors()
    serve = ["--cache-dir", str(place / "cache"), "--transcode", "run"]
    with Publisher(f"{upstream}/run", on_busy="wait", skips="off", anchor="never") as publisher:
        publisher.publish(0, states[0].tensors()).result(_LIMIT)
        with _serving(upstream, *serve) as (url, process):
            async with DirectSubscriber(f"{url}/run.overwrite", model, idle_timeout=_LIMIT) as subscriber:
                await (await anext(subscriber)).apply()
                for step in range(1, steps + 2):
                    await _step(figures, publisher, subscriber, states[step % 2].tensors(), step)
                    figures.exact &= states[step % 2].same_as(engine)
                figures.memory = _most_resident(process)
    for values in (figures.before, figures.behind, figures.changed, figures.made, figures.handed, figures.applied):
        del values[0]  # the first of each process loads and compiles
    return figures


async def _step(
    figures: _Figures, publisher: Publisher, subscriber: DirectSubscriber, state: dict[str, Tensor], step: int
) -> None:
    published = await asyncio.to_thread(lambda: publisher.publish(step, state).result(_LIMIT))
    update = await anext(subscriber)
    handed = time.time()
    (message,) = update.messages
    await update.apply()
    figures.before.append(published.nbytes)
    figures.behind.append(message.nbytes)
    figures.changed.append(published.changed)
    figures.made.append(message.created - published.message.created)
    figures.handed.append(handed - message.created)
    figures.applied.append(update.seconds["apply"])


def _most_resident(service: int) -> int:
    """Return how many bytes were resident at most in the process that a service transcodes in."""
    (worker,) = psutil.Process(service).children()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker.pid}/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


@contextlib.contextmanager
def _serving(upstream: str, *arguments: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "deltabus.cli", "serve", upstream, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
