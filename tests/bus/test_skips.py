"""Skip deltas: which blocks are joined, what pays, and what a reader then reads."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltabus.bus.errors import UsageError
from deltabus.bus.message import Message
from deltabus.bus.planner import MESSAGE_COST, plan
from deltabus.bus.skips import Ladder, SkipPolicy, Span, join, parse_skips
from deltabus.bus.version import VersionVector

from .support import anchor, delta


def unit(version: int, *, nbytes: int = 10, changed: int = 10) -> Span:
    """One delta's span."""
    return Span(version - 1, version, nbytes, 1, changed)


def climb(ladder: Ladder, version: int) -> list[tuple[int, int]]:
    """Feed one delta, and return the blocks that it completes."""
    block, joined = unit(version), []
    while (left := ladder.enter(block)) is not None:
        block = join(left, block)
        joined.append((block.base, block.version))
    return joined


def publish(
    policy: SkipPolicy, sizes: list[int], *, growth: float, first: int = 1, anchor_bytes: int = 10**12
) -> tuple[list[Message], int]:
    """A log with the skips that a publisher adds, and the bytes of these.

    A block of `n` deltas changes `n ** growth` times as much as one of them does on average.
    """
    ladder, skipped = Ladder(policy.levels), 0
    messages = [anchor(0, first, size=anchor_bytes)]
    written = [0]
    for version, size in enumerate(sizes, first + 1):
        written.append(written[-1] + size)
        messages.append(delta(len(messages), version, size=size))
        block = Span(version - 1, version, size, 1, size)
        while (left := ladder.enter(block)) is not None:
            block = join(left, block)
            whole = written[block.version - first] - written[block.base - first]
            changed = math.ceil(whole * block.steps ** (growth - 1))
            if not policy.fits(block, changed, anchor=anchor_bytes):
                ladder.clear()
                break
            if policy.pays(block, changed):
                messages.append(delta(len(messages), version, base=block.base, size=changed))
                block = block.published(changed, changed)
                skipped += changed
    return messages, skipped


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10))
@example(1, 64, 20)
@example(0, 64, 3)
def test_blocks_are_those_of_each_power_of_two_that_divides_a_version(first, count, levels):
    ladder = Ladder(levels)
    for version in range(first + 1, first + count + 1):
        expected = [
            (version - 2**level, version)
            for level in range(1, levels + 1)
            if version % 2**level == 0 and version - 2**level >= first
        ]
        assert climb(ladder, version) == expected
        waiting = ladder.waiting
        assert len(waiting) <= levels
        assert [block.steps for block in waiting] == sorted({block.steps for block in waiting}, reverse=True)
        assert all(one.version == other.base for one, other in itertools.pairwise(waiting))
        assert all(block.base >= first and block.version % (2 * block.steps) for block in waiting)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_no_block_reaches_over_a_gap(gaps):
    ladder, version, first = Ladder(20), 1, 1
    for gap in gaps:
        version += 2 if gap else 1
        first = version - 1 if gap else first
        assert all(base >= first for base, _ in climb(ladder, version))
        assert all(block.base >= first for block in ladder.waiting)


def test_starting_anew_forgets_what_waits():
    ladder = Ladder(20)
    for version in range(1, 8):
        climb(ladder, version)
    assert [block.steps for block in ladder.waiting] == [4, 2, 1]
    ladder.clear()
    assert ladder.waiting == ()
    assert climb(ladder, 8) == []


def test_what_memory_has_no_room_for_ends_the_levels_there():
    ladder = Ladder(20)
    for version in range(1, 8):
        climb(ladder, version)
    ladder.drop_longest()
    assert [block.steps for block in ladder.waiting] == [2, 1]
    assert climb(ladder, 8) == [(6, 8), (4, 8)]
    assert ladder.waiting == ()


@pytest.mark.parametrize(("base", "version"), [(0, 3), (1, 3), (2, 6), (3, 3), (4, 2)])
def test_only_aligned_blocks_enter(base, version):
    with pytest.raises(UsageError, match="aligned"):
        Ladder(20).enter(Span(base, version, 1, 1, 1))


def test_spans_that_do_not_follow_one_another_are_not_joined():
    with pytest.raises(UsageError, match="do not follow"):
        join(unit(1), unit(3))


def test_a_span_adds_up_until_it_is_published():
    whole = join(unit(1, nbytes=100, changed=50), unit(2, nbytes=300, changed=150))
    assert whole == Span(0, 2, 400, 2, 200)
    assert whole.estimate(100) == 200
    assert whole.published(180, 100) == Span(0, 2, 180, 1, 100)
    assert join(unit(1, nbytes=0, changed=0), unit(2, nbytes=0, changed=0)).estimate(0) == 0


def test_what_pays():
    two = Span(0, 2, 2_000_000, 2, 1000)
    assert SkipPolicy().pays(two, 500)
    assert not SkipPolicy().pays(two, 600)
    assert SkipPolicy(share=0.7).pays(two, 600)
    assert SkipPolicy(share=1).pays(two, 1000)
    assert not SkipPolicy(share=1, most=2).pays(Span(0, 1, 10, 1, 10), 10)
    assert not SkipPolicy().pays(Span(0, 8, 8_000_000, 7, 1000), 1000)
    assert SkipPolicy().pays(Span(0, 8, 8_000_000, 8, 1000), 1000)
    assert SkipPolicy().fits(two, 1000, anchor=None)
    assert SkipPolicy().fits(two, 1000, anchor=4_000_000)
    assert not SkipPolicy().fits(two, 1000, anchor=3_999_999)


sizes = st.lists(st.integers(0, 10**6), min_size=1, max_size=400)


@given(sizes, st.floats(0.3, 1.0), st.sampled_from([2, 4, 8, 16]), st.sampled_from([0.25, 0.5, 1.0]), st.data())
def test_a_reader_reads_messages_in_the_logarithm_of_its_lag(sizes, growth, most, share, data):
    policy = SkipPolicy(share=share, most=most)
    messages, _ = publish(policy, sizes, growth=growth)
    end = data.draw(st.integers(2, len(sizes) + 1))
    have = data.draw(st.integers(1, end - 1))
    lag = end - have
    way = shortest(messages, have, end)
    assert way <= 2 * (most - 1) * max(math.ceil(math.log(lag + 1, most)), 1)
    assert way <= lag


def shortest(messages: list[Message], have: int, end: int) -> int:
    """The fewest messages from a version to another, counted without the planner."""
    fewest = {have: 0}
    for message in sorted(messages[1:], key=lambda message: message.version):
        base = message.base["a"]
        if base in fewest and message.version <= end:
            fewest[message.version] = min(fewest.get(message.version, 1 << 40), fewest[base] + 1)
    return fewest[end]


@given(sizes, st.floats(0.3, 1.0), st.sampled_from([0.25, 0.5]))
def test_skips_that_pay_take_no_more_bytes_than_deltas(sizes, growth, share):
    policy = SkipPolicy(share=share, most=1 << 40)
    messages, skipped = publish(policy, sizes, growth=growth)
    deltas = sum(sizes) + len(sizes) * MESSAGE_COST
    skips = len(messages) - 1 - len(sizes)
    assert skipped + skips * MESSAGE_COST <= deltas * share / (1 - share) + len(sizes)


@given(sizes, st.floats(0.3, 1.0), st.integers(0, 10**6))
def test_no_skip_takes_more_than_its_share_of_an_anchor(sizes, growth, anchor_bytes):
    messages, _ = publish(SkipPolicy(), sizes, growth=growth, anchor_bytes=anchor_bytes)
    skips = [message for message in messages[1:] if message.version - message.base["a"] > 1]
    assert all(message.nbytes <= 0.5 * anchor_bytes + 1 for message in skips)


def test_every_power_of_two_when_asked_for():
    messages, _ = publish(parse_skips("all"), [1000] * 64, growth=0.9, first=64)
    skips = {
        (message.base["a"], message.version) for message in messages[1:] if message.version - message.base["a"] > 1
    }
    assert skips == {
        (version - 2**level, version)
        for version in range(65, 129)
        for level in range(1, 7)
        if version % 2**level == 0 and version - 2**level >= 64
    }
    way = plan(messages, have=VersionVector({"a": 64}), target=VersionVector({"a": 128})).messages
    assert [(message.base["a"], message.version) for message in way] == [(64, 128)]


def test_no_levels_no_skips():
    messages, skipped = publish(parse_skips("off"), [1000] * 64, growth=0.5)
    assert (len(messages), skipped) == (65, 0)


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("auto", SkipPolicy()),
        ("all", SkipPolicy(share=1.0, most=2)),
        ("off", SkipPolicy(levels=0)),
        (5, SkipPolicy(levels=5)),
        (SkipPolicy(most=3), SkipPolicy(most=3)),
    ],
)
def test_parse(value, policy):
    assert parse_skips(value) == policy


@pytest.mark.parametrize("value", ["", "on", "AUTO", "5", None, True, False, 1.5, -1, 41])
def test_what_makes_no_policy(value):
    with pytest.raises(UsageError, match="skips"):
        parse_skips(value)


@pytest.mark.parametrize(
    "options",
    [{"share": 0}, {"share": 1.1}, {"share": math.nan}, {"most": 1}, {"levels": -1}, {"levels": 41}, {"anchor": 0},
     {"anchor": math.inf}, {"memory": -1.0}, {"memory": math.nan}],
)  # fmt: skip
def test_figures_out_of_range(options):
    with pytest.raises(UsageError, match=r"not possible|cannot"):
        SkipPolicy(**options)
