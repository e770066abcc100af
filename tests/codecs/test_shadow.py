import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import (
    CorruptPayloadError,
    DivergedError,
    SchemaMismatchError,
    StorageFullError,
    UsageError,
)
from deltabus.codecs.changes import Changes, SegmentChanges, changes_between, reverse
from deltabus.codecs.digest import digest_of
from deltabus.codecs.kernels import compare
from deltabus.codecs.scratch import Scratch
from deltabus.codecs.shadow import Shadow, capture
from deltabus.codecs.state import as_integers, collect

from ..clients.interrupts import Steps


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "transposed": torch.randn(6, 4, generator=generator).bfloat16().t(),
        "f16": torch.randn(9, generator=generator).half(),
        "f32": torch.randn(33, generator=generator),
        "f64": torch.randn(3, generator=generator).double(),
        "fp8": torch.randn(10, generator=generator).to(torch.float8_e4m3fn),
        "ints": torch.arange(11),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
    }


def copy_of(shadow):
    return [shadow.read(segment.index).tolist() for segment in shadow.schema.segments]


def bits_of(state):
    return [state.read(segment.index).tolist() for segment in state.schema.segments]


def flip(tensors, random, share):
    """Give a random share of each tensor's elements another bit pattern."""
    for tensor in tensors.values():
        memory = as_integers(tensor)
        mask = torch.as_tensor(random.random(tuple(memory.shape)) < share)
        memory ^= mask.to(memory.dtype)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(1, 50), st.booleans())
def test_capture_finds_every_changed_bit(seed, share, segment_elements, threaded):
    tensors = model()
    with ThreadPoolExecutor(2) as pool:
        used = pool if threaded else None
        shadow = Shadow.of(collect(tensors, segment_elements=segment_elements), pool=used)
        before = copy_of(shadow)
        flip(tensors, np.random.default_rng(seed), share)
        state = collect(tensors, segment_elements=segment_elements)
        changes = capture(state, shadow, pool=used)
        assert copy_of(shadow) == before
        shadow.advance(changes)
        assert copy_of(shadow) == bits_of(state)
        assert shadow.digest(used) == digest_of(state.schema, state.read)
        shadow.advance(reverse(changes))
        assert copy_of(shadow) == before
    if share in {0.0, 1.0}:
        assert changes.count == share * state.schema.total


@pytest.mark.parametrize(
    ("dtype", "width", "before", "after"),
    [
        (torch.bfloat16, 16, 0x0000, 0x8000),  # 0.0 and -0.0 are equal as numbers
        (torch.bfloat16, 16, 0x7FC0, 0x7FC1),  # two NaNs
        (torch.float32, 32, 0x7F800001, 0x7FC00001),  # a signalling and a quiet NaN
        (torch.float32, 32, 0x00000001, 0x00000000),  # a denormal and zero
        (torch.float64, 64, 0x7FF0000000000001, 0xFFF0000000000001),
        (torch.float16, 16, 0x0001, 0x8001),
        (torch.float8_e5m2, 8, 0x7D, 0x7E),
    ],
)
def test_what_floats_call_equal_or_unequal_is_compared_as_bits(dtype, width, before, after):
    values = np.array([before] * 20, f"<u{width // 8}")
    tensor = torch.from_numpy(values.view(f"<i{width // 8}" if width > 8 else "u1")).view(dtype)
    shadow = Shadow.of(collect({"t": tensor}))
    assert not capture(collect({"t": tensor}), shadow).segments
    values[13] = after
    (change,) = capture(collect({"t": tensor}), shadow).segments.values()
    assert (change.positions.tolist(), change.old.tolist(), change.new.tolist()) == ([13], [before], [after])


def test_rounded_capture_sees_only_what_the_rounding_shows():
    masters = {"w": torch.tensor([1.0, 2.0, 3.0])}
    shadow = Shadow.of(collect(masters, dtype=torch.bfloat16))
    masters["w"][0] += 1e-6
    masters["w"][2] += 0.5
    (change,) = capture(collect(masters, dtype=torch.bfloat16), shadow).segments.values()
    assert change.positions.tolist() == [2]


def test_capture_of_another_schema_says_what_differs():
    shadow = Shadow.of(collect({"w": torch.zeros(3)}))
    with pytest.raises(SchemaMismatchError, match=r"shape of tensor 'w' is \(4,\), expected \(3,\)"):
        capture(collect({"w": torch.zeros(4)}), shadow)


def test_changes_of_far_apart_elements():
    tensor = torch.zeros(3_000_000, dtype=torch.uint8)
    shadow = Shadow.of(collect({"w": tensor}))
    tensor[[0, 1_500_000, 2_999_999]] = 1
    (change,) = capture(collect({"w": tensor}), shadow).segments.values()
    assert change.positions.tolist() == [0, 1_500_000, 2_999_999]


def one(position, old, new):
    return SegmentChanges(np.array([position], np.uint32), np.array([old], np.uint8), np.array([new], np.uint8))


def bytes_shadow(size=8, segment_elements=4):
    return Shadow.of(collect({"w": torch.zeros(size, dtype=torch.uint8)}, segment_elements=segment_elements))


def test_advance_is_all_or_nothing():
    shadow = bytes_shadow()
    with pytest.raises(DivergedError, match=r"'w' holds 0x00 at element 6, but the change starts from 0x05"):
        shadow.advance(Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 5, 6)}))
    assert copy_of(shadow) == [[0] * 4] * 2


@given(st.data())
def test_advance_is_all_or_nothing_whatever_does_not_fit(data):
    shadow = bytes_shadow(data.draw(st.integers(1, 700)), 300)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    before, after, changed = copy_of(shadow), copy_of(shadow), {}
    for segment in shadow.schema.segments:
        positions = np.flatnonzero(random.random(segment.size) < 0.5).astype(np.uint32)
        if positions.size:
            old = np.zeros(positions.size, np.uint8)
            changed[segment.index] = SegmentChanges(positions, old, old + np.uint8(1))
        for at in positions:
            after[segment.index][at] = 1
    wrong = data.draw(st.sampled_from([None, *changed]))
    if wrong is not None:
        changed[wrong].old[random.integers(changed[wrong].old.size)] = 9
    with ThreadPoolExecutor(2) as threads, shadow.snapshot() as snapshot:
        pool = data.draw(st.sampled_from([threads, None]))
        if wrong is None:
            shadow.advance(Changes(shadow.schema, changed), pool=pool)
        else:
            with pytest.raises(DivergedError):
                shadow.advance(Changes(shadow.schema, changed), pool=pool)
        assert copy_of(shadow) == (after if wrong is None else before)
        assert copy_of(snapshot) == before


def test_an_advance_may_be_interrupted_anywhere():
    changes = {0: one(5, 0, 1), 1: one(6, 0, 2)}
    old, new = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8) + np.uint8(10)
    old[6] = 2
    # The second is too much to be noted: a copy is kept.
    later = {0: one(7, 0, 3), 1: SegmentChanges(np.arange(64, dtype=np.uint32), old, new)}
    at, count, outcomes = 0, 1, set()
    while at <= count:
        shadow = bytes_shadow(128, 64)
        start = copy_of(shadow)
        first = shadow.snapshot()
        shadow.advance(Changes(shadow.schema, changes))
        second, middle = shadow.snapshot(), copy_of(shadow)
        try:
            with Steps(at) as steps:
                shadow.advance(Changes(shadow.schema, later))
        except KeyboardInterrupt:
            pass
        count = max(count, steps.count)
        outcomes.add(copy_of(shadow) == middle)
        assert copy_of(shadow) in (middle, [middle[0][:7] + [3] + [0] * 56, new.tolist()])
        assert copy_of(first) == start
        assert copy_of(second) == middle
        at += 1
    assert outcomes == {True, False}
    assert count > 20


def test_nothing_is_applied_twice():
    shadow = bytes_shadow()
    changes = Changes(shadow.schema, {0: one(1, 0, 1)})
    shadow.advance(changes)
    with pytest.raises(DivergedError):
        shadow.advance(changes)
    assert copy_of(shadow) == [[0, 1, 0, 0], [0] * 4]


def test_malformed_and_foreign_changes_are_refused():
    shadow = bytes_shadow()
    with pytest.raises(CorruptPayloadError):
        shadow.advance(Changes(shadow.schema, {0: one(4, 0, 1)}))
    with pytest.raises(SchemaMismatchError):
        shadow.advance(Changes(bytes_shadow(9).schema, {}))


def test_an_interrupted_advance_is_taken_back(monkeypatch):
    shadow = bytes_shadow()
    real, calls = compare.replace, []

    def replace(*arguments):
        calls.append(1)
        wrong = real(*arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wrong

    snapshot = shadow.snapshot()
    monkeypatch.setattr(compare, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        shadow.advance(Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 0, 6)}))
    assert copy_of(shadow) == copy_of(snapshot) == [[0] * 4] * 2
    shadow.advance(Changes(shadow.schema, {0: one(1, 0, 3)}))
    assert copy_of(snapshot) == [[0] * 4] * 2


@given(st.data())
def test_scratch_holds_one_copy_after_the_other(data):
    scratch = Scratch()
    for size in data.draw(st.lists(st.integers(0, 40), max_size=6)):
        kind = data.draw(st.sampled_from([np.uint8, np.uint16, np.uint64]))
        bits = np.arange(size).astype(kind)
        copy = scratch.copy(bits)
        assert copy.dtype == bits.dtype and copy.tolist() == bits.tolist()
        assert not np.shares_memory(copy, bits)


def test_a_snapshot_is_read_into_scratch():
    shadow, scratch = bytes_shadow(64, 64), Scratch()
    first, second = one(5, 0, 7), one(6, 0, 9)
    shadow.advance(Changes(shadow.schema, {0: first}))
    with shadow.snapshot() as snapshot:
        shadow.advance(Changes(shadow.schema, {0: second}))
        assert snapshot.read(0, scratch).tolist() == [0] * 5 + [7] + [0] * 58
        assert snapshot.read_before(0, first, scratch).tolist() == [0] * 64
        assert shadow.read(0)[5:7].tolist() == [7, 9]
        snapshot._keep(0)
        assert snapshot.read_before(0, first, scratch).tolist() == [0] * 64
        assert snapshot.read(0, scratch).tolist() == [0] * 5 + [7] + [0] * 58


def test_load_replaces_a_segment_and_checks_it():
    shadow = Shadow.empty(bytes_shadow().schema)
    shadow.load(1, np.array([1, 2, 3, 4], np.uint8))
    assert copy_of(shadow) == [[0] * 4, [1, 2, 3, 4]]
    for wrong in (np.zeros(3, np.uint8), np.zeros(4, np.uint16), np.zeros((2, 2), np.uint8)):
        with pytest.raises(CorruptPayloadError, match="segment 1 has 4 elements"):
            shadow.load(1, wrong)
    assert copy_of(shadow) == [[0] * 4, [1, 2, 3, 4]]


@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([0.02, 0.3, 1.0])), max_size=8), st.data())
def test_snapshots_keep_what_they_saw(steps, data):
    tensors = model()
    shadow = Shadow.of(collect(tensors, segment_elements=16))
    taken = []
    for seed, share in steps:
        if data.draw(st.booleans()):
            taken.append((shadow.snapshot(), copy_of(shadow), shadow.digest()))
        if taken and data.draw(st.booleans()):
            snapshot, bits, digest = data.draw(st.sampled_from(taken))
            taken.append((snapshot.again(), bits, digest))
            if data.draw(st.booleans()):
                snapshot.release()
                taken = [each for each in taken if each[0] is not snapshot]
        flip(tensors, np.random.default_rng(seed), share)
        state = collect(tensors, segment_elements=16)
        if data.draw(st.booleans()):
            shadow.advance(capture(state, shadow))
        else:
            for segment in state.schema.segments:
                shadow.load(segment.index, state.read(segment.index))
    for snapshot, bits, digest in taken:
        assert copy_of(snapshot) == bits
        assert snapshot.digest() == digest


def test_a_snapshot_keeps_at_most_one_copy_of_a_segment():
    shadow = bytes_shadow(64, 64)
    snapshot = shadow.snapshot()
    for step in range(100):
        shadow.advance(Changes(shadow.schema, {0: one(step % 64, shadow.read(0)[step % 64], step + 1)}))
        kept = sum(bits.nbytes for bits in snapshot._kept.values())
        kept += sum(change.nbytes for later in snapshot._later.values() for change in later)
        assert kept <= 64
    assert copy_of(snapshot) == [[0] * 64]


@pytest.mark.parametrize("moved", [0, 3, 100])
def test_a_snapshot_gives_what_was_before_the_change_that_led_to_it(moved):
    shadow = bytes_shadow(64, 64)
    change = one(5, 0, 7)
    shadow.advance(Changes(shadow.schema, {0: change}))
    snapshot = shadow.snapshot()
    for step in range(moved):
        shadow.advance(Changes(shadow.schema, {0: one(step % 64, shadow.read(0)[step % 64], step + 100)}))
    assert (0 in snapshot._kept) == (moved == 100)
    assert snapshot.read_before(0, change).tolist() == [0] * 64
    assert snapshot.read(0).tolist() == [0] * 5 + [7] + [0] * 58


def test_a_released_snapshot_keeps_nothing():
    shadow = bytes_shadow()
    with shadow.snapshot() as snapshot:
        shadow.advance(Changes(shadow.schema, {0: one(1, 0, 1)}))
        assert snapshot.read(0).tolist() == [0] * 4
    snapshot.release()
    with pytest.raises(UsageError, match="released"):
        snapshot.read(0)
    with pytest.raises(UsageError, match="released"):
        snapshot.again()
    shadow.advance(Changes(shadow.schema, {0: one(1, 1, 2)}))
    assert not snapshot._later


def test_a_forgotten_snapshot_costs_nothing():
    shadow = bytes_shadow()
    shadow.snapshot()
    gc.collect()
    assert not list(shadow._snapshots)


def test_snapshots_are_read_while_the_shadow_advances():
    size, rounds = 20_000, 60
    tensor = torch.zeros(size, dtype=torch.int32)
    shadow = Shadow.of(collect({"w": tensor}, segment_elements=3000))
    failures, started, done = [], threading.Event(), threading.Event()

    def watch():
        while True:
            last = done.is_set()
            with shadow.snapshot() as snapshot:
                # Each state holds one number everywhere, and a snapshot shows one state, however often it is read.
                seen = {
                    int(v)
                    for _ in range(2)
                    for s in snapshot.schema.segments
                    for v in np.unique(snapshot.read(s.index))
                }
            if len(seen) != 1:
                failures.append(seen)
            started.set()
            if last:
                return

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    assert started.wait(30)
    try:
        for _ in range(rounds):
            tensor += 1
            shadow.advance(capture(collect({"w": tensor}, segment_elements=3000), shadow))
    finally:
        done.set()
        for watcher in watchers:
            watcher.join(30)
    assert not failures
    assert not any(watcher.is_alive() for watcher in watchers)


def test_changes_between_a_state_and_a_shadow():
    tensors = model()
    shadow = Shadow.of(collect(tensors))
    flip(tensors, np.random.default_rng(1), 0.2)
    state = collect(tensors)
    with ThreadPoolExecutor(2) as pool:
        found = changes_between(state.schema, shadow.read, state.read, pool=pool)
    assert found.count == capture(state, shadow).count > 0


def test_a_state_too_large_for_memory_is_an_error_of_ours(monkeypatch):
    schema = collect(model()).schema

    def full(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(StorageFullError, match=f"{schema.nbytes} bytes"):
        patch.setattr(np, "zeros", full)
        Shadow.empty(schema)
