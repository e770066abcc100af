"""The training side: `Publisher`."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import ClosedError, UsageError
from deltabus.bus.group import Group
from deltabus.bus.policy import AnchorPolicy, parse_policy
from deltabus.bus.retention import Retention, parse_retention
from deltabus.bus.skips import SkipPolicy, parse_skips
from deltabus.codecs.casts import Dtypes, Transform
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.holdback import PATIENCE, Limits
from deltabus.codecs.shadow import Shadow
from deltabus.codecs.slices import TensorSlice
from deltabus.codecs.state import Parts, State, collect
from deltabus.transports import open_transport

from .attachment import Attachment
from .backstage import Backstage, ReaderLag
from .events import Events, Listener
from .keys import Key, signing_key, verify_keys
from .mapped import allocator
from .outbox import Outbox
from .publication import Publication
from .resume import resume
from .sender import Sender
from .statements import check_follows, checked_busy, rests_on, said
from .unmodified import Marks, watch_optimizers
from .workers import Workers

if TYPE_CHECKING:
    from .distributed import Division

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
        group: The writers that publish each step together, this one among them: ranks that each own tensors of their
            own, or slices (`TensorSlice`, `DTensor`). Readers take a step when all of them have published it. A
            restarted group takes a greater generation. `"ranks"` is all ranks of `torch.distributed`, which open their
            publishers, and publish, together: they agree on a generation, are named after `writer` and their rank, and
            divide among them what all hold alike, as in data parallel training. None is this writer alone.
        have: What a restarted trainer holds: a model, a mapping of tensors, or the path of a safetensors checkpoint.
            When its bits are those of the topic's newest version, the chain of deltas goes on. When they are those of
            an older one, the topic goes back there first, by a delta that undoes the later ones where that is cheaper
            than an anchor; a group goes back with its first publication. Otherwise the first publication is an anchor.
            Without it, the first model that is published counts.
        select: Which tensors to publish: a predicate on canonical names, or a list of glob patterns. None is all.
        dtype: The float dtype in which floating-point tensors are published, rounded as `tensor.to(dtype)` does;
            such as `torch.bfloat16` for float32 master weights. A mapping of glob patterns, or a function of the
            canonical name, chooses for each tensor. None is each tensor's own.
        transform: Functions by glob pattern that make of a tensor what is published, as quantised: they take its name
            and the tensor, and return a tensor, or several by name. The same weights must make the same bits.
        anchor: When to publish the whole state besides: `"adaptive"` (when the deltas since the last anchor outweigh a
            share of it), a number of steps, `"never"` (first and on request only), or an `AnchorPolicy`.
        skips: When to publish, in the background, several deltas as one, so that an engine n steps behind reads about
            log n messages: `"auto"` where that halves their cost or replaces eight (about the deltas' bytes again),
            `"all"` for each power of two, `"off"`, a number of levels (the longest takes 2^levels steps), or a
            `SkipPolicy`. What waits to be composed takes at most a tenth of the memory of the published weights.
        on_busy: What `publish` does while earlier steps are on their way: `"coalesce"` folds steps into one message, so
            that training never waits for the network; `"wait"` waits, so that each step becomes a version. None is
            `"coalesce"` for a writer that is alone; a group always waits, since its members would fold other steps.
        encoding: The encoding of every delta; None lets each segment take its smallest.
        threshold: Hold changes of floats back until they have added up to more than so many ULP (steps from one
            representable value to the next) since they were published. 0 holds nothing back.
        budget: About how many bytes a delta may take, by estimate. The largest changes go first, in ULP, and integers
            and booleans before them; at least one element goes. None is no limit. Whole states are not bounded by it.
        patience: Every so many publications in a row that hold small changes back, the threshold is lifted once.
        shadow: Where the copy of the published bits lies: None or `"ram"` for the host's memory, or a directory on a
            local disk for a file that is mapped into it. `"device"` is the memory of the devices where the weights
            are: it takes as much there as the weights do in the dtype published, and up to 150 MiB for each worker, and
            a publication moves only what changed to the host, where weights on a device are otherwise copied whole to
            be compared. It works on the device in the background: `flush` before a CUDA graph is captured. For weights
            in the host's memory `"ram"` is faster. A `torch.device` is the memory of that device.
        skip_unmodified: Do not compare tensors that torch counts as unmodified since the last publication: the same
            object at the same address, with the same version counter, that no `torch.optim.Optimizer` stepped over.
            Frozen tensors then cost nothing. Off by default, because not every write is counted: those through
            `.data`, `detach().numpy()`, DLPack or a view that has a counter of its own (as of flattened or sharded
            parameters), by kernels outside torch, and by replayed CUDA graphs are missed, and followers keep the old
            bits until the tensor is next seen to change. Switch it on only where nothing writes like that.
        key: Signs every message: a key's text, the path of its file, or a `SigningKey`. None takes the one in the
            environment variable `DELTABUS_SIGNING_KEY`; without that, messages are not signed.
        keys: Whose messages are accepted in this log besides those of `key`: after a rotation, the old key. Texts or
            files too; None takes those in `DELTABUS_VERIFY_KEYS`.
        retention: What of the topic to keep; the rest is removed in the background as new anchors come. A number of
            anchors, a text such as `"age:7d"` or `"anchors:3,bytes:1TB"`, or a `Retention`. None removes nothing. What
            readers with a lease need stays, and so does what is younger than ten minutes.
        on_event: Told of each step that became durable, or failed: `LoggingListener()`, `PrometheusListener()`, or any
            callable that takes an `Event`; one or several.
        timeout: Limit in seconds for opening, for a wait inside `publish`, and for `close`.
        workers: Threads that compare and encode; None is the number of usable cores, at most 8.

    Raises:
        UsageError: If an argument or the URL is wrong, or `shadow` cannot be written to or is no device.
        StorageFullError: If `have` is given and there is no room for the shadow.
        TransportError: If the topic cannot be reached.
        MessageFormatError: If what lies under the URL is not a topic.
        SignatureError: If there is a key, and the log has messages that no accepted key signed; or none, and they are.
        WaitTimeoutError: If opening takes longer than `timeout`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        writer: str = "trainer",
        group: Group | Literal["ranks"] | None = None,
        have: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        select: Callable[[str], bool] | Sequence[str] | None = None,
        dtype: Dtypes | None = None,
        transform: Transform | None = None,
        anchor: str | int | AnchorPolicy = "adaptive",
        skips: str | int | SkipPolicy = "auto",
        on_busy: Literal["coalesce", "wait"] | None = None,
        encoding: str | None = None,
        threshold: int = 0,
        budget: int | None = None,
        patience: int = PATIENCE,
        shadow: str | os.PathLike[str] | torch.device | None = None,
        skip_unmodified: bool = False,
        key: Key | None = None,
        keys: Key | Sequence[Key] | None = None,
        retention: str | int | Retention | None = None,
        on_event: Listener | Iterable[Listener] | None = None,
        timeout: float = 300.0,
        workers: int | None = None,
    ) -> None:
        self._division: Division | None = None
        if group == "ranks":
            from .distributed import Division, agree_on_group  # only where there are ranks

            writer, group = agree_on_group(url, stem=writer, key=key, keys=keys, timeout=timeout)
            self._division = Division()
        self._alone = group is None or len(group.members) == 1
        self._on_busy, self._timeout = checked_busy(on_busy, alone=self._alone), timeout
        self._state_of = partial(collect, select=select, dtype=dtype, transform=transform)
        policy, skip_policy = parse_policy(anchor), parse_skips(skips)
        kept = None if retention is None else parse_retention(retention)
        limits = Limits(threshold=threshold, budget=budget, patience=patience)
        self._allocate, transport = allocator(shadow), open_transport(url)
        log = LogWriter(transport, writer, group=group, key=signing_key(key), keys=verify_keys(keys))
        self.url = transport.url
        self._log, self._transport = log, transport
        self._publishing = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._anchor_asked = False
        self._taken: int | None = None
        marks = Marks() if skip_unmodified else None
        with ExitStack() as stack:
            self._workers = Workers(workers)
            stack.callback(self._workers.end)
            capturing = self._workers.capturing
            self._outbox = Outbox(capturing, limits=limits, encoding=encoding, allocate=self._allocate, marks=marks)
            stack.callback(self._outbox.forget)
            send = partial(
                Sender,
                log,
                self._outbox,
                policy=policy,
                skips=skip_policy,
                encoding=encoding,
                pool=self._workers.encoding,
                tell=Events(on_event).tell,
                topic=self.url,
            )
            self._backstage = Backstage(transport, log, send, retention=kept, timeout=timeout)
            stack.callback(self._backstage.shut_down)
            self._sender = self._backstage.sender
            if marks is not None:
                stack.callback(watch_optimizers(marks))
            if have is not None:
                self._recognise(self._collect(load_checkpoint(have) if isinstance(have, str | os.PathLike) else have))
            self._ending = stack.pop_all()
        self._farewell = weakref.finalize(self, _left_open, self._sender, self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publisher of {self.url} as {self._log.writer}, version {self.version}>"

    @property
    def version(self) -> int:
        """The newest durable version; 0 when there is none."""
        durable = self._sender.durable
        return durable.version if durable else 0

    def readers(self) -> list[ReaderLag]:
        """Return how far the readers are that hold a lease (`Subscriber(lease=)`) now, the furthest behind first.

        Raises:
            TransportError: If the leases cannot be read.
            WaitTimeoutError: If that takes too long.
            ClosedError: If the publisher was closed.
        """
        self._check_open()
        return self._backstage.readers()

    def publish(
        self,
        step: int,
        model: nn.Module | Mapping[str, Tensor] | Mapping[str, Tensor | TensorSlice],
        *,
        metadata: Mapping[str, str] | None = None,
        everything: bool = False,
        after: Mapping[str, int] | None = None,
    ) -> Publication:
        """Publish the model's weights as they are now, and return a handle.

        Args:
            step: The training step they belong to; in a group, greater than the one before.
            model: The model, or a mapping of names to tensors and slices of tensors. Of a model with distributed
                tensors (`DTensor`) what lies in this process is published.
            metadata: Pairs of text that travel with the message; at most 256, and 64 KiB together. When publications
                are folded, the newer value of a key counts.
            everything: Whether to send also what `threshold` and `budget` would hold back, as for the last step of a
                run and for one that a restarted trainer begins from.
            after: What these weights rest on of other writers of the topic, such as the `state` of an update that was
                applied before: readers get this step after that. It holds for all later steps too.

        Raises:
            UsageError: If the model or an argument cannot be published.
            UnsupportedTensorError: If a tensor is of a kind that cannot be published.
            SchemaMismatchError: If names collide.
            StorageFullError: If a shadow is to be made and there is no room for it; nothing was captured.
            PublishError: If an earlier step could not be stored; its cause is chained. Nothing of this step was
                captured. The next `publish` carries on: it leads from the last state that readers can have.
            FencedError: If another process took this writer's log over. This one must stop.
            SignatureError: If somebody without an accepted key wrote to the log. This one must stop.
            TransportError: If it is the first step, and what leads back to it from the newest cannot be fetched.
            WaitTimeoutError: If `on_busy="wait"` and the backend is too slow, or that takes too long.
            ClosedError: If the publisher was closed.
        """
        called = time.monotonic()
        if not self._publishing.acquire(blocking=False):
            raise UsageError("publish was called by two threads at once; call it from the training thread alone")
        try:
            self._check_open()
            self._backstage.raise_failure()
            step, metadata = said(step, metadata)
            check_follows(step, self._taken)
            state = self._collect(model)
            if self._outbox.shadow is None:
                self._recognise(state)
            if self._on_busy == "wait":
                self._outbox.wait_until_free(
                    self._timeout, unless=lambda: (self._sender.failure or self._sender.fatal) is not None
                )
                self._backstage.raise_failure()
            publication = self._outbox.capture(
                step,
                state,
                metadata=metadata,
                anchor=self._anchor_asked,
                called=called,
                everything=everything,
                after=rests_on(after, self._log.writer),
            )
            self._anchor_asked = False
            self._taken = None if self._alone else step
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
            SignatureError: If somebody without an accepted key wrote to the log.
            WaitTimeoutError: If the limit is reached; the publications go on.
            ClosedError: If the publisher was closed.
        """
        self._check_open()
        self._backstage.drain(skips=True, timeout=timeout)

    def close(self, timeout: float | None = None) -> None:
        """Store what is still on its way, then stop; may be called more than once.

        Skip deltas that are not there yet are left out.
        In a process that was forked from the publisher's it does nothing.

        Args:
            timeout: Limit in seconds; None is the publisher's own.

        Raises:
            PublishError: If something could not be stored.
            FencedError: If another process took this writer's log over, and this was not raised before.
            SignatureError: If somebody without an accepted key wrote to the log, and this was not raised before.
            WaitTimeoutError: If the limit is reached; what was not stored by then is lost.
        """
        if self._closed or self._process != os.getpid():
            return
        try:
            if not self._backstage.fatal_told:
                self._backstage.drain(skips=False, timeout=timeout)
        finally:
            self._closed = True
            self._farewell.detach()
            self._ending.close()

    def _collect(self, source: Parts) -> State:
        state = self._state_of(source)
        return state if self._division is None else self._division.of(state)

    def _recognise(self, state: State) -> None:
        """Go on with deltas if the topic's newest version is this very state."""
        newest = self._sender.durable
        if newest is None or newest.schema.checksum != state.schema.checksum or not self._sender.readable(newest):
            return
        pool = self._workers.encoding
        shadow = Shadow.of(state, pool=pool, allocate=self._allocate)
        finding = resume(self._transport, self._log, pool, shadow, newest=newest)
        resumed = self._backstage.run(finding, what=f"finding the model in {self.url}")
        if resumed is not None:
            # Of a group each member finds its own way back, by the bits that it has; which step it was they may find
            # different, and readers would put what is not of one step together.
            self._outbox.start_from(shadow, by=resumed.draft, at_once=self._alone)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the publisher of {self.url} was closed; open a new one")
        if self._process != os.getpid():
            raise ClosedError(
                f"the publisher of {self.url} belongs to process {self._process}, and its threads are not in this one "
                "that was forked from it; publish there, or open one here with a `writer` of its own"
            )


def _left_open(sender: Sender, url: str) -> None:
    if not sender.idle:
        _log.error("the publisher of %s was never closed: its last steps may be lost; call close(), or use `with`", url)
