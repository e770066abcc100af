"""The state that a delta is encoded against: the one that it leads from, wherever the shadow is by then."""

import threading

import pytest

from deltabus import Publisher, Subscriber
from deltabus import sender as sender_module
from deltabus.cli.verify import verify_topic
from deltabus.codecs.shadow import Snapshot

from .support import LIMIT, bits, small_model, train


@pytest.fixture
def gate(monkeypatch):
    """Holds every delta back before it is encoded, until it is opened."""
    opened, reached, encode = threading.Event(), threading.Event(), sender_module.encode_delta

    def gated(*arguments, **options):
        reached.set()
        assert opened.wait(LIMIT)
        return encode(*arguments, **options)

    monkeypatch.setattr(sender_module, "encode_delta", gated)
    return opened, reached


@pytest.fixture
def snapshots(monkeypatch):
    taken, original = [], Snapshot.__init__

    def noted(self, shadow):
        taken.append(self)
        original(self, shadow)

    monkeypatch.setattr(Snapshot, "__init__", noted)
    return taken


@pytest.mark.parametrize("anchor", ["never", 1])
async def test_a_delta_is_encoded_against_its_own_base_though_training_went_on(url, gate, snapshots, anchor):
    opened, reached = gate
    model = small_model()
    with Publisher(url, anchor=anchor, encoding="conditional") as publisher:
        publisher.publish(0, model).result(LIMIT)
        train(model, 1)
        first = publisher.publish(1, model)
        assert reached.wait(LIMIT)
        for step in (2, 3):
            train(model, step)
            last = publisher.publish(step, model)
        opened.set()
        messages = [first.result(LIMIT).message, last.result(LIMIT).message]
    assert [set(message.stats.encodings) for message in messages] == [{"conditional"}] * 2
    assert all(snapshot._released for snapshot in snapshots)
    follower = small_model(99)
    async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
        update = await anext(subscriber)
        update.apply(follower)
    assert (update.step, bits(follower)) == (3, bits(model))
    assert verify_topic(url).ok


def test_no_snapshot_is_taken_for_encodings_that_need_no_base(url, snapshots):
    model = small_model()
    with Publisher(url, anchor="never", encoding="step", skips="off") as publisher:
        publisher.publish(0, model).result(LIMIT)
        taken = len(snapshots)
        train(model, 1)
        publisher.publish(1, model).result(LIMIT)
    assert len(snapshots) == taken
