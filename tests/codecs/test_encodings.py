import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltabus.bus.errors import CodecError, CorruptPayloadError, DivergedError, SchemaMismatchError, UsageError
from deltabus.codecs import dtypes
from deltabus.codecs.changes import SegmentChanges
from deltabus.codecs.encodings import ENCODINGS, choose, decode_full, encode_full
from deltabus.codecs.schema import Schema, TensorSpec

FLOATS = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"]
NAMES = [*FLOATS, "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64"]

SPECIAL = {
    1: [0x00, 0x80, 0x7F, 0xFF, 0x7E, 0x01, 0x81],
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7FFF, 0x7F7F],
    4: [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    8: [0, 1 << 63, 1, (1 << 63) + 1, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1, (1 << 64) - 1],
}


def segment_of(name, size):
    return Schema.of([TensorSpec(name="w", dtype=name, shape=(size,))], segment_elements=1 << 28).segments[0]


@st.composite
def bits_of(draw, dtype, size):
    """Special values, any values, or values near each other."""
    limit = 2 ** (8 * dtype.size)
    near = draw(st.integers(0, limit - 4))
    values = draw(
        st.sampled_from([st.sampled_from(SPECIAL[dtype.size]), st.integers(0, limit - 1), st.integers(near, near + 3)])
    )
    return draw(hnp.arrays(dtype.bits, size, elements=values))


@st.composite
def cases(draw):
    """A segment, its bits before, and what changes."""
    segment = segment_of(draw(st.sampled_from(NAMES)), draw(st.integers(1, 300)))
    base, new = (draw(bits_of(segment.dtype, segment.size)) for _ in range(2))
    few = draw(st.sampled_from([1, 2, segment.size]))
    kept = draw(hnp.arrays(np.bool_, segment.size)) if few != segment.size else np.zeros(segment.size, np.bool_)
    new = np.where(kept, base, new)
    if (new == base).all():
        at = draw(st.sampled_from([0, segment.size - 1]))
        new[at] ^= new.dtype.type(1)
    positions = np.flatnonzero(new != base).astype(np.uint32)
    return segment, base, SegmentChanges(positions, base[positions], new[positions])


def same(a, b):
    pairs = ((a.positions, b.positions), (a.old, b.old), (a.new, b.new))
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@given(cases())
def test_round_trip(encoding, case):
    segment, base, changes = case
    before = base.copy()
    assert same(encoding.decode(segment, encoding.encode(segment, changes, base), base), changes)
    assert np.array_equal(base, before)


@given(st.sampled_from(NAMES), st.integers(1, 300), st.data())
def test_round_trip_of_full_states(name, size, data):
    segment = segment_of(name, size)
    bits = data.draw(bits_of(segment.dtype, size))
    found = decode_full(segment, encode_full(segment, bits))
    assert found.dtype == bits.dtype
    assert np.array_equal(found, bits)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@given(cases(), st.data())
def test_truncated_data_is_refused(encoding, case, data):
    segment, base, changes = case
    whole = encoding.encode(segment, changes, base)
    with pytest.raises(CorruptPayloadError):
        encoding.decode(segment, whole[: data.draw(st.integers(0, len(whole) - 1))], base)
    with pytest.raises(CorruptPayloadError):
        encoding.decode(segment, whole + b"\0", base)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@given(cases(), st.data())
def test_damaged_data_is_refused_or_gives_changes_in_order_and_range(encoding, case, data):
    segment, base, changes = case
    damaged = bytearray(encoding.encode(segment, changes, base))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
        damaged[bit // 8] ^= 1 << bit % 8
    try:
        found = encoding.decode(segment, bytes(damaged), base)
    except CodecError:
        return
    assert 0 < found.positions.size == found.old.size == found.new.size
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()
    assert found.positions[-1] < segment.size
    assert np.array_equal(found.old, base[found.positions])
    assert (found.old != found.new).all()


@given(st.sampled_from(list(ENCODINGS)), st.binary(max_size=300), st.integers(1, 300))
def test_noise_is_refused_or_gives_changes(name, noise, size):
    segment = segment_of("BF16", size)
    try:
        found = ENCODINGS[name].decode(segment, noise, np.zeros(size, np.uint16))
    except CodecError:
        return
    assert 0 < found.positions.size <= size


def training_step(noise, size=1 << 18):
    """Two bf16 states, as a step of training makes them."""
    rng = np.random.default_rng(5)
    master = (rng.standard_normal(size) * 0.02).astype(np.float32)
    moved = master + (rng.standard_normal(size) * noise).astype(np.float32)
    old, new = ((m.view(np.uint32) + np.uint32(0x8000) >> np.uint32(16)).astype(np.uint16) for m in (master, moved))
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return segment_of("BF16", size), old, SegmentChanges(positions, old[positions], new[positions])


def test_a_training_step_takes_few_bits_per_change():
    segment, base, changes = training_step(3e-7)
    assert 0.005 < changes.positions.size / segment.size < 0.02
    assert len(ENCODINGS["conditional"].encode(segment, changes, base)) * 8 < 7.1 * changes.positions.size
    assert len(ENCODINGS["step"].encode(segment, changes)) * 8 < 11 * changes.positions.size
    assert len(ENCODINGS["overwrite"].encode(segment, changes)) * 8 < 24 * changes.positions.size


@pytest.mark.parametrize("noise", [1e-8, 3e-7, 3e-6, 3e-5, 1e-3, 1.0])
def test_the_choice_costs_at_most_a_twentieth_more_than_the_best(noise):
    segment, base, changes = training_step(noise)
    sizes = {name: len(encoding.encode(segment, changes, base)) for name, encoding in ENCODINGS.items()}
    assert sizes[choose(segment, changes, base).name] <= 1.05 * min(sizes.values())
    del sizes["conditional"]
    assert sizes[choose(segment, changes).name] <= 1.05 * min(sizes.values())


@pytest.mark.parametrize("name", ["BOOL", "U8", "BF16"])
def test_what_changes_alike_everywhere_takes_next_to_nothing(name):
    segment = Schema.of([TensorSpec(name="w", dtype=name, shape=(262145,))]).segments[0]
    old = np.zeros(segment.size, segment.dtype.bits)
    changes = SegmentChanges(np.arange(segment.size, dtype=np.uint32), old, old + old.dtype.type(1))
    assert len(choose(segment, changes, old).encode(segment, changes, old)) < 20


def test_each_encoding_is_chosen_somewhere():
    segment, base, near = training_step(3e-7)
    assert choose(segment, near, base).name == "conditional"
    assert choose(segment, near).name == "step"
    assert choose(*training_step(1e-3)[::2]).name == "dense"
    reset = SegmentChanges(near.positions, near.old, np.zeros_like(near.old))
    assert choose(segment, reset, base).name == "overwrite"


@pytest.mark.parametrize("name", ENCODINGS)
def test_errors_name_segment_and_encoding(name):
    with pytest.raises(CorruptPayloadError, match=rf"segment 0 \({name}\) .*; fetch"):
        ENCODINGS[name].decode(segment_of("BF16", 10), b"", np.zeros(10, np.uint16))


def test_overwriting_what_is_there_already_is_divergence():
    segment = segment_of("BF16", 10)
    changes = SegmentChanges(np.array([3, 7], np.uint32), np.array([1, 2], np.uint16), np.array([5, 6], np.uint16))
    base = np.array([0, 0, 0, 1, 0, 0, 0, 6, 0, 0], np.uint16)
    with pytest.raises(DivergedError, match="element 7 of segment 0"):
        ENCODINGS["overwrite"].decode(segment, ENCODINGS["overwrite"].encode(segment, changes), base)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("base", [np.zeros(9, np.uint16), np.zeros(10, np.uint32), np.zeros((10, 1), np.uint16)])
def test_a_base_of_another_segment_is_refused(name, base):
    with pytest.raises(SchemaMismatchError, match="segment 0"):
        ENCODINGS[name].decode(segment_of("BF16", 10), b"", base)
    with pytest.raises(SchemaMismatchError, match="segment 0"):
        encode_full(segment_of("BF16", 10), base)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(
    ("positions", "old", "new", "what"),
    [
        ([], [], [], "segment 0"),
        ([10], [1], [2], "segment 0"),
        ([1, 2], [1], [2], "segment 0"),
        ([1], [1], [1], "does not change"),
    ],
)
def test_changes_that_do_not_fit_are_refused(name, positions, old, new, what):
    changes = SegmentChanges(np.array(positions, np.uint32), np.array(old, np.uint16), np.array(new, np.uint16))
    segment = segment_of("BF16", 10)
    base = np.ones(10, np.uint16)
    with pytest.raises(UsageError, match=what):
        ENCODINGS[name].encode(segment, changes, base)
    with pytest.raises(UsageError, match=what):
        choose(segment, changes, base)


@pytest.mark.parametrize("name", ENCODINGS)
def test_changes_of_another_dtype_or_out_of_order_are_refused(name):
    segment = segment_of("BF16", 10)
    old, new = np.array([1, 2], np.uint16), np.array([3, 4], np.uint16)
    for positions, before in (
        (np.array([1, 2], np.int64), old),
        (np.array([1, 2], np.uint32), old.astype(np.uint32)),
        (np.array([2, 1], np.uint32), old),
        (np.array([2, 2], np.uint32), old),
    ):
        with pytest.raises(UsageError):
            ENCODINGS[name].encode(segment, SegmentChanges(positions, before, new), np.ones(10, np.uint16))


def test_every_dtype_has_special_values_here():
    assert {dtypes.by_name(name).size for name in NAMES} == set(SPECIAL)


ONE_STEP = bytes.fromhex("0100000002000100000001")  # one change, at position 0 of 10


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("step", ONE_STEP + bytes.fromhex("020202000200"), "signs beyond"),
        ("step", ONE_STEP + bytes.fromhex("020102ff02ff"), "step of nothing"),
        ("step", ONE_STEP + bytes.fromhex("02010200020000"), "1 bytes too many"),
        ("dense", bytes.fromhex("02000200"), "no change"),
        ("overwrite", bytes.fromhex("0b000000"), "claims 11 changes in 10"),
        ("overwrite", bytes.fromhex("00000000"), "claims 0 changes"),
    ],
)
def test_what_is_wrong_is_said(name, data, what):
    with pytest.raises(CorruptPayloadError, match=what):
        ENCODINGS[name].decode(segment_of("BF16", 10), data, np.zeros(10, np.uint16))


def test_a_step_by_hand_is_read():
    changes = ENCODINGS["step"].decode(
        segment_of("BF16", 10), ONE_STEP + bytes.fromhex("020102000200"), np.zeros(10, np.uint16)
    )
    assert [each.tolist() for each in (changes.positions, changes.old, changes.new)] == [[0], [0], [0x8000]]
