"""The sequencer: messages in, in any order; history and cuts out.

Theory of operation. Each writer has a log. A message that is fed waits until every earlier position of its log is
known; then it enters history. So history grows in the order of the log whatever the order of feeding, and nothing that
comes late can reorder it. On entering, a message is held to the rules below; one that breaks a rule raises, and leaves
the sequencer as it was.

- A position holds one message; another one there is a conflict, the same one again is nothing new.
- Epochs never decrease along a log: what follows a newer incarnation of the writer was written by a zombie.
- Versions increase along a log. A message may lead again to a version that is known (the anchor of a step, which may
  land after later deltas; a delta from an older base); its digest and schema must be those known.
- A delta starts from a version that is known, with the digest and schema known.
- Generations of the writer's group never decrease along a log, and each is of one incarnation of the writer, and of the
  same members in all logs.

When retention removed the beginning of a log, versions that stood there are unknown. A base or late anchor among them
is taken at its word: the digests catch a lie before it is applied, and a false alarm would stop every reader.

Which states a reader may apply, `deltabus.bus.cuts` says.

It has no clock, no randomness and no I/O. Memory grows with the headers of messages kept, a few kB each; `begin` frees
those that retention removed, or that its caller needs no more. What state each version is stays, as the rules ask.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Self

from .cuts import Cuts, Reached, Usable
from .errors import ConflictError, UsageError
from .message import Message
from .planner import Fingerprint, Plan, Ways, plan_along
from .progress import Awaited
from .version import VersionVector

__all__ = ["Cut", "Sequencer"]

_NOTHING = VersionVector()


@dataclass(frozen=True, slots=True)
class Cut:
    """A state that a reader may apply.

    Attributes:
        step: The training step that the writers have reached that moved on last.
        state: The version of each writer.
        messages: The messages known to lead to those versions, by writer and position.
    """

    step: int
    state: VersionVector
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Head:
    """Where a log's history ends, as far as the rules ask.

    Attributes:
        position: The next position to enter.
        epoch: Of the last message; 0 before the first.
        generation: Of the last message's group.
        version: The greatest version; 0 before the first.
        needs: What the writer had applied of others.
        lost_from: Versions from here on may be unknown because retention removed them; None when nothing is missing.
    """

    position: int = 0
    epoch: int = 0
    generation: int = 0
    version: int = 0
    needs: VersionVector = _NOTHING
    lost_from: int | None = None

    def may_be_lost(self, version: int) -> bool:
        return self.lost_from is not None and version >= self.lost_from


class _Log:
    """One writer's history and what waits to enter it."""

    __slots__ = ("entered", "head", "start", "states", "waiting", "ways")

    def __init__(self) -> None:
        self.head = _Head()
        self.start = 0
        self.entered: dict[int, Message] = {}
        self.waiting: dict[int, Message] = {}
        self.ways = Ways()
        self.states: dict[int, Fingerprint] = {}


class Sequencer:
    """Brings messages into order and finds the states that a reader may apply.

    Args:
        topic: The topic's URL, named in errors.
        only: The writers that are fed; what rests on others does not wait for them. None is all.

    Examples:
        Drive it in a loop, and each cut comes once, in order:

        >>> sequencer, state = Sequencer(), VersionVector()
        >>> while cut := sequencer.next_cut(state):
        ...     state = cut.state
    """

    def __init__(self, *, topic: str = "", only: Collection[str] | None = None) -> None:
        self._topic = topic
        self._logs: dict[str, _Log] = {}
        self._cuts = Cuts(only)

    @classmethod
    def of(cls, messages: Iterable[Message], *, topic: str = "") -> Self:
        """Return a sequencer of these messages, each log of which begins with its first.

        Raises:
            ConflictError: If they break a rule of history.
        """
        sequencer = cls(topic=topic)
        firsts: set[str] = set()
        for message in sorted(messages, key=lambda message: (message.writer, message.position)):
            if message.writer not in firsts:
                firsts.add(message.writer)
                sequencer.begin(message.writer, message.position)
            sequencer.feed(message)
        return sequencer

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history: every message that entered and was not removed by retention, by writer and position."""
        return tuple(chain.from_iterable(self._logs[writer].entered.values() for writer in sorted(self._logs)))

    def messages_of(self, writer: str) -> tuple[Message, ...]:
        """Return the history of one writer, by position."""
        return tuple(self._logs[writer].entered.values()) if writer in self._logs else ()

    def feed(self, message: Message) -> None:
        """Take a message, in any order and any number of times.

        Raises:
            ConflictError: If it, or one that waited for it, breaks a rule of history; nothing was changed.
        """
        log = self._logs.get(message.writer) or _Log()
        if message.position < log.start:
            return
        known = log.entered.get(message.position) or log.waiting.get(message.position)
        if known is not None:
            if known != message:
                raise self._conflict(message, "differs from the message that was read there before")
            return
        if message.position != log.head.position:
            self._logs[message.writer] = log
            log.waiting[message.position] = message
            return
        self._enter(message.writer, log, log.head, {message.position: message})

    def begin(self, writer: str, position: int) -> None:
        """Forget what stood before a position of a log, and do not wait for it: it was removed, or is needed no more.

        Raises:
            UsageError: If the position is negative.
            ConflictError: If a message that waited for this breaks a rule of history; nothing was changed.
        """
        if position < 0:
            raise UsageError(f"log {writer!r} cannot begin at position {position}; the first is 0")
        log = self._logs.get(writer) or _Log()
        if position <= log.start:
            return
        head = log.head
        if position > head.position:
            lost_from = head.version + 1 if head.lost_from is None else head.lost_from
            head = replace(head, position=position, lost_from=lost_from)
        self._enter(writer, log, head, {})
        log.start = position
        for kept in (log.entered, log.waiting):
            for gone in [place for place in kept if place < position]:
                del kept[gone]
        before = log.ways.into.keys()
        log.ways.keep(log.entered.values())
        self._cuts.forget(writer, before - log.ways.into.keys())

    def holes(self) -> dict[str, tuple[range, ...]]:
        """Return, for each log that has any, the positions before the greatest seen that were not fed."""
        found: dict[str, tuple[range, ...]] = {}
        for writer, log in sorted(self._logs.items()):
            ends = [log.head.position - 1, *sorted(log.waiting)]
            holes = tuple(range(a + 1, b) for a, b in pairwise(ends) if a + 1 < b)
            if holes:
                found[writer] = holes
        return found

    def newest_cut(self, after: VersionVector | None = None, *, usable: Usable | None = None) -> Cut | None:
        """Return the newest cut that lies after a state; None when there is none.

        Args:
            after: The state; None is nothing.
            usable: Tells of a writer's version whether it can be had; None says that all can.
        """
        return self._cut(after, self._cuts.newest(after or _NOTHING, usable))

    def next_cut(self, after: VersionVector | None = None) -> Cut | None:
        """Return the first cut that lies after a state; None when there is none."""
        return self._cut(after, self._cuts.next(after or _NOTHING))

    def is_cut(self, state: VersionVector) -> bool:
        """Return whether a state is a cut of each group that has versions in it, and what these rest on is in it."""
        return self._cuts.is_cut(state)

    def waiting(self, after: VersionVector | None = None) -> tuple[Awaited, ...]:
        """Return what keeps steps from a reader beyond whose state no cut lies.

        For each group these are the first step beyond its newest cut that some members have and others lack, and the
        first cut that rests on something that nobody has published.

        Args:
            after: The state; None is nothing.
        """
        return self._cuts.waiting(after or _NOTHING)

    def generation(self, writer: str, version: int) -> int:
        """Return the generation of the group that published a version of a writer; 0 where that is not known."""
        return self._cuts.generation(writer, version)

    def comes_after(self, later: tuple[str, int], earlier: tuple[str, int]) -> bool:
        """Return whether a writer had applied a version of another when it published one of its own."""
        return self._cuts.needs(*later).of(earlier[0]) >= earlier[1]

    def twins(self, writer: str, version: int) -> Sequence[int]:
        """Return the versions of a writer that are the same state as a version, itself among them."""
        return self._logs[writer].ways.twins.get(version, ()) if writer in self._logs else ()

    def plan(self, *, have: VersionVector | None, target: VersionVector) -> Plan:
        """Return the cheapest messages of the history that lead to a state; see `deltabus.bus.planner.plan`.

        Time grows with the versions between what is had and the target, not with the history.

        Args:
            have: The state to start from; None is nothing. A version that no message leads on from counts as nothing.
            target: The state to reach.

        Raises:
            RetentionGapError: If the target cannot be reached; it says what is missing.
        """
        return plan_along({writer: self._ways(writer) for writer in target}, have=have, target=target)

    def _ways(self, writer: str) -> Ways:
        return self._logs[writer].ways if writer in self._logs else Ways()

    def _cut(self, after: VersionVector | None, reached: Iterable[Reached] | None) -> Cut | None:
        if reached is None:
            return None
        reached = tuple(reached)
        state = self._cuts.state(after or _NOTHING, reached)
        messages = (self._ways(writer).into.get(version, ()) for writer, version in state.items())
        return Cut(max(cut.step for cut in reached), state, tuple(chain.from_iterable(messages)))

    def _enter(self, writer: str, log: _Log, head: _Head, fed: dict[int, Message]) -> None:
        """Let what is next into history, and what waited for it; all of it keeps the rules, or nothing is changed."""
        news: dict[int, Fingerprint] = {}
        states = ChainMap(news, log.states)
        groups: dict[int, frozenset[str]] = {}
        run: list[tuple[Message, VersionVector]] = []
        while message := fed.get(head.position) or log.waiting.get(head.position):
            wrong = self._cuts.check(groups, message)
            if wrong:
                raise self._conflict(message, wrong)
            head = self._checked(head, states, message)
            run.append((message, head.needs))
        self._logs[writer] = log
        log.head = head
        for version, state in news.items():
            log.states[version] = state
            log.ways.note(version, state)
        for message, needs in run:
            log.waiting.pop(message.position, None)
            log.entered[message.position] = message
            self._cuts.claim(message)
            if log.ways.add(message):
                self._cuts.enter(message, needs)

    def _checked(self, head: _Head, states: MutableMapping[int, Fingerprint], message: Message) -> _Head:
        """Return the head after a message that keeps the rules, and note the states that it tells."""
        if message.epoch < head.epoch:
            raise self._conflict(message, f"was written by epoch {message.epoch} after one of epoch {head.epoch}")
        if message.generation < head.generation:
            raise self._conflict(
                message, f"is of generation {message.generation} of its group, after one of {head.generation}"
            )
        if message.generation == head.generation > 0 and message.epoch != head.epoch:
            raise self._conflict(
                message,
                f"is of generation {message.generation} of its group, as epoch {head.epoch} was before: "
                "a group takes a new generation when it restarts",
            )
        before, after = Fingerprint.before(message), Fingerprint.after(message)
        if before is not None:
            base = message.base[message.writer]
            if base not in states and not head.may_be_lost(base):
                raise self._conflict(message, f"starts from version {base}, which the log does not have")
            known = states.setdefault(base, before)
            if known != before:
                raise self._conflict(message, f"starts from {before}, but version {base} has {known}")
            after = after._replace(schema=known.schema)  # the same object, so that a long log keeps one of them
        version = message.version
        if version <= head.version and version not in states and not head.may_be_lost(version):
            raise self._conflict(message, f"leads to version {version} behind version {head.version}")
        known = states.setdefault(version, after)
        if known != after:
            raise self._conflict(message, f"leads to version {version} with {after}, but that version has {known}")
        return replace(
            head,
            position=message.position + 1,
            epoch=message.epoch,
            generation=message.generation,
            version=max(head.version, message.version),
            needs=head.needs.merge(message.needs) if message.needs else head.needs,
        )

    def _conflict(self, message: Message, what: str) -> ConflictError:
        return ConflictError(
            f"{message.kind} {message.position} of writer {message.writer!r} in {self._topic or 'this topic'} {what}; "
            "two processes wrote this log, or it was changed by hand: publish to a new topic",
            topic=self._topic,
            writer=message.writer,
        )
