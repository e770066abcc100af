"""Sequencer and planner as one machine: logs that grow, arrive in any order and are cut off, against brute force."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deltabus.bus.errors import ConflictError, RetentionGapError
from deltabus.bus.message import Kind
from deltabus.bus.planner import MESSAGE_COST
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.version import VersionVector

from .support import anchor, delta, digest

ACTIONS = (
    *("step", "step", "late anchor", "skip", "restart"),
    *("give", "give", "give all", "forge", "cut off", "take", "plan", "plan"),
)
SIZES = st.sampled_from([0, 7, MESSAGE_COST, 10 * MESSAGE_COST])


class Log:
    """What one writer wrote, what of it was given to the reader, and where it begins by now."""

    def __init__(self, writer, group):
        self.fields = {"writer": writer, "group": group}
        self.writer = writer
        self.written = []
        self.fed = set()
        self.start = 0
        self.version = 0
        self.epoch = 1

    def write(self, made, version, **options):
        message = made(len(self.written), version, epoch=self.epoch, **self.fields, **options)
        self.written.append(message)
        self.version = max(self.version, version)

    def entered(self):
        """The history that the reader must know of: the run of what it was given."""
        run = itertools.takewhile(lambda position: position in self.fed, range(self.start, len(self.written)))
        return [self.written[position] for position in run]


def cuts_of(logs):
    """Every state that may be applied, in order, by the plain meaning of a cut."""
    group = [log.entered() for log in logs]
    if len(logs) == 1:
        return [{logs[0].writer: version} for version in sorted({message.version for message in group[0]})]
    # Writers of a group here take each step once.
    by_step = [{message.step: message.version for message in reversed(entered)} for entered in group]
    common = sorted(set.intersection(*map(set, by_step)))
    return [{log.writer: steps[step] for log, steps in zip(logs, by_step, strict=True)} for step in common]


def cheapest(messages, writer, have, target):
    """What the cheapest way to a version costs, and in how many messages; None if there is none."""
    costs = {0: (0, 0), have: (0, 0)}
    for _ in range(len(messages)):
        for message in messages:
            origin = 0 if message.kind is Kind.ANCHOR else message.base[writer]
            if origin in costs:
                cost, hops = costs[origin]
                new = (cost + message.nbytes + MESSAGE_COST, hops + 1)
                costs[message.version] = min(new, costs.get(message.version, new))
    return costs.get(target)


class Histories(RuleBasedStateMachine):
    """A group of writers, and one reader that is given their messages.

    All that may happen is one rule: of several, Hypothesis leaves some out of most runs, and then hardly anything
    happens.
    """

    group = ("a",)

    def __init__(self):
        super().__init__()
        self.logs = [Log(writer, self.group) for writer in self.group]
        self.sequencer = Sequencer()
        self.state = VersionVector()
        for log in self.logs:
            log.write(anchor, 1)

    @rule(
        action=st.sampled_from(ACTIONS),
        number=st.integers(0, 2),
        back=st.integers(0, 6),
        size=SIZES,
        places=st.lists(st.integers(0, 50), max_size=5),
    )
    def go(self, action, number, back, size, places):
        log = self.logs[number % len(self.logs)]
        match action:
            case "give":
                for place in places:
                    self.feed(log, place % len(log.written))
            case "give all":
                for position in range(len(log.written)):
                    self.feed(log, position)
            case "forge":
                self.forge(log)
            case "cut off":
                self.cut_off(log, keep=1 + back % 3)
            case "take":
                self.take(newest=back > 3)
            case "plan":
                self.plan(log)
            case _:
                self.write(log, action, back, size)

    # What writers write

    def write(self, log, action, back, size):
        if action == "late anchor":
            log.write(anchor, max(1, log.version - back), size=size)
        elif action == "skip" and log.version - back > 2:
            log.write(delta, log.version, base=log.version - back - 2, size=size)
        elif action == "restart" and len(self.logs) == 1:
            log.epoch += 1
            log.write(anchor, log.version + 1, step=max(0, log.version - back), size=size)
        else:
            log.write(delta, log.version + 1, size=size)

    # What the reader is given

    def feed(self, log, position):
        self.sequencer.feed(log.written[position])
        if position >= log.start:
            log.fed.add(position)

    def forge(self, log):
        """Whatever contradicts history is refused, and changes nothing."""
        entered = log.entered()
        if not entered or log.start or (position := entered[-1].position + 1) in log.fed:
            return
        version, epoch = max(message.version for message in entered), entered[-1].epoch
        good = delta(position, version + 1, base=version, epoch=epoch, **log.fields)
        other = digest("somebody else", version)
        faults = [
            {"digest_before": other},
            {"base": {log.writer: version + 3}, "version": version + 4},
            {"position": position - 1, "created": 7.0},
            {"group": (*log.fields["group"], "z")},
        ]
        faults += [{"version": version, "base": {log.writer: version - 1}, "digest_after": other}] * (version > 1)
        faults += [{"epoch": epoch - 1}] * (epoch > 1)
        before = self.picture()
        for fault in faults:
            with pytest.raises(ConflictError):
                self.sequencer.feed(msgspec.structs.replace(good, **fault))
            assert self.picture() == before

    def cut_off(self, log, keep):
        """Retention removes what stands in front of an anchor, and of all that leads on from it."""
        anchors = sorted({m.version for m in log.written[log.start :] if m.kind is Kind.ANCHOR})
        if len(anchors) < keep:
            return
        version = anchors[-keep]
        needed = [m.position for m in log.written[log.start :] if m.version > version]
        own = [m.position for m in log.written[log.start :] if m.version == version and m.kind is Kind.ANCHOR]
        start = min(min(needed, default=len(log.written)), max(own))
        self.sequencer.begin(log.writer, start)
        log.start = max(log.start, start)
        log.fed = {position for position in log.fed if position >= log.start}

    # What the reader asks

    def take(self, newest):
        """Go on to a cut, and never back."""
        cut = (self.sequencer.newest_cut if newest else self.sequencer.next_cut)(self.state)
        behind = [state for state in cuts_of(self.logs) if after(state, self.state)]
        if cut is None:
            assert not behind
            return
        assert cut.state == (behind[-1] if newest else behind[0])
        self.state = cut.state

    def plan(self, log):
        """From everywhere to everywhere the cheapest way is found, and an error only where there is none."""
        entered = log.entered()
        versions = sorted({message.version for message in entered})
        for have, target in itertools.product([0, *versions[-4:]], versions[-4:]):
            best = cheapest(entered, log.writer, have, target)
            states = {"have": VersionVector({log.writer: have}), "target": VersionVector({log.writer: target})}
            if best is None:
                with pytest.raises(RetentionGapError):
                    self.sequencer.plan(**states)
                continue
            path = self.sequencer.plan(**states).messages
            assert (sum(m.nbytes + MESSAGE_COST for m in path), len(path)) == best
            at = have
            for message in path:
                assert message.kind is Kind.ANCHOR or message.base[log.writer] == at
                at = message.version
            assert at == target

    def picture(self):
        return self.sequencer.messages, self.sequencer.holes(), self.sequencer.newest_cut()

    @invariant()
    def the_history_is_the_run_of_what_was_given(self):
        entered = [message for log in self.logs for message in log.entered()]
        assert list(self.sequencer.messages) == entered

    @invariant()
    def holes_are_what_is_missing_in_front_of_what_was_given(self):
        reported = {w: {p for gap in gaps for p in gap} for w, gaps in self.sequencer.holes().items()}
        for log in self.logs:
            missing = set(range(log.start, max(log.fed, default=log.start))) - log.fed
            assert reported.get(log.writer, set()) == missing

    @invariant()
    def each_cut_comes_once_and_in_order(self):
        found, state = [], VersionVector()
        while cut := self.sequencer.next_cut(state):
            state = cut.state
            found.append(dict(state))
        assert found == cuts_of(self.logs)


def after(state, other):
    return all(state.get(writer, 0) >= version for writer, version in other.items()) and VersionVector(state) != other


class Groups(Histories):
    """Three writers that take each step together."""

    group = ("a", "b", "c")


TestHistories = Histories.TestCase
TestGroups = Groups.TestCase
TestHistories.settings = TestGroups.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
