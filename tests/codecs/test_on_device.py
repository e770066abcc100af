"""Bits in tensors: torch does the same, bit by bit, as the compiled loops do with arrays."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import CorruptPayloadError, SchemaMismatchError, StorageFullError, UsageError
from deltabus.codecs import dtypes, held, on_device
from deltabus.codecs.changes import SegmentChanges
from deltabus.codecs.encodings import ENCODINGS, choose, encode_full
from deltabus.codecs.ranks import places_of, ranks_of
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.scratch import Scratch

from .devices import on_each_device

NAMES = sorted(name for name in dtypes._BY_NAME)


@dataclass(frozen=True)
class Case:
    """Two states of a segment, and what differs."""

    segment: object
    old: np.ndarray
    new: np.ndarray

    @property
    def changes(self):
        positions = np.flatnonzero(self.old != self.new).astype(np.uint32)
        return SegmentChanges(positions, self.old[positions], self.new[positions])


def values_like(kind, dtype, size, rng):
    """Bits as weights have them, or all patterns there are, or those of one class or two."""
    if kind == "weights" and dtype.torch.is_floating_point:
        drawn = torch.from_numpy(rng.standard_normal(size) * 0.02).to(dtype.torch)
        return drawn.view(dtypes.INTEGERS[dtype.size]).numpy().view(dtype.bits).copy()
    patterns = rng.integers(0, 256, size * dtype.size, np.uint8).view(dtype.bits)
    if kind == "zeros":
        return np.where(patterns & dtype.bits.type(1), dtype.bits.type(1 << (8 * dtype.size - 1)), dtype.bits.type(0))
    return np.full(size, patterns[0]) if kind == "constant" else patterns


def case(name, size, *, kind, share, seed):
    rng, dtype = np.random.default_rng(seed), dtypes.by_name(name)
    segment = Schema.of([TensorSpec(name="w", dtype=name, shape=(size,))], segment_elements=1 << 24).segments[0]
    old = values_like(kind, dtype, size, rng)
    moved = rng.random(size) < share
    moved[rng.integers(size)] = True
    step = rng.integers(1, 4, size).astype(dtype.bits)
    return Case(segment, old, np.where(moved, old + step, old))


cases = st.builds(
    case,
    st.sampled_from(NAMES),
    st.one_of(st.integers(1, 40), st.integers(1, 3000)),
    kind=st.sampled_from(["weights", "patterns", "zeros", "constant"]),
    share=st.sampled_from([0.0, 0.01, 0.3, 0.95, 1.0]),
    seed=st.integers(0, 2**32),
)


def same(one, other):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def parts(changes):
    return changes.positions, changes.old, changes.new


@on_each_device
@given(cases)
def test_differences_are_the_same(device, case):
    old, new = (on_device.as_tensor(bits, device) for bits in (case.old, case.new))
    assert same(held.differing(old, new), held.differing(case.old, case.new))
    assert same(held.differing(old, case.new), parts(case.changes))
    assert same(held.differing(case.old, new), parts(case.changes))
    assert held.changes_from(old, case.old) is None
    assert same(parts(held.changes_from(old, new)), parts(case.changes))


@on_each_device
@given(cases)
def test_elements_are_taken_checked_and_written(device, case):
    changes = case.changes
    places, old, new = parts(changes)
    bits = held.copied(on_device.as_tensor(case.old, device))
    assert same([held.take(bits, places)], [old])
    assert held.first_not_holding(bits, places, old) == -1
    assert held.first_not_holding(bits, places, np.concatenate((old[:-1], new[-1:]))) == places.size - 1
    assert held.first_not_holding(bits, places, new) == 0
    before = held.copied(bits)
    held.scatter(bits, places, new)
    assert same([held.to_host(bits), held.to_host(before)], [case.new, case.old])
    held.copy_into(bits, case.old)
    assert same([held.to_host(bits)], [case.old])
    held.copy_into(before, on_device.as_tensor(case.new, device))
    array = np.zeros_like(case.old)
    held.copy_into(array, before)
    assert same([array], [case.new])
    assert same([held.sampled(bits)], [held.sampled(case.old)])


@on_each_device
@given(cases, st.integers(0, 2**64 - 1))
def test_the_digests_sum_is_the_same(device, case, key):
    bits = on_device.as_tensor(case.old, device)
    assert held.sum_run(bits, key) == held.sum_run(case.old, key)
    assert held.sum_run(bits[1:], key) == held.sum_run(case.old[1:], key)


@on_each_device
@given(cases)
def test_ranks_and_places_are_the_same(device, case):
    bits = on_device.as_tensor(case.old, device)
    here, there = (
        ranks_of(case.segment, case.old, case.changes, Scratch()),
        ranks_of(case.segment, bits, case.changes, Scratch()),
    )
    assert same(here, there)
    found = places_of(case.segment, bits, there.counts, there.gaps, Scratch())
    assert same(found, places_of(case.segment, case.old, here.counts, here.gaps, Scratch()))
    assert same(found[:1], [case.changes.positions])


@on_each_device
@given(cases, st.data())
def test_places_that_are_not_there_are_missed_alike(device, case, data):
    ranks = ranks_of(case.segment, case.old, case.changes, Scratch())
    gaps = ranks.gaps.copy()
    gaps[data.draw(st.integers(0, gaps.size - 1))] = data.draw(st.integers(0, case.segment.size - 1))
    bits = on_device.as_tensor(case.old, device)
    here = places_of(case.segment, case.old, ranks.counts, gaps, Scratch())
    assert same(here, places_of(case.segment, bits, ranks.counts, gaps, Scratch()))


@on_each_device
@given(cases)
def test_each_encoding_gives_the_same_bytes_and_reads_them_back(device, case):
    bits = on_device.as_tensor(case.old, device)
    assert choose(case.segment, case.changes, bits) is choose(case.segment, case.changes, case.old)
    assert encode_full(case.segment, bits) == encode_full(case.segment, case.old)
    for encoding in ENCODINGS.values():
        assert encoding.estimate(case.segment, case.changes, bits) == encoding.estimate(
            case.segment, case.changes, case.old
        )
        data = encoding.encode(case.segment, case.changes, bits)
        assert data == encoding.encode(case.segment, case.changes, case.old)
        for base in (bits, case.old):
            assert same(parts(encoding.decode(case.segment, data, base)), parts(case.changes))
    assert same([held.to_host(bits)], [case.old])


@on_each_device
@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F32", "I64"])
@pytest.mark.parametrize("share", [0.001, 0.3])
def test_large_segments(device, name, share):
    large = case(name, (1 << 20) + 4321, kind="weights", share=share, seed=3)
    bits = on_device.as_tensor(large.old, device)
    assert held.sum_run(bits, 2**64 - 5) == held.sum_run(large.old, 2**64 - 5)
    assert same(held.differing(bits, large.new), parts(large.changes))
    data = ENCODINGS["conditional"].encode(large.segment, large.changes, bits)
    assert data == ENCODINGS["conditional"].encode(large.segment, large.changes, large.old)
    assert same(parts(ENCODINGS["conditional"].decode(large.segment, data, bits)), parts(large.changes))


@on_each_device
def test_a_base_that_is_another_state_is_refused(device):
    small = case("BF16", 500, kind="weights", share=0.1, seed=1)
    changes = small.changes
    other = small.old.copy()
    other[changes.positions[7]] ^= 1
    data = ENCODINGS["conditional"].encode(small.segment, changes, small.old)
    for base in (other, on_device.as_tensor(other, device)):
        with pytest.raises(UsageError, match=f"other bits at element {changes.positions[7]} than"):
            ENCODINGS["conditional"].encode(small.segment, changes, base)
    for base in (np.zeros_like(other), on_device.as_tensor(np.zeros_like(other), device)):
        with pytest.raises(CorruptPayloadError, match=r"changes, of which \d+ have no place in the state read"):
            ENCODINGS["conditional"].decode(small.segment, data, base)
    for wrong in (small.old[1:], small.old.view(np.uint8), small.old.astype(np.uint32), small.old.reshape(2, 250)):
        for base in (wrong, on_device.as_tensor(wrong, device)):
            with pytest.raises(SchemaMismatchError, match="segment 0 has 500 elements of uint16"):
                choose(small.segment, changes, base)


@on_each_device
def test_bits_made_in_inference_mode_are_written_to_outside_it(device):
    with torch.inference_mode():
        bits = torch.zeros(8, dtype=torch.int16, device=device)
    held.scatter(bits, np.array([3], np.uint32), np.array([0xFFFF], np.uint16))
    held.copy_into(bits[:2], np.array([1, 2], np.uint16))
    assert held.to_host(bits).tolist() == [1, 2, 0, 0xFFFF, 0, 0, 0, 0]


@on_each_device
def test_works_where_torch_refuses_what_is_not_deterministic(device):
    small = case("BF16", 3000, kind="weights", share=0.2, seed=2)
    expected = ENCODINGS["conditional"].encode(small.segment, small.changes, small.old)
    torch.set_deterministic_debug_mode("error")
    try:
        bits = on_device.zeros(3000, torch.int16, device)
        held.copy_into(bits, small.old)
        assert same(held.differing(bits, small.new), parts(small.changes))
        data = ENCODINGS["conditional"].encode(small.segment, small.changes, bits)
        assert data == expected
        changes = ENCODINGS["conditional"].decode(small.segment, data, bits)
        held.scatter(bits, changes.positions, changes.new)
        assert held.sum_run(bits, 5) == held.sum_run(small.new, 5)
    finally:
        torch.set_deterministic_debug_mode("default")


def test_a_device_without_room_is_an_error_of_ours(monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    bits = torch.zeros(8, dtype=torch.int16)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    with pytest.raises(StorageFullError, match=r"no room on the device .*CUDA out of memory.*shadow='ram'"):
        held.copied(bits)
