import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import SchemaMismatchError
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import changes_between
from deltabus.codecs.drift import count_drift, overwriting, stage_differences
from deltabus.codecs.on_device import as_tensor
from deltabus.codecs.slices import TensorSlice
from deltabus.codecs.state import as_integers, collect

from .devices import on_each_device

SEGMENT = 16


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "bytes": torch.randint(0, 256, (11,), generator=generator, dtype=torch.uint8),
        "f64": torch.randn(3, 9, generator=generator).double(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
    }


def strided(source, device):
    """The same values in tensors of other layouts."""
    return {
        name: torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=device)[..., 1].copy_(tensor)
        for name, tensor in source.items()
    }


def plain(source, device):
    return {name: tensor.clone().to(device) for name, tensor in source.items()}


def as_bits(source):
    return {name: as_integers(tensor).tolist() for name, tensor in source.items()}


@on_each_device
@pytest.mark.parametrize("wanted_on_device", [False, True])
@pytest.mark.parametrize("layout", [plain, strided])
def test_what_differs_is_counted_and_set_right(layout, wanted_on_device, device):
    source = tensors(1)
    state = collect(source, segment_elements=SEGMENT)
    held = layout(source, device)
    held["module.f64"] = held["f64"]  # the same under the name of a wrapper

    def read(index):
        return as_tensor(state.read(index), device) if wanted_on_device else state.read(index)

    meant = [(Target.bind(held, state.schema), read)]
    assert count_drift(meant) == {}
    stage_differences(meant, limit=0).write()
    as_integers(held["bf16"])[6, 4] ^= 1
    as_integers(held["bf16"])[0, 0] ^= -32768
    held["bytes"] ^= 255
    held["scalar"] *= -1
    drifted = as_bits(held)
    assert count_drift(meant) == {"bf16": 2, "bytes": 11, "scalar": 1}
    nbytes = 2 * (4 + 2 * 2) + 11 * (4 + 2) + 4 + 2 * 4
    assert stage_differences(meant, limit=nbytes - 1) is None
    assert as_bits(held) == drifted
    staged = stage_differences(meant, limit=nbytes)
    staged.write()
    assert staged.written
    assert as_bits({name: held[name] for name in source}) == as_bits(source)
    staged.take_back()
    assert not staged.written
    assert as_bits(held) == drifted


def test_elements_that_only_miss_a_known_change_are_no_drift():
    before, after = tensors(1), tensors(1)
    after["bf16"][:3] *= 2
    old, new = (collect(source, segment_elements=SEGMENT) for source in (before, after))
    changes = changes_between(old.schema, old.read, new.read)
    held = plain(before, "cpu")
    meant = [(Target.bind(held, new.schema), new.read)]
    assert count_drift(meant) == {"bf16": 15}
    assert count_drift(meant, besides=[changes]) == {}
    held["bf16"][0, 0] = 7
    held["bf16"][6, 4] = 7
    held["bf16"][1] = after["bf16"][1]
    assert count_drift(meant, besides=[changes]) == {"bf16": 2}
    assert count_drift(meant) == {"bf16": 11}


boxes = st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 4), st.integers(1, 5))


@given(st.lists(boxes, min_size=1, max_size=4), st.integers(0, 99))
def test_of_elements_that_several_states_have_the_last_one_counts(cuts, seed):
    random = np.random.default_rng(seed)
    whole = torch.from_numpy(random.integers(0, 9, (5, 5), np.int16))
    held = {"w": torch.from_numpy(random.integers(0, 9, (5, 5), np.int16)), "rest": torch.tensor(1)}
    expected, states = held["w"].clone(), []
    for top, rows, left, columns in cuts:
        part = (whole + len(states))[top : top + rows, left : left + columns].contiguous()
        expected[top : top + part.shape[0], left : left + part.shape[1]] = part
        source = {"w": TensorSlice(part, (top, left), (5, 5)), "rest": torch.tensor(len(states))}
        states.append(collect(source, segment_elements=SEGMENT))
    targets = Target.bind_all(held, [state.schema for state in states])
    meant = [(target, state.read) for target, state in zip(targets, states, strict=True)]
    assert bool(any(overwriting([state.schema for state in states]))) == (len(states) > 1)
    wrong = int((expected != held["w"]).sum())
    assert count_drift(meant).get("w", 0) == wrong
    stage_differences(meant, limit=1 << 20).write()
    assert torch.equal(held["w"], expected)
    assert held["rest"] == len(states) - 1
    assert count_drift(meant) == {}


def test_tensors_that_share_memory_are_found_behind_those_that_several_writers_have():
    memory = torch.zeros(8)
    held = {"w": memory[:4], "x": memory[4:], "y": memory[4:]}
    first = collect({"w": torch.ones(4)}, segment_elements=SEGMENT).schema
    second = collect({name: torch.ones(4) for name in held}, segment_elements=SEGMENT).schema
    with pytest.raises(SchemaMismatchError, match="'x' and 'y' share memory"):
        Target.bind_all(held, [first, second])
