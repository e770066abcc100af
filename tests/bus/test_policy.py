from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import UsageError
from deltabus.bus.policy import Adaptive, AnchorPolicy, Every, Never, SinceAnchor, parse_policy


def publish(policy: AnchorPolicy, sizes: list[int], *, anchor: int) -> list[bool]:
    """Which of a log's versions get an anchor."""
    since, anchors = SinceAnchor(), []
    for size in sizes:
        due = policy.due(since)
        anchors.append(due)
        since = since.after_anchor(anchor) if due else since.after_delta(size)
    return anchors


@pytest.mark.parametrize("policy", [Adaptive(), Every(1000), Never()])
def test_the_first_message_is_an_anchor(policy):
    assert policy.due(SinceAnchor())


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_every(steps):
    assert publish(Every(steps), [1] * 31, anchor=5) == [version % steps == 0 for version in range(31)]


def test_never():
    assert publish(Never(), [10**9] * 5, anchor=1) == [True, False, False, False, False]


def test_adaptive_waits_until_the_deltas_outweigh_the_share():
    assert publish(Adaptive(share=0.5), [20] * 8, anchor=100) == [True, *[False] * 3, True, *[False] * 3]
    assert not Adaptive(share=0.5).due(SinceAnchor(100, 50, 5))
    assert Adaptive(share=0.5).due(SinceAnchor(100, 51, 5))


@given(st.lists(st.integers(0, 50), max_size=200), st.sampled_from([0.25, 0.5, 1.0, 3.0]))
def test_adaptive_keeps_what_its_docstring_promises(sizes, share):
    anchor, slack = 100, 50
    anchors = publish(Adaptive(share=share), sizes, anchor=anchor)
    chain = longest = deltas = 0
    for is_anchor, size in zip(anchors, sizes, strict=True):
        chain = 0 if is_anchor else chain + size
        deltas += 0 if is_anchor else size
        longest = max(longest, chain)
    assert longest <= share * anchor + slack
    again = max(sum(anchors) - 1, 0) * anchor
    assert again <= deltas / share


def test_a_due_anchor_stays_due_until_it_is_there():
    since = SinceAnchor(100, 101, 3)
    assert Adaptive().due(since)
    assert Adaptive().due(since.after_delta(0))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("adaptive", Adaptive()),
        ("adaptive:0.5", Adaptive(share=0.5)),
        ("every:100", Every(100)),
        (7, Every(7)),
        ("never", Never()),
        (Never(), Never()),
    ],
)
def test_parse(text, policy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "", "Adaptive", "adaptive:", "adaptive:x", "adaptive:0", "adaptive:-1", "adaptive:nan", "adaptive:inf", "every",
        "every:0", "every:1.5", "every:", "never:", "never:1", "100", 0, -1, True, 1.5, None,
    ],
)  # fmt: skip
def test_what_makes_no_policy(text):
    with pytest.raises(UsageError, match="anchor"):
        parse_policy(text)
