from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltabus.bus.errors import RetentionGapError
from deltabus.bus.message import Kind, Message
from deltabus.bus.planner import MESSAGE_COST, plan
from deltabus.bus.version import VersionVector

from .support import anchor, chain, delta

A = "a"


def at(version: int) -> VersionVector:
    return VersionVector({A: version})


def versions(messages: tuple[Message, ...]) -> list[tuple[int, int]]:
    return [(message.base.get(message.writer, 0), message.version) for message in messages]


def paths(messages: list[Message], have: int, version: int) -> list[tuple[Message, ...]]:
    """Every way to a version, by brute force."""
    found: list[tuple[Message, ...]] = [()] if have == version else []
    for message in messages:
        if message.version == version:
            if message.kind is Kind.ANCHOR:
                found.append((message,))
            else:
                found += [(*path, message) for path in paths(messages, have, message.base[A])]
    return found


def weight(path: tuple[Message, ...]) -> tuple[int, int]:
    return sum(message.nbytes + MESSAGE_COST for message in path), len(path)


@st.composite
def catalogues(draw) -> list[Message]:
    """Messages among a few versions; sizes collide often, so that ties are met."""
    sizes = st.sampled_from([0, MESSAGE_COST, 2 * MESSAGE_COST, 7, 10**6])
    edges = draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7), sizes).filter(lambda e: e[0] < e[1]), max_size=12)
    )
    return [
        anchor(position, version, size=size) if base == 0 else delta(position, version, base=base, size=size)
        for position, (base, version, size) in enumerate(edges)
    ]


@given(catalogues(), st.integers(0, 8), st.integers(1, 7), st.randoms(use_true_random=False))
@example([anchor(0, 1), delta(1, 2), anchor(2, 2, size=0)], 3, 2, random.Random(0))
def test_the_plan_is_the_cheapest_of_all_paths(messages, have, target, shuffler):
    every = paths(messages, have, target)
    shuffled = messages[:]
    shuffler.shuffle(shuffled)
    if not every:
        with pytest.raises(RetentionGapError):
            plan(messages, have=at(have), target=at(target))
        return
    found = plan(messages, have=at(have), target=at(target))
    assert found.messages in every
    assert weight(found.messages) == min(map(weight, every))
    assert found == plan(shuffled, have=at(have), target=at(target))
    assert found.nbytes == sum(message.nbytes for message in found.messages)


def test_nothing_to_do():
    assert plan(chain(3), have=at(3), target=at(3)).messages == ()
    assert plan([], have=at(3), target=at(3)).messages == ()
    assert plan(chain(3), have=None, target=VersionVector()).messages == ()


def test_a_reader_that_has_the_base_does_not_download_the_anchor():
    messages = [anchor(0, 1, size=10**9), delta(1, 2), anchor(2, 2, size=10**9), delta(3, 3)]
    assert versions(plan(messages, have=at(1), target=at(3)).messages) == [(1, 2), (2, 3)]
    assert versions(plan(messages, have=None, target=at(3)).messages) == [(0, 2), (2, 3)]


def test_a_reader_that_is_too_far_behind_takes_the_anchor():
    messages = [*chain(50, size=10**6), anchor(50, 50, size=2 * 10**6)]
    assert versions(plan(messages, have=at(1), target=at(50)).messages) == [(0, 50)]
    assert versions(plan(messages, have=at(49), target=at(50)).messages) == [(49, 50)]


def test_a_skip_delta_is_taken_where_it_is_cheaper():
    messages = [*chain(10, size=1000), delta(10, 10, base=2, size=1500)]
    assert versions(plan(messages, have=at(1), target=at(10)).messages) == [(1, 2), (2, 10)]


def test_many_empty_deltas_cost_more_than_a_small_skip():
    messages = [*chain(100, size=0), delta(100, 100, base=1, size=100)]
    assert versions(plan(messages, have=at(1), target=at(100)).messages) == [(1, 100)]


def test_a_version_off_the_path_counts_as_nothing():
    messages = [anchor(0, 1), delta(1, 2), delta(2, 4, base=2)]
    assert versions(plan(messages, have=at(3), target=at(4)).messages) == [(0, 1), (1, 2), (2, 4)]


def test_an_earlier_version_is_reached_from_an_anchor():
    assert versions(plan(chain(5), have=at(5), target=at(2)).messages) == [(0, 1), (1, 2)]


def test_what_is_had_is_preferred_to_an_equally_cheap_anchor():
    messages = [anchor(0, 1), delta(1, 2, size=5), anchor(2, 2, size=5)]
    assert versions(plan(messages, have=at(1), target=at(2)).messages) == [(1, 2)]


def test_of_equal_messages_the_first_in_the_log_is_taken():
    messages = [anchor(0, 1), delta(1, 2), delta(2, 2), anchor(3, 1)]
    for order in itertools.permutations(messages):
        assert plan(order, have=None, target=at(2)).messages == tuple(messages[:2])


def test_writers_are_planned_one_by_one():
    messages = [*chain(3, writer="b", group=("a", "b")), *chain(3, writer="a", group=("a", "b")), *chain(9, writer="c")]
    found = plan(messages, have=VersionVector({"b": 2}), target=VersionVector({"a": 2, "b": 3}))
    assert list(found.by_writer) == ["a", "b"]
    assert [(m.writer, m.version) for m in found.messages] == [("a", 1), ("a", 2), ("b", 3)]


def test_a_target_that_is_not_there_is_named():
    with pytest.raises(
        RetentionGapError, match=r"version 9 of writer 'a' is not in the topic \(it has versions 1 to 3\)"
    ):
        plan(chain(3), have=None, target=at(9))
    with pytest.raises(RetentionGapError, match="none of this writer") as caught:
        plan(chain(3), have=None, target=VersionVector({"b": 1}))
    assert caught.value.writer == "b"


def test_a_broken_chain_says_where_it_begins_and_what_to_do():
    with pytest.raises(RetentionGapError, match=r"from version 2: .* begins at version 4.* publish an anchor"):
        plan([delta(9, 5), delta(10, 6)], have=at(2), target=at(6))
    with pytest.raises(RetentionGapError, match="from nothing"):
        plan([delta(9, 5), delta(10, 6)], have=None, target=at(6))


def test_a_long_chain():
    messages = chain(20_000)
    assert len(plan(messages, have=at(19_999), target=at(20_000)).messages) == 1
    assert plan(messages, have=None, target=at(20_000)).messages == tuple(messages)
