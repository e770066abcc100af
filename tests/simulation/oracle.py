"""What must hold in a topic whatever happens to its users, found from what the store sees and what they are told.

It reads records and leases by itself and knows neither the sequencer, nor the planner, nor retention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .process import Process
from .state import State, digest

if TYPE_CHECKING:
    from .store import Store

__all__ = ["Oracle", "Said", "ViolationError"]

_FRAME = 8
"""Bytes in front of a record's body."""


class ViolationError(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a record says, as far as it matters here.

    Attributes:
        life: Which process wrote it.
    """

    position: int
    life: str
    epoch: int
    base: int
    version: int
    before: int | None
    after: int
    keys: tuple[str, ...]
    step: int
    generation: int
    members: frozenset[str]


@dataclass(slots=True)
class _Lease:
    holds: dict[str, int]
    stored: float
    ends: float


class Oracle:
    """Watches, and raises `ViolationError`.

    Attributes:
        acknowledged: How many messages somebody was told are durable.
        compared: How many states of readers were compared with what a trainer had.
    """

    def __init__(self) -> None:
        self.acknowledged = 0
        self.compared = 0
        self._logs: dict[str, list[Said]] = defaultdict(list)
        self._had: dict[tuple[str, str], dict[int, State]] = defaultdict(dict)
        self._states: dict[str, dict[int, State]] = defaultdict(dict)
        self._fenced: set[str] = set()
        self._leading: dict[str, dict[int, Said]] = defaultdict(dict)
        self._steps: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        self._newest: tuple[int, int, tuple[tuple[str, int], ...]] = (0, 0, ())
        self._naming: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._leases: dict[str, list[_Lease]] = defaultdict(list)
        self._lease_of: dict[str, _Lease] = {}

    # What trainers and readers tell

    def had(self, log: str, life: str, state: State) -> None:
        """A trainer is about to publish a state."""
        self._had[log, life][digest(state)] = state

    def acknowledge(self, log: str, position: int, version: int, state: State) -> None:
        """A trainer was told that a message is durable."""
        self.acknowledged += 1
        there = self._logs[log]
        if position >= len(there) or there[position].version != version or there[position].after != digest(state):
            raise ViolationError(f"position {position} of {log} was acknowledged, and is not there")

    def fenced(self, life: str) -> None:
        """A trainer was told to stop."""
        self._fenced.add(life)

    def holds(self, log: str, version: int, state: State, *, reader: str) -> None:
        """A reader holds a state."""
        self.compared += 1
        if version not in self._states[log]:
            raise ViolationError(f"{reader} holds version {version} of {log}, which was never there")
        if self._states[log][version] != state:
            raise ViolationError(f"{reader} holds {state} as version {version}, which is {self._states[log][version]}")

    @property
    def newest(self) -> dict[str, int]:
        """The newest cut that ever was in the store: the version of each writer."""
        return dict(self._newest[2])

    def delivered(self, state: Mapping[str, int], *, before: Mapping[str, int], reader: str) -> None:
        """A reader handed a state over, behind another."""
        said = [self._leading[log][version] for log, version in state.items()]
        if len({(one.generation, one.step, one.members) for one in said}) != 1 or said[0].members != state.keys():
            raise ViolationError(f"{reader} was given {dict(state)}, which no group had at one step")
        generations = [self._leading[log][version].generation for log, version in before.items()]
        if generations and generations[0] > said[0].generation:
            raise ViolationError(f"{reader} went back from generation {generations[0]} to {said[0].generation}")
        onward = all(version >= before.get(log, 0) for log, version in state.items())
        if generations and generations[0] == said[0].generation and not (onward and state != before):
            raise ViolationError(f"{reader} went from {dict(before)} to {dict(state)}")

    # What the store does

    def appended(self, log: str, position: int, record: bytes, store: Store) -> None:
        said, there = read(record), self._logs[log]
        what = f"{said.life} wrote position {position} of {log}"
        if position != len(there):
            raise ViolationError(f"{what} in front of the log, or behind a hole: it has {len(there)} records")
        if said.position != position:
            raise ViolationError(f"{what} with a record for {said.position}")
        if said.life in self._fenced:
            raise ViolationError(f"{what} though it had been fenced")
        if there and (said.epoch < there[-1].epoch or said.generation < there[-1].generation):
            raise ViolationError(f"{what} with epoch {said.epoch} behind {there[-1].epoch}")
        if any(other.epoch == said.epoch and other.life != said.life for other in there):
            raise ViolationError(f"{what} with the epoch {said.epoch} of another process")
        state = self._had[log, said.life].get(said.after)
        if state is None:
            raise ViolationError(f"{what} with a state that it never had")
        states = self._states[log]
        if states.setdefault(said.version, state) != state:
            raise ViolationError(f"{what} with other bits of version {said.version}")
        if said.base and (said.base not in states or digest(states[said.base]) != said.before):
            raise ViolationError(f"{what} from version {said.base}, which is not that state")
        for key in said.keys:
            if key not in store.blobs:
                raise ViolationError(f"{what} before, or after, {key} was there")
            self._naming[key].add((log, position))
        there.append(said)
        known = self._leading[log].setdefault(said.version, said)
        step = self._steps[said.generation, said.step if len(said.members) > 1 else said.version]
        step[log] = max(step.get(log, 0), said.version)
        if known.generation == said.generation and step.keys() == said.members:
            self._newest = max(self._newest, (said.generation, sum(step.values()), tuple(sorted(step.items()))))

    def removed(self, log: str, position: int, store: Store, process: Process) -> None:
        said = self._logs[log][position]
        for key in said.keys:
            self._naming[key].discard((log, position))
        now = store.loop.time()
        for folder, leases in self._leases.items():
            held = max(lease.holds.get(log, 0) for lease in leases)
            if said.version > held and _covers(leases, process.began, now):
                raise ViolationError(
                    f"{process.name} removed version {said.version} of {log} at {now:.2f}, which {folder} needed that "
                    f"held {held}"
                )
        self._check_way(log, store)

    def stored(self, key: str, data: bytes, now: float) -> None:
        if key.startswith("leases/"):
            told = msgspec.msgpack.decode(data)
            lease = _Lease(told["holds"], now, now + told["seconds"])
            self._leases[key.rpartition("/")[0]].append(lease)
            self._lease_of[key] = lease

    def deleted(self, key: str, now: float, process: Process) -> None:
        if self._naming[key]:
            raise ViolationError(f"{process.name} removed {key}, which {sorted(self._naming[key])} name")
        lease = self._lease_of.get(key)
        if lease is not None:
            if process.name.startswith("pruner") and now < lease.ends:
                raise ViolationError(f"{process.name} removed {key}, which was alive")
            lease.ends = min(lease.ends, now)

    def _check_way(self, log: str, store: Store) -> None:
        """The newest version must be reached from nothing, by what is there."""
        there = [self._logs[log][position] for position in sorted(store.records[log])]
        reached, size = {0}, 0
        while len(reached) > size:
            size = len(reached)
            for said in there:
                if said.base in reached and all(key in store.blobs for key in said.keys):
                    reached.add(said.version)
        needed = self.newest.get(log)
        if needed is not None and needed not in reached:
            raise ViolationError(f"nothing leads to version {needed} of {log} any more")


def read(record: bytes) -> Said:
    """Return what a record says."""
    body = msgspec.msgpack.decode(record[_FRAME:])
    blobs = (body["schema"], *body["blobs"])
    cohort = body.get("cohort", {})
    ranks, stem = cohort.get("ranks", 0), body["writer"].rpartition("-")[0]
    return Said(
        position=body["position"],
        life=body["metadata"]["life"],
        epoch=body["epoch"],
        base=body["base"].get(body["writer"], 0),
        version=body["version"],
        before=body["digest_before"],
        after=body["digest_after"],
        keys=tuple(blob["key"] for blob in blobs),
        step=body["step"],
        generation=cohort.get("generation", 0),
        members=frozenset(f"{stem}-{rank}" for rank in range(ranks)) if ranks else frozenset(body["group"]),
    )


def _covers(leases: list[_Lease], begin: float, end: float) -> bool:
    """Return whether at each moment from one time to another a lease was alive."""
    covered = begin
    for lease in sorted(leases, key=lambda lease: lease.stored):
        if lease.stored <= covered:
            covered = max(covered, lease.ends)
    return covered > end
