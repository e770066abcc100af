"""Catch-up: the cheapest messages that lead from what a reader has to where it wants to be.

States are nodes, messages are edges: an anchor leads from nothing to its version, a delta from its base to its version.
Versions with one fingerprint are one state, which a trainer comes back to that resumes from an older checkpoint: a
message that leads to one of them leads there from the others too, and then its payload is not needed. An edge costs its
payload and a constant; the cheapest path is found from the target backwards (Dijkstra 1959), so that a reader that is
one step behind looks at one step. Writers are planned one by one.

Whoever keeps messages sorted by the version that they lead into plans in time for the versions between the reader and
the target, and for those that are the same state as one of them, whatever the history behind them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import RetentionGapError
from .message import Kind, Message
from .version import VersionVector

__all__ = ["MESSAGE_COST", "Fingerprint", "Plan", "Ways", "plan", "plan_along"]

MESSAGE_COST = 16 << 10
"""What a message costs besides its payload, in bytes: about what a request and a decoder's start take on a fast
network, so that one composed delta is preferred to a chain of almost empty ones."""

_NOTHING = 0


class Fingerprint(NamedTuple):
    """What tells a state from another: its bits, and the tensors that they are the bits of.

    Attributes:
        digest: Of the bits; it knows neither aliases nor how elements are divided into segments.
        schema: The checksum of the schema.
    """

    digest: int
    schema: bytes

    @classmethod
    def before(cls, message: Message) -> Fingerprint | None:
        """Return what tells the state that a message starts from; None for an anchor."""
        if message.digest_before is None:
            return None
        return cls(message.digest_before, message.schema.checksum)

    @classmethod
    def after(cls, message: Message) -> Fingerprint:
        """Return what tells the state that a message leads to."""
        return cls(message.digest_after, message.schema.checksum)

    def __str__(self) -> str:
        return f"digest {self.digest:016x} and schema {self.schema.hex()[:16]}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The messages that lead to a state.

    Attributes:
        by_writer: For each writer of the target, sorted, the messages to apply, in order; none if it is there already.
            A writer's messages begin with an anchor, or with a delta from what the reader has.
    """

    by_writer: Mapping[str, tuple[Message, ...]]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, writer by writer, each in order."""
        return tuple(message for path in self.by_writer.values() for message in path)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all messages."""
        return sum(message.nbytes for message in self.messages)


@dataclass(slots=True)
class Ways:
    """One writer's messages, as a planner wants them.

    Attributes:
        into: The messages by the version that they lead into, each list in the order of the log.
        twins: For a version, all that are the same state, itself among them, in order; one list for all of them. Most
            have none.
    """

    into: dict[int, list[Message]] = field(default_factory=dict)
    twins: dict[int, list[int]] = field(default_factory=dict)
    _first: dict[Fingerprint, int] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Ways:
        """Return the ways that the messages of one log are, in any order."""
        ways = cls()
        messages = sorted(messages, key=lambda message: message.position)
        states = {message.version: Fingerprint.after(message) for message in messages}
        for message in messages:
            before = Fingerprint.before(message)
            if before is not None:
                states.setdefault(message.base[message.writer], before)
        for version in sorted(states):
            ways.note(version, states[version])
        for message in messages:
            ways.add(message)
        return ways

    def note(self, version: int, state: Fingerprint) -> None:
        """Note what state a version is, once."""
        first = self._first.setdefault(state, version)
        if first != version:
            same = self.twins.setdefault(first, [first])
            insort(same, version)
            self.twins[version] = same

    def add(self, message: Message) -> bool:
        """Add a message, and return whether it is the first that leads to its version."""
        leading = self.into.setdefault(message.version, [])
        leading.append(message)
        return len(leading) == 1

    def keep(self, messages: Iterable[Message]) -> None:
        """Forget all messages but these."""
        self.into = {}
        for message in messages:
            self.add(message)


def plan(messages: Iterable[Message], *, have: VersionVector | None, target: VersionVector) -> Plan:
    """Return the cheapest way to a state; of equally cheap ones that with fewer messages, then that from what is had.

    The order of `messages` makes no difference. Time grows with their number, and little else; `plan_along` is for
    whoever keeps them sorted.

    Args:
        messages: What the topic has.
        have: The state to start from; None is nothing. A version that no message leads on from counts as nothing.
        target: The state to reach.

    Raises:
        RetentionGapError: If the target cannot be reached; it says what is missing.
    """
    logs: dict[str, list[Message]] = {writer: [] for writer in target}
    for message in messages:
        if message.writer in logs:
            logs[message.writer].append(message)
    return plan_along({writer: Ways.of(log) for writer, log in logs.items()}, have=have, target=target)


def plan_along(ways: Mapping[str, Ways], *, have: VersionVector | None, target: VersionVector) -> Plan:
    """Return what `plan` does, in time that grows with the versions between what is had and the target alone.

    Args:
        ways: For each writer, its messages.
        have: The state to start from; None is nothing. A version that no message leads on from counts as nothing.
        target: The state to reach.

    Raises:
        RetentionGapError: If the target cannot be reached; it says what is missing.
    """
    have = have or VersionVector()
    return Plan({w: _path(w, ways.get(w, Ways()), have=have.of(w), target=version) for w, version in target.items()})


def _path(writer: str, ways: Ways, *, have: int, target: int) -> tuple[Message, ...]:
    """Return one writer's cheapest path, from the messages that lead into each version."""
    onward: dict[int, Message] = {}
    costs = {target: (0, 0)}
    # Of each list of twins, how many were looked at: from a version that costs more, they cost more.
    looked: dict[int, int] = {}
    # Of equally cheap origins the greatest version comes first: what the reader has, before nothing.
    heap = [(0, 0, -target)]
    while heap:
        cost, hops, version = heapq.heappop(heap)
        version = -version
        if version in (have, _NOTHING):
            return _followed(onward, version, target)
        if (cost, hops) > costs[version]:
            continue
        leading = ways.into.get(version, ())
        edges = [
            (_NOTHING if message.kind is Kind.ANCHOR else message.base[writer], message.nbytes, message)
            for message in leading
        ]
        twins = ways.twins.get(version)
        if twins and leading:
            end = bisect_left(twins, version)
            edges += [(twin, 0, leading[0]) for twin in twins[looked.get(id(twins), 0) : end]]
            looked[id(twins)] = max(end, looked.get(id(twins), 0))
        for origin, nbytes, message in edges:
            reached = (cost + nbytes + MESSAGE_COST, hops + 1)
            if origin not in costs or reached < costs[origin]:
                costs[origin], onward[origin] = reached, message
                heapq.heappush(heap, (*reached, -origin))
    raise _gap(writer, ways, have=have, target=target, reached=min(costs))


def _followed(onward: Mapping[int, Message], version: int, target: int) -> tuple[Message, ...]:
    path = []
    while version != target:
        path.append(onward[version])
        version = onward[version].version
    return tuple(path)


def _gap(writer: str, ways: Ways, *, have: int, target: int, reached: int) -> RetentionGapError:
    """Return the error for a target that nothing leads to; `reached` is the earliest version that leads to it."""
    where, into = f"version {target} of writer {writer!r}", ways.into
    if target not in into:
        kept = f"it has versions {min(into)} to {max(into)}" if into else "it has none of this writer"
        text = f"{where} is not in the topic ({kept}); it was removed, or is not published yet: choose another version"
    else:
        held = f"version {have}" if have else "nothing"
        text = (
            f"{where} cannot be reached from {held}: the chain of deltas behind it begins at version {reached}, and "
            "neither an anchor nor a delta that leads there is in the topic any more; "
            "let the publisher publish an anchor, or start from a checkpoint that holds a version of the chain"
        )
    return RetentionGapError(text, writer=writer)
