from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltabus.bus.errors import RetentionGapError
from deltabus.bus.message import Kind, Message
from deltabus.bus.planner import MESSAGE_COST, Ways, plan, plan_along
from deltabus.bus.version import VersionVector

from .support import OTHER_SCHEMA, anchor, chain, delta, digest

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


@given(catalogues(), st.integers(0, 8), st.integers(1, 7))
def test_messages_kept_by_version_give_the_same_plan(messages, have, target):
    ways = Ways.of(reversed(messages))
    try:
        expected = plan(messages, have=at(have), target=at(target))
    except RetentionGapError as error:
        with pytest.raises(RetentionGapError, match=re.escape(str(error))):
            plan_along({A: ways}, have=at(have), target=at(target))
    else:
        assert plan_along({A: ways, "b": Ways()}, have=at(have), target=at(target)) == expected


class Watched(dict[int, list[Message]]):
    """Messages by version that notes which versions are looked at."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__()
        self.seen: list[int] = []
        for message in messages:
            self.setdefault(message.version, []).append(message)

    def get(self, version, default=None):
        self.seen.append(version)
        return super().get(version, default)


@pytest.mark.parametrize(("lag", "most"), [(1, 1), (2, 3), (50, 60)])
def test_a_long_history_is_not_read(lag, most):
    watched = Watched(chain(20_000))
    assert len(plan_along({A: Ways(watched)}, have=at(20_000 - lag), target=at(20_000)).messages) == lag
    assert len(watched.seen) <= most


def test_a_state_that_a_trainer_came_back_to_is_held_already():
    back = delta(3, 4, size=900, digest_after=digest(A, 2))
    messages = [*chain(3), back, delta(4, 5, digest_before=digest(A, 2))]
    for have, expected in {3: [3, 4], 2: [3, 4], 1: [1, 3, 4], 0: [0, 1, 3, 4]}.items():
        assert [m.position for m in plan(messages, have=at(have), target=at(5)).messages] == expected
    # From version 3 the payload is needed, so that an anchor may be cheaper.
    anchored = [*messages[:4], anchor(4, 4, size=500, digest_after=digest(A, 2))]
    assert [m.position for m in plan(anchored, have=at(3), target=at(4)).messages] == [4]
    assert [m.position for m in plan(anchored, have=at(2), target=at(4)).messages] == [3]


def test_equal_bits_of_another_schema_are_another_state():
    """As where a tensor gets one more name, and the weights then come back to what they were."""
    same = digest(A, 1)
    messages = [
        anchor(0, 1),
        anchor(1, 2, schema=OTHER_SCHEMA, digest_after=same),
        delta(2, 3, schema=OTHER_SCHEMA, digest_before=same),
        delta(3, 4, schema=OTHER_SCHEMA, digest_after=same),
        delta(4, 5, schema=OTHER_SCHEMA, digest_before=same),
    ]
    for have, expected in {1: [1, 3, 4], 2: [3, 4], 0: [1, 3, 4]}.items():
        assert [m.position for m in plan(messages, have=at(have), target=at(5)).messages] == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_no_way_through_equal_states_is_cheaper(contents, data):
    """Against all ways, on a log whose versions hold one of four states."""
    marks = [digest(A, 100 + content) for content in contents]
    messages = [anchor(0, 1, digest_after=marks[0], size=data.draw(st.integers(0, 99_999)))]
    for version in range(2, len(marks) + 1):
        base = data.draw(st.integers(1, version - 1))
        size = data.draw(st.integers(0, 99_999))
        known = {"digest_before": marks[base - 1], "digest_after": marks[version - 1]}
        messages.append(delta(version - 1, version, base=base, size=size, **known))
    target = data.draw(st.integers(1, len(marks)))
    have = data.draw(st.integers(0, target))
    costs = {have: 0, 0: 0}
    for _ in range(len(marks) + 1):
        for message in messages:
            origin = message.base.get(A, 0)
            ways = {origin: message.nbytes} | {
                v: 0 for v in range(1, message.version) if marks[v - 1] == message.digest_after
            }
            for start, nbytes in ways.items():
                if start in costs:
                    cost = costs[start] + nbytes + MESSAGE_COST
                    costs[message.version] = min(cost, costs.get(message.version, cost))
    path = plan(messages, have=at(have), target=at(target)).messages
    held, cost = (have, 0) if path and path[0].kind is Kind.DELTA else (0, 0)
    if path and path[0].kind is not Kind.DELTA and have and marks[have - 1] == path[0].digest_after:
        held = have if have < path[0].version else 0
    for message in path:
        same = 0 < held < message.version and marks[held - 1] == message.digest_after
        assert same or message.base.get(A, 0) in (held, 0)
        cost += MESSAGE_COST + (0 if same else message.nbytes)
        held = message.version
    assert cost == (0 if have == target else costs[target])


def test_a_state_that_stays_the_same_costs_no_more_with_each_version():
    """As of a rank whose part is frozen, which publishes an empty delta at each step."""
    count, mark = 5_000, digest(A, 1)
    frozen = {"digest_before": mark, "digest_after": mark, "blobs": ()}
    ways = Ways.of([anchor(0, 1, digest_after=mark), *(delta(p, p + 1, **frozen) for p in range(1, count))])
    assert len({id(twins) for twins in ways.twins.values()}) == 1
    assert ways.twins[count] == list(range(1, count + 1))
    found = plan_along({A: ways}, have=None, target=at(count)).messages
    assert [message.version for message in found] == [1, count]
