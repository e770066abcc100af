from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError, UnsupportedTensorError
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import Changes, SegmentChanges, reverse
from deltabus.codecs.digest import digest_delta
from deltabus.codecs.kernels import compare
from deltabus.codecs.overlap import overlapping, overlaps_itself
from deltabus.codecs.shadow import Shadow, capture
from deltabus.codecs.slices import TensorSlice
from deltabus.codecs.state import as_integers, collect

SEGMENT = 16


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "f16": torch.randn(9, generator=generator).half(),
        "f32": torch.randn(3, 11, generator=generator),
        "f64": torch.randn(3, generator=generator).double(),
        "fp8": torch.randn(10, generator=generator).to(torch.float8_e5m2),
        "ints": torch.arange(11),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64, generator=generator),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
    }


def strided(source):
    """The same values in tensors of other layouts."""
    held = {}
    for name, tensor in source.items():
        width = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 1]
        held[name] = width.copy_(tensor)
    return held


def cloned(source):
    return {name: tensor.clone() for name, tensor in source.items()}


def as_bits(source):
    return {name: as_integers(tensor).tolist() for name, tensor in source.items()}


def step(source, seed, share=0.3):
    """Change a share of the elements, and return the changes."""
    shadow = Shadow.of(collect(source, segment_elements=SEGMENT))
    random = np.random.default_rng(seed)
    for tensor in source.values():
        memory = as_integers(tensor)
        memory ^= torch.as_tensor(random.random(tuple(memory.shape)) < share).to(memory.dtype)
    return capture(collect(source, segment_elements=SEGMENT), shadow)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([cloned, strided]))
def test_apply_is_bit_exact_and_reversible(seed, share, layout):
    source = tensors()
    held = layout(source)
    before = as_bits(held)
    changes = step(source, seed, share)
    target = Target.bind(held, changes.schema)
    old_digest = target.digest()
    target.apply(changes, digest_delta=digest_delta(changes))
    assert as_bits(held) == as_bits(source)
    assert target.digest() == (old_digest + digest_delta(changes)) % (1 << 64)
    target.apply(reverse(changes))
    assert as_bits(held) == before


@pytest.mark.parametrize("layout", [cloned, strided])
@pytest.mark.parametrize("threads", [0, 2])
def test_load_and_read(layout, threads):
    source, held = tensors(1), layout(tensors(2))
    state = collect(source, segment_elements=SEGMENT)
    target = Target.bind(held, state.schema)
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            target.load(state.read, pool=pool)
    else:
        target.load(state.read)
    assert as_bits(held) == as_bits(source)
    for segment in state.schema.segments:
        assert target.read(segment.index).tolist() == state.read(segment.index).tolist()


def test_load_takes_memory_that_cannot_be_written_to():
    held = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    target = Target.bind(held, collect(held).schema)
    target.load(lambda index: np.frombuffer(b"\x01\x02\x03\x04", np.uint16))
    assert as_integers(held["w"]).tolist() == [0x0201, 0x0403]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_written_once_and_stay_tied():
    source, model = Tied(), Tied()
    model.load_state_dict(source.state_dict())
    changes = step({"embed.weight": source.embed.weight}, 1)
    schema = collect(source, segment_elements=SEGMENT).schema
    assert schema.tensors[0].aliases == ("head.weight",)
    target = Target.bind(model, schema)
    target.apply(Changes(schema, changes.segments))
    assert torch.equal(model.head.weight, source.head.weight)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.requires_grad


def test_copies_under_several_names_are_all_written():
    source = Tied()
    schema = collect(source, segment_elements=SEGMENT).schema
    held = {name: torch.zeros(6, 4) for name in ("embed.weight", "module.head.weight")}
    target = Target.bind(held, schema)
    target.load(collect(source, segment_elements=SEGMENT).read)
    changes = Changes(schema, step({"embed.weight": source.embed.weight}, 2).segments)
    target.apply(changes)
    for tensor in held.values():
        assert torch.equal(tensor, source.embed.weight)
    target.digest()
    held["module.head.weight"][3, 1] += 1
    with pytest.raises(DivergedError, match="several times, with different bits"):
        target.digest()
    with pytest.raises(DivergedError):
        target.apply(reverse(Changes(schema, {0: all_of(source, schema)})))


def all_of(source, schema):
    bits = collect(source, segment_elements=SEGMENT).read(0)
    return SegmentChanges(np.arange(bits.size, dtype=np.uint32), bits ^ np.uint32(1), bits)


def test_an_alias_alone_is_enough():
    schema = collect(Tied()).schema
    held = {"head.weight": torch.zeros(6, 4)}
    source = Tied()
    Target.bind(held, schema).load(collect(source).read)
    assert torch.equal(held["head.weight"], source.head.weight)


def test_wrapped_models_and_extra_tensors():
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    schema = collect(plain, select=["0.*"]).schema
    source = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    Target.bind(nn.DataParallel(plain), schema).load(collect(source, select=["0.*"]).read)
    assert torch.equal(plain[0].weight, source[0].weight)
    held = {"a": torch.zeros(2), "elsewhere": torch.zeros(2, device="meta")}
    Target.bind(held, collect({"a": torch.zeros(2)}).schema)


def test_inference_tensors_and_parameters_in_use():
    with torch.inference_mode():
        held = {"w": torch.zeros(8)}
    weight = nn.Parameter(torch.zeros(8))
    source = {"w": torch.zeros(8)}
    changes = step(source, 3)
    for tensor in (held["w"], weight):
        Target.bind({"w": tensor}, changes.schema).apply(changes)
        assert torch.equal(tensor.detach(), source["w"])
    loss = (weight**2).sum()
    Target.bind({"w": weight}, changes.schema).apply(reverse(changes))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_staged_changes_are_written_later_and_once():
    source = tensors()
    held = cloned(source)
    before = as_bits(held)
    changes = step(source, 4)
    staged = Target.bind(held, changes.schema).stage(changes)
    assert as_bits(held) == before
    staged.write()
    assert as_bits(held) == as_bits(source)
    with pytest.raises(DivergedError):
        staged.write()
    assert as_bits(held) == as_bits(source)


@pytest.mark.parametrize("layout", [cloned, strided])
def test_a_diverged_model_is_named_and_left_alone(layout):
    source = {"a": torch.zeros(20, dtype=torch.bfloat16), "b": torch.zeros(4, 5, dtype=torch.bfloat16)}
    held = layout(source)
    changes = step(source, 5, share=1.0)
    as_integers(held["b"])[3, 2] = -2
    before = as_bits(held)
    with pytest.raises(
        DivergedError, match=r"'b' holds 0xfffe at element 17, but the change starts from 0x0000"
    ) as caught:
        Target.bind(held, changes.schema).apply(changes)
    assert caught.value.tensor == "b"
    assert as_bits(held) == before


def test_wrong_changes_are_refused():
    source = {"a": torch.zeros(20)}
    held = cloned(source)
    changes = step(source, 6)
    target = Target.bind(held, changes.schema)
    with pytest.raises(CorruptPayloadError, match="digest"):
        target.apply(changes, digest_delta=digest_delta(changes) + 1)
    with pytest.raises(SchemaMismatchError):
        target.apply(step({"z": torch.zeros(20)}, 6))
    (index, change), *_ = changes.segments.items()
    twice = SegmentChanges(*(np.concatenate((part, part)) for part in (change.positions, change.old, change.new)))
    with pytest.raises(CorruptPayloadError, match="strictly"):
        target.apply(Changes(changes.schema, {index: twice}))
    assert held["a"].eq(0).all()


@pytest.mark.parametrize("layout", [cloned, strided])
def test_writes_where_torch_refuses_what_is_not_deterministic(layout):
    source = tensors()
    held = layout(source)
    changes = step(source, 7)
    target = Target.bind(held, changes.schema)
    torch.set_deterministic_debug_mode("error")
    try:
        target.apply(changes)
        assert as_bits(held) == as_bits(source)
        target.load(collect(tensors(), segment_elements=SEGMENT).read)
        assert as_bits(held) == as_bits(tensors())
    finally:
        torch.set_deterministic_debug_mode("default")


class Failing:
    """Stands in for what writes to memory: does its work, and raises after some calls."""

    def __init__(self, monkeypatch, error, *, at, times=1):
        self.error, self.at, self.times, self.calls = error, at, times, 0
        torch_writes, loop_writes = torch.Tensor.index_copy_, compare.scatter
        monkeypatch.setattr(torch.Tensor, "index_copy_", lambda tensor, *args: self(torch_writes, tensor, *args))
        monkeypatch.setattr(compare, "scatter", lambda *args: self(loop_writes, *args))

    def __call__(self, write, *args):
        self.calls += 1
        result = write(*args)
        if self.at <= self.calls < self.at + self.times:
            raise self.error
        return result


@pytest.mark.parametrize("layout", [cloned, strided])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_failed_write_is_taken_back(monkeypatch, layout, error, at):
    source = tensors()
    held = layout(source)
    before = as_bits(held)
    changes = step(source, 7)
    target = Target.bind(held, changes.schema)
    failing = Failing(monkeypatch, error, at=at)
    with pytest.raises(type(error)):
        target.apply(changes)
    assert failing.calls > at
    assert as_bits(held) == before
    target.apply(changes)
    assert as_bits(held) == as_bits(source)


@pytest.mark.parametrize("layout", [cloned, strided])
def test_an_interrupt_while_a_write_is_taken_back_does_not_end_that(monkeypatch, layout):
    source = tensors()
    held = layout(source)
    before = as_bits(held)
    changes = step(source, 7)
    staged = Target.bind(held, changes.schema).stage(changes)
    failing = Failing(monkeypatch, KeyboardInterrupt(), at=5, times=4)
    with pytest.raises(KeyboardInterrupt):
        staged.write()
    assert failing.calls > 8
    assert as_bits(held) == before
    assert not staged.written
    staged.write()
    assert staged.written
    assert as_bits(held) == as_bits(source)
    with monkeypatch.context() as patch:
        Failing(patch, KeyboardInterrupt(), at=1, times=1000)
        with pytest.raises(DivergedError, match="mixture"):
            staged.take_back()


def test_a_model_that_cannot_be_repaired_refuses_changes_until_it_is_loaded(monkeypatch):
    source = tensors()
    held = cloned(source)
    changes = step(source, 8)
    target = Target.bind(held, changes.schema)
    with monkeypatch.context() as patch:
        Failing(patch, RuntimeError("device lost"), at=3, times=2)
        with pytest.raises(DivergedError, match="mixture") as caught:
            target.apply(changes)
    assert "device lost" in repr(caught.value.__cause__)
    with pytest.raises(DivergedError, match="mixture"):
        target.apply(changes)
    target.load(collect(source, segment_elements=SEGMENT).read)
    target.apply(reverse(changes))
    assert as_bits(held) == as_bits(tensors())


def test_a_load_that_fails_midway_marks_the_target():
    source, held = tensors(1), tensors(2)
    state = collect(source, segment_elements=SEGMENT)
    target = Target.bind(held, state.schema)
    before = as_bits(held)

    def broken_from(first):
        def read(index):
            if index >= first:
                raise CorruptPayloadError("checksum")
            return state.read(index)

        return read

    with pytest.raises(CorruptPayloadError, match="checksum"):
        target.load(broken_from(0))
    assert as_bits(held) == before
    with pytest.raises(CorruptPayloadError, match="segment 0 has"):
        target.load(lambda index: state.read(index)[1:])
    assert as_bits(held) == before
    target.apply(Changes(state.schema, {}))

    with pytest.raises(DivergedError, match="mixture") as caught:
        target.load(broken_from(2))
    assert isinstance(caught.value.__cause__, CorruptPayloadError)
    with pytest.raises(CorruptPayloadError):
        target.load(broken_from(0))
    with pytest.raises(DivergedError, match="mixture"):
        target.apply(Changes(state.schema, {}))
    target.load(state.read)
    target.apply(Changes(state.schema, {}))
    assert as_bits(held) == as_bits(source)


def test_misfits_are_counted_and_named():
    schema = collect({f"w{i}": torch.zeros(2) for i in range(8)}).schema
    held = {"w0": torch.zeros(2), "w1": torch.zeros(3), "w2": torch.zeros(2, dtype=torch.float16), "x": torch.zeros(1)}
    with pytest.raises(SchemaMismatchError) as caught:
        Target.bind(held, schema)
    text = str(caught.value)
    assert "8 tensors" in text
    assert "5 missing: 'w3', 'w4', 'w5', ..." in text
    assert "2 of another shape, dtype or layout: 'w1' is F32 (3,), the topic has F32 (2,); 'w2' is F16" in text.replace(
        "), 'w2'", "); 'w2'"
    )


def test_unsupported_targets_are_named():
    schema = collect({"w": torch.zeros(2)}).schema
    with pytest.raises(UnsupportedTensorError, match=r"'w'.*meta"):
        Target.bind({"w": torch.zeros(2, device="meta")}, schema)


def test_memory_that_is_written_twice_is_refused():
    schema = collect({"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}).schema
    both = torch.zeros(4, 6)
    Target.bind({"a": both[:, :3], "b": both[:, 3:]}, schema)
    shared = torch.zeros(4, 3)
    for held in (
        {"a": shared, "b": shared},
        {"a": both[:, :3], "b": both[:, 2:5]},
        {"a": both.view(-1)[:12].view(4, 3), "b": both.view(-1)[11:23].view(4, 3)},
    ):
        with pytest.raises(SchemaMismatchError, match="'a' and 'b' share memory"):
            Target.bind(held, schema)
    with pytest.raises(SchemaMismatchError, match="'a' has elements that share memory"):
        Target.bind({"a": torch.zeros(1, 3).expand(4, 3), "b": shared}, schema)


@st.composite
def views(draw):
    """A view of 60 elements, and which of them it holds."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    reach = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    offset = draw(st.integers(0, 12))
    whole = torch.arange(offset + reach + 1)
    return shape, strides, offset, whole.as_strided(shape, strides, offset).reshape(-1).tolist()


@given(views(), views())
def test_overlap_is_never_missed(first, second):
    base = torch.zeros(200)
    one, other = (base.as_strided(shape, strides, offset) for shape, strides, offset, _ in (first, second))
    for tensor, (*_, places) in ((one, first), (other, second)):
        assert overlaps_itself(tensor) or len(set(places)) == len(places)
    if not overlaps_itself(one) and not overlaps_itself(other):
        meet = bool({*first[3]} & {*second[3]})
        assert overlapping([one, other]) == (0, 1) or not meet
        if one.stride() == other.stride() and 1 not in (*one.shape, *other.shape):
            assert (overlapping([one, other]) == (0, 1)) == meet


@pytest.mark.parametrize("start", [(0, 0), (2, 0), (6, 0)])
@pytest.mark.parametrize("rows", [range(6), range(4, 6)])
def test_a_slice_without_elements_lacks_nothing(start, rows):
    weight, bias = torch.randn(6, 4).bfloat16(), torch.randn(6).bfloat16()
    published = collect({"weight": TensorSlice(torch.empty(0, 4).bfloat16(), start, (6, 4)), "bias": bias})
    part = TensorSlice(weight[rows.start : rows.stop], (rows.start, 0), (6, 4))
    target = Target.bind({"weight": part, "bias": bias.clone()}, published.schema)
    assert target.complete
    assert target.digest() == Shadow.of(published).digest()
