import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bench.formats import FORMATS, size_of

EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))


def step(shape, places, *, flip=1):
    old = np.arange(np.prod(shape), dtype=np.int64).astype(np.uint16).reshape(shape)
    new = old.copy()
    new.reshape(-1)[np.asarray(places, np.int64)] ^= np.uint16(flip)
    return old, new


def assert_round_trip(form, old, new):
    sent = form.encode(old, new)
    held = old.copy()
    form.decode(sent, held)
    np.testing.assert_array_equal(held, new)
    return size_of(sent)


@EACH
@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((8, 8), []),
        ((8, 8), [0]),
        ((8, 8), [63]),
        ((8, 8), list(range(64))),
        ((1,), [0]),
        ((5,), [1, 4]),
        ((2, 3, 4), [0, 5, 23]),
        ((300_000,), [0, 1, 299_999]),  # a gap, and a column, that 16 bits do not hold
        ((70_000,), [65_535, 65_536]),  # the last gap that they hold
        ((70_000,), [65_536]),  # the first that they do not
        ((300, 4), [0, 1199]),  # a row that 8 bits do not hold
        ((257, 2), [2, 512, 513]),
    ],
)
def test_the_new_bits_come_out(form, shape, places):
    assert_round_trip(form, *step(shape, places))


@EACH
@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1 << 32),
)
def test_any_step_comes_out(form, rows, columns, share, seed):
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, (rows, columns), np.uint16)
    new = np.where(random.random(old.shape) < share, random.integers(0, 1 << 16, old.shape, np.uint16), old)
    assert_round_trip(form, old, new)


@EACH
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (40, 30)])
def test_every_width_and_shape_comes_out(form, dtype, shape):
    random = np.random.default_rng(1)
    old, other = (np.array(random.integers(0, 200, shape), dtype) for _ in range(2))
    new = np.where(random.random(shape) < 0.3, other, old)
    assert (new.shape, new.dtype) == (old.shape, old.dtype)
    assert_round_trip(form, old, new)


def test_sizes_are_those_of_the_descriptions():
    old, new = step((1000, 1000), range(0, 1_000_000, 100))
    sizes = {name: assert_round_trip(form, old, new) for name, form in FORMATS.items()}
    assert sizes["int32 index + value"] == 10_000 * 6
    assert sizes["uint16 gap + value"] == 10_000 * 4
    assert sizes["LEB128 gap + value"] == 10_000 * 3  # gaps of 99 take one byte


@pytest.mark.parametrize(("gap", "code"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (1 << 21, "80808001")])
def test_varints_are_leb128(gap, code):
    (codes, _) = FORMATS["LEB128 gap + value"].encode(*step((gap + 1,), [gap]))
    assert codes.tobytes().hex() == code


def test_a_wide_gap_widens_its_tensor():
    gaps, values = FORMATS["uint16 gap + value"].encode(*step((70_000,), [1, 69_999]))
    assert (gaps.dtype, values.dtype) == (np.uint32, np.uint16)
