"""Which tensors a publisher need not compare."""

import gc

import pytest
import torch
from torch import nn

from deltabus import Publisher
from deltabus.bus.errors import UsageError
from deltabus.codecs.state import collect

from .optimizers import OPTIMIZERS, layers, step_with
from .stepwise import Follower, bits_of, nudge, one_tensor
from .support import LIMIT, bits

# What need not be compared


class Compared:
    """Counts how often each tensor of a state is read."""

    def __init__(self, monkeypatch):
        self.names = []
        from deltabus.codecs import state

        piece = state.State.piece

        def counted(this, run):
            name = this.schema.tensors[run.tensor].name
            if name in ALL:  # not of the small states that loops are compiled with
                self.names.append(name)
            return piece(this, run)

        monkeypatch.setattr(state.State, "piece", counted)

    def taken(self):
        names, self.names = sorted(set(self.names)), []
        return names


ALL = ["a.weight", "b.weight", "frozen.weight"]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("attached", [False, True], ids=["by hand", "attached"])
def test_optimizers_are_seen_and_frozen_tensors_cost_nothing(url, make, attached, monkeypatch):
    model = layers()
    model["frozen"].requires_grad_(False)
    optimizer = make(model.parameters())
    compared = Compared(monkeypatch)
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model).result(LIMIT)
        assert compared.taken() == ALL
        handle = publisher.attach(optimizer, model) if attached else None
        for step in range(1, 4):
            step_with(optimizer, model)
            if not attached:
                publisher.publish(step, model)
            publisher.flush(LIMIT)
            assert compared.taken() == ["a.weight", "b.weight"]
            follower.follow_to(step)
            assert bits(follower.model) == bits(model)
        if handle is not None:
            handle.remove()
        publisher.publish(8, model).result(LIMIT)  # twice, as an attached publisher runs before the step is over
        publisher.publish(9, model).result(LIMIT)
        compared.taken()
        assert publisher.publish(10, model).result(LIMIT).changed == 0
        assert compared.taken() == []


def in_place(model):
    with torch.no_grad():
        model["a"].weight.mul_(1.5)


def by_index(model):
    with torch.no_grad():
        model["a"].weight[3, 4] = 7.0


def through_a_view(model):
    with torch.no_grad():
        model["a"].weight.view(-1)[5:9].zero_()


def loaded(model):
    model["a"].load_state_dict({"weight": torch.randn(12, 12)})


def assigned(model):
    model["a"].load_state_dict({"weight": torch.randn(12, 12)}, assign=True)


def replaced(model):
    model["a"].weight = nn.Parameter(torch.randn(12, 12))


def other_memory(model):
    model["a"].weight.data = torch.randn(12, 12)


def turned(model):
    model["a"].weight.data = model["a"].weight.data.t()


def swapped(model):
    model["a"].weight, model["b"].weight = model["b"].weight, model["a"].weight


def foreach(model):
    with torch.no_grad():
        torch._foreach_add_([model["a"].weight], 1.0)


def initialised(model):
    nn.init.orthogonal_(model["a"].weight)


WRITES = [
    in_place, by_index, through_a_view, loaded, assigned, replaced, other_memory, turned, swapped, foreach, initialised
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_that_torch_counts_are_seen(url, write, monkeypatch):
    model = layers()
    compared = Compared(monkeypatch)
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model)
        publisher.publish(1, model).result(LIMIT)
        compared.taken()
        write(model)
        assert publisher.publish(2, model).result(LIMIT).changed
        assert compared.taken() == (["a.weight", "b.weight"] if write is swapped else ["a.weight"])
        follower.follow_to(2)
        assert bits(follower.model) == bits(model)


def by_data(model):
    model["a"].weight.data.mul_(1.5)


def by_numpy(model):
    model["a"].weight.detach().numpy()[2, 3] = 5.0


@pytest.mark.parametrize("write", [by_data, by_numpy], ids=lambda write: write.__name__)
@pytest.mark.parametrize("skip", [False, True], ids=["compared", "skipped"])
def test_writes_that_torch_does_not_count_are_missed_only_with_the_option(url, write, skip):
    model = layers()
    with Publisher(url, skip_unmodified=skip, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model)
        before = bits(model)
        write(model)
        assert (publisher.publish(1, model).result(LIMIT).changed == 0) is skip
        follower.follow_to(1)
        assert bits(follower.model) == (before if skip else bits(model))
        in_place(model)  # the next write that is counted brings the missed one along
        publisher.publish(2, model)
        follower.follow_to(2)
        assert bits(follower.model) == bits(model)


def test_models_that_take_turns_are_compared(url):
    one, other = layers(), layers()
    in_place(other)
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        for step, model in enumerate((one, other, one, one, other)):
            publisher.publish(step, model)
            follower.follow_to(step)
            assert bits(follower.model) == bits(model)


def test_another_object_over_the_same_memory_is_compared(url):
    model = one_tensor()
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher:
        publisher.publish(0, model)
        nudge(model["w"].data, places=5)
        again = {"w": model["w"].data}
        assert (again["w"].data_ptr(), again["w"]._version) == (model["w"].data_ptr(), model["w"]._version)
        assert publisher.publish(1, again).result(LIMIT).changed == 5


def test_what_is_held_back_of_an_unmodified_tensor_is_sent_later(url):
    model = one_tensor()
    with (
        Publisher(url, threshold=9, patience=2, skip_unmodified=True, on_busy="wait") as publisher,
        Follower(url, one_tensor()) as follower,
    ):
        publisher.publish(0, model)
        nudge(model["w"], places=10)
        assert publisher.publish(1, model).result(LIMIT).held == 10
        assert publisher.publish(2, model).result(LIMIT).changed == 10
        follower.follow_to(2)
        assert bits_of(follower.model) == bits_of(model)


def test_inference_tensors_have_no_counter_and_are_compared(url):
    with torch.inference_mode():
        model = one_tensor()
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher:
        publisher.publish(0, model)
        with torch.inference_mode():
            model["w"][:5] = 3.0
        assert publisher.publish(1, model).result(LIMIT).changed == 5


def test_a_refused_step_leaves_the_marks_of_the_last_captured_one(url):
    model = layers()
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model)
        in_place(model)
        with pytest.raises(UsageError):
            publisher.publish(1, model, metadata={"a": "b" * (1 << 20)})
        assert publisher.publish(2, model).result(LIMIT).changed
        follower.follow_to(2)
        assert bits(follower.model) == bits(model)


def test_watching_optimizers_ends_with_the_publisher(url):
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    publisher = Publisher(url, skip_unmodified=True)
    assert len(optimizer._global_optimizer_pre_hooks) == before[0] + 1
    publisher.close()
    assert (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)) == before


def test_marks_keep_no_tensor_alive():
    import weakref

    from deltabus.unmodified import Marks

    marks, tensors = Marks(), one_tensor()
    marks.touch(tensors.values())
    marks.keep(marks.look(collect(tensors)))
    held = weakref.ref(tensors["w"])
    assert marks.look(collect(tensors)).unmoved == {0}
    del tensors
    gc.collect()
    assert held() is None
