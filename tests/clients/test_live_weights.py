"""The layout that an engine's loader makes is learned exactly, and what cannot be written safely is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from deltabus import Publisher, Subscriber, TensorSlice
from deltabus.bus.errors import DivergedError, SchemaMismatchError, UnsupportedTensorError
from deltabus.codecs import dtypes
from deltabus.codecs.state import collect
from deltabus.integrations import live_weights
from deltabus.integrations.index_map import IndexMap
from deltabus.integrations.live_weights import LiveWeights
from deltabus.patches import TensorPatch

from .engines import EngineModel, bits, checkpoint, fresh, relaid, train

KINDS = [{"tied": False}, {"tied": True}, {"rank": 0, "ranks": 2}, {"rank": 1, "ranks": 2}]


def specs_of(tensors):
    return collect(tensors).schema.tensors


def named(tied, tensors):
    return tensors | {"head.weight": tensors["embed.weight"] if tied else tensors["embed.weight"] * 2}


def patches_between(old, new):
    for spec in specs_of(old):
        width = old[spec.name].element_size()
        before, after = (
            side[spec.name].reshape(-1).view(dtypes.INTEGERS[width]).numpy().view(f"u{width}") for side in (old, new)
        )
        at = np.flatnonzero(before != after)
        if at.size:
            yield TensorPatch(spec, at, before[at], after[at])


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_an_update_written_through_the_map_equals_a_fresh_load(options):
    old = named(options.get("tied", True), checkpoint())
    new = train({name: tensor.clone() for name, tensor in old.items()}, 1)
    if options.get("tied", True):
        new["head.weight"] = new["embed.weight"]
    engine = fresh(old, **options)
    weights = LiveWeights(engine)
    weights.learn(specs_of(old), reference=old)
    assert bits(engine) == bits(fresh(old, **options)), "learning writes nothing"
    staged = weights.stage(patches_between(old, new))
    staged.write()
    assert bits(engine) == bits(fresh(new, **options)) != bits(fresh(old, **options))
    with pytest.raises(DivergedError):
        staged.write()
    staged.revert()
    assert bits(engine) == bits(fresh(old, **options))


def test_every_element_is_mapped_to_where_the_loader_puts_it():
    engine, tensors = EngineModel(rank=1, ranks=2, tied=False, dtype=torch.float64), checkpoint(dtype=torch.float64)
    number = 1
    for tensor in tensors.values():
        tensor.copy_(torch.arange(number, number + tensor.numel(), dtype=torch.float64).view(tensor.shape))
        number += tensor.numel()
    engine.load_weights(iter(tensors.items()))
    found = IndexMap.trace(engine, specs_of(tensors))
    for name, tensor in tensors.items():
        for at in found.places_of(name, np.arange(tensor.numel())):
            weight = found.weights[at.weight]
            memory = torch.empty(0, dtype=weight.dtype).set_(weight.data.untyped_storage())
            assert memory[torch.from_numpy(at.places)].equal(
                tensor.reshape(-1)[torch.from_numpy(at.chosen)].to(weight.dtype)
            )
    mapped = {
        name: sum(at.places.size for at in found.places_of(name, np.arange(t.numel()))) for name, t in tensors.items()
    }
    assert {name: count / tensors[name].numel() for name, count in mapped.items()} == {
        name: {"norm.weight": 1, "scale": 3}.get(name, 0.5) for name in tensors
    }


@pytest.mark.parametrize("slices", [False, True])
async def test_updates_of_a_topic_are_written_whole_or_as_deltas(tmp_path, slices):
    tensors = checkpoint()
    url = (tmp_path / "topic").as_uri()

    def published():
        if not slices:
            return tensors
        half = tensors["mlp.gate.weight"][4:], tensors["attention.out.weight"][:, 2:]
        return {
            "mlp.gate.weight": TensorSlice(half[0], start=(4, 0), whole=(12, 8)),
            "attention.out.weight": TensorSlice(half[1], start=(0, 2), whole=(8, 8)),
        }

    held = {name: tensor.clone() for name, tensor in tensors.items()}
    engine = fresh(held)
    weights = LiveWeights(engine, constants=["*"])
    with Publisher(url, on_busy="wait") as publisher:
        publisher.publish(0, published())
        async with Subscriber(url, latest=False, idle_timeout=110) as subscriber:
            for step in range(3):
                if step:
                    train(tensors, step)
                    publisher.publish(step, published())
                update = await anext(subscriber)
                weights.learn(s for schema in update.schemas for s in schema.tensors)
                staged = weights.stage(update.patches())
                staged.write()
                update.mark_applied()
                assert update.whole == (step == 0)
                now = {name: tensor.clone() for name, tensor in tensors.items()}
                if slices:
                    now = held | {name: held[name].clone() for name in ("mlp.gate.weight", "attention.out.weight")}
                    now["mlp.gate.weight"][4:] = tensors["mlp.gate.weight"][4:]
                    now["attention.out.weight"][:, 2:] = tensors["attention.out.weight"][:, 2:]
                assert bits(engine) == bits(fresh(now))


def test_weights_that_were_laid_out_anew_are_refused():
    tensors = checkpoint()
    engine = fresh(tensors, relaid=True)
    weights = LiveWeights(engine)
    with pytest.raises(UnsupportedTensorError, match="laid out anew") as caught:
        weights.learn(specs_of(tensors), reference=tensors)
    assert caught.value.tensor == "experts.0.weight"
    # Without a checkpoint at hand the old bits show it, before anything is written.
    weights.learn(specs_of(tensors))
    new = train({name: tensor.clone() for name, tensor in tensors.items()}, 1)
    with pytest.raises(DivergedError, match="experts"):
        weights.stage(patches_between(tensors, new))
    assert bits(engine) == bits(fresh(tensors, relaid=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_were_laid_out_anew_are_written_where_it_is_known_how(rank, dtype):
    old = checkpoint(dtype=dtype)
    new = train({name: tensor.clone() for name, tensor in old.items()}, 1)
    options = {"rank": rank, "ranks": 2, "relaid": True, "dtype": dtype}
    engine = fresh(old, **options)
    weights = LiveWeights(engine, relays={"experts": relaid})
    weights.learn(specs_of(old), reference=old)
    assert bits(engine) == bits(fresh(old, **options)), "learning writes nothing"
    staged = weights.stage(patches_between(old, new))
    staged.write()
    assert bits(engine) == bits(fresh(new, **options)) != bits(fresh(old, **options))
    staged.revert()
    assert bits(engine) == bits(fresh(old, **options))


@pytest.mark.parametrize(
    ("relay", "match"),
    [
        (lambda blocks: blocks * 2, "does not keep each element"),
        (lambda blocks: blocks[:, :1].expand(blocks.shape), "does not keep each element"),
        (lambda blocks: blocks.transpose(1, 2), "changes its shape"),
        (torch.clone, "laid out anew after loading"),
    ],
    ids=["computed", "repeated", "transposed", "otherwise"],
)
def test_weights_that_were_laid_out_in_another_way_are_refused(relay, match):
    tensors = checkpoint()
    engine = fresh(tensors, relaid=True)
    with pytest.raises(UnsupportedTensorError, match=match):
        LiveWeights(engine, relays={"experts": relay}).learn(specs_of(tensors), reference=tensors)
    assert bits(engine) == bits(fresh(tensors, relaid=True))


def test_equal_elements_say_nothing_of_the_layout():
    tensors = checkpoint()
    for name in ("experts.0.weight", "experts.1.weight"):
        tensors[name].zero_()
    with pytest.raises(UnsupportedTensorError, match="are equal"):
        LiveWeights(fresh(tensors)).learn(specs_of(tensors), reference=tensors)


def loading(work):
    """An engine of one weight whose loader does something with what it is given."""
    engine = EngineModel()
    engine.load_weights = lambda weights: [work(engine, loaded) for name, loaded in weights if name == "norm.weight"]
    return engine


@pytest.mark.parametrize(
    "work",
    [
        lambda engine, loaded: engine.norm.data.copy_(loaded + 1),
        lambda engine, loaded: engine.norm.data.copy_(torch.cat([loaded[4:], loaded[:4]])),
        lambda engine, loaded: engine.norm.data.fill_(loaded[0].item()),
        lambda engine, loaded: (engine.norm.data.copy_(loaded), engine.norm.data[3:].fill_(1.0)),
        lambda engine, loaded: engine.norm.data.add_(1.0),
        lambda engine, loaded: setattr(engine.norm, "data", loaded),
        lambda engine, loaded: torch.zeros(8).copy_(loaded),
        lambda engine, loaded: engine.down.data.copy_(loaded[0].expand(8, 12)),
    ],
    ids=["sum", "cat", "item", "fill", "add", "exchange", "elsewhere", "repeated"],
)
def test_loaders_that_compute_are_refused_and_weights_stay(work):
    tensors = checkpoint()
    engine = loading(work)
    EngineModel.load_weights(engine, iter(tensors.items()))
    before = bits(engine)
    with pytest.raises(UnsupportedTensorError):
        IndexMap.trace(engine, specs_of(tensors))
    assert bits(engine) == before


def test_derived_tensors_are_refused_unless_they_are_constant():
    tensors = checkpoint()
    engine = fresh(tensors)
    engine.absorbed = engine.out.data @ engine.out.data.T
    with pytest.raises(UnsupportedTensorError, match="'absorbed'"):
        LiveWeights(engine).learn(specs_of(tensors), reference=tensors)
    LiveWeights(engine, constants=["absorbed"]).learn(specs_of(tensors), reference=tensors)
    engine.absorbed = None
    engine.extra = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    with pytest.raises(UnsupportedTensorError, match="'extra'"):
        LiveWeights(engine).learn(specs_of(tensors), reference=tensors)


def test_what_changed_since_it_was_learned_is_refused():
    tensors = checkpoint()
    new = train({name: tensor.clone() for name, tensor in tensors.items()}, 1)
    engine = fresh(tensors)
    weights = LiveWeights(engine)
    with pytest.raises(SchemaMismatchError, match="not learned"):
        weights.stage(patches_between(tensors, new))
    with pytest.raises(SchemaMismatchError, match="lacks"):
        weights.learn(specs_of(tensors), reference={"norm.weight": tensors["norm.weight"]})
    weights.learn(specs_of(tensors), reference=tensors)
    with pytest.raises(SchemaMismatchError, match="restart"):
        weights.learn(specs_of(tensors | {"norm.weight": torch.zeros(9)}))
    staged = weights.stage(patches_between(tensors, new))
    engine.qkv.data.add_(1)
    before = bits(engine)
    with pytest.raises(DivergedError, match="'qkv' holds"):
        staged.write()
    assert bits(engine) == before
    engine.qkv.data = engine.qkv.data.clone()
    with pytest.raises(UnsupportedTensorError, match="laid 'qkv' out anew"):
        staged.write()
    assert bits(engine) == before


def test_a_write_that_fails_midway_is_taken_back(monkeypatch):
    tensors = checkpoint()
    new = train({name: tensor.clone() for name, tensor in tensors.items()}, 1)
    engine = fresh(tensors)
    weights = LiveWeights(engine)
    weights.learn(specs_of(tensors), reference=tensors)
    staged = weights.stage(patches_between(tensors, new))
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        scatter(*arguments)

    scatter = live_weights.scatter
    monkeypatch.setattr(live_weights, "scatter", failing)
    with pytest.raises(KeyboardInterrupt):
        staged.write()
    assert bits(engine) == bits(fresh(tensors))
    staged.write()
    assert bits(engine) == bits(fresh(new))
