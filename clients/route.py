"""Which messages a subscriber takes next, around what is missing or damaged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deltabus.bus.errors import RetentionGapError
from deltabus.bus.message import Kind, Message
from deltabus.bus.planner import plan
from deltabus.bus.sequencer import Cut, Sequencer
from deltabus.bus.version import VersionVector

__all__ = ["Route", "Router"]

_ANCHORS = 2
"""Anchors that are kept in mind, so that there is another where the newest is damaged."""

_NOTHING = VersionVector()


@dataclass(frozen=True, slots=True)
class Route:
    """What to take next.

    Attributes:
        messages: Those of each writer in order.
        target: The state that they lead to.
        detour: Why it is not the usual way; empty when it is.
    """

    messages: tuple[Message, ...]
    target: VersionVector
    detour: str = ""


class Router:
    """Finds the next messages from what a sequencer knows, without those that could not be had.

    Args:
        sequencer: The topic's history; whoever follows the topic feeds it.
        topic: Named in errors.
        latest: Whether to go to the newest state at once, or through each.
    """

    def __init__(self, sequencer: Sequencer, *, topic: str, latest: bool) -> None:
        self._sequencer = sequencer
        self._topic = topic
        self._latest = latest
        self._avoided: dict[tuple[str, int], tuple[Message, str]] = {}
        self._here: VersionVector | None = None

    def avoid(self, message: Message, reason: str) -> None:
        """Leave a message out until the state that is held has moved on to where it leads, or beyond."""
        self._avoided[message.writer, message.position] = message, reason

    def forgive(self) -> None:
        """Leave nothing out any more: what could not be had may be there by now."""
        self._avoided.clear()

    def forget(self, here: VersionVector | None, writer: str) -> None:
        """Free the messages of a writer that lead to nothing but versions before a state, and before its last anchors.

        Args:
            here: The state that is held; None is nothing, and frees nothing.
            writer: Whose messages.
        """
        messages = self._sequencer.messages_of(writer)
        anchors = sorted({message.version for message in messages if message.kind is Kind.ANCHOR})
        if here is None or len(anchors) < _ANCHORS:
            return
        needed = min(here.of(writer), anchors[-_ANCHORS])
        self._sequencer.begin(writer, next(message.position for message in messages if message.version >= needed))

    def next(self, here: VersionVector | None, *, starts: Mapping[str, int]) -> Route | None:
        """Return the way to take from a state; None when there is nothing newer.

        Args:
            here: How far each writer is held; None is nothing.
            starts: The first position of each log that retention has left.

        Raises:
            RetentionGapError: If there is something newer, and no way to it, or to anything on the way.
        """
        if here is not None and here != self._here:
            # Only when it moved on, or else what leads round over an older version would be tried for ever.
            self._avoided = {at: (m, why) for at, (m, why) in self._avoided.items() if m.version > here.of(m.writer)}
        self._here = here
        newest = self._sequencer.newest_cut(here)
        if newest is None:
            return None
        following = self._sequencer.next_cut(here) if not self._latest and here is not None else None
        if following is not None:
            try:
                messages = self._plan(here, following.state)
                return Route(messages, following.state, self._why(messages, here, following, starts))
            except RetentionGapError as error:
                why = self._broken() if self._avoided else f"{error} Going on from the newest state."
                return self._to_newest(here, newest, starts, why)
        return self._to_newest(here, newest, starts, "")

    def _to_newest(self, here: VersionVector | None, newest: Cut, starts: Mapping[str, int], why: str) -> Route:
        try:
            messages = self._plan(here, newest.state)
            return Route(messages, newest.state, why or self._why(messages, here, newest, starts))
        except RetentionGapError as error:
            # As far as it goes: what is missing or damaged may be the last step of one writer alone.
            within: dict[str, frozenset[int]] = {}

            def usable(writer: str, version: int) -> bool:
                if writer not in within:
                    held = here.of(writer) if here is not None else 0
                    within[writer] = self._reach(self._usable(writer), writer, {held, 0})
                return version in within[writer]

            best = self._sequencer.newest_cut(here, usable=usable)
            if best is None:
                if not self._avoided:
                    raise
                raise RetentionGapError(
                    f"nothing that can be had leads on from {here or 'nothing'}: {self._reasons()}",
                    topic=self._topic,
                    writer=error.writer,
                ) from None
            return Route(self._plan(here, best.state), best.state, self._broken() if self._avoided else str(error))

    def _plan(self, here: VersionVector | None, target: VersionVector) -> tuple[Message, ...]:
        # What the others hold already needs no way.
        target = VersionVector({w: v for w, v in target.items() if v != (here or _NOTHING).of(w)})
        if not self._avoided:
            return self._sequencer.plan(have=here, target=target).messages
        usable = [message for writer in target for message in self._usable(writer)]
        return plan(usable, have=here, target=target).messages

    def _usable(self, writer: str) -> list[Message]:
        messages = self._sequencer.messages_of(writer)
        return [message for message in messages if (writer, message.position) not in self._avoided]

    def _why(
        self, messages: tuple[Message, ...], here: VersionVector | None, cut: Cut, starts: Mapping[str, int]
    ) -> str:
        """Return why the way to a cut is not the one that leads on from what is held; empty when it is."""
        if self._avoided:
            usual = self._sequencer.plan(have=here, target=cut.state).messages
            if any((message.writer, message.position) in self._avoided for message in usual):
                return self._broken()
        first = {message.writer: message for message in reversed(messages)}
        for writer, message in first.items():
            held = here.of(writer) if here is not None else 0
            # A way that begins with a delta leads on from what is held; the others are few, and looked at more closely.
            if not held or not starts.get(writer) or message.kind is Kind.DELTA:
                continue
            target = cut.state.of(writer)
            if self._sequencer.generation(writer, held) != self._sequencer.generation(writer, target):
                continue
            if target not in self._reach(self._usable(writer), writer, {held}, deltas=True):
                return (
                    f"retention removed what led on from version {held} of writer {writer!r}, and an anchor leads to "
                    f"version {target} instead; a lease (`lease=`) keeps what a reader needs"
                )
        return ""

    def _broken(self) -> str:
        return f"another way was taken around what is missing or damaged: {self._reasons()}"

    def _reasons(self) -> str:
        return "; ".join(reason for _, reason in self._avoided.values())

    def _reach(
        self, messages: Iterable[Message], writer: str, origins: Collection[int], *, deltas: bool = False
    ) -> frozenset[int]:
        """Return the versions that can be reached from some, those among them; 0 is nothing."""
        onward: dict[int, list[int]] = {}
        leading: set[int] = set()
        for message in messages:
            leading.add(message.version)
            if message.kind is Kind.DELTA or not deltas:
                onward.setdefault(message.base.get(writer, 0), []).append(message.version)
        reached, waiting = set(origins), list(origins)
        looked: dict[int, int] = {}  # of each list of twins, from which place on
        while waiting:
            version = waiting.pop()
            twins = self._sequencer.twins(writer, version)
            begin, end = bisect_right(twins, version), looked.get(id(twins), len(twins))
            later = [twin for twin in twins[begin:end] if twin in leading]
            looked[id(twins)] = min(begin, end)
            for other in (*onward.get(version, ()), *later):
                if other not in reached:
                    reached.add(other)
                    waiting.append(other)
        return frozenset(reached)
