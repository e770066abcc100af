"""Dtypes tensor by tensor, and functions that make of a tensor what is published."""

import pytest
import torch
from torch import nn

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError, UsageError
from deltabus.codecs.slices import TensorSlice
from deltabus.codecs.state import as_integers, collect


def quantised(name, tensor):
    """Rows in int8, and their scales."""
    scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale.float()}


def dtypes_of(state):
    return {spec.name: spec.dtype for spec in state.schema.tensors}


def model():
    torch.manual_seed(3)
    made = nn.ModuleDict({"mlp": nn.Linear(6, 4), "norm": nn.LayerNorm(4), "router": nn.Linear(4, 2, bias=False)})
    made.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return made


@pytest.mark.parametrize(
    "dtype",
    [
        {"*norm*": torch.float32, "router.*": None, "*": torch.bfloat16},
        lambda name: torch.bfloat16 if name.startswith("mlp") else None,
    ],
)
def test_each_tensor_has_the_dtype_that_is_chosen_for_it(dtype):
    masters = model()
    state = collect(masters, dtype=dtype)
    mlp = dict.fromkeys(("mlp.weight", "mlp.bias"), "BF16")
    others = dict.fromkeys(("norm.weight", "norm.bias", "router.weight"), "F32")
    assert dtypes_of(state) == {**mlp, **others, "count": "I64"}
    held = state.tensors[[spec.name for spec in state.schema.tensors].index("mlp.weight")]
    assert torch.equal(held, masters["mlp"].weight), "it is rounded when it is read"


@pytest.mark.parametrize("dtype", [torch.int8, {"*": torch.int8}, lambda name: torch.int8, {"*": "bf16"}])
def test_what_is_no_floating_dtype_is_refused(dtype):
    with pytest.raises(UsageError, match="floating dtype"):
        collect(model(), dtype=dtype)


def test_quantised_tensors_arrive_bit_for_bit_and_a_restart_goes_on(tmp_path):
    masters, kinds = model(), {"mlp.weight": quantised, "router.*": lambda name, t: t.to(torch.float8_e4m3fn)}
    options = {"dtype": torch.bfloat16, "transform": kinds, "anchor": "never", "workers": 1}
    with Publisher(tmp_path, **options) as publisher:
        publisher.publish(0, masters).result(30)
    with Publisher(tmp_path, have=masters, **options) as publisher:
        with torch.no_grad():
            masters["mlp"].weight[1] *= 3
            masters["router"].weight[0, 0] += 1
        published = publisher.publish(1, masters).result(30)
    assert published.kind == "delta" and published.version == 2
    expected = {**quantised("mlp.weight", masters["mlp"].weight.detach()), "count": masters.count}
    expected["router.weight"] = masters["router"].weight.detach().to(torch.float8_e4m3fn)
    expected |= {name: t.detach().bfloat16() for name, t in masters.named_parameters() if name not in expected}
    engine = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for update in Subscriber(tmp_path, idle_timeout=30).sync():
        update.apply(engine)
        break
    assert all(torch.equal(as_integers(engine[name]), as_integers(expected[name])) for name in expected)


def test_tied_tensors_are_transformed_once_and_stay_tied():
    tied, calls = torch.ones(4, 4), []

    def half(name, tensor):
        calls.append(name)
        return tensor / 2

    state = collect({"head": tied, "embed": tied, "other": torch.ones(4, 4)}, transform={"*": half})
    assert [(spec.name, spec.aliases) for spec in state.schema.tensors] == [("embed", ("head",)), ("other", ())]
    assert calls == ["embed", "other"]


def test_transforms_that_cannot_be_published_are_refused():
    part = TensorSlice(torch.ones(2, 3), start=(2, 0), whole=(4, 3))
    state = collect({"w": part}, transform={"w": lambda name, tensor: tensor.bfloat16()})
    assert state.schema.tensors[0].dtype == "BF16" and state.schema.tensors[0].start == (2, 0)
    with pytest.raises(UnsupportedTensorError, match="slice"):
        collect({"w": part}, transform={"*": quantised})
    with pytest.raises(UsageError, match="no tensor"):
        collect(model(), transform={"mlp.*": lambda name, tensor: 3})
    taken = {"mlp.weight": lambda name, tensor: {"norm.bias": tensor}}
    with pytest.raises(SchemaMismatchError, match=r"norm\.bias"):
        collect(model(), transform=taken)
