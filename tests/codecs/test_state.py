import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError, UsageError
from deltabus.codecs import dtypes
from deltabus.codecs.state import as_integers, canonical_name, collect

DTYPES = [
    dtype.torch for dtype in map(dtypes.by_name, ("BF16", "F16", "F32", "F64", "BOOL", "U8", "I16", "I64", "C64"))
]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]


def random_tensor(dtype, shape, seed=0):
    """Any bit pattern at all, except that booleans stay booleans."""
    size = int(np.prod(shape, dtype=np.int64))
    width = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 256, size * width, np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def read_back(state):
    """The published bits of each tensor, row-major, gathered through its segments."""
    bits = {spec.name: np.empty(spec.size, dtypes.by_name(spec.dtype).bits) for spec in state.schema.tensors}
    for segment in state.schema.segments:
        read = state.read(segment.index)
        assert read.dtype == segment.dtype.bits
        assert read.shape == (segment.size,)
        for piece in segment.pieces:
            run = read[piece.offset : piece.offset + piece.stop - piece.start]
            bits[state.schema.tensors[piece.tensor].name][piece.start : piece.stop] = run
    return bits


def bits_of(tensor):
    flat = as_integers(tensor.contiguous()).reshape(-1).numpy()
    return flat.view(f"<u{flat.itemsize}")


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("weight", "weight"),
        ("module.weight", "weight"),
        ("module.module.a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("module._orig_mod.a.weight", "a.weight"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight", "a.b.weight"),
        ("a.module.weight", "a.module.weight"),
        ("module", "module"),
        ("a._orig_mod", "a._orig_mod"),
        ("modules.weight", "modules.weight"),
    ],
)
def test_canonical_name(name, canonical):
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6),
    st.integers(1, 40),
)
def test_read_gives_the_bits_whatever_the_layout(parts, segment_elements):
    tensors = {}
    for number, (dtype, shape, transposed) in enumerate(parts):
        tensor = random_tensor(dtype, shape, number)
        tensors[f"t{number}"] = tensor.permute(tuple(reversed(range(tensor.dim())))) if transposed else tensor
    state = collect(tensors, segment_elements=segment_elements)
    found = read_back(state)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], bits_of(tensor))


def test_layouts():
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    tensors = {"sliced": base[:, 1:4], "step": base[::2], "expanded": torch.tensor([7]).expand(5), "scalar": base[2, 3]}
    found = read_back(collect(tensors, segment_elements=4))
    for name, tensor in tensors.items():
        assert found[name].tolist() == tensor.reshape(-1).tolist()


def test_contiguous_tensors_are_not_copied():
    tensor = torch.zeros(8, dtype=torch.bfloat16)
    state = collect({"a": tensor}, segment_elements=4)
    assert np.shares_memory(state.read(1), as_integers(tensor).numpy())
    out = np.empty(4, np.uint16)
    assert state.read(1, out) is out


def test_rounding_is_that_of_to():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(37, 11, generator=generator).t()
    half = torch.randn(5, generator=generator).half()
    counter = torch.tensor([3, 4])
    state = collect({"w": weight, "h": half, "n": counter}, dtype=torch.bfloat16, segment_elements=50)
    assert [spec.dtype for spec in state.schema.tensors] == ["BF16", "I64", "BF16"]
    found = read_back(state)
    np.testing.assert_array_equal(found["w"], bits_of(weight.to(torch.bfloat16)))
    np.testing.assert_array_equal(found["h"], bits_of(half.to(torch.bfloat16)))
    assert found["n"].tolist() == [3, 4]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(9), persistent=False)

    def get_extra_state(self):
        return {"format": 2}

    def set_extra_state(self, state):
        raise AssertionError(state)


def test_module_with_ties_buffers_and_extra_state():
    state = collect(Tied())
    assert [spec.name for spec in state.schema.tensors] == [
        "embed.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "norm.weight"
    ]  # fmt: skip
    assert state.schema.tensors[0].aliases == ("head.weight",)


class Compiled(nn.Module):
    """What `torch.compile` makes of a module, without the seconds that importing the compiler takes."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_wrapped_modules_have_the_schema_of_what_they_wrap():
    model = Tied()
    expected = collect(model).schema
    assert collect(nn.DataParallel(model)).schema == expected
    assert collect(nn.DataParallel(Compiled(model))).schema == expected
    assert collect({f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}).schema == expected


def test_empty_tensors_are_never_tied():
    state = collect({"a": torch.empty(0), "b": torch.empty(0)})
    assert [spec.aliases for spec in state.schema.tensors] == [(), ()]


def test_views_of_one_storage_are_different_tensors():
    base = torch.zeros(4)
    state = collect({"all": base, "half": base[:2], "other": base[2:]})
    assert len(state.schema.tensors) == 3


def test_same_tensor_under_a_wrapped_and_a_plain_name():
    weight = torch.zeros(2)
    assert [spec.name for spec in collect({"module.w": weight, "w": weight}).schema.tensors] == ["w"]
    with pytest.raises(SchemaMismatchError, match=r"'module\.w' and 'w' are different"):
        collect({"module.w": torch.zeros(2), "w": torch.ones(2)})


@pytest.mark.parametrize("select", [["*.weight", "bias"], lambda name: name.endswith(("weight", "bias"))])
def test_select(select):
    tensors = {"module.a.weight": torch.zeros(1), "bias": torch.zeros(2), "other": torch.zeros(3, device="meta")}
    assert [spec.name for spec in collect(tensors, select=select).schema.tensors] == ["a.weight", "bias"]


def test_select_that_matches_nothing():
    with pytest.raises(UsageError, match=r"matches no tensor.*\ba\b"):
        collect({"a": torch.zeros(1)}, select=["b*"])
    with pytest.raises(UsageError, match="list of patterns"):
        collect({"a": torch.zeros(1)}, select="a")


def test_nothing_at_all_is_a_state():
    assert collect({}).schema.total == 0


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
        (nn.UninitializedParameter(), "not initialised"),
        ("text", "no tensor but str"),
    ],
)
def test_unsupported_tensors_are_named(tensor, reason):
    with pytest.raises(UnsupportedTensorError, match=reason) as caught:
        collect({"fine": torch.zeros(1), "layer.odd": tensor})
    assert caught.value.tensor == "layer.odd"


def test_distributed_tensors_are_named():
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            raise AssertionError("never asked")

    with pytest.raises(UnsupportedTensorError, match="to_local"):
        collect({"w": torch.zeros(2).as_subclass(Wrapper)})


def test_wrong_calls():
    with pytest.raises(UsageError, match="floating dtype"):
        collect({"a": torch.zeros(1)}, dtype=torch.int8)
    with pytest.raises(UsageError, match="mapping of tensors"):
        collect([torch.zeros(1)])
    with pytest.raises(UsageError, match="text"):
        collect({1: torch.zeros(1)})
