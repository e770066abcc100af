"""What an update does to a model, and which models it refuses."""

import pytest
import torch
from torch import nn

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import (
    DivergedError,
    SchemaMismatchError,
    StaleUpdateError,
)
from deltabus.codecs.patches import _HostPatch

from .support import LIMIT, Trainer, bits, small_model


async def test_update_that_was_not_applied_is_folded_into_the_next(url):
    held = small_model(9)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            first = await anext(subscriber)
            trainer.publish(3)
            second = await anext(subscriber)
            with pytest.raises(StaleUpdateError):
                first.apply(held)
            assert second.whole and second.step == 1
            second.apply(held)
            assert bits(held) == trainer.states[1]
            third, fourth = await anext(subscriber), await anext(subscriber)
            assert (third.step, fourth.step) == (2, 3)
            assert str(fourth.base) == "trainer@2"
            with pytest.raises(StaleUpdateError):
                third.apply(held)
            fourth.apply(held)
            assert bits(held) == trainer.states[3]


async def test_failed_apply_changes_nothing_and_can_be_made_good(url, monkeypatch):
    held = small_model(9)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            before = bits(held)
            trainer.publish(2)
            update = await anext(subscriber)
            real, calls = _HostPatch.write, []

            def failing(self, *, back):
                calls.append(self)
                if len(calls) == 2:
                    raise RuntimeError("device lost")
                real(self, back=back)

            with monkeypatch.context() as patch:
                patch.setattr(_HostPatch, "write", failing)
                with pytest.raises(RuntimeError, match="device lost"):
                    update.apply(held)
            assert len(calls) > 2 and bits(held) == before and not update.applied
            later = await anext(subscriber)
            later.apply(held)
            assert bits(held) == trainer.states[2]


async def test_applying_twice_does_nothing_the_second_time(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            trainer.publish()
            update = await anext(subscriber)
            update.apply(held)
            update.apply(held)
    assert bits(held) == trainer.states[1]


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_an_update_that_was_taken_elsewhere_is_not_folded_into_the_next(url, elsewhere):
    held = small_model(9)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            trainer.publish(2)
            second = await anext(subscriber)
            if elsewhere:
                second.mark_applied()
            third = await anext(subscriber)
    assert str(third.base) == ("trainer@2" if elsewhere else "trainer@1")


async def test_drift_at_a_touched_element_is_refused_with_the_tensor_s_name(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            with torch.no_grad():
                held["inner"].weight.mul_(-1)
            before = bits(held)
            trainer.publish()
            update = await anext(subscriber)
            with pytest.raises(DivergedError, match=r"inner\.weight") as caught:
                update.apply(held)
            assert caught.value.tensor == "inner.weight"
            assert bits(held) == before


async def test_model_that_was_reloaded_in_place_is_noticed(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            first = await anext(subscriber)
            first.apply(held)
            held["inner"].weight.data = held["inner"].weight.data.clone()  # the same parameter, other memory
            with torch.no_grad():
                held["norm"].bias.add_(1)  # an element that the next update leaves alone, most likely
            first.apply(held)
            assert bits(held) == trainer.states[0], "the whole state is written again, not taken to be there"
            trainer.publish()
            update = await anext(subscriber)
            untouched = trainer.model["norm"].bias == held["norm"].bias
            assert untouched.any()
            with torch.no_grad():
                held["norm"].bias[untouched.nonzero()[0]] += 1
            before = bits(held)
            with pytest.raises(DivergedError):
                update.apply(held)
            assert bits(held) == before


async def test_model_that_was_never_seen_is_compared_whole(url):
    held, stranger = small_model(9), small_model(10)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            twin = small_model(9)
            twin.load_state_dict(held.state_dict())
            trainer.publish()
            update = await anext(subscriber)
            before = bits(stranger)
            with pytest.raises(DivergedError, match="holds"):
                update.apply(stranger)
            assert bits(stranger) == before
            update.apply(twin)
            update.apply(held)
    assert bits(twin) == bits(held) == trainer.states[1]


async def test_model_that_missed_an_update_is_refused(url):
    one, two = small_model(9), small_model(10)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            first = await anext(subscriber)
            first.apply(one)
            first.apply(two)
            trainer.publish(2)
            (await anext(subscriber)).apply(one)
            update = await anext(subscriber)
            update.apply(one)
            with pytest.raises(DivergedError, match="trainer@1"):
                update.apply(two)
    assert bits(two) == trainer.states[0]


async def test_models_that_do_not_fit_are_refused_before_anything_is_written(url):
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            for wrong in (nn.Linear(40, 60), small_model(dtype=torch.float32)):
                before = bits(wrong)
                with pytest.raises(SchemaMismatchError):
                    update.apply(wrong)
                assert bits(wrong) == before


async def test_dict_and_wrapped_module_can_be_updated(url):
    held = small_model(9)
    wrapped = nn.Module()
    wrapped.module = small_model(8)
    tensors = {name: tensor.clone() for name, tensor in held.state_dict().items()}
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            for _ in range(2):
                update = await anext(subscriber)
                update.apply(tensors)
                update.apply(wrapped)
                trainer.publish()
    assert bits(wrapped.module) == trainer.states[update.step]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wrapped.module.state_dict().items())


async def test_models_that_share_a_tensor_are_told_apart(url):
    shared = torch.zeros(4)
    one, two = ({"a": shared, "b": torch.zeros(100)} for _ in range(2))
    state = {"a": torch.ones(4), "b": torch.arange(100.0)}
    with Publisher(url) as publisher:
        publisher.publish(0, state).result(LIMIT)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            update.apply(one)
            update.apply(two)
    assert one["b"].tolist() == two["b"].tolist() == state["b"].tolist()


async def test_model_with_an_exchanged_tensor_is_compared_whole(url):
    held = {"a": torch.zeros(4), "b": torch.zeros(100)}
    state = {"a": torch.ones(4), "b": torch.arange(100.0)}
    with Publisher(url) as publisher:
        publisher.publish(0, state).result(LIMIT)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            held["b"] = held["b"].clone()
            held["b"][7] = -1
            state["b"][5] = -1
            publisher.publish(1, state).result(LIMIT)
            update = await anext(subscriber)
            with pytest.raises(DivergedError, match="holds"):
                update.apply(held)
            held["b"][7] = 7
            update.apply(held)
    assert held["b"].tolist() == state["b"].tolist()
