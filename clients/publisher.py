"""The training side: `Publisher`."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import ClosedError, PublishError, UsageError
from deltabus.bus.message import check_step_and_metadata, check_writer_name
from deltabus.bus.policy import AnchorPolicy, parse_policy
from deltabus.bus.transport import Transport
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.holdback import PATIENCE, Limits
from deltabus.codecs.shadow import Shadow
from deltabus.codecs.state import State, collect
from deltabus.transports import open_transport

from .attachment import Attachment
from .bridge import LoopThread
from .mapped import allocator
from .outbox import Outbox
from .publication import Publication
from .sender import Sender
from .unmodified import Marks, watch_optimizers
from .workers import usable_cores

__all__ = ["Publisher"]

_log = logging.getLogger("deltabus.publisher")


class Publisher:
    """Publishes a model's weights to a topic, step by step; for synchronous training code.

    `publish` takes over what changed before it returns, so the weights may change again at once; encoding and upload go
    on in the background. Use it as a context manager, or call `close`: what is not closed may be lost when the process
    ends.

    Args:
        url: The topic, such as `file:///data/run-7`.
        writer: The name of this writer's log. A topic has one log per writer; a restarted trainer uses the same name.
        have: What a restarted trainer holds: a model, a mapping of tensors, or the path of a safetensors checkpoint.
            When its bits are those of the topic's newest version, the chain of deltas goes on; without it, or when they
            differ, the first publication is an anchor.
        select: Which tensors to publish: a predicate on canonical names, or a list of glob patterns. None is all.
        dtype: The float dtype in which floating-point tensors are published, rounded as `tensor.to(dtype)` does;
            such as `torch.bfloat16` for float32 master weights. None is each tensor's own.
        anchor: When to publish the whole state besides: `"adaptive"` (when the deltas since the last anchor outweigh a
            share of it), a number of steps, `"never"` (first and on request only), or an `AnchorPolicy`.
        on_busy: What `publish` does while earlier steps are on their way: `"coalesce"` folds steps into one message, so
            that training never waits for the network; `"wait"` waits, so that each step becomes a version.
        encoding: The encoding of every delta; None lets each segment take its smallest.
        threshold: Hold changes of floats back until they have added up to more than so many ULP (steps from one
            representable value to the next) since they were published. 0 holds nothing back.
        budget: About how many bytes a delta may take, by estimate. The largest changes go first, in ULP, and integers
            and booleans before them; at least one element goes. None is no limit. Whole states are not bounded by it.
        patience: Every so many publications in a row that hold small changes back, the threshold is lifted once.
        shadow: Where the copy of the published bits lies: None or `"ram"` for memory, or a directory on a local disk
            for a file that is mapped into memory.
        skip_unmodified: Do not compare tensors that torch counts as unmodified since the last publication: the same
            object at the same address, with the same version counter, that no `torch.optim.Optimizer` stepped over.
            Frozen tensors then cost nothing. Off by default, because not every write is counted: those through
            `.data`, `detach().numpy()`, DLPack or a view that has a counter of its own (as of flattened or sharded
            parameters), by kernels outside torch, and by replayed CUDA graphs are missed, and followers keep the old
            bits until the tensor is next seen to change. Switch it on only where nothing writes like that.
        timeout: Limit in seconds for opening, for a wait inside `publish`, and for `close`.
        workers: Threads that compare and encode; None is the number of usable cores, at most 8.

    Raises:
        UsageError: If an argument or the URL is wrong, or `shadow` cannot be written to.
        StorageFullError: If `have` is given and there is no room for the shadow.
        TransportError: If the topic cannot be reached.
        MessageFormatError: If what lies under the URL is not a topic.
        WaitTimeoutError: If opening takes longer than `timeout`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        writer: str = "trainer",
        have: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        select: Callable[[str], bool] | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        anchor: str | int | AnchorPolicy = "adaptive",
        on_busy: Literal["coalesce", "wait"] = "coalesce",
        encoding: str | None = None,
        threshold: int = 0,
        budget: int | None = None,
        patience: int = PATIENCE,
        shadow: str | os.PathLike[str] | None = None,
        skip_unmodified: bool = False,
        timeout: float = 300.0,
        workers: int | None = None,
    ) -> None:
        if on_busy not in ("coalesce", "wait"):
            raise UsageError(f"on_busy={on_busy!r} is not 'coalesce' or 'wait'")
        if encoding is not None and encoding not in ENCODINGS:
            raise UsageError(f"encoding={encoding!r} is not one of {', '.join(ENCODINGS)}")
        self._writer_name = check_writer_name(writer)
        self._select, self._dtype, self._on_busy, self._timeout = select, dtype, on_busy, timeout
        policy = parse_policy(anchor)
        limits = Limits(threshold=threshold, budget=budget, patience=patience)
        self._allocate = allocator(shadow)
        transport = open_transport(url)
        self.url = transport.url
        self._pool = ThreadPoolExecutor(workers or usable_cores(), thread_name_prefix="deltabus-encode")
        marks = Marks() if skip_unmodified else None
        self._outbox = Outbox(self._pool, limits=limits, encoding=encoding, allocate=self._allocate, marks=marks)
        self._publishing = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._anchor_asked = False
        self._fatal_told = False
        self._loop = LoopThread(f"deltabus publisher of {self.url}")
        try:
            self._sender, self._task = self._loop.run(
                self._open(transport, policy, encoding), timeout=timeout, what=f"opening {self.url}"
            )
        except BaseException:
            self._loop.stop()
            self._pool.shutdown(cancel_futures=True)
            raise
        self._transport = transport
        self._stop_watching = watch_optimizers(marks) if marks is not None else None
        try:
            if have is not None:
                self._recognise(self._collect(load_checkpoint(have) if isinstance(have, str | os.PathLike) else have))
        except BaseException:
            self._shut_down()
            raise
        self._farewell = weakref.finalize(self, _left_open, self._sender, self.url)

    async def _open(
        self, transport: Transport, policy: AnchorPolicy, encoding: str | None
    ) -> tuple[Sender, asyncio.Task[None]]:
        await transport.__aenter__()
        try:
            log = LogWriter(transport, self._writer_name)
            await log.open()
        except BaseException:
            await transport.close()
            raise
        sender = Sender(log, self._outbox, policy=policy, encoding=encoding, pool=self._pool)
        return sender, asyncio.create_task(sender.run())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publisher of {self.url} as {self._writer_name}, version {self.version}>"

    @property
    def version(self) -> int:
        """The newest durable version; 0 when there is none."""
        durable = self._sender.durable
        return durable.version if durable else 0

    def publish(
        self,
        step: int,
        model: nn.Module | Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        everything: bool = False,
    ) -> Publication:
        """Publish the model's weights as they are now, and return a handle.

        Args:
            step: The training step they belong to.
            model: The model, or a mapping of names to tensors.
            metadata: Pairs of text that travel with the message; at most 256, and 64 KiB together. When publications
                are folded, the newer value of a key counts.
            everything: Whether to send also what `threshold` and `budget` would hold back, as for the last step of a
                run and for one that a restarted trainer begins from.

        Raises:
            UsageError: If the model or an argument cannot be published.
            UnsupportedTensorError: If a tensor is of a kind that cannot be published.
            SchemaMismatchError: If names collide.
            StorageFullError: If a shadow is to be made and there is no room for it; nothing was captured.
            PublishError: If an earlier step could not be stored; its cause is chained. Nothing of this step was
                captured. The next `publish` carries on: it leads from the last state that readers can have.
            FencedError: If another process took this writer's log over. This one must stop.
            WaitTimeoutError: If `on_busy="wait"` and the backend is too slow.
            ClosedError: If the publisher was closed.
        """
        called = time.monotonic()
        if not self._publishing.acquire(blocking=False):
            raise UsageError("publish was called by two threads at once; call it from the training thread alone")
        try:
            self._check_open()
            self._raise_failure()
            step, metadata = _said(step, metadata)
            state = self._collect(model)
            if self._outbox.shadow is None:
                self._recognise(state)
            if self._on_busy == "wait":
                self._outbox.wait_until_free(
                    self._timeout, unless=lambda: (self._sender.failure or self._sender.fatal) is not None
                )
                self._raise_failure()
            publication = self._outbox.capture(
                step, state, metadata=metadata, anchor=self._anchor_asked, called=called, everything=everything
            )
            self._anchor_asked = False
            return publication
        finally:
            self._publishing.release()

    def attach(
        self, optimizer: Optimizer, model: nn.Module | Mapping[str, Tensor], *, every: int = 1, start: int = 0
    ) -> Attachment:
        """Publish a model by itself, after every so many steps of an optimizer.

        What `publish` raises, `optimizer.step()` raises, when its own work is done. Remove the handle before the
        publisher is closed, if the optimizer goes on.

        Args:
            optimizer: Whose steps are counted; steps that a gradient scaler leaves out are none.
            model: What is published.
            every: The steps that are published are multiples of this.
            start: Steps done before; the next one is `start + 1`.

        Returns:
            The handle, with the number of steps done and the newest publication.

        Raises:
            UsageError: If `every` is not positive, or a number is not whole.
            ClosedError: If the publisher was closed.
        """
        self._check_open()
        try:
            every, start = operator.index(every), operator.index(start)
        except TypeError as error:
            raise UsageError(f"every={every!r} and start={start!r} must be whole numbers") from error
        if every < 1:
            raise UsageError(f"every={every} is not positive; every=1 publishes each step")
        return Attachment(self.publish, optimizer, model, every=every, start=start)

    def request_anchor(self) -> None:
        """Let the next publication be followed by an anchor.

        While another anchor is on its way, it is the first publication after that.
        """
        self._anchor_asked = True

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published so far is durable.

        Args:
            timeout: Limit in seconds; None is the publisher's own.

        Raises:
            PublishError: If something could not be stored.
            FencedError: If another process took this writer's log over.
            WaitTimeoutError: If the limit is reached; the publications go on.
            ClosedError: If the publisher was closed.
        """
        self._check_open()
        limit = self._timeout if timeout is None else timeout
        self._loop.run(self._sender.drain(), timeout=limit, what=f"storing what was published to {self.url}")
        self._raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Store what is still on its way, then stop; may be called more than once.

        In a process that was forked from the publisher's it does nothing.

        Args:
            timeout: Limit in seconds; None is the publisher's own.

        Raises:
            PublishError: If something could not be stored.
            FencedError: If another process took this writer's log over, and this was not raised before.
            WaitTimeoutError: If the limit is reached; what was not stored by then is lost.
        """
        if self._closed or self._process != os.getpid():
            return
        try:
            if not self._fatal_told:
                self.flush(timeout)
        finally:
            self._closed = True
            self._farewell.detach()
            self._shut_down()

    def _shut_down(self) -> None:
        try:
            self._loop.run(self._close_transport(), timeout=self._timeout, what=f"closing {self.url}")
        finally:
            self._loop.stop()
            self._sender.give_up()
            self._outbox.forget()
            if self._stop_watching is not None:
                self._stop_watching()
            self._pool.shutdown(cancel_futures=True)

    async def _close_transport(self) -> None:
        # The task puts back what it was about to send; only then all handles can be told.
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._sender.aclose()
        await self._transport.close()

    def _collect(self, source: nn.Module | Mapping[str, Tensor]) -> State:
        return collect(source, select=self._select, dtype=self._dtype)

    def _recognise(self, state: State) -> None:
        """Go on with deltas if the topic's newest version is this very state."""
        newest = self._sender.durable
        if newest is None or newest.schema.checksum != state.schema.checksum:
            return
        shadow = Shadow.of(state, pool=self._pool, allocate=self._allocate)
        if shadow.digest(pool=self._pool) == newest.digest_after and self._sender.readable(newest):
            self._outbox.start_from(shadow)
        else:
            _log.info("%s: the model is not version %d; an anchor will be published", self.url, newest.version)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the publisher of {self.url} was closed; open a new one")
        if self._process != os.getpid():
            raise ClosedError(
                f"the publisher of {self.url} belongs to process {self._process}, and its threads are not in this one "
                "that was forked from it; publish there, or open one here with a `writer` of its own"
            )

    def _raise_failure(self) -> None:
        if self._sender.fatal is not None:
            self._fatal_told = True
            raise self._sender.fatal
        if self._task.done():
            self._task.result()
        failure, self._sender.failure = self._sender.failure, None
        if failure is not None:
            raise PublishError(
                f"an earlier step could not be stored in {self.url}: {failure} Nothing is lost yet: publish again and "
                "its changes travel with the next step."
            ) from failure


def _said(step: int, metadata: Mapping[str, str] | None) -> tuple[int, dict[str, str]]:
    """Return a step and its metadata as a message can carry them."""
    try:
        step, said = operator.index(step), dict(metadata or {})
    except (TypeError, ValueError) as error:
        raise UsageError(f"a step is a whole number, and metadata map text to text: {error}") from error
    check_step_and_metadata(step, said)
    return step, said


def _left_open(sender: Sender, url: str) -> None:
    if not sender.idle:
        _log.error("the publisher of %s was never closed: its last steps may be lost; call close(), or use `with`", url)
