import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError
from deltabus.codecs.changes import (
    Changes,
    SegmentChanges,
    changes_between,
    check_same_schema,
    compose,
    find_differing,
    locate,
    reverse,
    validate,
)
from deltabus.codecs.kernels import compare
from deltabus.codecs.schema import Schema, TensorSpec

SCHEMA = Schema.of(
    [
        TensorSpec(name="a", dtype="BF16", shape=(5,)),
        TensorSpec(name="b", dtype="F8_E4M3", shape=(3, 4)),
        TensorSpec(name="c", dtype="BF16", shape=(9,)),
        TensorSpec(name="d", dtype="I64", shape=()),
    ],
    segment_elements=8,
)


def state(values):
    """A state of SCHEMA from any list of small integers, repeated as needed."""
    line, states = np.resize(np.array(values, np.uint64), SCHEMA.total), []
    for segment in SCHEMA.segments:
        states.append(line[: segment.size].astype(segment.dtype.bits))
        line = line[segment.size :]
    return states


def difference(old, new):
    return changes_between(SCHEMA, old.__getitem__, new.__getitem__)


def applied(states, changes):
    states = [bits.copy() for bits in states]
    for index, change in changes.segments.items():
        assert states[index][change.positions].tolist() == change.old.tolist()
        states[index][change.positions] = change.new
    return states


def as_lists(states):
    return [bits.tolist() for bits in states]


states = st.lists(st.integers(0, 2), min_size=SCHEMA.total, max_size=SCHEMA.total).map(state)


@given(states, states)
def test_difference_leads_from_old_to_new_and_back(old, new):
    changes = difference(old, new)
    validate(changes)
    assert as_lists(applied(old, changes)) == as_lists(new)
    assert as_lists(applied(new, reverse(changes))) == as_lists(old)
    assert changes.count == sum(int((a != b).sum()) for a, b in zip(old, new, strict=True))


@given(states, states, states)
def test_composition_equals_one_after_the_other(first, second, third):
    composed = compose(difference(first, second), difference(second, third))
    expected = difference(first, third)
    validate(composed)
    assert composed.segments.keys() == expected.segments.keys()
    for index, change in composed.segments.items():
        other = expected.segments[index]
        assert [change.positions.tolist(), change.old.tolist(), change.new.tolist()] == [
            other.positions.tolist(), other.old.tolist(), other.new.tolist()
        ]  # fmt: skip


@given(states, states)
def test_there_and_back_is_nothing(old, new):
    changes = difference(old, new)
    assert not compose(changes, reverse(changes)).segments


def test_compose_refuses_changes_that_do_not_follow():
    first = difference(state([0]), state([1]))
    with pytest.raises(
        DivergedError, match=r"'a' holds 0x0001 at element 0, but the change starts from 0x0000"
    ) as caught:
        compose(first, first)
    assert caught.value.tensor == "a"


def test_other_schemas_are_refused():
    def like(**other):
        spec = {"name": "a", "dtype": "F32", "shape": (2,), **other}
        return Schema.of([TensorSpec(**spec)], segment_elements=8)

    check_same_schema(like(), like())
    for other, what in (
        ({"name": "z"}, "'a' is in only one"),
        ({"dtype": "BF16"}, "dtype of tensor 'a' is BF16, expected F32"),
        ({"shape": (3,)}, r"shape of tensor 'a' is \(3,\), expected \(2,\)"),
        ({"aliases": ("y",)}, "aliases of tensor 'a'"),
    ):
        with pytest.raises(SchemaMismatchError, match=what):
            check_same_schema(like(), like(**other))
    with pytest.raises(SchemaMismatchError, match="segments have 4 elements, expected 8"):
        check_same_schema(like(), Schema.of(like().tensors, segment_elements=4))
    with pytest.raises(SchemaMismatchError):
        compose(Changes(like(), {}), Changes(SCHEMA, {}))


def test_locate_finds_every_element():
    found = []
    for segment in SCHEMA.segments:
        for position in range(segment.size):
            spec, element = locate(SCHEMA, segment.index, position)
            found.append((spec.name, element))
    assert sorted(found) == [(spec.name, i) for spec in SCHEMA.tensors for i in range(spec.size)]


def change(positions, old, new, dtype=np.uint16):
    return SegmentChanges(np.array(positions, np.uint32), np.array(old, dtype), np.array(new, dtype))


@pytest.mark.parametrize(
    ("segments", "what"),
    [
        ({9: change([0], [1], [2])}, "segment 9"),
        ({-1: change([0], [1], [2])}, "segment -1"),
        ({0: change([], [], [])}, "empty"),
        ({0: change([0], [1], [2], np.uint32)}, "other types"),
        ({0: SegmentChanges(np.array([0]), np.array([1], np.uint16), np.array([2], np.uint16))}, "other types"),
        ({0: change([0, 1], [1], [2])}, "different lengths"),
        ({0: change([1, 0], [1, 1], [2, 2])}, "increase strictly"),
        ({0: change([1, 1], [1, 1], [2, 2])}, "increase strictly"),
        ({0: change([8], [1], [2])}, "below 8"),
        ({0: change([1, 2], [1, 5], [2, 5])}, "does not change"),
    ],
)
def test_malformed_changes_are_refused(segments, what):
    with pytest.raises(CorruptPayloadError, match=what):
        validate(Changes(SCHEMA, segments))


@given(
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.integers(0, 700),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 1000),
    st.sampled_from([0, 0.01, 0.5, 1]),
)
def test_find_differing_at_any_alignment(dtype, size, shift_old, shift_new, seed, density):
    random = np.random.default_rng(seed)
    old, new = np.zeros(size + shift_old, dtype)[shift_old:], np.zeros(size + shift_new, dtype)[shift_new:]
    old[:] = random.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    new[:] = old
    touched = random.random(size) < density
    # One bit anywhere, the topmost included.
    new[touched] ^= dtype(1) << random.integers(0, old.itemsize * 8, int(touched.sum())).astype(dtype)
    found = find_differing(old, new)
    assert found.positions.dtype == np.uint32
    assert found.positions.tolist() == np.flatnonzero(touched).tolist()
    assert found.old.dtype == found.new.dtype == dtype
    assert found.old.tolist() == old[touched].tolist()
    assert found.new.tolist() == new[touched].tolist()


def test_find_differing_grows_its_memory_when_all_has_changed():
    size = compare.CHUNK * 32 * 50 + 3
    old = np.zeros(size, np.uint16)
    assert find_differing(old, old + np.uint16(1)).positions.tolist() == list(range(size))
    last = old.copy()
    last[[0, -1]] = 1
    assert find_differing(old, last).positions.tolist() == [0, size - 1]


def test_find_differing_of_misaligned_memory():
    raw = np.zeros(8 * 100 + 3, np.uint8)
    new = raw[3:].view(np.uint32)
    old = np.zeros(200, np.uint32)
    old[150] = 9
    assert find_differing(old, new).positions.tolist() == [150]
    assert find_differing(new, old).positions.tolist() == [150]
