"""What the tests of the clients share: small models, integer comparison, and a transport that can be made to fail."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from deltabus import Publisher, Subscriber, publisher, subscriber
from deltabus.bus.message import decode_message
from deltabus.bus.transport import Buffer, Record, StoredBlob, Transport
from deltabus.transports import open_transport

LIMIT = 30.0
"""Seconds after which a wait in a test has failed."""


def small_model(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A few thousand parameters, a buffer, and a tied tensor."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict({"inner": nn.Linear(40, 60), "norm": nn.LayerNorm(60), "head": nn.Linear(60, 40, bias=False)})
    model.register_buffer("counter", torch.zeros((), dtype=torch.int64))
    model.to(dtype)
    model["tied"] = nn.Linear(60, 40, bias=False)
    model["tied"].weight = model["head"].weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def train(model: nn.Module, seed: int, share: float = 0.03) -> None:
    """Change a share of the weights, as a step would."""
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(parameter * chosen * 0.01 * torch.randn(parameter.shape, generator=generator))
        model.counter.add_(1)


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every tensor's bytes, to compare states as integers."""
    return {
        name: tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


def fingerprint(model: nn.Module) -> str:
    """A hash of every tensor's name and bytes, to compare states across processes."""
    held = bits(model)
    return hashlib.sha256(b"".join(name.encode() + held[name] for name in sorted(held))).hexdigest()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait, in a thread that has no event loop, until a condition holds."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        threading.Event().wait(0.002)


class Faults:
    """What a `FaultyTransport` does; shared by all that are opened meanwhile.

    Attributes:
        before: Called with the operation's name and its key or log; what it raises, the operation raises.
        after: Likewise, when the operation has taken effect.
        gate: What `put` waits at; open unless a test closes it.
        calls: Operations in the order in which they were begun.
    """

    def __init__(self) -> None:
        self.before: Callable[[str, str], None] = lambda operation, name: None
        self.after: Callable[[str, str], None] = lambda operation, name: None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, str]] = []

    def count(self, operation: str) -> int:
        return sum(1 for name, _ in self.calls if name == operation)


class FaultyTransport(Transport):
    """A real transport whose operations can be held up and can fail, before or after they take effect."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.url = inner.url

    async def __aenter__(self) -> FaultyTransport:
        await self._inner.__aenter__()
        return self

    async def _around(self, operation: str, name: str, work: Callable[[], object]) -> object:
        self._faults.calls.append((operation, name))
        self._faults.before(operation, name)
        result = await work()  # type: ignore[misc]
        self._faults.after(operation, name)
        return result

    async def put(self, key: str, data: Buffer) -> None:
        while not self._faults.gate.is_set():  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.002)
        await self._around("put", key, lambda: self._inner.put(key, data))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self._around("get", key, lambda: self._inner.get(key, start, stop))

    async def delete(self, keys: Iterable[str]) -> None:
        await self._inner.delete(keys)

    async def blobs(self, folder: str) -> list[StoredBlob]:
        return await self._around("blobs", folder, lambda: self._inner.blobs(folder))

    async def trim(self, log: str, before: int) -> None:
        await self._around("trim", log, lambda: self._inner.trim(log, before))

    async def append(self, log: str, position: int, record: Buffer) -> None:
        await self._around("append", log, lambda: self._inner.append(log, position, record))

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:
        return await self._around("read", log, lambda: self._inner.read(log, after, limit))

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:
        return self._inner.tail(log, after)

    async def logs(self) -> list[str]:
        return await self._inner.logs()

    async def close(self) -> None:
        await self._inner.close()


@contextmanager
def faulty(monkeypatch) -> Iterable[Faults]:
    """Let publishers and subscribers that are made meanwhile use a `FaultyTransport`."""
    faults = Faults()
    with monkeypatch.context() as patch:
        for module in (publisher, subscriber):
            patch.setattr(module, "open_transport", lambda url: FaultyTransport(open_transport(url), faults))
        yield faults


def once(error: Exception, operation: str, name: str = "") -> Callable[[str, str], None]:
    """A fault that strikes the first matching operation only."""
    struck = []

    def strike(called: str, key: str) -> None:
        if called == operation and name in key and not struck:
            struck.append(key)
            raise error

    return strike


class Trainer:
    """Publishes a small model step by step, and remembers every state."""

    def __init__(self, url, **options):
        self.model = small_model()
        self.states = {}
        self.step = -1
        self.publisher = Publisher(url, on_busy="wait", **options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.publisher.close()

    def publish(self, steps=1):
        for _ in range(steps):
            self.step += 1
            train(self.model, self.step)
            self.states[self.step] = bits(self.model)
            published = self.publisher.publish(self.step, self.model).result(LIMIT)
        return published


async def history(url):
    async with open_transport(url) as transport:
        return [decode_message(record.data) for record in await transport.read("trainer")]


async def follow_to(url, step, **options):
    """The bits and the update that a new follower has when it reaches a step."""
    model = small_model(99)
    async with Subscriber(url, idle_timeout=LIMIT, **options) as subscriber:
        async for update in subscriber:
            update.apply(model)
            if update.step == step:
                return bits(model), update
    raise AssertionError("the topic ended")


def lies_on_a_disk(path: Path) -> bool:
    """Whether Linux surely counts what is read from the files there, because they are on a disk and not in memory."""
    if sys.platform != "linux":
        return False
    shown = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True)
    return shown.stdout.strip() in {"ext2/ext3", "xfs", "btrfs"}
