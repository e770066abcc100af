"""What each worker of an engine does: it follows a topic while the engine serves, and writes when it is told to."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from deltabus.bridge import LoopThread
from deltabus.bus.errors import (
    ClosedError,
    DeltabusError,
    DivergedError,
    SchemaMismatchError,
    WaitTimeoutError,
)
from deltabus.bus.version import Ordering, VersionVector
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.fetching import in_thread
from deltabus.subscriber import Subscriber
from deltabus.update import Update

from ..live_weights import LiveWeights, StagedWrite
from ..relayout import Relay

__all__ = ["EngineWorker"]

_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class _Ready:
    """An update that lies ready, or was written and may still be taken back."""

    update: Update
    staged: StagedWrite
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Topic:
    """What is followed, and how."""

    url: str
    checkpoint: Path
    keys: tuple[str, ...] | None
    shadow: str | None
    constants: tuple[str, ...]


@dataclass(slots=True)
class _Following:
    """One subscriber, in a thread of its own.

    Attributes:
        loop: The thread.
        wanted: The state to get ready; None is whatever comes next.
        ready: What lies ready.
        go_on: Set when the subscriber is to go on to the next update.
        failure: Why it ended.
        told: Whether somebody has heard of that; then the topic may be opened again.
    """

    loop: LoopThread
    wanted: VersionVector | None = None
    ready: _Ready | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    told: bool = False

    def passes_over(self, update: Update) -> bool:
        """Return whether a state is wanted that comes after an update's."""
        return self.wanted is not None and self.wanted.compare(update.state) is Ordering.AFTER


class EngineWorker:
    """Follows a topic for one worker of an engine, with all that is not the engine's own interface.

    The next update is downloaded, decoded, checked, and brought into the layout of the weights while the engine serves.
    `write` then takes O(changed). What was written can be taken back until `commit`, so that all workers of an
    engine go on to a state together or not at all.

    Args:
        model: The worker's model.
        log: Told what happens.
        relays: As `LiveWeights` takes them.
    """

    def __init__(
        self, model: nn.Module, *, log: logging.Logger | None = None, relays: Mapping[str, Relay] | None = None
    ) -> None:
        self._model = model
        self._relays = relays
        self._log = log or logging.getLogger("deltabus.vllm")
        self._changed = threading.Condition()
        self._topic: _Topic | None = None
        self._following: _Following | None = None
        self._weights: LiveWeights | None = None
        self._held: VersionVector | None = None
        self._touched = False

    def open(
        self,
        url: str,
        *,
        checkpoint: Path,
        keys: Sequence[str] | None = None,
        shadow: str | None = None,
        constants: Sequence[str] = (),
    ) -> None:
        """Begin to follow a topic; does nothing if it is followed already, in this way.

        Args:
            url: The topic.
            checkpoint: What the engine's weights were loaded from.
            keys: As `Subscriber` takes them.
            shadow: As `Subscriber` takes it.
            constants: As `LiveWeights` takes them.

        Raises:
            UsageError: If an argument is wrong.
        """
        topic = _Topic(url, checkpoint, None if keys is None else tuple(keys), shadow, tuple(constants))
        if topic == self._topic and self._following is not None:
            return
        self.close()
        self._subscriber(topic, have=None)  # checks the arguments here, where somebody hears of it
        if self._weights is None or self._topic is None or topic.constants != self._topic.constants:
            self._weights = LiveWeights(self._model, constants=topic.constants, relays=self._relays)
        self._topic, self._held = topic, None
        self._start()

    def check_open(self) -> None:
        """Check that a topic is followed.

        Raises:
            ClosedError: If not.
        """
        if self._following is None:
            raise ClosedError("this engine follows no topic yet: call /init_weight_transfer_engine with its URL")

    def command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a driver says, and tell how things are; what goes wrong stands under `error`.

        Args:
            command: `{"do": "prepare", "state": {...}}` gets a state ready, `{"do": "revert"}` takes back what was
                written and not committed, `{"do": "status"}` does nothing.
        """
        try:
            match command.get("do"):
                case "prepare":
                    self.prepare(command["state"])
                case "revert":
                    self.revert()
                    return self._status(heard=False)  # who takes back has not asked how it goes
        except (DeltabusError, KeyError) as error:
            return {**self._status(heard=False), "error": str(error) or repr(error)}
        return self._status()

    def prepare(self, state: Mapping[str, int]) -> None:
        """Let the worker get a state ready, and return at once.

        Raises:
            ClosedError: If no topic is followed.
        """
        self.check_open()
        with self._changed:
            following = self._following
            assert following is not None
            if following.failure is not None and following.told:
                following = self._restart()
            following.wanted = VersionVector(state)
            ready = following.ready
            if ready is not None and not ready.written and following.passes_over(ready.update):
                following.ready = None
                following.loop.loop.call_soon_threadsafe(following.go_on.set)

    def write(self, state: Mapping[str, int] | None = None, *, timeout: float) -> None:
        """Write an update, all or nothing.

        Args:
            state: The state to write; None is the next one.
            timeout: Limit in seconds for the wait until it is ready.

        Raises:
            ClosedError: If no topic is followed.
            WaitTimeoutError: If it was not ready within the limit.
            DivergedError: If the engine's weights are not those that it starts from.
            DeltabusError: What ended the following of the topic.
        """
        if state is not None:
            self.prepare(state)
        self.check_open()
        wanted = None if state is None else VersionVector(state)
        with self._changed:
            following = self._following
            assert following is not None
            if wanted is not None and wanted == self._held:
                return
            self._changed.wait_for(
                lambda: (
                    following.failure is not None
                    or (following.ready is not None and (wanted is None or following.ready.update.state == wanted))
                ),
                timeout,
            )
            if following.failure is not None:
                following.told = True
                raise following.failure
            ready = following.ready
            if ready is None or (wanted is not None and ready.update.state != wanted):
                there = "nothing is" if ready is None else f"{ready.update.state} is"
                raise WaitTimeoutError(f"{wanted or 'an update'} was not ready within {timeout} s; {there}")
            if ready.written:
                return
            started = time.perf_counter()
            self._touched = True
            try:
                ready.staged.write()
            except DivergedError as error:
                self._end(following, error)
                following.told = True
                raise
            ready.written = True
            self._log.info(
                "step %d is written: %d elements in %.1f ms",
                ready.update.step,
                ready.staged.count,
                1e3 * (time.perf_counter() - started),
            )

    def revert(self) -> None:
        """Take back what was written and not committed, if anything.

        Raises:
            DivergedError: If it cannot be taken back.
        """
        with self._changed:
            ready = None if self._following is None else self._following.ready
            if ready is not None and ready.written:
                ready.staged.revert()
                ready.written = False

    def commit(self) -> None:
        """Keep what was written, if anything, and go on to the next update."""
        with self._changed:
            following = self._following
            if following is not None and following.ready is not None and following.ready.written:
                ready, following.ready = following.ready, None
                ready.update.mark_applied()
                self._held = ready.update.state
                following.loop.loop.call_soon_threadsafe(following.go_on.set)

    def close(self) -> None:
        """Stop following; what is written stays."""
        with self._changed:
            following, self._following = self._following, None
        if following is not None:
            following.loop.stop()

    def _status(self, *, heard: bool = True) -> dict[str, Any]:
        with self._changed:
            following, held = self._following, self._held
            ready = None if following is None else following.ready
            failure = None if following is None else following.failure
            if following is not None and failure is not None and heard:
                following.told = True
            return {
                "held": None if held is None else dict(held),
                "ready": None if ready is None else dict(ready.update.state),
                "written": ready is not None and ready.written,
                "step": None if ready is None else ready.update.step,
                "changed": None if ready is None else ready.staged.count,
                "nbytes": None if ready is None else ready.update.nbytes,
                "error": "" if failure is None else str(failure) or repr(failure),
            }

    def _subscriber(self, topic: _Topic, *, have: Path | None) -> Subscriber:
        return Subscriber(topic.url, have=have, latest=False, keys=topic.keys, shadow=topic.shadow)

    def _start(self) -> _Following:
        following = self._following = _Following(LoopThread("deltabus-engine"))
        following.loop.submit(self._follow(following))
        return following

    def _restart(self) -> _Following:
        assert self._following is not None
        threading.Thread(target=self._following.loop.stop, daemon=True).start()
        return self._start()

    async def _follow(self, following: _Following) -> None:
        assert self._topic is not None
        try:
            # Weights that were written to are no longer those of the checkpoint; the whole state is compared with them.
            have = None if self._touched else self._topic.checkpoint
            try:
                await self._follow_from(following, have)
            except SchemaMismatchError:
                if have is None:
                    raise
                self._log.warning("%s: the checkpoint has other tensors than the topic", self._topic.url)
                await self._follow_from(following, None)
        except Exception as error:
            self._log.warning("%s: %s", self._topic.url, error)
            with self._changed:
                self._end(following, error)

    async def _follow_from(self, following: _Following, have: Path | None) -> None:
        assert self._topic is not None
        async with self._subscriber(self._topic, have=have) as subscriber:
            recognising = asyncio.create_task(self._note_recognised(subscriber))
            try:
                async for update in subscriber:
                    recognising.cancel()
                    await self._offer(following, update)
            finally:
                recognising.cancel()

    async def _offer(self, following: _Following, update: Update) -> None:
        """Get an update ready, and wait until it is kept, or passed over: then the next one has it folded in."""
        self._held = self._held or update.base
        if following.passes_over(update):
            return
        staged = await in_thread(self._stage, update)
        with self._changed:
            if following.passes_over(update):
                return
            following.go_on.clear()
            following.ready = _Ready(update, staged)
            self._changed.notify_all()
        await following.go_on.wait()

    async def _note_recognised(self, subscriber: Subscriber) -> None:
        """Note what the engine holds if its checkpoint is one of the topic's states, though no update may follow."""
        while subscriber.recognised is None:  # noqa: ASYNC110 - a subscriber has nothing to wait for here
            await asyncio.sleep(_LOOK_SECONDS)
        self._held = self._held or subscriber.recognised

    def _stage(self, update: Update) -> StagedWrite:
        assert self._weights is not None
        assert self._topic is not None
        reference = None if self._touched else load_checkpoint(self._topic.checkpoint)
        self._weights.learn((spec for schema in update.schemas for spec in schema.tensors), reference=reference)
        return self._weights.stage(update.patches())

    def _end(self, following: _Following, error: Exception) -> None:
        following.failure, following.ready = error, None
        # Then the weights are not those of a known state, and the whole state is compared with them next time.
        self._touched = self._touched or isinstance(error, DivergedError)
        self._changed.notify_all()
