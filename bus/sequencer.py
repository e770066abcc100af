"""The sequencer: messages in, in any order; history and cuts out.

Theory of operation. Each writer has a log. A message that is fed waits until every earlier position of its log is
known; then it enters history. So history grows in the order of the log whatever the order of feeding, and nothing that
comes late can reorder it. On entering, a message is held to the rules below; one that breaks a rule raises, and leaves
the sequencer as it was.

- A position holds one message; another one there is a conflict, the same one again is nothing new.
- Epochs never decrease along a log: what follows a newer incarnation of the writer was written by a zombie.
- Versions increase along a log. A message may lead again to a version that is known (the anchor of a step, which may
  land after later deltas; a delta from an older base); its digest must be the one known.
- A delta starts from a version that is known, with the digest known.
- All writers name the same group.

When retention removed the beginning of a log, versions that stood there are unknown. A base or late anchor among them
is taken at its word: the digests catch a lie before it is applied, and a false alarm would stop every reader.

A cut is a version vector at which every writer of the group has reached the same step. A writer that is alone makes
a cut with every version, whatever its step, since a restarted trainer counts its steps again.

It has no clock, no randomness and no I/O. Memory grows with the headers of messages kept, a few kB each; `begin` frees
those that retention removed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from .errors import ConflictError, UsageError
from .message import Kind, Message
from .version import VersionVector

__all__ = ["Cut", "Sequencer"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A state that a reader may apply.

    Attributes:
        step: The training step that all writers have reached.
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
        version: The greatest version; 0 before the first.
        lost_from: Versions from here on may be unknown because retention removed them; None when nothing is missing.
    """

    position: int = 0
    epoch: int = 0
    version: int = 0
    lost_from: int | None = None

    def may_be_lost(self, version: int) -> bool:
        return self.lost_from is not None and version >= self.lost_from


class _Log:
    """One writer's history and what waits to enter it."""

    __slots__ = ("digests", "entered", "head", "leading", "start", "waiting")

    def __init__(self) -> None:
        self.head = _Head()
        self.start = 0
        self.entered: dict[int, Message] = {}
        self.waiting: dict[int, Message] = {}
        self.leading: dict[int, list[Message]] = {}
        self.digests: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class _Reached:
    """A cut's place in the order of cuts; `total` and `versions` grow from one to the next."""

    total: int
    versions: tuple[int, ...]
    step: int
    state: VersionVector

    @classmethod
    def of(cls, step: int, versions: dict[str, int]) -> _Reached:
        state = VersionVector(versions)
        return cls(sum(state.values()), tuple(state.values()), step, state)

    @property
    def order(self) -> tuple[int, tuple[int, ...]]:
        return self.total, self.versions


class Sequencer:
    """Brings messages into order and finds the states that a reader may apply.

    Args:
        topic: The topic's URL, named in errors.

    Examples:
        Drive it in a loop, and each cut comes once, in order:

        >>> sequencer, state = Sequencer(), VersionVector()
        >>> while cut := sequencer.next_cut(state):
        ...     state = cut.state
    """

    def __init__(self, *, topic: str = "") -> None:
        self._topic = topic
        self._logs: dict[str, _Log] = {}
        self._group: frozenset[str] = frozenset()
        self._steps: dict[int, dict[str, int]] = {}
        self._cuts: list[_Reached] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history: every message that entered and was not removed by retention, by writer and position."""
        return tuple(chain.from_iterable(self._logs[writer].entered.values() for writer in sorted(self._logs)))

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
        """Say that retention removed what stood before a position of a log: it is forgotten, and not waited for.

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
        log.leading = {}
        for message in log.entered.values():
            log.leading.setdefault(message.version, []).append(message)
        self._find_cuts_again()

    def holes(self) -> dict[str, tuple[range, ...]]:
        """Return, for each log that has any, the positions before the greatest seen that were not fed."""
        found: dict[str, tuple[range, ...]] = {}
        for writer, log in sorted(self._logs.items()):
            ends = [log.head.position - 1, *sorted(log.waiting)]
            holes = tuple(range(a + 1, b) for a, b in pairwise(ends) if a + 1 < b)
            if holes:
                found[writer] = holes
        return found

    def newest_cut(self, after: VersionVector | None = None) -> Cut | None:
        """Return the newest cut that lies after a state; None when there is none."""
        after = after or VersionVector()
        for reached in reversed(self._cuts):
            if reached.total <= sum(after.values()):
                break
            if reached.state.covers(after):
                return self._cut(reached)
        return None

    def next_cut(self, after: VersionVector | None = None) -> Cut | None:
        """Return the first cut that lies after a state; None when there is none."""
        after = after or VersionVector()
        first = bisect_right(self._cuts, sum(after.values()), key=lambda reached: reached.total)
        for place in range(first, len(self._cuts)):
            if self._cuts[place].state.covers(after):
                return self._cut(self._cuts[place])
        return None

    def _cut(self, reached: _Reached) -> Cut:
        messages = (self._logs[writer].leading[version] for writer, version in reached.state.items())
        return Cut(reached.step, reached.state, tuple(chain.from_iterable(messages)))

    def _enter(self, writer: str, log: _Log, head: _Head, fed: dict[int, Message]) -> None:
        """Let what is next into history, and what waited for it; all of it keeps the rules, or nothing is changed."""
        news: dict[int, int] = {}
        digests = ChainMap(news, log.digests)
        group = self._group
        run: list[Message] = []
        while message := fed.get(head.position) or log.waiting.get(head.position):
            group = group or frozenset(message.group)
            if group != frozenset(message.group):
                ours, theirs = ", ".join(sorted(group)), ", ".join(sorted(message.group))
                raise self._conflict(message, f"names the group {theirs}, but the topic's group is {ours}")
            head = self._checked(head, digests, message)
            run.append(message)
        self._logs[writer], self._group = log, group
        log.head = head
        log.digests.update(news)
        for message in run:
            log.waiting.pop(message.position, None)
            log.entered[message.position] = message
            leading = log.leading.setdefault(message.version, [])
            leading.append(message)
            if len(leading) == 1:
                self._reach(message)

    def _checked(self, head: _Head, digests: MutableMapping[int, int], message: Message) -> _Head:
        """Return the head after a message that keeps the rules, and note the digests that it tells."""
        if message.epoch < head.epoch:
            raise self._conflict(message, f"was written by epoch {message.epoch} after one of epoch {head.epoch}")
        if message.kind is Kind.DELTA:
            base = message.base[message.writer]
            if base not in digests and not head.may_be_lost(base):
                raise self._conflict(message, f"starts from version {base}, which the log does not have")
            assert message.digest_before is not None
            if digests.setdefault(base, message.digest_before) != message.digest_before:
                raise self._conflict(
                    message,
                    f"starts from digest {message.digest_before:016x}, but version {base} has {digests[base]:016x}",
                )
        version = message.version
        if version <= head.version and version not in digests and not head.may_be_lost(version):
            raise self._conflict(message, f"leads to version {version} behind version {head.version}")
        if digests.setdefault(version, message.digest_after) != message.digest_after:
            raise self._conflict(
                message,
                f"leads to version {version} with digest {message.digest_after:016x}, "
                f"but that version has {digests[version]:016x}",
            )
        return replace(
            head, position=message.position + 1, epoch=message.epoch, version=max(head.version, message.version)
        )

    def _reach(self, message: Message) -> None:
        """Note that a writer reached a version."""
        if len(self._group) == 1:
            insort(self._cuts, _Reached.of(message.step, {message.writer: message.version}), key=lambda cut: cut.order)
            return
        # Of several versions of a step the newest counts: a restarted group takes the step again.
        versions = self._steps.setdefault(message.step, {})
        if self._group <= versions.keys():
            self._cuts.remove(_Reached.of(message.step, versions))
        versions[message.writer] = max(message.version, versions.get(message.writer, 0))
        if self._group <= versions.keys():
            insort(self._cuts, _Reached.of(message.step, versions), key=lambda cut: cut.order)

    def _find_cuts_again(self) -> None:
        self._cuts.clear()
        self._steps.clear()
        for log in self._logs.values():
            for messages in log.leading.values():
                self._reach(messages[0])

    def _conflict(self, message: Message, what: str) -> ConflictError:
        return ConflictError(
            f"{message.kind} {message.position} of writer {message.writer!r} in {self._topic or 'this topic'} {what}; "
            "two processes wrote this log, or it was changed by hand: publish to a new topic",
            topic=self._topic,
            writer=message.writer,
        )
