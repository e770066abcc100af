import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import CorruptPayloadError, UsageError
from deltabus.codecs.cursor import Cursor
from deltabus.codecs.rice import MAX_SIZE, PositionCode


def encoded(positions, size):
    code = PositionCode.of(np.array(positions, np.uint32), size)
    data = code.encode()
    assert len(data) <= code.nbytes
    return data


def decoded(data, count, size):
    cursor = Cursor(data, "positions")
    positions = PositionCode.decode(cursor, count, size)
    cursor.finish()
    return positions.tolist()


@st.composite
def position_sets(draw):
    size = draw(st.one_of(st.integers(1, 2000), st.integers(1, MAX_SIZE)))
    few = st.sets(st.integers(0, size - 1), min_size=1, max_size=min(size, 300))
    start, length = draw(st.integers(0, size - 1)), draw(st.integers(1, 600))
    run = st.just(set(range(start, min(start + length, size))))
    return sorted(draw(st.one_of(few, run, st.tuples(few, run).map(lambda both: both[0] | both[1])))), size


@given(position_sets())
def test_round_trip(case):
    positions, size = case
    assert decoded(encoded(positions, size), len(positions), size) == positions


@pytest.mark.parametrize("size", [1, 2, 3, 127, 128, 129, 1000])
def test_ends_and_everything(size):
    for positions in ([0], [size - 1], sorted({0, size - 1}), list(range(size))):
        assert decoded(encoded(positions, size), len(positions), size) == positions


def test_the_bytes_are_as_described():
    # Gaps 0, 2, 11 with parameter 2, in the order in which bits are filled in: 1 00, 1 01, 001 11.
    assert encoded([0, 3, 15], 16) == bytes.fromhex("0202020000002907")
    assert int("11100101001", 2).to_bytes(2, "little") == bytes.fromhex("2907")


def test_a_far_jump_is_written_as_it_is():
    positions = [*range(100), 1 << 27]
    data = encoded(positions, 1 << 28)
    assert len(data) == 2 + 4 + (100 + 12 + 28 + 7) // 8
    assert decoded(data, 101, 1 << 28) == positions


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_random_positions_come_near_their_entropy(density):
    size = 1 << 20
    positions = np.flatnonzero(np.random.default_rng(7).random(size) < density)
    share = positions.size / size
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * size
    assert len(encoded(positions, size)) * 8 < entropy + 0.08 * positions.size + 200


def test_clumps_cost_less_than_their_average_density_says():
    size = 1 << 20
    row = np.random.default_rng(7).random(384) < 0.05
    positions = np.concatenate([np.flatnonzero(row) + start for start in range(0, size - 384, 384 * 50)])
    # As if spread evenly, these would take 11.3 bits each.
    assert len(encoded(positions, size)) * 8 < 7.1 * positions.size


@pytest.mark.parametrize("positions", [[3, 3], [4, 3], [10], [0, 10]])
def test_positions_that_do_not_fit_are_refused(positions):
    with pytest.raises(UsageError, match="increase"):
        encoded(positions, 10)


@pytest.mark.parametrize("size", [0, MAX_SIZE + 1])
def test_segments_of_impossible_size_are_refused(size):
    with pytest.raises(UsageError, match="elements"):
        encoded([0], size)


@given(position_sets(), st.data())
def test_truncated_positions_are_refused(case, data):
    positions, size = case
    whole = encoded(positions, size)
    with pytest.raises(CorruptPayloadError):
        decoded(whole[: data.draw(st.integers(0, len(whole) - 1))], len(positions), size)


@given(position_sets(), st.data())
def test_damaged_positions_are_refused_or_stay_in_order_and_range(case, data):
    positions, size = case
    damaged = bytearray(encoded(positions, size))
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        found = decoded(bytes(damaged), len(positions), size)
    except CorruptPayloadError:
        return
    assert len(found) == len(positions)
    assert found == sorted(set(found))
    assert found[-1] < size


@given(st.binary(max_size=200), st.integers(0, 1 << 32), st.integers(1, MAX_SIZE))
def test_noise_is_refused_or_stays_in_order_and_range(noise, count, size):
    try:
        found = decoded(noise, count, size)
    except CorruptPayloadError:
        return
    assert len(found) == count
    assert found == sorted(set(found))
    assert found[-1] < size


def test_a_huge_count_takes_no_memory():
    # A constant plane of parameters and no codes: nothing here pays for 2^28 positions.
    with pytest.raises(CorruptPayloadError, match="claims"):
        decoded(bytes.fromhex("020000000000"), MAX_SIZE, MAX_SIZE)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("0204020000002907", "parameter 4"),
        ("020203000000290700", "does not hold"),  # a byte too many
        ("02020200000029ff", "behind its last"),  # bits in the padding
        ("0202020000000000", "does not hold"),  # one escape, and no bits left
        ("02020400000000f000f0", "does not hold"),  # escapes that lead out of the segment
    ],
)
def test_what_is_wrong_is_said(data, what):
    with pytest.raises(CorruptPayloadError, match=what):
        decoded(bytes.fromhex(data), 3, 16)
