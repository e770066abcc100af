"""Shadows whose segments are tensors: they follow, are compared and are read as those in host memory are."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabus.bus.errors import CorruptPayloadError, DivergedError, StorageFullError
from deltabus.codecs import on_device
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import Changes, SegmentChanges, reverse
from deltabus.codecs.container import decode_anchor, decode_delta, encode_anchor, encode_delta
from deltabus.codecs.held import to_host
from deltabus.codecs.holdback import estimate_bytes
from deltabus.codecs.shadow import Shadow, capture, on_devices
from deltabus.codecs.state import as_integers, collect

from .devices import on_each_device


def model(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "transposed": torch.randn(6, 4, generator=generator).bfloat16().t(),
        "f16": torch.randn(9, generator=generator).half(),
        "f32": torch.randn(33, generator=generator),
        "f64": torch.randn(3, generator=generator).double(),
        "fp8": torch.randn(10, generator=generator).to(torch.float8_e4m3fn),
        "ints": torch.arange(11),
        "words": torch.arange(5).to(torch.uint16),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def flip(tensors, random, share):
    """Give a random share of each tensor's elements another bit pattern."""
    for tensor in tensors.values():
        memory = as_integers(tensor)
        mask = torch.as_tensor(random.random(tuple(memory.shape)) < share)
        memory ^= mask.to(memory.device, memory.dtype)


def bits_of(source):
    """All bits that a shadow, a snapshot or a state holds, in host memory."""
    return [to_host(source.read(segment.index)).tolist() for segment in source.schema.segments]


def plainly(changes):
    """Changes as numbers that can be compared."""
    return {
        index: (change.positions.tolist(), change.old.tolist(), change.new.tolist())
        for index, change in changes.segments.items()
    }


@on_each_device
@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    segment_elements=st.integers(1, 50),
    rounded=st.booleans(),
    threaded=st.booleans(),
)
def test_it_finds_and_follows_the_same_changes(device, seed, share, segment_elements, rounded, threaded):
    tensors = model(device)
    how = {"segment_elements": segment_elements, "dtype": torch.bfloat16 if rounded else None}
    with ThreadPoolExecutor(2) as threads:
        pool = threads if threaded else None
        here = Shadow.of(collect(tensors, **how))
        there = Shadow.of(collect(tensors, **how), pool=pool, allocate=on_devices)
        assert {there.read(segment.index).device.type for segment in there.schema.segments} == {device.type}
        assert bits_of(there) == bits_of(here)
        flip(tensors, np.random.default_rng(seed), share)
        state = collect(tensors, **how)
        changes = capture(state, there, pool=pool)
        assert plainly(changes) == plainly(capture(state, here))
        before = bits_of(there)
        for shadow in (here, there):
            shadow.advance(changes)
        assert bits_of(there) == bits_of(here) == bits_of(state)
        assert there.digest(pool) == here.digest()
        there.advance(reverse(changes))
        assert bits_of(there) == before
        assert plainly(capture(state, there, skip=range(len(state.tensors)))) == {}


@on_each_device
@settings(max_examples=30)
@given(seed=st.integers(0, 1000), share=st.sampled_from([0.05, 0.5]), encoding=st.sampled_from([None, "conditional"]))
def test_the_same_bytes_leave_and_lead_to_the_same_state(device, seed, share, encoding):
    tensors = model(device)
    shadows = [
        Shadow.of(collect(tensors, segment_elements=64)),
        Shadow.of(collect(tensors, segment_elements=64), allocate=on_devices),
    ]
    schema = shadows[0].schema
    flip(tensors, np.random.default_rng(seed), share)
    changes = capture(collect(tensors, segment_elements=64), shadows[1])
    sent = []
    for shadow in shadows:
        estimate = estimate_bytes(changes, base=shadow.read, encoding=encoding)
        shadow.advance(changes)
        with shadow.snapshot() as view:
            base = lambda index, view=view: view.read_before(index, changes.segments[index])  # noqa: E731
            delta = [bytes(part.data) for part in encode_delta(changes, base=base, encoding=encoding)]
            anchor = [bytes(part.data) for part in encode_anchor(schema, view.read)]
        sent.append((delta, anchor, estimate))
    assert sent[0] == sent[1]
    delta, anchor, _ = sent[0]
    for shadow in shadows:
        shadow.advance(reverse(changes))
        assert plainly(decode_delta(delta, schema, shadow.read)) == plainly(changes)
        for index, bits in decode_anchor(anchor, schema):
            shadow.load(index, bits)
    assert bits_of(shadows[1]) == bits_of(shadows[0])


@on_each_device
@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([0.02, 0.3, 1.0])), max_size=6), st.data())
def test_snapshots_keep_what_they_saw(device, steps, data):
    tensors = model(device)
    shadow = Shadow.of(collect(tensors, segment_elements=16), allocate=on_devices)
    taken = []
    for seed, share in steps:
        if data.draw(st.booleans()):
            taken.append((shadow.snapshot(), bits_of(shadow), shadow.digest()))
        flip(tensors, np.random.default_rng(seed), share)
        state = collect(tensors, segment_elements=16)
        if data.draw(st.booleans()):
            shadow.advance(capture(state, shadow))
        else:
            for segment in state.schema.segments:
                shadow.load(segment.index, state.read(segment.index))
    for snapshot, bits, digest in taken:
        assert bits_of(snapshot) == bits
        assert snapshot.digest() == digest


def one(position, old, new):
    return SegmentChanges(np.array([position], np.uint32), np.array([old], np.uint8), np.array([new], np.uint8))


def bytes_shadow(device, size=8, segment_elements=4):
    state = collect({"w": torch.zeros(size, dtype=torch.uint8, device=device)}, segment_elements=segment_elements)
    return Shadow.of(state, allocate=on_devices)


@on_each_device
def test_advance_is_all_or_nothing(device):
    shadow = bytes_shadow(device)
    with pytest.raises(DivergedError, match=r"'w' holds 0x00 at element 6, but the change starts from 0x05"):
        shadow.advance(Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 5, 6)}))
    assert bits_of(shadow) == [[0] * 4] * 2
    for wrong in (np.zeros(3, np.uint8), np.zeros(4, np.uint16), torch.zeros(4, dtype=torch.int8)):
        with pytest.raises(CorruptPayloadError, match="segment 1 has 4 elements of uint8, not"):
            shadow.load(1, wrong)
    assert bits_of(shadow) == [[0] * 4] * 2


def test_an_interrupted_advance_is_taken_back(monkeypatch):
    shadow = bytes_shadow("cpu")
    real, calls = on_device.scatter, []

    def scatter(bits, positions, values):
        calls.append(1)
        real(bits, positions, values)
        if len(calls) == 2:
            raise KeyboardInterrupt

    snapshot = shadow.snapshot()
    monkeypatch.setattr(on_device, "scatter", scatter)
    with pytest.raises(KeyboardInterrupt):
        shadow.advance(Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 0, 6)}))
    assert bits_of(shadow) == bits_of(snapshot) == [[0] * 4] * 2


def failing_scatter(monkeypatch, calls):
    """Let the n-th writes to a device fail for want of memory."""
    real, count = on_device.scatter, [0]

    def scatter(bits, positions, values):
        count[0] += 1
        if count[0] in calls:
            raise StorageFullError("no room")
        real(bits, positions, values)

    monkeypatch.setattr(on_device, "scatter", scatter)


def test_nothing_is_written_where_something_does_not_fit(monkeypatch):
    shadow = bytes_shadow("cpu", 12, 4)
    failing_scatter(monkeypatch, range(1, 100))
    with pytest.raises(DivergedError, match="element 9"):
        shadow.advance(Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 0, 6), 2: one(1, 5, 6)}))
    assert bits_of(shadow) == [[0] * 4] * 3
    shadow.snapshot()


def test_what_was_written_is_taken_back_when_memory_runs_out(monkeypatch):
    shadow = bytes_shadow("cpu", 12, 4)
    failing_scatter(monkeypatch, [3])
    changes = Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 0, 6), 2: one(1, 0, 6)})
    with pytest.raises(StorageFullError):
        shadow.advance(changes)
    assert bits_of(shadow) == [[0] * 4] * 3
    shadow.advance(changes)
    assert bits_of(shadow) == [[0, 1, 0, 0], [0, 0, 6, 0], [0, 6, 0, 0]]


def test_a_mixture_is_never_gone_on_from(monkeypatch):
    shadow = bytes_shadow("cpu", 12, 4)
    failing_scatter(monkeypatch, [3, 4, 5])  # taking the third back, and then the first
    changes = Changes(shadow.schema, {0: one(1, 0, 1), 1: one(2, 0, 6), 2: one(1, 0, 6)})
    with pytest.raises(DivergedError, match="mixture"):
        shadow.advance(changes)
    assert bits_of(shadow) == [[0, 1, 0, 0], [0] * 4, [0] * 4]
    for attempt in (lambda: shadow.advance(changes), shadow.snapshot):
        with pytest.raises(DivergedError, match="mixture"):
            attempt()


@on_each_device
def test_a_snapshot_keeps_at_most_one_copy_of_a_segment(device):
    shadow = bytes_shadow(device, 64, 64)
    snapshot = shadow.snapshot()
    for step in range(100):
        old = int(to_host(shadow.read(0))[step % 64])
        shadow.advance(Changes(shadow.schema, {0: one(step % 64, old, step + 1)}))
        kept = sum(bits.nbytes for bits in snapshot._kept.values())
        kept += sum(change.nbytes for later in snapshot._later.values() for change in later)
        assert kept <= 64
    assert bits_of(snapshot) == [[0] * 64]


@on_each_device
def test_it_may_lie_elsewhere_than_the_state(device):
    tensors = model("cpu")
    state = collect(tensors, segment_elements=16)
    shadow = Shadow.of(state, allocate=lambda schema, devices: on_devices(schema, [device] * len(devices)))
    assert bits_of(shadow) == bits_of(state)
    flip(tensors, np.random.default_rng(1), 0.2)
    changes = capture(collect(tensors, segment_elements=16), shadow)
    shadow.advance(changes)
    assert bits_of(shadow) == bits_of(state)
    assert changes.count > 10


@on_each_device
def test_a_model_is_read_loaded_and_told_apart_where_it_lies(device):
    source, other = model(device), model(device, 1)
    shadow = Shadow.of(collect(source, segment_elements=16), allocate=on_devices)
    target = Target.bind(other, shadow.schema)
    target.load(shadow.read)
    assert bits_of(target) == bits_of(shadow)
    assert target.digest() == shadow.digest()
    again = Shadow.empty(shadow.schema, allocate=lambda schema, devices: on_devices(schema, [device] * len(devices)))
    for segment in shadow.schema.segments:
        again.load(segment.index, target.read(segment.index))
    assert bits_of(again) == bits_of(shadow)


@on_each_device
def test_a_shadow_made_in_inference_mode_is_used_outside_it(device):
    tensors = model(device)
    with torch.inference_mode():
        shadow = Shadow.of(collect(tensors), allocate=on_devices)
        snapshot = shadow.snapshot()
    before = bits_of(shadow)
    flip(tensors, np.random.default_rng(1), 0.5)
    state = collect(tensors)
    shadow.advance(capture(state, shadow))
    assert bits_of(shadow) == bits_of(state)
    assert bits_of(snapshot) == before


def test_a_device_without_room_is_an_error_before_anything_is_made(monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    state = collect(model("cpu"))
    with monkeypatch.context() as patch, pytest.raises(StorageFullError, match="no room on the device"):
        patch.setattr(torch, "zeros", full)
        Shadow.of(state, allocate=on_devices)
