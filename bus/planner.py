"""Catch-up: the cheapest messages that lead from what a reader has to where it wants to be.

States are nodes, messages are edges: an anchor leads from nothing to its version, a delta from its base to its version.
An edge costs its payload and a constant; the cheapest path is found from the target backwards (Dijkstra 1959), so that
a reader that is one step behind looks at one step. Writers are planned one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import RetentionGapError
from .message import Kind, Message
from .version import VersionVector

__all__ = ["MESSAGE_COST", "Plan", "plan"]

MESSAGE_COST = 16 << 10
"""What a message costs besides its payload, in bytes: about what a request and a decoder's start take on a fast
network, so that one composed delta is preferred to a chain of almost empty ones."""

_NOTHING = 0


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


def plan(messages: Iterable[Message], *, have: VersionVector | None, target: VersionVector) -> Plan:
    """Return the cheapest way to a state; of equally cheap ones that with fewer messages, then that from what is had.

    The order of `messages` makes no difference. Time grows with their number, and little else.

    Args:
        messages: What the topic has, such as a sequencer's history.
        have: The state to start from; None is nothing. A version that no message leads on from counts as nothing.
        target: The state to reach.

    Raises:
        RetentionGapError: If the target cannot be reached; it says what is missing.
    """
    have = have or VersionVector()
    leading: dict[str, dict[int, list[Message]]] = {writer: {} for writer in target}
    for message in messages:
        if message.writer in leading:
            leading[message.writer].setdefault(message.version, []).append(message)
    return Plan({w: _path(w, into, have=have.of(w), target=target[w]) for w, into in leading.items()})


def _path(writer: str, into: Mapping[int, list[Message]], *, have: int, target: int) -> tuple[Message, ...]:
    """Return one writer's cheapest path, from the messages that lead into each version."""
    onward: dict[int, Message] = {}
    costs = {target: (0, 0)}
    # Of equally cheap origins the greatest version comes first: what the reader has, before nothing.
    heap = [(0, 0, -target)]
    while heap:
        cost, hops, version = heapq.heappop(heap)
        version = -version
        if version in (have, _NOTHING):
            return _followed(onward, version, target)
        if (cost, hops) > costs[version]:
            continue
        for message in sorted(into.get(version, ()), key=lambda message: message.position):
            origin = _NOTHING if message.kind is Kind.ANCHOR else message.base[writer]
            reached = (cost + message.nbytes + MESSAGE_COST, hops + 1)
            if origin not in costs or reached < costs[origin]:
                costs[origin], onward[origin] = reached, message
                heapq.heappush(heap, (*reached, -origin))
    raise _gap(writer, into, have=have, target=target, reached=min(costs))


def _followed(onward: Mapping[int, Message], version: int, target: int) -> tuple[Message, ...]:
    path = []
    while version != target:
        path.append(onward[version])
        version = onward[version].version
    return tuple(path)


def _gap(writer: str, into: Mapping[int, list[Message]], *, have: int, target: int, reached: int) -> RetentionGapError:
    """Return the error for a target that nothing leads to; `reached` is the earliest version that leads to it."""
    where = f"version {target} of writer {writer!r}"
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
