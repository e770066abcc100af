"""What is measured: states, made-up steps, and the bounds of their entropy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltabus.bench.bounds import bounds_of
from deltabus.bench.shapes import SHAPES, qwen3, synthetic, tiny
from deltabus.bench.source import DTYPES, Source, load_pair, schema_of, warm_pair
from deltabus.bench.states import Pair, Weights
from deltabus.bus.errors import SchemaMismatchError, UsageError
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.state import collect

TINY = tiny()
MIXED = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "c": torch.tensor(5, dtype=torch.int64),
    "d": torch.tensor([True, False]),
    "e": torch.arange(3, dtype=torch.float32).reshape(3, 1),
    "f": torch.empty(0, 4, dtype=torch.float16),
}


def weights_of(schema, *lines):
    return Weights(schema, tuple(np.asarray(line, np.uint16) for line in lines))


def one_tensor(old, new):
    schema = Schema.of([TensorSpec(name="a", dtype="BF16", shape=(len(old),))])
    return Pair("toy", weights_of(schema, old), weights_of(schema, new))


def test_the_shapes_are_those_of_the_published_models():
    schema = qwen3()
    assert schema.total == 596_049_920
    assert len(schema.tensors) == 28 * 11 + 2
    # all-MiniLM-L6-v2 has 103 tensors.
    assert (SHAPES["minilm"]().total, len(SHAPES["minilm"]().tensors)) == (22_713_216, 103)


@pytest.mark.parametrize("density", [0.01, 0.2])
def test_a_made_up_step_has_the_wanted_density(density):
    pair = synthetic(TINY, density)
    assert abs(pair.changed / pair.old.size / density - 1) < 0.1


def test_a_made_up_step_is_the_same_each_time():
    first, second = synthetic(TINY, 0.05, workers=1), synthetic(TINY, 0.05, workers=2)
    assert first.old.same_as(second.old)
    assert first.new.same_as(second.new)
    assert not synthetic(TINY, 0.05, seed=1).old.same_as(first.old)


def test_weights_are_their_tensors_and_their_segments():
    weights = Weights.of(collect(MIXED, segment_elements=5))
    found = weights.tensors()
    assert found.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    state = collect(MIXED, segment_elements=5)
    for segment, bits in zip(state.schema.segments, weights.segments(), strict=True):
        assert np.array_equal(bits, state.read(segment.index))
        assert np.array_equal(bits, weights.shadow().read(segment.index))
    assert [array.shape for array in weights.arrays()] == [spec.shape for spec in weights.schema.tensors]
    assert weights.nbytes == sum(line.nbytes for line in weights.lines)
    found["a"][0] = 9
    assert weights.tensors()["a"][0] == 9


def test_weights_are_copied_and_compared():
    weights = Weights.of(collect(MIXED))
    other = weights.copy()
    assert other.same_as(weights)
    other.lines[0][-1] ^= 1
    assert not other.same_as(weights)
    assert Pair("toy", weights, other).changed == 1
    weights.take(other)
    assert weights.same_as(other)


def test_tied_tensors_stand_under_all_names_or_one():
    tied = torch.ones(3)
    weights = Weights.of(collect({"head": tied, "embed": tied}))
    both = weights.tensors()
    assert both["head"].data_ptr() == both["embed"].data_ptr()
    assert list(weights.tensors(aliases=False)) == ["embed"]


def test_states_that_do_not_fit_together_are_told():
    one, other = (Weights.of(collect({"a": torch.zeros(size)})) for size in (3, 4))
    with pytest.raises(SchemaMismatchError, match="'a'"):
        Pair("toy", one, other)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either a shape or two checkpoints"),
        ({"shape": "tiny", "checkpoints": ("a", "b")}, "either"),
        ({"shape": "huge"}, "choose one of qwen3-0.6b, minilm, tiny"),
        ({"shape": "tiny", "density": 0.0}, "above 0"),
        ({"shape": "tiny", "density": float("nan")}, "above 0"),
        ({"shape": "tiny", "dtype": "bfloat16"}, "goes with checkpoints"),
        ({"checkpoints": ("a", "b"), "dtype": "int8"}, "not one of bfloat16"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        Source(**fields)


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_checkpoints_are_loaded_in_the_dtype_asked_for(tmp_path, dtype):
    before = {"w": torch.linspace(0, 1, 50), "n": torch.tensor([3])}
    after = {"w": before["w"] * 1.5, "n": torch.tensor([4])}
    paths = tuple(str(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    for path, tensors in zip(paths, (before, after), strict=True):
        save_file(tensors, path)
    source = Source(checkpoints=paths, dtype=dtype)
    pair = load_pair(source)
    assert pair.label == "a.safetensors to b.safetensors"
    assert schema_of(source) == pair.schema
    wanted = torch.float32 if dtype is None else getattr(torch, dtype)
    for tensors, weights in ((before, pair.old), (after, pair.new)):
        assert torch.equal(weights.tensors()["w"], tensors["w"].to(wanted))
        assert torch.equal(weights.tensors()["n"], tensors["n"])


def test_two_equal_checkpoints_measure_nothing(tmp_path):
    paths = tuple(str(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    for path in paths:
        save_file({"w": torch.ones(3)}, path)
    with pytest.raises(UsageError, match="the same bits"):
        load_pair(Source(checkpoints=paths))


def test_what_warms_up_has_every_dtype():
    schema = collect(MIXED).schema
    pair = warm_pair(schema)
    assert {spec.dtype for spec in pair.schema.tensors} == {spec.dtype for spec in schema.tensors} - {"F16"}
    assert all((old != new).any() for old, new in zip(pair.old.lines, pair.new.lines, strict=True))
    assert pair.new.tensors()["BOOL"].view(torch.uint8).max() == 1


def test_positions_alone_cost_their_entropy():
    # Half of the elements change, each by one up: one bit for each element, and none for the steps.
    old = np.full(64, 0x3F80, np.uint16)
    new = old.copy()
    new[::2] += 1
    bounds = bounds_of(one_tensor(old, new))
    assert bounds.independent == pytest.approx(64)
    assert bounds.conditional == pytest.approx(64)


def test_directions_cost_one_bit_each():
    old = np.full(64, 0x3F85, np.uint16)
    new = old.copy()
    new[::2] += 1
    new[1::2] -= 1
    bounds = bounds_of(one_tensor(old, new))
    assert bounds.independent == pytest.approx(64)
    assert bounds.conditional == pytest.approx(64)


def test_exponents_that_tell_everything_leave_nothing_to_say():
    # Small weights change and large ones do not.
    old = np.array([0x3000] * 32 + [0x3F80] * 32, np.uint16)
    new = old.copy()
    new[:32] += 1
    bounds = bounds_of(one_tensor(old, new))
    assert bounds.independent == pytest.approx(64)
    assert bounds.conditional == pytest.approx(0)


def test_tensors_are_told_apart():
    schema = Schema.of(TensorSpec(name=name, dtype="BF16", shape=(32,)) for name in "ab")
    old = np.full(64, 0x3F80, np.uint16)
    new = old.copy()
    new[:32] += 1
    bounds = bounds_of(Pair("toy", weights_of(schema, old), weights_of(schema, new)))
    assert bounds.independent == pytest.approx(64)
    assert bounds.conditional == pytest.approx(0)


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64", "F8_E4M3", "I32", "I64"])
def test_bounds_know_every_width(dtype):
    schema = Schema.of([TensorSpec(name="a", dtype=dtype, shape=(64,))])
    old = Weights.empty(schema)
    for line in old.lines:
        line.fill(5)
    new = old.copy()
    new.lines[0][::2] += 1
    new.lines[0][1] ^= np.array(1).astype(new.lines[0].dtype) << (8 * new.lines[0].itemsize - 1)  # a step across all
    bounds = bounds_of(Pair("toy", old, new))
    # 33 of 64 change, and one of these by another step than the others.
    shares = np.array([31, 33]) / 64
    wanted = -64 * (shares * np.log2(shares)).sum() - 33 * (1 / 33 * np.log2(1 / 33) + 32 / 33 * np.log2(32 / 33))
    assert bounds.independent == pytest.approx(wanted)
    assert bounds.conditional == pytest.approx(wanted)


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 3)), min_size=1, max_size=60))
def test_knowing_more_never_costs_more(elements):
    old = np.array([bits for bits, _ in elements], np.uint16)
    new = old + np.array([step for _, step in elements], np.uint16)
    bounds = bounds_of(one_tensor(old, new))
    assert -1e-6 <= bounds.conditional <= bounds.independent + 1e-6
