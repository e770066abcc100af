import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltabus.bus.errors import CorruptPayloadError
from deltabus.codecs.cursor import Cursor
from deltabus.codecs.dtypes import Order
from deltabus.codecs.planes import (
    estimate_planes,
    pack_plane,
    pack_planes,
    rotate,
    thin_out,
    unpack_plane,
    unpack_planes,
    unrotate,
)

RAW, ZSTD, CONSTANT, SPARSE = range(4)


def planes():
    return st.one_of(
        hnp.arrays(np.uint8, st.integers(0, 400)),
        hnp.arrays(np.uint8, st.integers(0, 400), elements=st.sampled_from([0, 0, 0, 0, 0, 1, 255])),
    )


def frame(content, **kwargs):
    data = zstandard.ZstdCompressor(**kwargs).compress(content)
    return bytes((ZSTD,)) + len(data).to_bytes(4, "little") + data


def unpacked(data, size):
    cursor = Cursor(data, "a plane")
    values = unpack_plane(cursor, size)
    cursor.finish()
    return values


@given(planes())
def test_round_trip_of_a_plane(values):
    packed = pack_plane(values)
    assert (unpacked(packed, values.size) == values).all()
    assert len(packed) <= values.size + 1


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@given(st.data())
def test_round_trip_of_planes(dtype, data):
    values = data.draw(hnp.arrays(dtype, st.integers(0, 200)))
    cursor = Cursor(pack_planes(values), "planes")
    found = unpack_planes(cursor, values.size, values.dtype)
    cursor.finish()
    assert found.dtype == values.dtype
    assert (found == values).all()


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("size", [1, 32767, 32768, 32769, 100_000])
def test_planes_are_unpacked_into_memory_that_is_there(order, size):
    values = np.random.default_rng(size).integers(0, 1 << 16, size, np.uint16)
    out = np.zeros(size, np.uint16)
    packed = pack_planes(values, order)
    assert packed == pack_planes(rotate(values, order))
    assert unpack_planes(Cursor(packed, "planes"), size, out.dtype, order, out=out) is out
    assert (out == values).all()


@given(st.sampled_from(["u1", "u2", "u4", "u8"]).flatmap(lambda d: hnp.arrays(d, 8)), st.sampled_from(Order))
def test_rotation_is_undone(bits, order):
    assert (unrotate(rotate(bits, order), order) == bits).all()


def test_rotation_leaves_the_exponent_alone_in_the_top_byte():
    minus_three = np.array([0b1_10000000_1000000], np.uint16)
    assert int(rotate(minus_three, Order.SIGN_MAGNITUDE)[0]) == 0b10000000_1000000_1
    assert int(rotate(minus_three, Order.PLAIN)[0]) == int(minus_three[0])


@pytest.mark.parametrize(
    ("values", "method"),
    [
        (np.zeros(1000, np.uint8), CONSTANT),
        (np.full(1, 9, np.uint8), CONSTANT),
        (np.random.default_rng(1).integers(0, 256, 1000).astype(np.uint8), RAW),
        (np.random.default_rng(1).integers(0, 4, 1000).astype(np.uint8), ZSTD),
        ((np.random.default_rng(1).random(4000) < 0.1).astype(np.uint8), SPARSE),
    ],
)
def test_the_smallest_way_is_taken(values, method):
    packed = pack_plane(values)
    assert packed[0] == method
    assert (unpacked(packed, values.size) == values).all()


def test_bytes_are_as_described():
    assert pack_plane(np.array([5, 5, 5], np.uint8)) == bytes((CONSTANT, 5))
    assert pack_plane(np.array([5, 6], np.uint8)) == bytes((RAW, 5, 6))
    assert pack_planes(np.array([0x0105, 0x0206], np.uint16)) == bytes((RAW, 5, 6, RAW, 1, 2))
    marked = bytes((SPARSE, RAW, 0b10000001, 0b00000010, CONSTANT, 7))
    assert unpacked(marked, 10).tolist() == [7, 0, 0, 0, 0, 0, 0, 7, 0, 7]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "truncated"),
        (b"\x00123", "truncated"),
        (b"\x0012345678901", "too many"),
        (b"\x04", "unknown way 4"),
        (b"\x01\xff\xff\xff\xff", "truncated"),
        (b"\x01\x04\x00\x00\x00abcd", "decompress"),
        (frame(bytes(11)), "frame of 11 bytes"),
        (frame(bytes(9)), "frame of 9 bytes"),
        (frame(bytes(10), compression_params=zstandard.ZstdCompressionParameters(write_content_size=0)), "frame of"),
        (b"\x03\x03\x00\x01", "unknown way 3"),
        (b"\x03\x00\x01\xfc\x02\x01", "beyond its 10"),
    ],
)
def test_damaged_planes_are_refused(data, what):
    with pytest.raises(CorruptPayloadError, match=what):
        unpacked(data, 10)


def test_more_than_one_frame_is_refused():
    two = zstandard.ZstdCompressor().compress(bytes(10)) * 2
    with pytest.raises(CorruptPayloadError):
        unpacked(bytes((ZSTD,)) + len(two).to_bytes(4, "little") + two, 10)


@pytest.mark.parametrize("claimed", [1 << 30, 1 << 40, (1 << 64) - 2])
def test_a_frame_that_claims_a_huge_content_takes_no_memory(claimed):
    # Magic number, descriptor with an 8-byte content size and a single segment, the size, one raw last block of a byte.
    hostile = bytes.fromhex("28b52ffde0") + claimed.to_bytes(8, "little") + bytes.fromhex("09000041")
    data = bytes((ZSTD,)) + len(hostile).to_bytes(4, "little") + hostile
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayloadError):
            unpacked(data, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_asks_for_a_huge_window_is_refused():
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    data = compressor.compress(bytes(1000)) + compressor.flush()
    with pytest.raises(CorruptPayloadError):
        unpacked(bytes((ZSTD,)) + len(data).to_bytes(4, "little") + data, 1000)


@given(planes(), st.data())
def test_damage_is_refused_or_gives_a_plane_of_the_same_size(values, data):
    packed = bytearray(pack_plane(values))
    if packed:
        bit = data.draw(st.integers(0, len(packed) * 8 - 1))
        packed[bit // 8] ^= 1 << bit % 8
    try:
        found = unpacked(bytes(packed), values.size)
    except CorruptPayloadError:
        return
    assert found.size == values.size


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
def test_estimates_come_near(share, dtype):
    rng = np.random.default_rng(3)
    values = np.minimum(rng.geometric(0.3, 100_000), 200).astype(dtype) * (rng.random(100_000) < share).astype(dtype)
    size = len(pack_planes(values))
    assert 0.7 * size < estimate_planes(thin_out(values), values.size) < 1.5 * size
    some = values[values > 0]
    assert 0.7 * size < estimate_planes(thin_out(some), some.size, zeros=values.size - some.size) < 1.5 * size
