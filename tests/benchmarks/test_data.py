import numpy as np
import pytest
from bounds import bounds_of
from data import Pair, Run, line_of, qwen3, real_runs, shadow_over, synthetic, tensors
from safetensors.numpy import save_file

from deltabus.codecs.schema import Schema, TensorSpec

TINY = qwen3(1, vocabulary=512, hidden=64)


def one_tensor(old, new):
    schema = Schema.of([TensorSpec(name="a", dtype="BF16", shape=(len(old),))])
    return Pair("toy", schema, np.asarray(old, np.uint16), np.asarray(new, np.uint16))


def test_the_shapes_are_those_of_the_published_model():
    schema = qwen3()
    assert schema.total == 596_049_920
    assert len(schema.tensors) == 28 * 11 + 2


@pytest.mark.parametrize("density", [0.01, 0.2])
def test_a_made_up_step_has_the_wanted_density(density):
    pair = synthetic(TINY, density)
    assert abs(pair.changed / pair.old.size / density - 1) < 0.1


def test_a_made_up_step_is_the_same_each_time():
    first, second = synthetic(TINY, 0.05, workers=1), synthetic(TINY, 0.05, workers=2)
    assert np.array_equal(first.old, second.old)
    assert np.array_equal(first.new, second.new)
    assert not np.array_equal(synthetic(TINY, 0.05, seed=1).old, first.old)


def test_a_line_is_its_tensors_and_its_segments():
    pair = synthetic(TINY, 0.05)
    assert np.array_equal(line_of(TINY, tensors(TINY, pair.old)), pair.old)
    shadow = shadow_over(TINY, pair.old)
    assert np.array_equal(np.concatenate([shadow.read(s.index) for s in TINY.segments]), pair.old)
    assert [array.shape for array in pair.arrays(pair.old)] == [spec.shape for spec in TINY.tensors]


def test_a_run_goes_from_state_to_state():
    start = np.zeros(4, np.uint16)
    steps = tuple((np.array([at], np.uint32), np.array([bits], np.uint16)) for at, bits in ((1, 5), (3, 7)))
    schema = Schema.of([TensorSpec(name="a", dtype="BF16", shape=(4,))])
    pairs = list(Run("lr", schema, start, steps).pairs())
    assert [(list(pair.old), list(pair.new)) for pair in pairs] == [
        ([0, 0, 0, 0], [0, 5, 0, 0]),
        ([0, 5, 0, 0], [0, 5, 0, 7]),
    ]


def test_a_run_that_was_made_before_is_read_back(tmp_path):
    schema = Schema.of([TensorSpec(name="a", dtype="BF16", shape=(4,))])
    kept = {"schema": np.frombuffer(schema.encode(), np.uint8), "start": np.zeros(4, np.uint16)}
    kept |= {"0.positions": np.array([2], np.uint32), "0.bits": np.array([9], np.uint16)}
    save_file(kept, tmp_path / "finetuning-0.001-1.safetensors")
    (run,) = real_runs(tmp_path, (1e-3,), steps=1, log=pytest.fail)
    (pair,) = run.pairs()
    assert pair.schema == schema
    assert list(pair.new) == [0, 0, 9, 0]


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
    bounds = bounds_of(Pair("toy", schema, old, new))
    assert bounds.independent == pytest.approx(64)
    assert bounds.conditional == pytest.approx(0)
