"""Binding a model once: the same target as binding anew, and every change of the model noticed."""

import gc
import weakref

import pytest
import torch
from torch import nn

from deltabus.bindings import Bindings
from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError, UsageError
from deltabus.codecs.apply import Target
from deltabus.codecs.state import collect

from .support import small_model


@pytest.fixture
def searches(monkeypatch):
    """How often a model was searched in full."""
    calls = []
    bind = Target.bind_all

    def counted(source, schemas):
        calls.append(source)
        return bind(source, schemas)

    monkeypatch.setattr(Target, "bind_all", counted)
    return calls


def bound(bindings: Bindings, source, schema) -> Target:
    (target,) = bindings.bind(source, [schema])
    return target


def same(one: Target, other: Target) -> bool:
    return all(a is b for a, b in zip(one.tensors, other.tensors, strict=True)) and one.schema is other.schema


def as_mapping(model):
    return dict(model.state_dict(keep_vars=True))


@pytest.mark.parametrize("form", [lambda model: model, as_mapping], ids=["module", "mapping"])
def test_a_model_is_searched_once(form, searches):
    source = form(small_model())
    schema, bindings = collect(source).schema, Bindings()
    first = bound(bindings, source, schema)
    for _ in range(3):
        assert same(bound(bindings, source, schema), first)
    assert len(searches) == 1
    assert [len(copies) for copies in first.copies] == [1] * len(schema.tensors)


def test_a_mapping_made_anew_of_the_same_tensors_is_the_same_model(searches):
    model = small_model()
    schema, bindings = collect(model).schema, Bindings()
    bound(bindings, model, schema)
    assert same(bound(bindings, as_mapping(model), schema), Target.bind(model, schema))
    assert len(searches) == 2


def test_copies_of_a_tied_tensor_are_all_written(searches):
    weight = torch.zeros(2, 3)
    schema = collect({"embed": weight, "head": weight}).schema
    source = {"embed": torch.zeros(2, 3), "head": torch.zeros(2, 3)}
    bindings = Bindings()
    assert same(bound(bindings, source, schema), bound(bindings, source, schema))
    assert [len(copies) for copies in bound(bindings, source, schema).copies] == [2]
    assert len(searches) == 1


def replace_parameter(model):
    model["inner"].weight = nn.Parameter(model["inner"].weight.detach().clone())


def replace_first(model):
    model["inner"].weight, model["inner"].bias = (
        nn.Parameter(model["inner"].weight.detach().clone()),
        nn.Parameter(model["inner"].bias.detach().clone()),
    )


def replace_buffer(model):
    model.counter = model.counter.clone()


def untie(model):
    model["tied"].weight = nn.Parameter(model["tied"].weight.detach().clone())


def move_memory(model):
    model["head"].weight.data = model["head"].weight.data.clone()


def another_layout(model):
    model["head"].weight.data = model["head"].weight.data.t().contiguous().t()


def add_a_module(model):
    model["more"] = nn.Linear(2, 2)


def remove_an_alias(model):
    del model["tied"]


def swap_names(model):
    model["inner"].weight, model["head"].weight = (
        nn.Parameter(model["inner"].weight.detach().clone()),
        nn.Parameter(model["head"].weight.detach().clone()),
    )


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter, replace_first, replace_buffer, untie, move_memory, another_layout, add_a_module,
        remove_an_alias, swap_names,
    ],
)  # fmt: skip
def test_a_model_that_changed_is_bound_anew(change, searches):
    model = small_model()
    schema, bindings = collect(model).schema, Bindings()
    bound(bindings, model, schema)
    change(model)
    target = bound(bindings, model, schema)
    assert len(searches) == 2
    assert same(target, Target.bind(model, schema))
    assert same(bound(bindings, model, schema), target)
    assert len(searches) == 3


def another_shape(model):
    model["head"].weight.data = torch.zeros(3, 3, dtype=torch.bfloat16)


def another_dtype(model):
    model["head"].weight.data = model["head"].weight.data.float()


def without_it(model):
    del model["norm"]


def shared_memory(model):
    model["inner"].weight.data = model["head"].weight.data.view(60, 40)


def overlapping_elements(model):
    model["inner"].weight.data = torch.zeros(1, 40, dtype=torch.bfloat16).expand(60, 40)


@pytest.mark.parametrize("change", [another_shape, another_dtype, without_it, shared_memory, overlapping_elements])
def test_a_model_that_no_longer_fits_is_refused(change):
    model = small_model()
    schema, bindings = collect(model).schema, Bindings()
    bound(bindings, model, schema)
    change(model)
    for _ in range(2):
        with pytest.raises(SchemaMismatchError):
            bound(bindings, model, schema)


def test_another_schema_is_another_binding(searches):
    model = small_model()
    bindings = Bindings()
    bound(bindings, model, collect(model).schema)
    fewer = collect(model, select=["inner.*"]).schema
    assert len(bound(bindings, model, fewer).tensors) == 2
    assert len(searches) == 2


def test_what_is_no_model_is_refused():
    schema, bindings = collect(small_model()).schema, Bindings()
    with pytest.raises(UsageError, match="module or a mapping"):
        bound(bindings, [torch.zeros(2)], schema)
    with pytest.raises(UnsupportedTensorError, match="no tensor"):
        bound(bindings, {**as_mapping(small_model()), "more": 3}, schema)
    assert bound(bindings, {}, collect({}).schema).tensors == ()


def test_a_model_is_not_kept_alive():
    model = small_model()
    schema, bindings = collect(model).schema, Bindings()
    bound(bindings, model, schema)
    gone = [weakref.ref(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    del model
    gc.collect()
    assert not any(tensor() is not None for tensor in gone)
