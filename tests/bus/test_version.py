from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import UsageError
from deltabus.bus.version import Ordering, VersionVector

VECTORS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)).map(VersionVector)
OPPOSITE = {
    Ordering.EQUAL: Ordering.EQUAL,
    Ordering.CONCURRENT: Ordering.CONCURRENT,
    Ordering.BEFORE: Ordering.AFTER,
    Ordering.AFTER: Ordering.BEFORE,
}


def expected(a: VersionVector, b: VersionVector) -> Ordering:
    """The order written out component by component."""
    less = any(a.of(w) < b.of(w) for w in "abc")
    more = any(a.of(w) > b.of(w) for w in "abc")
    if less and more:
        return Ordering.CONCURRENT
    return Ordering.BEFORE if less else Ordering.AFTER if more else Ordering.EQUAL


@given(VECTORS, VECTORS)
def test_order_is_that_of_the_components(a, b):
    assert a.compare(b) is expected(a, b)
    assert b.compare(a) is OPPOSITE[a.compare(b)]
    assert (a == b) is (a.compare(b) is Ordering.EQUAL)
    assert a != b or hash(a) == hash(b)


@given(VECTORS, VECTORS, VECTORS)
def test_merge_is_the_least_upper_bound(a, b, c):
    merged = a.merge(b)
    assert merged.covers(a) and merged.covers(b)
    assert merged == b.merge(a) and a.merge(a) == a
    assert not (c.covers(a) and c.covers(b)) or c.covers(merged)


def test_a_missing_writer_is_at_zero():
    assert VersionVector({"a": 0}) == VersionVector() == {} == VersionVector({"b": 0})
    assert VersionVector({"a": 1}).of("b") == 0
    assert list(VersionVector({"b": 1, "a": 2, "c": 0})) == ["a", "b"]
    assert VersionVector({"a": 1}) == {"a": 1, "b": 0}
    assert VersionVector({"a": 1}) != "a@1"


def test_text():
    assert str(VersionVector({"b": 1, "a": 2})) == "a@2 b@1"
    assert str(VersionVector()) == "nothing"


def test_a_negative_version_is_refused():
    with pytest.raises(UsageError, match="'a' is -1"):
        VersionVector({"a": -1})


def test_it_keeps_its_own_copy():
    versions = {"a": 1}
    vector = VersionVector(versions)
    versions["a"] = 2
    assert vector["a"] == 1
