"""Trainers of the simulation: what section 5 of the protocol asks of a publisher, around the real `LogWriter`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import FencedError, OvertakenError, RetentionGapError, TransportError, UsageError
from deltabus.bus.group import Group
from deltabus.bus.message import Blob, Kind, Message, Stats
from deltabus.bus.planner import plan
from deltabus.bus.retry import Retry

from .oracle import Oracle
from .process import Process
from .state import SIZE, State, changed, digest, encode
from .store import SimulatedTransport

__all__ = ["Habits", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the trainers of a run publish.

    Attributes:
        pause: Seconds from one step to the next, in the mean.
        anchors: Chance of an anchor besides a delta.
        skips: Chance of a delta from an older base besides a delta.
        parts: Most blobs of a payload.
        filler: Bytes by which the blobs of an anchor are longer.
        uploads: Seconds that what goes beside the deltas takes, in steps.
    """

    pause: float
    anchors: float
    skips: float
    parts: int
    filler: int
    uploads: float


class Trainer:
    """One incarnation of a writer.

    Args:
        process: What it dies with.
        writer: The name of its log.
        transport: The topic.
        oracle: Is told what it publishes.
        chance: Decides.
        retry: How long it tries.
        habits: How it publishes.
        state: What its model holds when it starts.
        group: Who makes a cut with it; None is nobody.
        step: The training step that it starts from.
        counts: Counts what happened to it.

    Attributes:
        saved: The states that it knows to be durable, oldest first, for who is started from a checkpoint.
        durable: The version that it was told of last; 0 for none.
        writer: The name of its log.
        state: What its model holds.
        step: The training step of that.
    """

    def __init__(
        self,
        process: Process,
        writer: str,
        transport: SimulatedTransport,
        *,
        oracle: Oracle,
        chance: random.Random,
        retry: Retry,
        habits: Habits,
        state: State,
        group: Group | None,
        step: int,
        counts: Counter[str],
    ) -> None:
        self.saved: list[State] = []
        self.durable = 0
        self.state = state
        self._life = process.name
        self._log = LogWriter(transport, writer, group=group, clock=process.clock, retry=retry, draw=process.draw)
        self.writer = writer
        self._oracle = oracle
        self._chance = chance
        self._habits = habits
        self._counts = counts
        self.step = step
        self._alone = group is None
        self._base: Message | None = None
        self._base_state: State = (0,) * SIZE
        self._known: dict[int, tuple[Message, State]] = {}
        self._beside: asyncio.Task[None] | None = None
        self._overtaken = False
        self._stopped = False

    async def run(self, steps: int, *, last: bool) -> None:
        """Publish steps, until fenced; if these are the last ones, go on until one of them is durable.

        One that is alone goes on after a failure, and what failed travels with the next step. A member of a group
        publishes each step until that is durable, as the others wait for it.
        """
        try:
            await self._log.open()
        except UsageError:
            if self._alone:
                raise
            self._counts["outdated groups"] += 1  # a later generation has begun
            return
        newest = _newest(self._log.history)
        if newest is not None and newest.digest_after == digest(self.state) and self._readable(newest):
            self._counts["resumed"] += 1
            self._take_base(newest, self.state)
        done = True
        while not self._stopped and (steps > 0 or (not done and (last or not self._alone))):
            if self._alone or done:
                steps -= 1
                self.state = changed(self.state, self._chance)
                self.step += 1
            done = await self._publish()
            await asyncio.sleep(self._chance.expovariate(1 / self._habits.pause))
        if self._beside is not None:
            await asyncio.wait([self._beside])

    async def _publish(self) -> bool:
        """Publish what the model holds, and return whether it is durable; what is not travels with the next step."""
        if self._overtaken:
            self._fall_behind()
        state, base = self.state, self._base
        try:
            message = await self._commit(Kind.ANCHOR if base is None else Kind.DELTA, state, base=base)
        except FencedError:
            self._stop()
        except OvertakenError:
            self._counts["overtaken"] += 1
            self._fall_behind()
        except UsageError:
            if not self._overtaken:
                raise
            self._fall_behind()  # what goes on beside was overtaken, so that this version is not the next any more
        except TransportError:
            self._counts["failed"] += 1
        else:
            self._take_base(message, state)
            self.saved.append(state)
            self.durable = message.version
            if base is not None and self._beside is None:
                self._besides(message, state)
            return True
        return False

    def _besides(self, message: Message, state: State) -> None:
        """Publish something else beside the next deltas, now and then."""
        draw = self._chance.random()
        older = [version for version in self._known if version < message.version - 1]
        if draw < self._habits.anchors:
            self._beside = asyncio.create_task(self._go_beside(Kind.ANCHOR, message, state, None))
        elif older and draw < self._habits.anchors + self._habits.skips:
            self._beside = asyncio.create_task(self._go_beside(Kind.DELTA, message, state, self._chance.choice(older)))

    async def _go_beside(self, kind: Kind, message: Message, state: State, older: int | None) -> None:
        try:
            base = None if older is None else self._known[older]
            await asyncio.sleep(self._chance.random() * self._habits.uploads * self._habits.pause)
            await self._commit(kind, state, base=base and base[0], repeats=message, base_state=base and base[1])
            self._counts["late anchors" if base is None else "skips"] += 1
        except FencedError:
            self._stop()
        except OvertakenError:
            self._counts["overtaken beside"] += 1
            self._overtaken = True
        except TransportError:
            self._counts["failed beside"] += 1
        finally:
            self._beside = None

    async def _commit(
        self,
        kind: Kind,
        state: State,
        *,
        base: Message | None,
        repeats: Message | None = None,
        base_state: State | None = None,
    ) -> Message:
        version = repeats.version if repeats is not None else self._log.next_version
        start = None if kind is Kind.ANCHOR else base_state or self._base_state
        payload = encode(
            state,
            base=start,
            parts=self._chance.randint(1, self._habits.parts),
            filler=self._habits.filler if start is None else 0,
        )
        blobs = [
            await self._log.store(part, name=f"{version:012d}-{kind}-{number:04}")
            for number, part in enumerate(payload)
        ]
        self._oracle.had(self.writer, self._life, state)
        message = await self._append(kind, version, state, base, blobs)
        self._oracle.acknowledge(self.writer, message.position, version, state)
        return message

    async def _append(self, kind: Kind, version: int, state: State, base: Message | None, blobs: list[Blob]) -> Message:
        return await self._log.commit(
            kind=kind,
            step=self.step,
            version=version,
            base={} if base is None else {self.writer: base.version},
            schema=await self._log.store_schema(b"{}"),
            digest_before=None if base is None else base.digest_after,
            digest_after=digest(state),
            blobs=blobs,
            stats=Stats(changed=0, total=SIZE),
            metadata={"life": self._life},
        )

    def _readable(self, message: Message) -> bool:
        try:
            plan(self._log.history, have=None, target=message.state)
        except RetentionGapError:
            return False
        return True

    def _take_base(self, message: Message, state: State) -> None:
        self._base, self._base_state = message, state
        self._known[message.version] = message, state

    def _fall_behind(self) -> None:
        """Go on with an anchor, unless what was found in the log leads to the very state that is the base here."""
        self._overtaken = False
        newest, base = _newest(self._log.history), self._base
        if newest is None or base is None or (newest.version, newest.digest_after) != (base.version, base.digest_after):
            self._base = None
            self._known.clear()

    def _stop(self) -> None:
        self._counts["fenced"] += 1
        self._oracle.fenced(self._life)
        self._stopped = True


def _newest(history: list[Message]) -> Message | None:
    return max(history, key=lambda message: (message.version, message.position), default=None)
