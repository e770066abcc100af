"""Publishing and following with a copy of the weights on a device: same messages, and little that crosses."""

import threading

import pytest
import torch

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import UsageError
from deltabus.bus.message import decode_message
from deltabus.cli.verify import verify_topic
from deltabus.codecs import on_device
from deltabus.codecs.state import State
from deltabus.transports import open_transport
from deltabus.transports.memory import drop_topic

from .support import LIMIT, bits, small_model, train

on_each_device = pytest.mark.parametrize(
    "device",
    [
        torch.device("cpu"),
        pytest.param(
            torch.device("cuda"),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
        ),
    ],
    ids=str,
)


async def blobs_of(url):
    """The payload of each message, in order, and what the messages say of it."""
    async with open_transport(url) as transport:
        messages = [decode_message(record.data) for record in await transport.read("trainer")]
        return [
            (message.kind, message.version, message.digest_after, [await transport.get(b.key) for b in message.blobs])
            for message in messages
        ]


def follow(url, model, step, **options):
    """Apply what leads to a step; return how many updates that took."""
    count = 0
    with_options = {"latest": False, "idle_timeout": LIMIT, **options}
    updates = Subscriber(url, **with_options).sync()
    try:
        for update in updates:
            update.apply(model)
            count += 1
            if update.step == step:
                return count
    finally:
        updates.close()
    raise AssertionError("the topic ended")


@on_each_device
@pytest.mark.parametrize("options", [{}, {"encoding": "step"}, {"threshold": 3}, {"budget": 300, "anchor": 2}], ids=str)
async def test_the_same_messages_are_published(url, device, options):
    sent = {}
    for shadow in ("ram", "device", device):
        name = f"{url}-{str(shadow).replace(':', '-')}"
        model = small_model().to(device)
        with Publisher(name, shadow=shadow, on_busy="wait", **options) as publisher:
            for step in range(5):
                publisher.publish(step, model)
                publisher.flush()
                train_on(device, model, step)
        sent[str(shadow)] = await blobs_of(name)
        assert verify_topic(name).ok
        drop_topic(name.removeprefix("memory://"))
    first, *others = sent.values()
    assert len(first) >= 5
    assert all(other == first for other in others)


def train_on(device, model, step):
    """Train on the host, and take the weights over: a device may round in another way."""
    host = small_model()
    host.load_state_dict(model.state_dict())
    train(host, step)
    model.load_state_dict(host.state_dict())


@on_each_device
def test_followers_with_a_copy_on_a_device_reach_the_trainers_bits(url, device):
    model, followers = small_model().to(device), [small_model(9).to(device) for _ in range(2)]
    with Publisher(url, shadow="device", anchor=2, on_busy="wait") as publisher:
        publisher.publish(0, model).result(LIMIT)
        assert follow(url, followers[0], 0, shadow=device) == 1
        for step in range(1, 5):
            train_on(device, model, step)
            publisher.publish(step, model).result(LIMIT)
        assert follow(url, followers[0], 4, shadow=device, have=followers[0]) == 4
        assert follow(url, followers[1], 4, shadow=device, latest=True) == 1
    assert bits(followers[0]) == bits(followers[1]) == bits(model)


@on_each_device
def test_a_restarted_trainer_goes_on_with_deltas(url, device):
    model = small_model().to(device)
    with Publisher(url, shadow="device") as publisher:
        publisher.publish(0, model)
    with Publisher(url, have=model, shadow="device") as publisher:
        train_on(device, model, 1)
        assert publisher.publish(1, model).result(LIMIT).kind == "delta"


class Crossing:
    """Counts the bytes that go between tensors on devices and arrays in host memory."""

    def __init__(self, monkeypatch):
        self.nbytes, self._lock = 0, threading.Lock()
        for name in ("as_array", "as_tensor"):
            monkeypatch.setattr(on_device, name, self._counted(getattr(on_device, name)))

    def _counted(self, real):
        def moved(bits, *arguments):
            with self._lock:
                self.nbytes += bits.nbytes
            return real(bits, *arguments)

        return moved


@on_each_device
@pytest.mark.parametrize("encoding", [None, "conditional", "step", "overwrite"])
def test_a_publication_moves_only_what_changed_to_the_host(url, device, monkeypatch, encoding):
    size, changed = 1 << 20, 500
    model = {"w": torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)}
    with Publisher(url, shadow="device", on_busy="wait", anchor="never", encoding=encoding) as publisher:
        publisher.publish(0, model).result(LIMIT)

        def whole(*arguments):
            raise AssertionError("a whole tensor was copied to the host")

        crossing = Crossing(monkeypatch)
        monkeypatch.setattr(State, "piece", whole)
        model["w"].view(torch.int16)[:: size // changed] ^= 1
        published = publisher.publish(1, model).result(LIMIT)
    assert published.changed == len(range(0, size, size // changed))
    # Positions and bits a few times, and a bounded sample for the choice of the encoding, of 2 MiB.
    assert 8 * published.changed <= crossing.nbytes <= 60 * published.changed + (1 << 14)


def test_a_subscriber_has_nothing_to_lie_beside(url):
    with pytest.raises(UsageError, match=r"shadow='device' is for publishers.*torch\.device\('cuda'\)"):
        Subscriber(url, shadow="device")


@pytest.mark.parametrize("make", [Publisher, Subscriber])
@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(url, make, device):
    with pytest.raises(UsageError, match=rf"shadow=torch\.device\('{device}'\) cannot be used here"):
        make(url, shadow=torch.device(device))
