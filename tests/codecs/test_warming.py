"""Warming, for each type: what it is for is seen by what is compiled afterwards."""

import pytest
import torch

from deltabus.codecs import dtypes
from deltabus.codecs.kernels import adaptive, classes, compare, mix
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.shadow import Shadow, capture
from deltabus.codecs.state import collect
from deltabus.codecs.warming import _compile, warm_up

LOOPS = [
    compare.find_differing,
    compare.first_malformed,
    compare.first_not_holding,
    compare.scatter,
    classes.count_between,
    classes.find_counted,
    adaptive.write_changes,
    adaptive.read_changes,
    mix.sum_changed,
]


@pytest.mark.parametrize("name", ["BF16", "F32", "F16", "F8_E4M3", "I64", "BOOL"])
def test_a_step_compiles_nothing_more(name):
    dtype = dtypes.by_name(name)
    _compile.cache_clear()
    warm_up(Schema.of([TensorSpec(name="x", dtype=name, shape=(3,))]))
    compiled = [len(loop.signatures) for loop in LOOPS]
    assert all(compiled)
    before, after = torch.zeros(9000, dtype=dtype.torch), torch.ones(9000, dtype=dtype.torch)
    shadow = Shadow.of(collect({"w": before}))
    shadow.advance(capture(collect({"w": after}), shadow))
    assert [len(loop.signatures) for loop in LOOPS] == compiled
