import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.codecs.dtypes import Order
from deltabus.codecs.steps import (
    advance,
    advance_zigzag,
    distances_between,
    ordered,
    steps_between,
    zigzag_between,
)

WIDTHS = [np.dtype(code) for code in ("u1", "u2", "u4", "u8")]


def pairs():
    """Two patterns of one width."""
    return st.sampled_from(WIDTHS).flatmap(
        lambda dtype: st.tuples(
            st.just(dtype), *[st.integers(0, 2 ** (8 * dtype.itemsize) - 1) for _ in range(2)], st.sampled_from(Order)
        )
    )


@given(pairs())
def test_steps_lead_from_any_pattern_to_any_other(pair):
    dtype, a, b, order = pair
    old, new = np.array([a], dtype), np.array([b], dtype)
    assert advance_zigzag(old, zigzag_between(old, new, order), order) == new
    if a != b:
        steps = steps_between(old, new, order)
        assert steps.beyond.dtype == dtype
        assert advance(old, steps, order) == new
        assert int(steps.beyond[0]) < 2 ** (8 * dtype.itemsize - 1)


@pytest.mark.parametrize("dtype", WIDTHS[:2], ids=str)
@pytest.mark.parametrize("order", Order)
def test_order_is_a_bijection_and_its_own_inverse(dtype, order):
    every = np.arange(2 ** (8 * dtype.itemsize), dtype=np.uint64).astype(dtype)
    places = ordered(every, order)
    assert np.unique(places).size == every.size
    assert (ordered(places, order) == every).all()


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_places_follow_the_order_of_the_floats(a, b):
    bits = np.array([struct.unpack("<I", struct.pack("<f", value))[0] for value in (a, b)], np.uint32)
    here, there = ordered(bits, Order.SIGN_MAGNITUDE).view(np.int32).tolist()
    key = [(value, math.copysign(1, value)) for value in (a, b)]
    assert (here < there) == (key[0] < key[1])


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        (0x3F80, 0x3F81, 1),  # 1.0 to the next bf16
        (0x3F80, 0x3F7F, -1),
        (0xBF80, 0xBF81, -1),  # -1.0 away from zero
        (0x0000, 0x8000, -1),  # +0.0 to -0.0
        (0x8000, 0x0000, 1),
        (0x0001, 0x8001, -3),  # across both zeros, between the smallest denormals
        (0x7F7F, 0x7F80, 1),  # the largest number to infinity
        (0x7FC0, 0x7FC1, 1),  # from one NaN to another
        (0xFFFF, 0x7FFF, -1),  # from the lowest place to the highest: it wraps
    ],
)
def test_known_steps_of_bf16(old, new, step):
    steps = steps_between(np.array([old], np.uint16), np.array([new], np.uint16), Order.SIGN_MAGNITUDE)
    assert (bool(steps.negative[0]), int(steps.beyond[0])) == (step < 0, abs(step) - 1)
    zigzag = zigzag_between(np.array([old], np.uint16), np.array([new], np.uint16), Order.SIGN_MAGNITUDE)
    assert int(zigzag[0]) == (2 * step if step > 0 else -2 * step - 1)


def test_the_longest_step_is_down():
    old, new = np.array([0], np.uint8), np.array([128], np.uint8)
    steps = steps_between(old, new, Order.PLAIN)
    assert (bool(steps.negative[0]), int(steps.beyond[0])) == (True, 127)
    assert advance(old, steps, Order.PLAIN) == new


@given(pairs())
def test_distances_never_wrap(pair):
    dtype, a, b, order = pair
    signed = dtype.str.replace("u", "i") if order is Order.SIGN_MAGNITUDE else dtype
    places = [int(ordered(np.array([bits], dtype), order).view(signed)[0]) for bits in (a, b)]
    distances = distances_between(np.array([a, b], dtype), np.array([b, a], dtype), order)
    assert distances.dtype == dtype
    assert distances.tolist() == [abs(places[0] - places[1])] * 2
