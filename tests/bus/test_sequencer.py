from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import ConflictError, RetentionGapError, UsageError
from deltabus.bus.message import Cohort, Kind, Message
from deltabus.bus.planner import plan
from deltabus.bus.sequencer import Cut, Sequencer
from deltabus.bus.version import VersionVector

from .support import OTHER_SCHEMA, anchor, chain, delta, digest


def fed(messages: Iterable[Message]) -> Sequencer:
    sequencer = Sequencer(topic="fake://topic")
    for message in messages:
        sequencer.feed(message)
    return sequencer


def cuts(sequencer: Sequencer, after: VersionVector | None = None) -> list[Cut]:
    """Drive the sequencer in a loop."""
    found: list[Cut] = []
    while cut := sequencer.next_cut(found[-1].state if found else after):
        found.append(cut)
    return found


def states(sequencer: Sequencer) -> list[dict[str, int]]:
    return [dict(cut.state) for cut in cuts(sequencer)]


def picture(sequencer: Sequencer) -> object:
    """Everything that can be asked."""
    return sequencer.messages, sequencer.holes(), cuts(sequencer), sequencer.newest_cut()


def one_log(*, writer: str = "a", group: Sequence[str] = ("a",)) -> list[Message]:
    """A log with all that is allowed: late anchors, a skip delta, and a restart whose steps go back."""
    shared = {"writer": writer, "group": tuple(group)}
    return [
        anchor(0, 1, **shared),
        delta(1, 2, **shared),
        delta(2, 3, **shared),
        anchor(3, 2, **shared),
        delta(4, 3, base=1, **shared),
        anchor(5, 4, step=1, epoch=2, **shared),
        delta(6, 5, step=2, epoch=2, **shared),
    ]


def test_one_writer_makes_a_cut_with_every_version_in_version_order():
    found = cuts(fed(one_log()))
    assert [(dict(cut.state), cut.step) for cut in found] == [
        ({"a": 1}, 1),
        ({"a": 2}, 2),
        ({"a": 3}, 3),
        ({"a": 4}, 1),
        ({"a": 5}, 2),
    ]
    assert [[m.position for m in cut.messages] for cut in found] == [[0], [1, 3], [2, 4], [5], [6]]


def test_every_order_gives_the_same_history():
    log = one_log()[:6]
    expected = picture(fed(log))
    for order in itertools.permutations(log):
        assert picture(fed(order)) == expected


@st.composite
def logs(draw, writer: str = "a", group: tuple[str, ...] = ("a",)) -> list[Message]:
    """A history as a writer may write it."""
    messages: list[Message] = []
    newest, epoch, step = 0, 1, 0
    for position in range(draw(st.integers(1, 12))):
        shared = {"writer": writer, "group": group}
        action = draw(st.sampled_from(["delta", "delta", "anchor", "late anchor", "skip", "restart"]))
        if action == "restart":
            epoch, step = epoch + 1, step - draw(st.integers(0, step))
        if not messages or action in ("anchor", "restart"):
            newest, step = newest + 1, step + 1
            messages.append(anchor(position, newest, step=step, epoch=epoch, **shared))
        elif action == "late anchor":
            version = draw(st.sampled_from(messages)).version
            messages.append(anchor(position, version, epoch=epoch, **shared))
        elif action == "skip" and newest > 1:
            version = draw(st.integers(2, newest))
            base = draw(st.integers(1, version - 1))
            messages.append(delta(position, version, base=base, epoch=epoch, **shared))
        else:
            newest, step = newest + 1, step + 1
            messages.append(delta(position, newest, step=step, epoch=epoch, **shared))
    return messages


ORDERS = st.randoms(use_true_random=False)


@given(logs(), logs("b", ("b",)), ORDERS)
def test_any_order_with_duplicates_gives_the_same_history(log, _, chance):
    many = log * 2 + chance.sample(log, chance.randint(0, len(log)))
    chance.shuffle(many)
    sequencer = fed(many)
    assert picture(sequencer) == picture(fed(log))
    assert list(sequencer.messages) == log
    assert states(sequencer) == [{"a": v} for v in sorted({m.version for m in log})]
    assert sequencer.holes() == {}


@given(logs(), ORDERS)
def test_a_consumer_that_asks_in_between_gets_each_cut_once_and_in_order(log, chance):
    many = log * 2
    chance.shuffle(many)
    sequencer = Sequencer()
    state, seen = VersionVector(), []
    for message in many:
        sequencer.feed(message)
        while chance.random() < 0.7 and (cut := sequencer.next_cut(state)):
            state = cut.state
            seen.append(state["a"])
    seen += [cut.state["a"] for cut in cuts(sequencer, state)]
    assert seen == sorted({message.version for message in log})


@given(logs(), ORDERS)
def test_a_hole_holds_back_what_is_behind_it_until_it_is_filled(log, chance):
    missing = set(chance.sample(range(len(log)), chance.randint(0, len(log))))
    given_first = [message for message in log if message.position not in missing]
    chance.shuffle(given_first)
    sequencer = fed(given_first)
    end = max((message.position for message in given_first), default=-1)
    first_gap = min(missing | {len(log)})
    reported = {position for gaps in sequencer.holes().values() for gap in gaps for position in gap}
    assert reported == {position for position in missing if position < end}
    assert list(sequencer.messages) == log[:first_gap]
    assert cuts(sequencer) == cuts(fed(log[:first_gap]))
    late = [log[position] for position in missing]
    chance.shuffle(late)
    for message in late:
        sequencer.feed(message)
    assert picture(sequencer) == picture(fed(log))


def test_holes_are_ranges():
    log = chain(10)
    assert fed([log[1], log[4], log[5], log[9]]).holes() == {"a": (range(0, 1), range(2, 4), range(6, 9))}
    assert fed([log[0], log[2]]).holes() == {"a": (range(1, 2),)}
    assert fed([]).holes() == {}


def test_newest_cut():
    sequencer = fed(chain(5))
    assert sequencer.newest_cut() == sequencer.newest_cut(VersionVector({"a": 2})) == cuts(sequencer)[-1]
    assert sequencer.newest_cut(VersionVector({"a": 5})) is None
    assert sequencer.newest_cut(VersionVector({"x": 1})).state == {"a": 5, "x": 1}
    assert Sequencer().newest_cut() is Sequencer().next_cut() is None


# What breaks the rules


def bad_logs() -> dict[str, list[Message]]:
    good = [anchor(0, 1), delta(1, 2)]
    other = digest("other", 1)
    return {
        "position": [*good, msgspec.structs.replace(good[1], created=1.0)],
        "epoch": [anchor(0, 1, epoch=2), delta(1, 2, epoch=1)],
        "anchor repeats with another digest": [*good, anchor(2, 1, digest_after=other)],
        "delta repeats with another digest": [*good, delta(2, 3), delta(3, 3, base=1, digest_after=other)],
        "version skipped earlier": [anchor(0, 1), delta(1, 5, base=1), anchor(2, 3)],
        "version skipped before a late anchor": [anchor(0, 1), delta(1, 5, base=1), anchor(2, 1), anchor(3, 3)],
        "delta to a version skipped earlier": [anchor(0, 1), delta(1, 5, base=1), delta(2, 3, base=1)],
        "base unknown": [*good, delta(2, 4, base=3)],
        "base unknown at the start": [delta(0, 2, base=1)],
        "base with another digest": [*good, delta(2, 3, digest_before=other)],
        "anchor repeats with another schema": [*good, anchor(2, 2, schema=OTHER_SCHEMA)],
        "delta into another schema": [*good, delta(2, 3, schema=OTHER_SCHEMA)],
        "group": [*good, delta(2, 3, group=("a", "b"))],
    }


@pytest.mark.parametrize("log", bad_logs().values(), ids=bad_logs())
def test_a_broken_rule_raises_and_changes_nothing(log):
    sequencer = fed(log[:-1])
    before = picture(sequencer)
    for _ in range(2):
        with pytest.raises(ConflictError, match="position|" + log[-1].kind) as caught:
            sequencer.feed(log[-1])
        assert picture(sequencer) == before
    assert (caught.value.topic, caught.value.writer) == ("fake://topic", "a")


@pytest.mark.parametrize("log", bad_logs().values(), ids=bad_logs())
def test_a_broken_rule_is_found_in_every_order(log):
    for order in itertools.permutations(log):
        with pytest.raises(ConflictError):
            fed(order)


def test_a_message_that_would_let_a_bad_one_in_is_refused_with_it():
    log = [anchor(0, 1), delta(1, 2), delta(2, 4, base=3)]
    sequencer = fed([log[0], log[2]])
    before = picture(sequencer)
    with pytest.raises(ConflictError, match=r"delta 2 of writer 'a' .* starts from version 3"):
        sequencer.feed(log[1])
    assert picture(sequencer) == before


def test_two_writers_that_do_not_know_each_other_make_cuts_of_their_own():
    sequencer = fed([anchor(0, 1), anchor(0, 1, writer="b"), delta(1, 2, writer="b")])
    assert states(sequencer) == [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}]
    assert sequencer.newest_cut().state == {"a": 1, "b": 2}


def test_one_generation_has_one_group():
    with pytest.raises(ConflictError, match="makes a group of a, c where generation 0 is a group of a, b"):
        fed([anchor(0, 1, group=("a", "b")), delta(1, 2, group=("a", "c"))])


def test_a_message_that_repeats_a_version_claims_its_group_too():
    alone = [anchor(0, 1), anchor(0, 1, writer="b")]
    repeated = anchor(1, 1, group=("a", "b"), cohort=Cohort(generation=1), epoch=2)
    for messages in itertools.permutations([*alone, repeated]):
        with pytest.raises(ConflictError, match="generation 0"):
            fed(messages)


# Retention


def test_a_log_may_begin_later():
    log = chain(10)
    sequencer = Sequencer()
    sequencer.begin("a", 6)
    for message in log[6:]:
        sequencer.feed(message)
    assert list(sequencer.messages) == log[6:]
    assert sequencer.holes() == {}
    assert states(sequencer) == [{"a": v} for v in (7, 8, 9, 10)]
    sequencer.feed(log[2])
    assert list(sequencer.messages) == log[6:]


def test_the_start_may_be_told_after_the_messages():
    log = chain(10)
    sequencer = fed(log[6:])
    assert sequencer.holes() == {"a": (range(6),)}
    assert cuts(sequencer) == []
    sequencer.begin("a", 6)
    assert list(sequencer.messages) == log[6:]


def test_what_was_removed_is_forgotten():
    log = chain(10)
    sequencer = fed(log)
    sequencer.begin("a", 7)
    assert list(sequencer.messages) == log[7:]
    assert states(sequencer) == [{"a": v} for v in (8, 9, 10)]
    sequencer.feed(delta(10, 11))
    sequencer.feed(anchor(11, 3))
    with pytest.raises(ConflictError, match="version 2 with digest"):
        sequencer.feed(anchor(12, 2, digest_after=1))
    sequencer.begin("a", 3)
    assert sequencer.messages[0] == log[7]


def test_a_reader_that_fell_behind_goes_on_where_the_log_now_begins():
    log = chain(20)
    sequencer = fed(log[:5])
    sequencer.begin("a", 12)
    for message in reversed(log[12:]):
        sequencer.feed(message)
    assert list(sequencer.messages) == log[12:]
    assert [cut.state["a"] for cut in cuts(sequencer, VersionVector({"a": 5}))] == list(range(13, 21))


def test_versions_that_retention_removed_are_taken_at_their_word_once():
    sequencer = Sequencer()
    sequencer.begin("a", 60)
    sequencer.feed(anchor(60, 50))
    sequencer.feed(delta(61, 59))
    sequencer.feed(anchor(62, 55))
    sequencer.feed(delta(63, 60, base=56))
    assert states(sequencer) == [{"a": v} for v in (50, 55, 59, 60)]
    for wrong in (delta(64, 61, base=58, digest_before=7), anchor(64, 56, digest_after=7)):
        with pytest.raises(ConflictError):
            sequencer.feed(wrong)


def test_only_versions_that_retention_may_have_removed_are_taken_at_their_word():
    sequencer = fed([anchor(0, 1), delta(1, 5, base=1)])
    sequencer.begin("a", 4)
    sequencer.feed(delta(4, 9))
    for wrong in (delta(5, 10, base=3), anchor(5, 4)):
        with pytest.raises(ConflictError):
            sequencer.feed(wrong)
    sequencer.feed(anchor(5, 6))


def test_beginning_later_lets_in_what_waited_or_changes_nothing():
    log = [anchor(6, 1), delta(7, 2, digest_before=7)]
    sequencer = fed(log)
    before = picture(sequencer)
    with pytest.raises(ConflictError):
        sequencer.begin("a", 6)
    assert picture(sequencer) == before


def test_a_log_does_not_begin_below_zero():
    with pytest.raises(UsageError, match="-1"):
        Sequencer().begin("a", -1)


@given(logs(), ORDERS)
def test_the_start_may_be_told_at_any_time(log, chance):
    start = chance.randint(0, len(log) - 1)
    expected = Sequencer()
    expected.begin("a", start)
    for message in log[start:]:
        expected.feed(message)
    events: list[Message | None] = [*log[start:], *chance.sample(log, chance.randint(0, start)), None]
    chance.shuffle(events)
    sequencer = Sequencer()
    for event in events:
        if event is None:
            sequencer.begin("a", start)
        else:
            sequencer.feed(event)
    assert picture(sequencer) == picture(expected)


# Many writers

GROUP = ("a", "b", "c")


def group_logs(length: int) -> dict[str, list[Message]]:
    return {writer: chain(length, writer=writer, group=GROUP) for writer in GROUP}


@given(st.tuples(*[st.integers(0, 5)] * 3), ORDERS)
def test_a_cut_needs_every_writer_of_the_group(lengths, chance):
    messages = [m for (w, log), n in zip(group_logs(5).items(), lengths, strict=True) for m in log[:n]]
    chance.shuffle(messages)
    sequencer = fed(messages)
    assert states(sequencer) == [dict.fromkeys(GROUP, v) for v in range(1, min(lengths) + 1)]
    newest = sequencer.newest_cut()
    assert (newest.step if newest else 0) == min(lengths)
    if newest:
        assert [(m.writer, m.version) for m in newest.messages] == [(w, newest.step) for w in GROUP]


def test_versions_of_writers_may_differ_at_one_step():
    shared = {"group": ("a", "b")}
    sequencer = fed(
        [
            anchor(0, 1, step=1, **shared),
            delta(1, 2, step=2, **shared),
            delta(2, 3, step=3, **shared),
            anchor(0, 1, step=1, writer="b", **shared),
            delta(1, 2, step=3, writer="b", **shared),
        ]
    )
    assert states(sequencer) == [{"a": 1, "b": 1}, {"a": 3, "b": 2}]


def test_a_group_that_takes_a_step_again_cuts_at_its_newest_versions():
    messages: list[Message] = []
    for writer in ("a", "b"):
        shared = {"writer": writer, "group": ("a", "b")}
        messages += chain(4, **shared)
        messages += [anchor(4, 5, step=3, epoch=2, **shared), delta(5, 6, step=4, epoch=2, **shared)]
    random.Random(1).shuffle(messages)
    assert [cut.state["a"] for cut in cuts(fed(messages))] == [1, 2, 5, 6]
    assert all(cut.state["a"] == cut.state["b"] for cut in cuts(fed(messages)))


def test_the_late_anchor_of_a_step_that_was_taken_again_does_not_bring_back_its_old_version():
    shared = {"step": 4, "group": ("a", "b")}
    sequencer = Sequencer()
    sequencer.begin("a", 10)
    for message in (delta(10, 8, **shared), anchor(11, 6, **shared), anchor(0, 1, writer="b", **shared)):
        sequencer.feed(message)
    assert states(sequencer) == [{"a": 8, "b": 1}]


@given(logs("a", ("a", "b")), logs("b", ("a", "b")), ORDERS)
def test_cuts_of_several_writers_are_a_chain_in_every_order(first, second, chance):
    messages = [*first, *second] * 2
    chance.shuffle(messages)
    sequencer = fed(messages)
    assert picture(sequencer) == picture(fed([*second, *first]))
    found = cuts(sequencer)
    for before, after in itertools.pairwise(found):
        assert after.state.covers(before.state) and after.state != before.state
    for cut in found:
        for writer, version in cut.state.items():
            steps = [m.step for m in sequencer.messages if (m.writer, m.version) == (writer, version)]
            assert steps[0] == cut.step
            assert {m.version for m in cut.messages if m.writer == writer} == {version}


def test_messages_are_ordered_by_writer_and_position():
    logs_by_writer = group_logs(3)
    sequencer = fed(m for log in reversed(logs_by_writer.values()) for m in log)
    assert [(m.writer, m.position) for m in sequencer.messages] == [(w, p) for w in GROUP for p in range(3)]
    assert all(m.kind in Kind for m in sequencer.messages)


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 6), st.integers(0, 6))
def test_a_plan_is_made_of_what_the_history_holds(entered, begin, target, have):
    sequencer = fed(one_log()[:entered])
    sequencer.begin("a", min(begin, entered))
    state = {"have": VersionVector({"a": have}), "target": VersionVector({"a": target})}
    try:
        expected = plan(sequencer.messages, **state)
    except RetentionGapError as error:
        with pytest.raises(RetentionGapError, match=re.escape(str(error))):
            sequencer.plan(**state)
    else:
        assert sequencer.plan(**state) == expected


def test_a_plan_for_a_writer_that_is_not_there():
    with pytest.raises(RetentionGapError, match="none of this writer"):
        fed(chain(3)).plan(have=None, target=VersionVector({"b": 1}))
