"""What travels between the processes: weights to the workers, rollouts to the trainer, all of it through one URL.

    URL/weights                 with deltabus: a topic, as `Publisher` writes it and `Subscriber` reads it
    URL/checkpoints             without: a blob for each step, and a log that says which are there
    URL/rollouts                a log for each worker; its record at position t is the worker's part of batch t

Logs and blobs are those of the transports below `Publisher` and `Subscriber`, so that every URL carries all three.
Either way of the weights is opened with `async with`, and looks the same from outside. Workers that sample with vLLM
need no `DeltaReceiver`, since vLLM follows the topic by itself.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import torch
from safetensors.torch import load, save
from task import Settings
from torch import Tensor, nn

import deltabus
from deltabus.bus.errors import AppendUnknownError, TransientTransportError, WaitTimeoutError
from deltabus.bus.message import encode_message
from deltabus.bus.retry import Retry
from deltabus.bus.transport import Record, Transport
from deltabus.transports import open_transport

_LOG = "steps"
_WRITER = "trainer"


def below(url: str, name: str) -> str:
    """Return the URL of a topic below a URL or a local path; options stay."""
    if "://" not in url:
        return (Path(url).expanduser().absolute() / name).as_uri()
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


class Records:
    """One log of a transport: what one process appends, another takes, in order and each once.

    Args:
        transport: That the log is of.
        log: The log's name.
        limit: The longest wait, in seconds.
    """

    def __init__(self, transport: Transport, log: str, *, limit: float) -> None:
        self._transport, self._log, self._limit = transport, log, limit
        self._retry = Retry(limit=limit)
        self._position = -1
        self._tail: AsyncIterator[Record] | None = None

    async def append(self, position: int, data: bytes) -> None:
        """Write a record; one that is there already, with the same bytes, counts as written."""
        await self._retry.call(
            f"appending to {self._log}",
            lambda: self._transport.append(self._log, position, data),
            on=(TransientTransportError, AppendUnknownError),
        )

    async def take(self, what: str) -> bytes:
        """Return the next record, and wait for it if need be.

        Raises:
            WaitTimeoutError: If it does not come within the limit; `what` was awaited.
        """
        try:
            async with asyncio.timeout(self._limit):
                record = await self._retry.call(f"reading {self._log}", self._next)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"{what} did not come to {self._transport.url} within {self._limit:g} s; see what became of its process"
            ) from error
        self._position = record.position
        return record.data

    async def _next(self) -> Record:
        if self._tail is None:
            self._tail = self._transport.tail(self._log, self._position)
        try:
            return await anext(self._tail)
        except TransientTransportError:
            self._tail = None  # it ends with the fault; the next goes on behind the last record
            raise


class Rollouts:
    """The way from workers to the trainer; use it as `async with`."""

    def __init__(self, settings: Settings) -> None:
        self._transport = open_transport(below(settings.url, "rollouts"))
        self._logs = [
            Records(self._transport, f"worker-{worker}", limit=settings.limit) for worker in range(settings.workers)
        ]

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._transport.close()

    async def send(self, worker: int, batch: int, data: bytes) -> None:
        """Hand in a worker's part of a batch."""
        await self._logs[worker].append(batch, data)

    async def take(self, batch: int) -> list[bytes]:
        """Return all parts of the next batch, in the order of the workers."""
        return [await log.take(f"worker-{worker}'s part of batch {batch}") for worker, log in enumerate(self._logs)]


@dataclass(frozen=True)
class Sent:
    """What a step cost on its way, in bytes, and how many of how many weights changed; None where nobody looked."""

    nbytes: int
    changed: int | None
    total: int


def state_of(step: int) -> dict[str, int]:
    """Return the state of the topic, the version of each writer, that is a step: the first step is version 1."""
    return {_WRITER: step + 1}


class DeltaSender:
    """Publishes what changed, by deltabus.

    Raises:
        SystemExit: If the URL has another run's weights.
    """

    def __init__(self, settings: Settings) -> None:
        # Each step becomes a version of its own, since batches need the weights of just one step. Workers are there
        # from the first step on, so that nothing is stored for those who come late.
        self._publisher = deltabus.Publisher(
            below(settings.url, "weights"),
            writer=_WRITER,
            dtype=torch.bfloat16,
            on_busy="wait",
            anchor="never",
            skips="off",
            timeout=settings.limit,
        )
        self._publications: list[deltabus.Publication] = []
        if self._publisher.version:
            self._publisher.close()
            raise SystemExit(f"{settings.url} has the weights of another run; name a URL that none has used")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._publisher.close)

    async def send(self, step: int, model: nn.Module) -> None:
        """Take a step's weights over, and return when training may go on."""
        self._publications.append(await asyncio.to_thread(self._publisher.publish, step, model))

    async def finish(self) -> list[Sent]:
        """Wait until all is stored, and return what each step cost."""
        await asyncio.to_thread(self._publisher.flush)
        stored = [publication.result(0) for publication in self._publications]
        return [
            Sent(
                each.nbytes + len(encode_message(each.message)),
                each.changed if each.kind == "delta" else None,
                each.total,
            )
            for each in stored
        ]


class DeltaReceiver:
    """Follows the topic; the next update is fetched and decoded while the worker is busy."""

    def __init__(self, settings: Settings) -> None:
        self._subscriber = deltabus.Subscriber(
            below(settings.url, "weights"), latest=False, idle_timeout=settings.limit
        )
        self._step = -1

    async def __aenter__(self) -> Self:
        await self._subscriber.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._subscriber.aclose()

    async def receive(self, step: int, weights: dict[str, Tensor]) -> None:
        """Bring weights to those of just this step."""
        while self._step < step:
            update = await anext(self._subscriber)
            update.apply(weights)
            self._step = update.step


class CheckpointSender:
    """Stores the whole bf16 state of each step as a safetensors file; the upload goes on behind training, as above."""

    def __init__(self, settings: Settings) -> None:
        self._transport = open_transport(below(settings.url, "checkpoints"))
        self._retry = Retry(limit=settings.limit)
        self._log = Records(self._transport, _LOG, limit=settings.limit)
        self._sent: list[Sent] = []
        self._uploading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._uploading is not None:
            self._uploading.cancel()
        await self._transport.close()

    async def send(self, step: int, model: nn.Module) -> None:
        """Take a step's weights over, and return when training may go on."""
        if self._uploading is not None:
            await self._uploading
        data = await asyncio.to_thread(_checkpoint_of, model)
        self._sent.append(Sent(len(data), None, sum(weights.numel() for weights in model.state_dict().values())))
        self._uploading = asyncio.create_task(self._upload(step, data))

    async def finish(self) -> list[Sent]:
        """Wait until all is stored, and return what each step cost."""
        if self._uploading is not None:
            await self._uploading
        return self._sent

    async def _upload(self, step: int, data: bytes) -> None:
        await self._retry.call(f"storing step {step}", lambda: self._transport.put(f"step/{step}", data))
        await self._log.append(step, f"step/{step}".encode())


class CheckpointReceiver:
    """Fetches the whole state of each step, the next one while the worker is busy."""

    def __init__(self, settings: Settings) -> None:
        self._transport = open_transport(below(settings.url, "checkpoints"))
        self._retry = Retry(limit=settings.limit)
        self._log = Records(self._transport, _LOG, limit=settings.limit)
        self._next: asyncio.Task[bytes] | None = None
        self._step = -1

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        self._next = asyncio.create_task(self._fetch(0))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._transport.close()

    async def receive(self, step: int, weights: dict[str, Tensor]) -> None:
        """Bring weights to those of just this step."""
        if self._step < step:
            weights.update(load(await self.receive_file(step)))

    async def receive_file(self, step: int) -> bytes:
        """Return the safetensors file of just this step, which is later than the last one."""
        data = b""
        while self._step < step:
            assert self._next is not None
            data = await self._next
            self._step += 1
            self._next = asyncio.create_task(self._fetch(self._step + 1))
        return data

    async def _fetch(self, step: int) -> bytes:
        key = await self._log.take(f"the weights of step {step}")
        return await self._retry.call(f"fetching step {step}", lambda: self._transport.get(key.decode()))


SENDERS: dict[str, type[DeltaSender] | type[CheckpointSender]] = {"delta": DeltaSender, "checkpoint": CheckpointSender}
RECEIVERS: dict[str, type[DeltaReceiver] | type[CheckpointReceiver]] = {
    "delta": DeltaReceiver,
    "checkpoint": CheckpointReceiver,
}


def _checkpoint_of(model: nn.Module) -> bytes:
    return save({name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()})
