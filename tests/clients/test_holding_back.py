"""Publishers that hold small changes back, or send the largest first."""

import pytest
import torch

from deltabus import Publisher
from deltabus.bus.errors import StorageFullError, UsageError
from deltabus.bus.message import Stats, decode_message
from deltabus.cli.log import print_log, read_log
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from .stepwise import Follower, bits_of, nudge, one_tensor, patterns
from .support import LIMIT, bits, faulty, once, small_model, train, wait_until

# Holding back


def test_small_changes_wait_until_they_add_up(url):
    model = one_tensor()
    with Publisher(url, threshold=2, on_busy="wait") as publisher, Follower(url, one_tensor()) as follower:
        publisher.publish(0, model)
        start = bits_of(model)
        for step in (1, 2):
            nudge(model["w"], places=10)
            published = publisher.publish(step, model).result(LIMIT)
            assert (published.changed, published.held, published.nbytes) == (0, 10, 0)
            follower.follow_to(step)
            assert bits_of(follower.model) == start
        nudge(model["w"], places=4)
        published = publisher.publish(3, model).result(LIMIT)
        assert (published.changed, published.held) == (4, 6)
        follower.follow_to(3)
        assert patterns(follower.model["w"])[:4].tolist() == patterns(model["w"])[:4].tolist()
        assert bits_of(follower.model) != bits_of(model)
    assert verify_topic(url).ok


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_no_small_change_waits_longer_than_patience(url, patience):
    model = one_tensor()
    with (
        Publisher(url, threshold=1000, patience=patience, on_busy="wait") as publisher,
        Follower(url, one_tensor()) as follower,
    ):
        publisher.publish(0, model)
        waiting = 0
        for step in range(1, 12):
            nudge(model["w"], places=step)
            held = publisher.publish(step, model).result(LIMIT).held
            waiting = waiting + 1 if held else 0
            assert waiting < patience
            if not held:
                follower.follow_to(step)
                assert bits_of(follower.model) == bits_of(model)
        assert waiting == 11 % patience


@pytest.mark.parametrize(
    "options", [{"threshold": 50, "patience": 5}, {"budget": 400}, {"threshold": 50, "budget": 400}]
)
def test_followers_reach_the_trainers_bits_once_it_stops(url, options):
    model = small_model()
    with Publisher(url, on_busy="wait", **options) as publisher, Follower(url, small_model(9)) as follower:
        publisher.publish(0, model)
        for step in range(1, 4):
            train(model, step)
            assert publisher.publish(step, model).result(LIMIT).held
        for step in range(4, 200):
            if not publisher.publish(step, model).result(LIMIT).held:
                break
        follower.follow_to(step)
        assert bits(follower.model) == bits(model)
    assert verify_topic(url).ok


def test_the_last_step_can_be_sent_whole(url):
    model = small_model()
    with Publisher(url, threshold=1 << 14, budget=300, on_busy="wait") as publisher:
        publisher.publish(0, model)
        train(model, 1)
        assert publisher.publish(1, model).result(LIMIT).held
        assert publisher.publish(2, model, everything=True).result(LIMIT).held == 0
    with Publisher(url, have=model) as publisher:  # and is what a successor goes on from
        train(model, 3)
        assert publisher.publish(3, model).result(LIMIT).kind == "delta"
    with Follower(url, small_model(9)) as follower:
        follower.follow_to(3)
        assert bits(follower.model) == bits(model)


def large_model():
    generator = torch.Generator().manual_seed(3)
    return {"w": (torch.randn(1 << 19, generator=generator) * 0.02)}


def train_large(model, seed):
    generator = torch.Generator().manual_seed(seed)
    model["w"] += torch.randn(model["w"].shape, generator=generator) * 4e-6


@pytest.mark.parametrize("encoding", [None, "step", "overwrite"])
def test_a_budget_bounds_every_message(url, encoding):
    model, budget = large_model(), 6000
    with Publisher(url, budget=budget, encoding=encoding, dtype=torch.bfloat16, on_busy="wait") as publisher:
        publisher.publish(0, model)
        for step in range(1, 4):
            train_large(model, step)
            published = publisher.publish(step, model).result(LIMIT)
            assert published.held
            assert 0.8 * budget < published.nbytes < 1.1 * budget + 600  # 600: what a part says of itself


def test_a_budget_bounds_folded_messages_too(url, monkeypatch):
    model, budget = large_model(), 6000
    with faulty(monkeypatch) as faults, Publisher(url, budget=budget, dtype=torch.bfloat16) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        for step in range(1, 6):
            train_large(model, step)
            publication = publisher.publish(step, model)
            if step == 1:
                wait_until(lambda: publisher._outbox.empty)
        faults.gate.set()
        published = publication.result(LIMIT)
        assert published.steps == (2, 3, 4, 5)
        assert published.held
        assert published.nbytes < 1.1 * budget + 600
    assert verify_topic(url).ok


def test_nothing_is_lost_when_a_held_back_step_fails(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, budget=400, on_busy="wait") as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.before = once(StorageFullError("no room", url=url), "put", "blobs/")
        train(model, 1)
        assert publisher.publish(1, model)._future.exception(LIMIT) is not None
        publisher._sender.failure = None
        train(model, 2)
        assert publisher.publish(2, model).result(LIMIT).held
        assert publisher.publish(3, model, everything=True).result(LIMIT).held == 0
    with Follower(url, small_model(9)) as follower:
        follower.follow_to(3)
        assert bits(follower.model) == bits(model)
    assert verify_topic(url).ok


def test_an_anchor_holds_what_was_published_and_says_what_is_not(url):
    model = one_tensor()
    with Publisher(url, threshold=2, on_busy="wait") as publisher:
        publisher.publish(0, model)
        start = bits_of(model)
        nudge(model["w"], places=10)
        publisher.request_anchor()
        publisher.publish(1, model)
    log = read_log(url, now=0.0)
    assert [(row["kind"], row["held"]) for row in log["messages"]] == [("anchor", 0), ("delta", 10), ("anchor", 10)]
    with Follower(url, one_tensor()) as follower:
        nudge(follower.model["w"], places=1)
        follower.follow_to(1)
        assert bits_of(follower.model) == start
    assert verify_topic(url).ok


def test_the_log_shows_what_was_held_back_only_where_something_was(url, capsys):
    model = one_tensor()
    with Publisher(url, threshold=2, on_busy="wait") as publisher:
        publisher.publish(0, model).result(LIMIT)
        print_log(read_log(url, now=0.0))
        assert "held" not in capsys.readouterr().out
        nudge(model["w"], places=10)
        publisher.publish(1, model)
    print_log(read_log(url, now=0.0))
    shown = capsys.readouterr().out
    assert "held" in shown
    assert "10" in shown


async def test_readers_that_do_not_know_what_was_held_ignore_it(url):
    import msgspec

    class OldStats(msgspec.Struct):
        changed: int
        total: int

    stats = msgspec.msgpack.encode(Stats(changed=1, total=2, held=3))
    assert msgspec.msgpack.decode(stats, type=OldStats) == OldStats(1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(OldStats(1, 2)), type=Stats).held == 0
    with Publisher(url) as publisher:
        publisher.publish(0, one_tensor())
    async with open_transport(url) as transport:
        (record,) = await transport.read("trainer")
    assert decode_message(record.data).stats.held == 0


@pytest.mark.parametrize("options", [{"threshold": -1}, {"budget": 0}, {"budget": 2.5}, {"patience": 0}])
def test_limits_out_of_range_are_refused_before_anything_is_opened(options, tmp_path):
    with pytest.raises(UsageError, match=f"{next(iter(options))}="):
        Publisher(tmp_path / "topic", **options)
    assert not list(tmp_path.iterdir())
