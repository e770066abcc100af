"""Publishers that follow an optimizer by themselves."""

import pytest
import torch

from deltabus import Publisher
from deltabus.bus.errors import ClosedError, StorageFullError, UsageError

from .optimizers import OPTIMIZERS, layers, step_with
from .stepwise import Follower
from .support import LIMIT, bits, faulty, once

# Publishing by itself


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_attached_publisher_follows_the_optimizer(url, make):
    model = layers()
    optimizer = make(model.parameters())
    with Publisher(url, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        handle = publisher.attach(optimizer, model, every=3)
        assert (handle.step, handle.publication) == (0, None)
        for step in range(1, 8):
            step_with(optimizer, model)
            assert handle.step == step
            if step % 3 == 0:
                assert handle.publication.step == step
                assert handle.publication.result(LIMIT).version == step // 3
                follower.follow_to(step)
                assert bits(follower.model) == bits(model)
        assert handle.publication.step == 6
        handle.remove()
        handle.remove()
        step_with(optimizer, model)
        assert handle.step == 7
        assert publisher.version == 2
    assert "every 3 steps, 7 done" in repr(handle)


def test_a_resumed_run_goes_on_counting(url):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Publisher(url, on_busy="wait") as publisher:
        handle = publisher.attach(optimizer, model, every=10, start=1007)
        for _ in range(3):
            assert handle.publication is None
            step_with(optimizer, model)
        assert handle.publication.step == handle.step == 1010


def test_what_publishing_raises_the_step_raises(url, monkeypatch):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait") as publisher:
        handle = publisher.attach(optimizer, model)
        step_with(optimizer, model)
        handle.publication.result(LIMIT)
        faults.before = once(StorageFullError("no room", url=url), "put", "blobs/")
        step_with(optimizer, model)
        failed = handle.publication
        assert failed._future.exception(LIMIT) is not None
        before = bits(model)
        with pytest.raises(Exception, match="no room") as raised:
            step_with(optimizer, model)
        assert type(raised.value).__name__ == "PublishError"
        assert bits(model) != before  # the optimizer's own work is done
        assert (handle.step, handle.publication) == (3, failed)
        step_with(optimizer, model)
        assert handle.publication.result(LIMIT).step == 4
    with pytest.raises(ClosedError):
        step_with(optimizer, model)
    handle.remove()
    step_with(optimizer, model)
    with pytest.raises(ClosedError):
        publisher.attach(optimizer, model)
    with Follower(url, layers()) as follower:
        follower.follow_to(4)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -2}, {"every": 1.5}, {"start": "now"}])
def test_an_attachment_that_makes_no_sense_is_refused(url, options):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Publisher(url) as publisher:
        with pytest.raises(UsageError, match="every="):
            publisher.attach(optimizer, model, **options)
        assert not optimizer._optimizer_step_post_hooks
