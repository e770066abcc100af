"""The benchmark of the relay: many readers of one blob at a time, and many who wait, on loopback.

make bench-relay
make bench-relay ARGS="--docs docs"
make bench-relay ARGS="--quick"        # tiny sizes, to see that it works; its figures mean nothing
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from relay_peers import allow_many_files
from rich.console import Console

from deltabus.bench.machine import machine
from deltabus.bench.tables import Table, machine_table
from deltabus.transports import open_transport

__all__ = ["main"]

_BEGIN, _END = "<!-- relay: written by `make bench-relay` -->", "<!-- end of relay -->"
_PEERS = str(Path(__file__).with_name("relay_peers.py"))
_LIMIT = 60.0
_GOALS = {"upstream": 1.0, "wall": 2.0, "told": 0.050, "memory": 300e6}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to measure.

    Attributes:
        readers: At a time.
        messages: That each of them reads.
        size: Bytes of each.
        rounds: How often each way is timed; medians count.
        idle: Followers that wait.
        news: Records that are told.
    """

    readers: int
    messages: int
    size: int
    rounds: int
    idle: int
    news: int


_FULL = _Plan(readers=32, messages=20, size=5_000_000, rounds=5, idle=1000, news=300)
_QUICK = _Plan(readers=4, messages=2, size=100_000, rounds=1, idle=20, news=10)


@dataclass(frozen=True, slots=True)
class _Figures:
    upstream: float
    relay_cold: float
    relay_warm: float
    static: float
    quiet: list[float]
    told: list[float]
    last: list[float]
    memory_reading: float
    memory: float


class _Server:
    """A process that tells its address on the first line."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()
        if not self.url.startswith("http"):
            raise RuntimeError(f"{shlex.join(command)} did not start")

    def memory(self) -> float:
        """The most bytes that were resident so far."""
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+([0-9]+) kB", text)
        assert found is not None
        return float(found[1]) * 1024

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_LIMIT)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def _serving(*command: str) -> Iterator[_Server]:
    server = _Server(*command)
    try:
        yield server
    finally:
        server.end()


def _serve(upstream: str, *arguments: str) -> contextlib.AbstractContextManager[_Server]:
    command = (sys.executable, "-m", "deltabus.cli", "serve", upstream, "--port", "0", "--rate", "1000000", *arguments)
    return _serving(*command)


async def _fetch_all(urls: list[str], plan: _Plan, digest: bytes) -> float:
    """Return the seconds in which all readers have got all, one after the other."""
    timeout = aiohttp.ClientTimeout(total=None)

    async def read(check: bool) -> None:
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 18) as session:
            found = hashlib.sha256()
            for url in urls:
                async with session.get(url) as answer:
                    answer.raise_for_status()
                    size = 0
                    async for piece in answer.content.iter_any():
                        size += len(piece)
                        if check:
                            found.update(piece)
                    if size != plan.size:
                        raise RuntimeError(f"{url} gave {size} bytes")
            if check and found.digest() != digest:
                raise RuntimeError("other bytes came than were published")

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(plan.readers):
            tasks.create_task(read(check=number == 0))
    return time.perf_counter() - begun


async def _figure(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def _tell(url: str, topic: str, followers: int, news: int) -> tuple[list[float], list[float]]:
    """Return from append to sight: of each follower and record, and of the last follower of each record."""
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(open_transport(f"{url}/{topic}"))
        # Lines of one session: the client's connections are not what is measured.
        reader = await stack.enter_async_context(open_transport(f"{url}/{topic}"))
        seen: list[list[float]] = [[] for _ in range(news + 1)]
        arrived = asyncio.Event()

        async def follow() -> None:
            async with contextlib.aclosing(_tail(reader)) as tail:
                async for position in tail:
                    seen[position].append(time.perf_counter())
                    if len(seen[position]) == followers:
                        arrived.set()
                    if position == news:
                        return

        begun = []
        async with asyncio.TaskGroup() as tasks:
            for _ in range(followers):
                tasks.create_task(follow())
            for position in range(news + 1):  # the first one only says that all are there
                arrived.clear()
                begun.append(time.perf_counter())
                await writer.append("main", position, os.urandom(400))
                await asyncio.wait_for(arrived.wait(), _LIMIT)
                await asyncio.sleep(0.01)
    delays = [[at - begun[position] for at in seen[position]] for position in range(1, news + 1)]
    return [delay for each in delays for delay in each], [max(each) for each in delays]


async def _tail(reader: object) -> AsyncIterator[int]:
    async for record in reader.tail("main"):  # type: ignore[attr-defined]
        yield record.position


async def _measure(plan: _Plan, place: Path) -> _Figures:
    files, cache = place / "topics" / "run" / "blobs" / "main", place / "cache"
    keys, whole = [], hashlib.sha256()
    with _serve((place / "topics").as_uri()) as bus:
        async with open_transport(f"{bus.url}/run") as transport:
            for number in range(plan.messages):
                data = random.Random(number).randbytes(plan.size)
                whole.update(data)
                name = f"{number + 1}-delta-0-{hashlib.sha256(data).hexdigest()[:16]}"
                keys.append(name)
                await transport.put(f"blobs/main/{name}", data)
        static, cold, warm = [], [], []
        upstream = memory_reading = 0.0
        with _serving(sys.executable, _PEERS, "serve", str(files)) as plain:
            for turn in range(plan.rounds):
                with _serve(bus.url, "--cache-dir", str(cache / str(turn))) as relay:
                    there = [f"{relay.url}/run/-/blobs/blobs/main/{name}" for name in keys]
                    before = await _figure(bus.url, "deltabus_sent_bytes_total")
                    cold.append(await _fetch_all(there, plan, whole.digest()))
                    sent = await _figure(bus.url, "deltabus_sent_bytes_total") - before
                    upstream = max(upstream, sent / (plan.messages * plan.size))
                    static.append(await _fetch_all([f"{plain.url}/{name}" for name in keys], plan, whole.digest()))
                    warm.append(await _fetch_all(there, plan, whole.digest()))
                    memory_reading = max(memory_reading, relay.memory())
        with _serve(bus.url, "--cache-dir", str(cache / "told")) as relay:
            quiet, _ = await _tell(relay.url, "quiet", plan.readers, plan.news)
            idle = f"{relay.url}/idle/-/logs/main/events"
            with _serving(sys.executable, _PEERS, "wait", idle, str(plan.idle)):
                there_now = await _figure(relay.url, "deltabus_followers")
                if there_now < plan.idle:
                    raise RuntimeError(f"{there_now} of {plan.idle} idle followers are there")
                told, last = await _tell(relay.url, "told", plan.readers, plan.news)
            memory = relay.memory()
    return _Figures(upstream, min(cold), min(warm), min(static), quiet, told, last, memory_reading, memory)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _tables(figures: _Figures, plan: _Plan) -> list[Table]:
    cold, warm = figures.relay_cold / figures.static, figures.relay_warm / figures.static
    p99, memory = _percentile(figures.told, 0.99), max(figures.memory, figures.memory_reading)
    goals = [
        (
            "upstream bytes, of those published",
            f"{figures.upstream:.2f}",
            "1.0",
            figures.upstream <= _GOALS["upstream"],
        ),
        ("wall time, cold cache, of a plain file server's", f"{cold:.2f}", "<= 2", cold <= _GOALS["wall"]),
        ("wall time, warm cache, of the same", f"{warm:.2f}", "<= 2", warm <= _GOALS["wall"]),
        (f"told, p99, beside {plan.idle:,} who wait", f"{1e3 * p99:.1f} ms", "<= 50 ms", p99 <= _GOALS["told"]),
        ("memory, the most", f"{memory / 1e6:.0f} MB", "<= 300 MB", memory <= _GOALS["memory"]),
    ]
    label = f"{plan.readers} readers of {plan.messages} messages of {plan.size / 1e6:.1f} MB"
    rows = [(what, value, goal, "yes" if met else "**no**") for what, value, goal, met in goals]
    details = [
        ("relay, cold cache", f"{figures.relay_cold:.2f} s"),
        ("relay, warm cache", f"{figures.relay_warm:.2f} s"),
        ("aiohttp's FileResponse", f"{figures.static:.2f} s"),
        ("told, median, p99, nobody else there", _delays(figures.quiet)),
        (f"told, median, p99, beside {plan.idle:,} who wait", _delays(figures.told)),
        (f"the last of {plan.readers} told, median, p99", _delays(figures.last)),
        ("memory of the relay, readers", f"{figures.memory_reading / 1e6:.0f} MB"),
        ("memory of the relay, those who wait", f"{figures.memory / 1e6:.0f} MB"),
    ]
    return [
        Table(f"Through one relay: {label}", ("what", "measured", "goal", "met"), rows),
        Table("In absolute terms", ("what", "measured"), details),
    ]


def _delays(values: list[float]) -> str:
    return f"{1e3 * _percentile(values, 0.5):.1f} ms, {1e3 * _percentile(values, 0.99):.1f} ms"


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description="Measure a relay on loopback.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--docs", type=Path, help="the directory whose benchmarks.md is written anew")
    given = parser.parse_args()
    allow_many_files()  # also those of the relay, which inherits it
    plan = _QUICK if given.quick else _FULL
    found, begun = machine(), time.perf_counter()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        figures = asyncio.run(_measure(plan, Path(place)))
    found["load after"] = f"{os.getloadavg()[0]:.1f}"
    command = "make bench-relay" + (f" ARGS='{shlex.join(sys.argv[1:])}'" if sys.argv[1:] else "")
    tables = [*_tables(figures, plan), machine_table(found, command=command, seconds=time.perf_counter() - begun)]
    console = Console()
    for table in tables:
        console.print(table.rich())
    if given.docs:
        page = given.docs / "benchmarks.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
        _, _, after = rest.partition(_END)
        told = "\n".join(table.markdown() for table in tables)
        page.write_text(f"{before}{_BEGIN}\n\n{told}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
