"""Cuts of several writers, against an oracle that looks at whole histories."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import ConflictError
from deltabus.bus.message import Cohort, Message
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.version import VersionVector

from .support import anchor, delta

NAMES = ("a", "b", "c", "d")


def next_message(log: list[Message], writer: str, step: int, *, group: tuple[str, ...], generation: int) -> Message:
    """The next message of a log: an anchor where a generation begins, a delta after that."""
    fields = {
        "writer": writer,
        "step": step,
        "group": group,
        "epoch": max(generation, 1),
        "cohort": Cohort(generation=generation) if generation else msgspec.UNSET,
    }
    position, version = len(log), (log[-1].version if log else 0) + 1
    if log and log[-1].generation == generation:
        return delta(position, version, **fields)
    return anchor(position, version, **fields)


@st.composite
def histories(draw) -> dict[str, list[Message]]:
    """The logs of a group over its restarts, each of which takes steps again and may break off anywhere."""
    logs: dict[str, list[Message]] = {name: [] for name in NAMES}
    step = 0
    for generation in range(1, draw(st.integers(1, 3)) + 1):
        others = draw(st.sets(st.sampled_from(NAMES[1:])))
        group = tuple(sorted({"a", *others}))
        step = max(0, step - draw(st.integers(0, 2)))
        for _ in range(draw(st.integers(0, 3))):
            step += 1
            for writer in draw(st.permutations(group)):
                logs[writer].append(next_message(logs[writer], writer, step, group=group, generation=generation))
        broken_off = draw(st.sets(st.sampled_from(group)))
        for writer in broken_off if len(broken_off) < len(group) else ():
            logs[writer].append(next_message(logs[writer], writer, step + 1, group=group, generation=generation))
    return {writer: log for writer, log in logs.items() if log}


def complete_steps(logs: dict[str, list[Message]]) -> list[dict[str, int]]:
    """The versions at which all members of a generation were at one step, in the order of history."""
    told = [message for log in logs.values() for message in log]
    found = []
    for generation, step in sorted({(message.generation, message.step) for message in told}):
        of_step = {m.writer: m.version for m in told if (m.generation, m.step) == (generation, step)}
        members = next(m.members for m in told if m.generation == generation)
        if of_step.keys() == members:
            found.append(of_step)
    return found


@given(histories(), st.randoms(use_true_random=False))
def test_cuts_are_the_complete_steps_of_each_generation_in_order(logs, chance):
    many = [message for log in logs.values() for message in log] * 2
    chance.shuffle(many)
    sequencer = Sequencer()
    for message in many:
        sequencer.feed(message)
    expected = complete_steps(logs)
    found, state = [], VersionVector()
    while cut := sequencer.next_cut(state):
        state = cut.state
        found.append(dict(state))
        assert sequencer.is_cut(state)
    assert found == expected
    newest = sequencer.newest_cut()
    assert (dict(newest.state) if newest else None) == (expected[-1] if expected else None)


@given(histories(), st.randoms(use_true_random=False))
def test_a_reader_in_the_middle_of_it_never_gets_halves_of_two_incarnations(logs, chance):
    """It asks while messages arrive, each log in order, and keeps what it got."""
    waiting = {writer: list(log) for writer, log in logs.items()}
    expected = complete_steps(logs)
    sequencer, state, places = Sequencer(), VersionVector(), []
    while waiting:
        writer = chance.choice(sorted(waiting))
        sequencer.feed(waiting[writer].pop(0))
        if not waiting[writer]:
            del waiting[writer]
        while chance.random() < 0.7 and (
            cut := sequencer.newest_cut(state) if chance.random() < 0.5 else sequencer.next_cut(state)
        ):
            state = cut.state
            places.append(expected.index(dict(state)))
    assert places == sorted(set(places))
    last = sequencer.newest_cut(state)
    assert (expected.index(dict(last.state)) if last else max(places, default=-1)) == len(expected) - 1


@st.composite
def dependent(draw) -> dict[str, list[Message]]:
    """The logs of writers that are alone, and rest on what they saw of each other."""
    logs: dict[str, list[Message]] = {name: [] for name in NAMES[:3]}
    for _ in range(draw(st.integers(1, 10))):
        writer = draw(st.sampled_from(NAMES[:3]))
        message = next_message(logs[writer], writer, len(logs[writer]), group=(writer,), generation=0)
        others = {w: draw(st.integers(0, log[-1].version)) for w, log in logs.items() if w != writer and log}
        message = msgspec.structs.replace(message, base={**message.base, **{w: v for w, v in others.items() if v}})
        logs[writer].append(message)
    return {writer: log for writer, log in logs.items() if log}


def is_closed(state: VersionVector, logs: dict[str, list[Message]]) -> bool:
    """Whether all that the messages of a state rest on is in it."""
    within = [message for writer, log in logs.items() for message in log if message.version <= state.of(writer)]
    return all(state.covers(message.needs) for message in within)


@given(dependent(), st.randoms(use_true_random=False))
def test_what_a_state_rests_on_is_in_it(logs, chance):
    waiting = {writer: list(log) for writer, log in logs.items()}
    sequencer, state, one_by_one = Sequencer(), VersionVector(), VersionVector()
    while waiting:
        writer = chance.choice(sorted(waiting))
        sequencer.feed(waiting[writer].pop(0))
        if not waiting[writer]:
            del waiting[writer]
        while cut := sequencer.next_cut(one_by_one):
            assert is_closed(cut.state, logs)
            assert sequencer.is_cut(cut.state)
            assert cut.state.covers(one_by_one)
            assert cut.state != one_by_one
            one_by_one = cut.state
        newest = sequencer.newest_cut(state)
        if newest is not None:
            assert is_closed(newest.state, logs)
            assert newest.state.covers(state)
            state = newest.state
    assert state == one_by_one == {writer: log[-1].version for writer, log in logs.items()}


def grouped(writer: str, *steps: int, generation: int = 1, group: tuple[str, ...] = ("a", "b")) -> list[Message]:
    log: list[Message] = []
    for step in steps:
        log.append(next_message(log, writer, step, group=group, generation=generation))
    return log


def test_who_is_awaited_is_told():
    sequencer = Sequencer()
    for message in (*grouped("a", 1, 2, 3), *grouped("b", 1)):
        sequencer.feed(message)
    (progress,) = sequencer.waiting()
    assert (progress.step, progress.missing, dict(progress.last)) == (2, ("b",), {"b": 1})
    assert str(progress) == "step 2 is there from 1 of 2 writers, and waits for b (last step 1)"
    for message in grouped("b", 1, 2, 3)[1:]:
        sequencer.feed(message)
    assert sequencer.waiting() == ()


def resting(log: list[Message], **needs: int) -> Message:
    """The next message of a writer that is alone, which had applied these versions of others."""
    writer = log[0].writer
    message = next_message(log, writer, len(log) + 1, group=(writer,), generation=0)
    return msgspec.structs.replace(message, base={**message.base, **needs})


def test_what_a_step_rests_on_and_nobody_published_is_told():
    sequencer, first = Sequencer(), anchor(0, 1)
    for message in (
        first,
        resting([first], b=2),
        *(log := [anchor(0, 1, writer="b")]),
        resting(log, c=7, a=2),  # so that the first waits for the third
        anchor(0, 1, writer="c"),
        *grouped("d", 1, group=("d", "e")),
        msgspec.structs.replace(anchor(0, 1, writer="f"), base={"d": 1}),  # waits for the rest of a group
    ):
        sequencer.feed(message)
    here = sequencer.newest_cut().state
    assert here == {"a": 1, "b": 1, "c": 1}
    rest, *others = sorted(sequencer.waiting(here), key=lambda awaited: awaited.group, reverse=True)
    assert str(rest) == "step 1 is there from 1 of 2 writers, and waits for e (last step none)"
    assert [(awaited.missing, dict(awaited.needs)) for awaited in others] == [(("c",), {"c": 7})] * 2
    assert str(others[1]) == ("step 2 of a is there, and waits for what it rests on: version 7 of c (newest version 1)")
    for version in range(2, 8):
        sequencer.feed(delta(version - 1, version, writer="c"))
    here = sequencer.newest_cut(here).state
    assert here == {"a": 2, "b": 2, "c": 7}
    assert sequencer.waiting(here) == (rest,)


def test_a_generation_is_of_one_incarnation_and_never_falls():
    first = grouped("a", 1)
    again = msgspec.structs.replace(anchor(1, 2, group=("a", "b")), cohort=first[0].cohort, epoch=2)
    fallen = msgspec.structs.replace(anchor(1, 2, group=("a",)), epoch=2)
    for message, text in ((again, "takes a new generation"), (fallen, "generation 0 of its group, after one of 1")):
        sequencer = Sequencer()
        sequencer.feed(first[0])
        with pytest.raises(ConflictError, match=text):
            sequencer.feed(message)
        assert sequencer.messages == tuple(first)


def test_versions_that_were_removed_make_no_cut_any_more():
    sequencer = Sequencer()
    for message in (*grouped("a", 1, 2, 3), *grouped("b", 1, 2, 3)):
        sequencer.feed(message)
    assert sequencer.next_cut().state == {"a": 1, "b": 1}
    sequencer.begin("b", 2)
    assert sequencer.next_cut().state == {"a": 3, "b": 3}
    assert sequencer.newest_cut(usable=lambda writer, version: version < 3) is None


def test_what_lacks_what_it_rests_on_is_no_cut():
    log = [anchor(0, 1), msgspec.structs.replace(delta(1, 2), base={"a": 1, "b": 2})]
    sequencer = Sequencer()
    for message in (*log, anchor(0, 1, writer="b"), delta(1, 2, writer="b")):
        sequencer.feed(message)
    found = {(a, b): sequencer.is_cut(VersionVector({"a": a, "b": b})) for a in range(3) for b in range(3) if a or b}
    assert {state for state, cut in found.items() if not cut} == {(2, 0), (2, 1)}


def test_groups_that_had_one_generation_each_cannot_be_joined():
    sequencer = Sequencer()
    for message in (*grouped("a", 1, group=("a", "b")), *grouped("c", 1, group=("c", "d"))):
        sequencer.feed(message)
    joining = next_message(grouped("a", 1), "a", 2, group=("a", "c"), generation=2)
    with pytest.raises(ConflictError, match="brings a, b and c, d together, which both had a generation 1"):
        sequencer.feed(joining)
