import numpy as np
import pytest
from data import Run, line_of, real_runs
from safetensors.numpy import save_file

from deltabus.bench.shapes import synthetic, tiny
from deltabus.codecs.schema import Schema, TensorSpec


def test_a_line_is_its_tensors():
    weights = synthetic(tiny(), 0.05).old
    assert np.array_equal(line_of(weights.schema, weights.tensors()), weights.lines[0])


def test_a_run_goes_from_state_to_state():
    start = np.zeros(4, np.uint16)
    steps = tuple((np.array([at], np.uint32), np.array([bits], np.uint16)) for at, bits in ((1, 5), (3, 7)))
    schema = Schema.of([TensorSpec(name="a", dtype="BF16", shape=(4,))])
    pairs = list(Run("lr", schema, start, steps).pairs())
    assert [[list(weights.lines[0]) for weights in (pair.old, pair.new)] for pair in pairs] == [
        [[0, 0, 0, 0], [0, 5, 0, 0]],
        [[0, 5, 0, 0], [0, 5, 0, 7]],
    ]


def test_a_run_that_was_made_before_is_read_back(tmp_path):
    schema = Schema.of([TensorSpec(name="a", dtype="BF16", shape=(4,))])
    kept = {"schema": np.frombuffer(schema.encode(), np.uint8), "start": np.zeros(4, np.uint16)}
    kept |= {"0.positions": np.array([2], np.uint32), "0.bits": np.array([9], np.uint16)}
    save_file(kept, tmp_path / "finetuning-0.001-1.safetensors")
    (run,) = real_runs(tmp_path, (1e-3,), steps=1, log=pytest.fail)
    (pair,) = run.pairs()
    assert pair.schema == schema
    assert list(pair.new.lines[0]) == [0, 0, 9, 0]
