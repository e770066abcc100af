"""Catching up: messages and bytes for a follower that fell behind, with skip deltas and without.

python benchmarks/catch_up.py           # simulated for lags up to 10,000, measured up to 300; a few minutes
python benchmarks/catch_up.py --quick   # short, to see that it works
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from data import real_runs
from torch import Tensor

from deltabus import Publisher, Subscriber
from deltabus.bus.message import Blob, Kind, Message, Stats
from deltabus.bus.planner import Ways, plan_along
from deltabus.bus.skips import Ladder, SkipPolicy, Span, join, parse_skips
from deltabus.bus.version import VersionVector
from deltabus.codecs.changes import changes_between
from deltabus.codecs.container import encode_delta
from deltabus.codecs.state import collect

__all__ = ["main"]

_WRITER = "trainer"
_DELTA, _ANCHOR = 5_200_000, 800_000_000
"""Bytes at Qwen3-0.6B's shapes with 1 % changed, as `make bench` measures them."""

_POLICIES = {"off": parse_skips("off"), "auto": parse_skips("auto"), "all": parse_skips("all")}
_CACHE = Path(__file__).parents[1] / ".cache" / "bench"
_ENDS = 24
_LIMIT = 120.0


@dataclass(frozen=True, slots=True)
class _Made:
    """A made-up log.

    Attributes:
        ways: Its messages, by the version that they lead into.
        end: The newest version.
        share: Bytes of skips over those of deltas.
    """

    ways: Ways
    end: int
    share: float


def main() -> int:
    """Print the tables as Markdown; 1 when a follower reached other bits than the trainer's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short, to see that it works")
    quick = parser.parse_args().quick
    lags = (1, 10, 100) if quick else (1, 2, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
    for growth in (0.5, 0.9) if quick else (0.5, 0.7, 0.9, 1.0):
        print("\n".join(simulated(growth, lags)), end="\n\n")
    lines, exact = measured(40 if quick else 330, (1, 10, 30) if quick else (1, 2, 3, 10, 30, 100, 200, 300))
    print("\n".join(lines))
    if not quick:
        print("", *real(), sep="\n")
    return 0 if exact else 1


def simulated(growth: float, lags: Sequence[int]) -> Iterator[str]:
    """Yield a table of messages and bytes, each the mean over ends of the log that are aligned differently.

    A skip of `n` steps takes `n ** growth` times a delta: 1 where no element changes twice, 0.5 where changes come and
    go as a random walk does. Anchors come as the adaptive policy makes them.
    """
    logs = {name: _log(policy, growth, versions=max(lags) + 2000) for name, policy in _POLICIES.items()}
    extra = ", ".join(f"`{name}` {logs[name].share:.2f}" for name in ("auto", "all"))
    yield f"A skip of n steps takes n^{growth:g} deltas (bytes of skips, as multiple of the deltas': {extra}):"
    yield ""
    yield "| steps behind | " + " | ".join(f"`{name}`: messages | MB" for name in logs) + " |"
    yield "| ---: |" + " ---: | ---: |" * len(logs)
    for lag in lags:
        cells = [cell for log in logs.values() for cell in _mean(log, lag)]
        yield f"| {lag:,} | " + " | ".join(cells) + " |"


def _mean(log: _Made, lag: int) -> tuple[str, str]:
    messages, nbytes = 0, 0
    for back in range(_ENDS):
        end = log.end - 37 * back
        states = {"have": VersionVector({_WRITER: end - lag}), "target": VersionVector({_WRITER: end})}
        found = plan_along({_WRITER: log.ways}, **states)
        messages += len(found.messages)
        nbytes += found.nbytes
    return f"{messages / _ENDS:,.1f}", f"{nbytes / _ENDS / 1e6:,.1f}"


def _log(policy: SkipPolicy, growth: float, *, versions: int) -> _Made:
    ways = Ways({1: [_message(0, 1, None, _ANCHOR)]})
    ladder, position, deltas, skips, since = Ladder(policy.levels), 1, 0, 0, 0

    def add(version: int, base: int | None, nbytes: int) -> None:
        nonlocal position
        ways.add(_message(position, version, base, nbytes))
        position += 1

    for version in range(2, versions + 1):
        add(version, version - 1, _DELTA)
        deltas, since = deltas + _DELTA, since + _DELTA
        block = Span(version - 1, version, _DELTA, 1, _DELTA)
        while (left := ladder.enter(block)) is not None:
            block = join(left, block)
            nbytes = math.ceil(_DELTA * block.steps**growth)
            if not policy.fits(block, nbytes, anchor=_ANCHOR):
                ladder.clear()
                break
            if policy.pays(block, nbytes):
                add(version, block.base, nbytes)
                skips += nbytes
                block = block.published(nbytes, nbytes)
        if since > _ANCHOR:
            add(version, None, _ANCHOR)
            since = 0
    return _Made(ways, versions, skips / deltas)


def _message(position: int, version: int, base: int | None, nbytes: int) -> Message:
    return Message(
        writer=_WRITER,
        position=position,
        epoch=1,
        kind=Kind.ANCHOR if base is None else Kind.DELTA,
        step=version,
        base={} if base is None else {_WRITER: base},
        version=version,
        group=(_WRITER,),
        schema=Blob(key="schema", size=1, checksum=bytes(32)),
        digest_before=None if base is None else base,
        digest_after=version,
        blobs=(Blob(key="payload", size=nbytes, checksum=bytes(32)),),
        stats=Stats(changed=0, total=0),
        created=0.0,
    )


def measured(steps: int, lags: Sequence[int]) -> tuple[list[str], bool]:
    """Return a table of what followers of a real topic fetched, and whether all reached the trainer's very bits.

    A million bf16 weights with float32 masters, moved as AdamW moves them along gradients that keep their direction for
    about ten steps; each follower starts from the weights of some steps ago.
    """
    rows: dict[int, list[str]] = {lag: [] for lag in lags}
    shares, exact = [], True
    for name in _POLICIES:
        with tempfile.TemporaryDirectory() as directory:
            url = Path(directory).as_uri()
            history = _train(url, name, steps)
            shares.append(f"`{name}` {asyncio.run(_share(url)):.2f}")
            for lag in lags:
                follower = {"w": history[-1 - lag].clone()}
                messages, nbytes = asyncio.run(_catch_up(url, follower))
                exact &= torch.equal(follower["w"].view(torch.int16), history[-1].view(torch.int16))
                rows[lag] += [f"{messages}", f"{nbytes / 1e3:,.1f}"]
    lines = [
        f"Measured over `file://`, {steps} steps (bytes of skips, as multiple of the deltas': {', '.join(shares)}):",
        "",
        "| steps behind | " + " | ".join(f"`{name}`: messages | kB" for name in _POLICIES) + " |",
        "| ---: |" + " ---: | ---: |" * len(_POLICIES),
        *(f"| {lag} | " + " | ".join(cells) + " |" for lag, cells in rows.items()),
        "",
        f"All followers reached the trainer's bits: {'yes' if exact else 'no'}.",
    ]
    return lines, exact


def _train(url: str, skips: str, steps: int) -> list[Tensor]:
    """Publish a run, each step when the skips of the one before are there, and return the weights after each."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(1 << 20, generator=generator) * 0.02
    gradient = torch.randn(1 << 20, generator=generator)
    first, second = gradient.clone(), gradient.square()
    history = []
    with Publisher(url, skips=skips, on_busy="wait") as publisher:
        for step in range(steps):
            gradient.mul_(0.9).add_(torch.randn(1 << 20, generator=generator), alpha=0.44)
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            master.addcdiv_(first, second.sqrt().add_(1e-8), value=-2e-7)
            history.append(master.bfloat16())
            publisher.publish(step, {"w": history[-1]})
            publisher.flush()
    return history


def real() -> Iterator[str]:
    """Yield a table of what composed steps of real fine-tuning runs take, by number of steps."""
    spans = (1, 2, 4, 8)
    yield "Bytes of a skip of n steps, as multiple of one step's, on real fine-tuning runs (22.7 M weights, AdamW):"
    yield ""
    yield "| run | " + " | ".join(f"n = {span}" for span in spans) + " | exponent |"
    yield "| --- |" + " ---: |" * (len(spans) + 1)
    for run in real_runs(_CACHE, (3e-7, 1e-6, 3e-6), steps=12, log=lambda text: print(text, file=sys.stderr)):
        states = [pair.old for pair in run.pairs()]
        sizes = []
        for span in spans:
            first, last = (collect(states[3 + at].tensors()) for at in (0, span))
            changes = changes_between(first.schema, first.read, last.read)
            sizes.append(sum(len(part.data) for part in encode_delta(changes, base=first.read)))
        cells = [f"{size / sizes[0]:.2f}" for size in sizes]
        yield f"| {run.label} | " + " | ".join(cells) + f" | {math.log(sizes[-1] / sizes[0], spans[-1]):.2f} |"


async def _catch_up(url: str, follower: dict[str, Tensor]) -> tuple[int, int]:
    async with Subscriber(url, have=follower, idle_timeout=_LIMIT) as subscriber:
        update = await anext(subscriber)
        update.apply(follower)
        return len(update.messages), update.nbytes


async def _share(url: str) -> float:
    """Return the bytes of a topic's skips over those of its deltas."""
    from deltabus.bus.core import TopicReader
    from deltabus.transports import open_transport

    async with open_transport(url) as transport:
        deltas = [message for message in await TopicReader(transport).load() if message.kind is Kind.DELTA]
    single = sum(message.nbytes for message in deltas if message.version - message.base[_WRITER] == 1)
    return sum(message.nbytes for message in deltas) / single - 1


if __name__ == "__main__":
    sys.exit(main())
