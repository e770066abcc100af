"""The subscriber's copy of a topic's bits: a stager for each writer, and the states that they make together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from deltabus.bus.errors import ConflictError, CorruptPayloadError, KeyNotFoundError, MessageFormatError
from deltabus.bus.message import Message
from deltabus.bus.planner import Fingerprint
from deltabus.bus.version import VersionVector
from deltabus.codecs.apply import Target
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.slices import overlapping_slices

from .fetching import in_thread
from .staged import Staged, StagedState
from .stager import HeldState, Stager

__all__ = ["UNAVAILABLE", "Lanes"]

UNAVAILABLE = (KeyNotFoundError, CorruptPayloadError, MessageFormatError)
"""What says that a message cannot be had, so that another way is looked for."""

_WRITERS = 4
"""Writers that are staged at once, each with downloads of its own."""


class Lanes:
    """Stages the messages of all writers, each by itself, and puts a state together when all have arrived.

    Args:
        make: Makes the stager of a writer.
        topic: Named in errors.
    """

    def __init__(self, make: Callable[[], Stager], *, topic: str) -> None:
        self._make = make
        self._topic = topic
        self._stagers: dict[str, Stager] = {}
        self._idle: dict[str, Stager] = {}
        self._pending: dict[str, Staged] = {}
        self._writers: frozenset[str] = frozenset()
        self._checked: tuple[list[tuple[str, Schema]], list[tuple[str, str, str]]] = ([], [])

    @property
    def state(self) -> VersionVector | None:
        """How far each writer's bits are; None for nothing."""
        return VersionVector({writer: stager.version for writer, stager in self._stagers.items()}) or None

    @property
    def moved(self) -> bool:
        """Whether any writer's bits moved on since a state was returned."""
        return bool(self._pending)

    async def adopt(
        self, bind: Callable[[Schema], Target], messages: Mapping[str, Sequence[Message]]
    ) -> list[Target] | None:
        """Start from a model that holds states of the topic's writers.

        Args:
            bind: Finds the model's tensors for a schema.
            messages: The messages of each writer.

        Returns:
            The model's tensors, writer by writer, if it holds a state of each; None if it does not. What it holds of
            some is kept then, and the rest comes whole.

        Raises:
            SchemaMismatchError: If the model cannot hold the tensors of a writer's newest message.
            TransportError: If a schema cannot be fetched.
        """
        targets: list[Target] = []
        for writer, log in sorted(messages.items()):
            stager = self._make()
            target = await stager.adopt(bind, log)
            if target is None:
                self._idle[writer] = stager  # it knows the schema
            else:
                self._stagers[writer] = stager
                targets.append(target)
        if len(targets) < len(messages):
            return None
        self._writers = frozenset(messages)
        return targets

    def hold(self, held: HeldState, messages: Sequence[Message]) -> bool:
        """Start from bits that are known to be a state of a writer; return whether the topic has that state.

        Args:
            held: The bits, and what led to them, wherever that stands.
            messages: The writer's messages here.
        """
        wanted = held.message
        same = [message for message in messages if Fingerprint.after(message) == Fingerprint.after(wanted)]
        if not same:
            return False
        stager = self._make()
        stager.hold(held.shadow, digest=wanted.digest_after, version=max(message.version for message in same))
        self._stagers[wanted.writer] = stager
        self._writers = frozenset((wanted.writer,))
        return True

    async def take(self, messages: Iterable[Message], unavailable: Callable[[Message, Exception], None]) -> None:
        """Stage messages, writer by writer, several at once; what lies behind one that cannot be had is left.

        Args:
            messages: Those of each writer in order.
            unavailable: Told of each message that cannot be had, and why.

        Raises:
            DivergedError: If a message does not start from the state held.
            StorageFullError: If there is no room for the copy of the weights.
            TransportError: If a blob cannot be fetched.
        """
        logs: dict[str, list[Message]] = {}
        for message in messages:
            logs.setdefault(message.writer, []).append(message)
        waiting = deque(logs.values())

        async def work() -> None:
            while waiting:
                log = waiting.popleft()
                for message in log:
                    try:
                        await self._take_one(message)
                    except UNAVAILABLE as error:
                        unavailable(message, error)
                        break

        workers = [asyncio.create_task(work()) for _ in range(min(_WRITERS, len(logs)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _take_one(self, message: Message) -> None:
        stager = self._stagers.get(message.writer) or self._idle.pop(message.writer, None) or self._make()
        staged = await stager.stage(message)
        self._stagers[message.writer] = stager
        before = self._pending.get(message.writer)
        # Not in one assignment: when this is cancelled, nothing goes on anyway.
        self._pending[message.writer] = staged if before is None else await in_thread(before.followed_by, staged)

    def complete(
        self, writers: Collection[str], *, comes_after: Callable[[tuple[str, int], tuple[str, int]], bool]
    ) -> StagedState:
        """Return what leads from the state that was returned last to the one held now.

        Args:
            writers: Those that the state is made of; the bits of others are given back.
            comes_after: Tells of two writers with their versions whether the first had applied the second.

        Raises:
            ConflictError: If two writers hold the same elements, and neither had applied the other's; or several did in
                a circle.
        """
        for writer in self._stagers.keys() - writers:
            self._stagers.pop(writer).forget()
            gone = self._pending.pop(writer, None)
            if gone is not None:
                gone.release()
        order, shared = self._in_order(comes_after)
        fresh = any(staged.base is None for staged in self._pending.values())
        whole = fresh or shared or self._writers != frozenset(writers)
        parts: list[Staged] = []
        for writer in order:
            pending = self._pending.pop(writer, None)
            if pending is None or (whole and pending.base is not None):
                still = self._stagers[writer].still(writer, whole=whole)
                pending = still if pending is None else _in_place_of(pending, still)
            parts.append(pending)
        self._writers = frozenset(writers)
        return StagedState(tuple(parts))

    def forget(self) -> None:
        """Give all bits back; when nothing is staged any more."""
        for staged in self._pending.values():
            staged.release()
        for stager in self._stagers.values():
            stager.forget()
        self._pending.clear()
        self._stagers.clear()

    def _in_order(self, comes_after: Callable[[tuple[str, int], tuple[str, int]], bool]) -> tuple[list[str], bool]:
        """Return the writers, each behind those whose elements it overwrites, and whether any does."""
        writers = sorted(self._stagers)
        if len(writers) == 1:
            return writers, False
        versions = {writer: self._stagers[writer].version for writer in writers}
        pairs = self._overlapping()
        behind: dict[str, set[str]] = {writer: set() for writer in writers}
        for one, other, name in pairs:
            first, second = (one, versions[one]), (other, versions[other])
            if comes_after(second, first):
                behind[other].add(one)
            elif comes_after(first, second):
                behind[one].add(other)
            else:
                raise ConflictError(
                    f"writers {one!r} (version {first[1]}) and {other!r} (version {second[1]}) in {self._topic} both "
                    f"hold elements of {name!r}, and neither had applied the other's: give each writer its own tensors "
                    "or slices (`select=`, `TensorSlice`), or let one publish with `after=` what it had applied",
                    topic=self._topic,
                    writer=other,
                )
        order: list[str] = []
        placed: set[str] = set()
        while len(order) < len(writers):  # few overlap
            free = [writer for writer in writers if writer not in placed and behind[writer] <= placed]
            if not free:
                around = [writer for writer in writers if writer not in placed]
                raise ConflictError(
                    f"writers {', '.join(around[:8])} in {self._topic} hold elements of each other, and each says that "
                    "it had applied the next one's, all around: publish with `after=` only what was applied before",
                    topic=self._topic,
                    writer=around[0],
                )
            order += free
            placed.update(free)
        return order, bool(pairs)

    def _overlapping(self) -> list[tuple[str, str, str]]:
        """Return the pairs of writers that hold elements of one tensor in common, with its name."""
        schemas = [(writer, stager.schema_held) for writer, stager in sorted(self._stagers.items())]
        known, pairs = self._checked
        if len(known) == len(schemas) and all(
            name == writer and before is schema for (name, before), (writer, schema) in zip(known, schemas, strict=True)
        ):
            return pairs
        by_name: dict[str, list[tuple[str, TensorSpec]]] = {}
        for writer, schema in schemas:
            for spec in schema.tensors:
                for name in (spec.name, *spec.aliases):
                    by_name.setdefault(name, []).append((writer, spec))
        found: dict[tuple[str, str], str] = {}
        for name, held in by_name.items():
            for one, other in overlapping_slices([spec for _, spec in held]):
                found.setdefault((held[one][0], held[other][0]), name)
        self._checked = schemas, [(one, other, name) for (one, other), name in found.items()]
        return self._checked[1]


def _in_place_of(pending: Staged, still: Staged) -> Staged:
    """Return the whole state with what is told of the way to it."""
    return Staged(
        writer=still.writer,
        schema=still.schema,
        base=None,
        base_digest=None,
        version=still.version,
        digest=still.digest,
        snapshot=still.snapshot,
        messages=pending.messages,
        downloaded=pending.downloaded,
        seconds=pending.seconds,
    )
