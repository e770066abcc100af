"""A world of trainers, readers and pruners around one topic: its storms, and what must be true when they are over."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deltabus.bus.errors import TransportError
from deltabus.bus.group import Group
from deltabus.bus.pruner import Pruner
from deltabus.bus.retention import Retention
from deltabus.bus.retry import Retry

from .clock import VirtualLoop
from .faults import CALM, storm
from .follower import Follower, may_end
from .oracle import Oracle, ViolationError
from .process import Process, task_factory
from .state import SIZE, State
from .store import SimulatedTransport, Store
from .trainer import Habits, Trainer

__all__ = ["BOUND", "Report", "simulate"]

BOUND = 100.0
"""Seconds after the last publication within which every reader must have it when nothing goes wrong any more."""

ALONE = "main"
STEM = "rank"
GRACE = 35.0
GARBAGE = 200.0
_PATIENCE = 12.0
_LEASES = (None, None, 25.0, 60.0)
_MOST_LAUNCHES = 3
_MOST_READERS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in a run.

    Attributes:
        seed: What it was made from.
        seconds: How long it took on the virtual clock.
        turns: How often the event loop turned.
        trace: A hash of all that changed the store, and when.
        counts: How often things happened.
    """

    seed: int
    seconds: float
    turns: int
    trace: int
    counts: Mapping[str, int]


def simulate(seed: int) -> Report:
    """Play the world that a seed makes.

    Raises:
        ViolationError: If something happened that must never happen, or did not happen in time.
        StuckError: If everybody waits for ever.
    """
    chance = random.getstate()
    random.seed(seed)  # tenacity draws its pauses there
    world = World(seed)
    try:
        return world.play()
    finally:
        world.close()
        random.setstate(chance)


@dataclass(eq=False, slots=True)
class _Launch:
    """Trainers that were started together.

    Attributes:
        count: How many they were.
        alive: Those that are left.
    """

    count: int
    alive: list[Process]


class World:
    """Everything there is.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chance = chance = random.Random(seed)
        self._loop = loop = VirtualLoop()
        loop.set_task_factory(task_factory)
        loop.set_exception_handler(self._note_failure)
        self._failed: asyncio.Future[None] = loop.create_future()
        self._counts: Counter[str] = Counter()
        self._oracle = Oracle()
        self._store = Store(loop, chance, self._oracle, conditional=chance.random() < 0.5)
        self._retry = Retry(limit=_PATIENCE, longest=4.0, clock=loop.time)
        self._habits = Habits(
            pause=chance.choice([0.3, 1.0, 4.0]),
            anchors=chance.choice([0.0, 0.2, 0.6]),
            skips=chance.choice([0.0, 0.1, 0.3]),
            parts=chance.choice([1, 3]),
            filler=chance.choice([0, 0, 30_000]),
            uploads=chance.choice([0.0, 2.0, 8.0]),
        )
        self._busy = chance.choice([0.0, 0.0, 3.0, 10.0])
        self._policy = Retention(
            keep_anchors=chance.choice([1, 1, 2]),
            max_age=chance.choice([None, 10.0, 40.0]),
            max_bytes=chance.choice([None, None, 100_000]),
            grace=0.0 if self._store.conditional and chance.random() < 0.7 else GRACE,
            garbage_age=GARBAGE,
        )
        self._length = max(10.0, self._habits.pause * chance.uniform(8, 28))
        self._calms = self._habits.pause * chance.uniform(0.5, 3)
        self._numbers: Counter[str] = Counter()
        self._ranks = chance.choice([0, 0, 2, 3])
        self._generation = 0
        self._last_step = 0
        self._trainers: dict[Process, Trainer] = {}
        self._launches: list[_Launch] = []
        self._readers: dict[Process, Follower] = {}
        self._pruners: dict[Process, None] = {}
        self._models: dict[str, list[State]] = defaultdict(lambda: [(0,) * SIZE])
        self._stormy = True
        self._closed = False

    def play(self) -> Report:
        """Let everything happen, and tell of it."""
        self._loop.run_until_complete(self._play())
        counts = self._counts + Counter(self._store.happened)
        counts["acknowledged"] = self._oracle.acknowledged
        counts["compared"] = self._oracle.compared
        return Report(self._seed, self._loop.time(), self._loop.turns, self._store.trace, counts)

    def close(self) -> None:
        """End whatever still runs."""
        for process in (*self._trainers, *self._readers, *self._pruners):
            process.crash()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _play(self) -> None:
        whole = asyncio.create_task(self._live())
        await asyncio.wait([whole, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            whole.cancel()
            self._failed.result()
        await whole

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._fail(context.get("exception") or ViolationError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _live(self) -> None:
        self._store.faults = storm(self._chance)
        self._launch()
        for _ in range(self._chance.randint(1, 2)):
            self._start_reader()
        while self._loop.time() < self._length:
            await asyncio.sleep(self._chance.expovariate(1 / self._calms))
            self._strike()
        self._stormy = False
        self._store.faults = CALM
        for process in (*self._readers, *self._pruners):
            process.cut_off = False
            process.doom(1 << 60, "")
        for process in list(self._trainers):
            process.crash()
        await self._publish_last()
        await self._all_have_the_newest()
        self._closed = True
        for process in self._readers:
            process.crash()
        self._readers.clear()
        await asyncio.sleep(GARBAGE)
        await self._prune_last()
        self._start_reader(have=False)
        await self._all_have_the_newest()

    async def _publish_last(self) -> None:
        """Let trainers come until all of a launch end well."""
        while True:
            launch = self._launch(steps=2, last=True)
            trainers = [self._trainers[process] for process in launch]
            await asyncio.wait([process.main for process in launch if process.main is not None])
            cut = {trainer.writer: trainer.durable for trainer in trainers}
            if all(cut.values()):
                assert self._oracle.newest == cut
                return

    async def _prune_last(self) -> None:
        process = self._start_pruner()
        assert process.main is not None
        await asyncio.wait([process.main])

    async def _all_have_the_newest(self) -> None:
        """Every reader must come to the newest version in time."""
        began, newest = self._loop.time(), self._oracle.newest
        while late := [process.name for process, reader in self._readers.items() if reader.delivered != newest]:
            if self._loop.time() > began + BOUND:
                raise ViolationError(f"{', '.join(late)} did not come to {newest} in {BOUND:g} s")
            await asyncio.sleep(0.5)
        self._counts["slowest"] = max(self._counts["slowest"], round(self._loop.time() - began))

    # What happens in a storm

    def _strike(self) -> None:
        """Let something go wrong, or begin."""
        trainers, readers = list(self._trainers), list(self._readers)
        everybody = [*trainers, *readers, *self._pruners]
        draw = self._chance.choice
        events: list[tuple[str, int, Callable[[], object]]] = [
            ("doomed trainers", 3, lambda: trainers and self._doom(draw(trainers))),
            ("second trainers", 2, self._start_second),
            ("doomed readers", 2, lambda: readers and self._doom(draw(readers))),
            ("cuts", 4, lambda: everybody and self._cut_off(draw(everybody))),
            ("prunings", 6, self._start_pruner),
            ("newcomers", 1, lambda: len(readers) < _MOST_READERS and self._start_reader()),
            ("clock jumps", 1, lambda: everybody and draw(everybody).change_clock()),
        ]
        ((name, _, event),) = self._chance.choices(events, [weight for _, weight, _ in events])
        self._counts[name] += 1
        event()

    def _doom(self, process: Process) -> None:
        process.doom(self._chance.randint(1, 8), self._chance.choice(["before", "meanwhile", "behind"]))

    def _cut_off(self, process: Process) -> None:
        process.cut_off = True

        def heal() -> None:
            process.cut_off = False

        self._loop.call_later(self._chance.uniform(5, 40), heal)

    def _start_second(self) -> None:
        if len(self._launches) < _MOST_LAUNCHES:
            self._launch()

    # Who comes

    def _new_process(self, kind: str) -> Process:
        self._numbers[kind] += 1
        return Process(self._loop, f"{kind}-{self._numbers[kind]}", self._chance)

    def _launch(self, *, steps: int = 1 << 30, last: bool = False) -> list[Process]:
        """Start a trainer: one process, or one for each member of a group, which takes a new generation."""
        if not self._ranks:
            processes = [self._start_trainer(ALONE, None, steps=steps, last=last)]
        else:
            self._generation += 1
            self._last_step = max(0, self._last_step - self._chance.choice([0, 0, 1, 3]))
            count = self._chance.choice([self._ranks, self._ranks, 1, 2, 3])
            group = Group.of_ranks(STEM, count, generation=self._generation)
            processes = [self._start_trainer(name, group, steps=steps, last=last) for name in group.members]
        self._launches.append(_Launch(len(processes), list(processes)))
        return processes

    def _start_trainer(self, writer: str, group: Group | None, *, steps: int, last: bool) -> Process:
        process = self._new_process("trainer")
        trainer = Trainer(
            process,
            writer,
            SimulatedTransport(self._store, process),
            oracle=self._oracle,
            chance=self._chance,
            retry=self._retry,
            habits=self._habits,
            state=self._model(writer),
            group=group,
            step=self._last_step,
            counts=self._counts,
        )
        self._trainers[process] = trainer
        process.start(trainer.run(steps, last=last), ended=partial(self._trainer_ended, trainer))
        return process

    def _model(self, writer: str) -> State:
        """What a trainer starts from: its predecessor's last state, an older one, or something else."""
        draw, models = self._chance.random(), self._models[writer]
        if draw < 0.7:
            return models[-1]
        if draw < 0.9:
            return self._chance.choice(models)
        return tuple(self._chance.getrandbits(32) for _ in range(SIZE))

    def _trainer_ended(self, trainer: Trainer, process: Process) -> None:
        del self._trainers[process]
        launch = next(launch for launch in self._launches if process in launch.alive)
        launch.alive.remove(process)
        if not launch.alive:
            self._launches.remove(launch)
        self._last_step = max(self._last_step, trainer.step)
        models = self._models[trainer.writer]
        models += trainer.saved[-3:]
        if self._chance.random() < 0.3:
            models.append(trainer.state)
        self._check_end(process)
        if self._stormy and self._chance.random() < 0.8:  # or the others go on without it
            for other in launch.alive:
                self._loop.call_later(self._chance.uniform(0, 3), other.crash)
        if self._stormy:
            self._loop.call_later(self._chance.uniform(0.1, 10), self._replace_trainers)

    def _replace_trainers(self) -> None:
        """Start trainers where none are whole any more."""
        if self._stormy and not any(len(launch.alive) == launch.count for launch in self._launches):
            self._launch()

    def _start_reader(self, *, have: bool = True) -> None:
        """Start a reader that holds nothing, or what another one holds."""
        others = [reader for reader in self._readers.values() if have and reader.delivered]
        before = self._chance.choice(others) if others and self._chance.random() < 0.3 else None
        self._follow_in(self._new_process("reader"), before)

    def _follow_in(self, process: Process, before: Follower | None) -> None:
        reader = Follower(
            process,
            SimulatedTransport(self._store, process),
            oracle=self._oracle,
            retry=self._retry,
            latest=self._chance.random() < 0.5,
            lease=self._chance.choice(_LEASES),
            have=before.states if before is not None else {},
            busy=self._busy_time,
            counts=self._counts,
        )
        self._readers[process] = reader
        process.start(reader.run(), ended=partial(self._reader_ended, reader))

    def _busy_time(self) -> float:
        return self._chance.expovariate(1 / self._busy) if self._stormy and self._busy else 0.0

    def _reader_ended(self, reader: Follower, process: Process) -> None:
        self._check_end(process)
        if self._closed:
            return
        keeps = self._chance.random() < 0.6
        again = self._new_process("reader")

        def start() -> None:
            if self._readers.pop(process, None) is not None:
                self._follow_in(again, reader if keeps else None)

        self._loop.call_later(self._chance.uniform(0.1, 10), start)

    def _start_pruner(self) -> Process:
        process = self._new_process("pruner")
        pruner = Pruner(
            SimulatedTransport(self._store, process),
            self._policy,
            retry=self._retry,
            clock=process.clock,
            draw=process.draw,
        )

        async def prune() -> None:
            pruning = await pruner.prune()
            self._counts["removed records"] += len(pruning.removal.records)
            self._counts["removed garbage"] += len(pruning.garbage)
            self._counts["held by leases"] += bool(pruning.removal.held_by)

        self._pruners[process] = None
        process.start(prune(), ended=self._pruner_ended)
        if self._stormy and self._chance.random() < 0.3:
            process.doom(self._chance.randint(1, 30), "meanwhile")
        return process

    def _pruner_ended(self, process: Process) -> None:
        del self._pruners[process]
        if not (process.failure is None or isinstance(process.failure, TransportError)):
            self._fail(process.failure)

    def _check_end(self, process: Process) -> None:
        """Let nothing but faults end a process."""
        self._counts["crashes"] += process.dead
        self._counts["given up"] += process.failure is not None
        if not may_end(process.failure):
            assert process.failure is not None
            self._fail(process.failure)
