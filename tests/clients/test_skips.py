"""Skip deltas, from a publisher to followers that fell behind."""

import asyncio
import logging
import threading
from dataclasses import replace

import pytest
import torch

from deltabus import Publisher, Subscriber
from deltabus import sender as sender_module
from deltabus import skips as skips_module
from deltabus.bus.errors import (
    AppendUnknownError,
    FencedError,
    PublishError,
    StorageFullError,
    TransientTransportError,
)
from deltabus.bus.message import Kind, decode_message
from deltabus.bus.planner import plan
from deltabus.bus.skips import SkipPolicy
from deltabus.bus.version import VersionVector
from deltabus.cli.log import print_log, read_log
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from .support import LIMIT, bits, faulty, once, small_model, train, wait_until

ALL = SkipPolicy(share=1, most=2, anchor=100, memory=100)
"""Every power of two, however small the model is beside its changes."""


async def history(url):
    messages, after = [], -1
    async with open_transport(url) as transport:
        while records := await transport.read("trainer", after):
            messages += [decode_message(record.data) for record in records]
            after = records[-1].position
    return messages


def skips_of(messages):
    return [(m.base["trainer"], m.version) for m in messages if m.base and m.version - m.base["trainer"] > 1]


def check(url):
    """Check that every message leads to the state that it says."""
    report = verify_topic(url)
    assert (report.problems, report.unreachable) == ((), 0)
    assert report.replayed == report.records


def aligned(first, last, *, above=1):
    """Every block of a power of two that divides its end, longer than `above`, within some versions."""
    return {
        (version - (1 << level), version)
        for version in range(first + 1, last + 1)
        for level in range(1, 20)
        if version % (1 << level) == 0 and version - (1 << level) >= first and 1 << level > above
    }


def publish(publisher, model, steps, *, states=None, flush=True):
    """Publish some steps; what waits to be composed is composed before the next one, if asked for."""
    for step in steps:
        if step:
            train(model, step)
        published = publisher.publish(step, model, metadata={"step": str(step)}).result(LIMIT)
        if flush:
            publisher.flush(LIMIT)
        if states is not None:
            states[published.version] = bits(model)


async def first_update(url, have):
    async with Subscriber(url, have=have, idle_timeout=LIMIT) as subscriber:
        async for update in subscriber:
            return update
    raise AssertionError("the topic ended")


async def test_followers_of_every_lag_read_few_messages_and_no_anchor(url):
    model, states = small_model(), {}
    with Publisher(url, on_busy="wait", anchor="never", skips=ALL) as publisher:
        publish(publisher, model, range(40), states=states)
    messages = await history(url)
    assert set(skips_of(messages)) == aligned(1, 40)
    check(url)
    for version in (1, 7, 8, 24, 31, 38, 39):
        follower = small_model(99)
        follower.load_state_dict({name: load(model, name, states[version][name]) for name in states[version]})
        assert bits(follower) == states[version]
        update = await first_update(url, follower)
        way = plan(messages, have=VersionVector({"trainer": version}), target=VersionVector({"trainer": 40}))
        assert update.messages == way.messages
        assert len(update.messages) <= 2 * (40 - version).bit_length()
        assert all(message.kind is Kind.DELTA for message in update.messages)
        assert (update.version, update.step) == (40, 39)
        assert update.message.metadata == {"step": "39"}
        update.apply(follower)
        assert bits(follower) == states[40]


def load(model, name, data):
    like = model.state_dict()[name]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).reshape(like.shape)


async def test_a_checkpoint_that_is_recognised_takes_skips_and_no_anchor(url, tmp_path):
    from safetensors.torch import save_file

    model = small_model()
    with Publisher(url, on_busy="wait", anchor="never") as publisher:
        publish(publisher, model, range(8))
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(saved, tmp_path / "at-8.safetensors")
        publish(publisher, model, range(8, 17))
    follower = small_model(99)
    follower.load_state_dict(saved)
    update = await first_update(url, tmp_path / "at-8.safetensors")
    assert [(m.base["trainer"], m.version) for m in update.messages] == [(8, 12), (12, 16), (16, 17)]
    assert update.base == {"trainer": 8}
    update.apply(follower)
    assert bits(follower) == bits(model)


async def test_every_version_is_delivered_to_who_wants_each(url):
    model, states = small_model(), {}
    with Publisher(url, on_busy="wait", skips=ALL) as publisher:
        publish(publisher, model, range(12), states=states)
    follower, seen = small_model(99), []
    follower.load_state_dict({name: load(model, name, states[1][name]) for name in states[1]})
    async with Subscriber(url, have=follower, latest=False, idle_timeout=LIMIT) as subscriber:
        async for update in subscriber:
            update.apply(follower)
            seen.append(update.version)
            assert bits(follower) == states[update.version]
            if update.version == 12:
                break
    assert seen == list(range(2, 13))


@pytest.mark.parametrize(
    "options",
    [{"encoding": "overwrite"}, {"threshold": 1}, {"dtype": torch.float16}, {"shadow": torch.device("cpu")}],
    ids=["encoding", "threshold", "dtype", "device"],
)
async def test_skips_are_of_what_was_published(url, options):
    model = small_model()
    with Publisher(url, on_busy="wait", skips=ALL, **options) as publisher:
        publish(publisher, model, range(17))
        publisher.publish(17, model, everything=True).result(LIMIT)
    messages = await history(url)
    assert aligned(1, 16) <= set(skips_of(messages))
    check(url)
    if "encoding" in options:
        assert {name for m in messages if m.kind is Kind.DELTA for name in m.stats.encodings} == {"overwrite"}


async def test_a_mapped_shadow_and_folded_steps(url, tmp_path, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, shadow=tmp_path, skips=ALL) as publisher:
        publish(publisher, model, range(2))
        for start in range(2, 50, 4):
            faults.gate.clear()
            for step in range(start, start + 4):
                train(model, step)
                publication = publisher.publish(step, model)
            faults.gate.set()
            publication.result(LIMIT)
            publisher.flush(LIMIT)
    messages = await history(url)
    assert set(skips_of(messages)) == aligned(1, max(m.version for m in messages))
    check(url)


async def test_off_publishes_none(url):
    model = small_model()
    with Publisher(url, on_busy="wait", skips="off", anchor="never") as publisher:
        publish(publisher, model, range(17))
    assert [m.version for m in await history(url)] == list(range(1, 18))


async def test_levels_bound_the_longest(url):
    model = small_model()
    with Publisher(url, on_busy="wait", skips=replace(ALL, levels=2)) as publisher:
        publish(publisher, model, range(17))
    assert set(skips_of(await history(url))) == {(a, b) for a, b in aligned(1, 17) if b - a <= 4}


async def test_what_waits_takes_a_bounded_share_of_memory(url):
    model = small_model()
    policy = replace(ALL, memory=0.1)
    with Publisher(url, on_busy="wait", skips=policy, anchor="never") as publisher:
        sender = publisher._sender._skips
        room = 0.1 * sum(t.nbytes for t in model.state_dict().values())
        for step in range(33):
            publish(publisher, model, [step])
            assert sum(kept.nbytes for kept, _ in sender._kept.values()) <= room
            assert set(sender._kept) == {span.base for span in sender._ladder.waiting}
    longest = max(b - a for a, b in skips_of(await history(url)))
    assert longest < 16
    check(url)


async def test_skips_go_on_beside_anchors_and_end_at_a_share_of_one(url):
    model = small_model()
    with Publisher(url, on_busy="wait", anchor=4, skips=replace(ALL, anchor=0.3)) as publisher:
        publish(publisher, model, range(33))
    messages = await history(url)
    assert len([m for m in messages if m.kind is Kind.ANCHOR]) > 4
    whole = min(m.nbytes for m in messages if m.kind is Kind.ANCHOR)
    found = [m for m in messages if m.base and m.version - m.base["trainer"] > 1]
    assert {m.version - m.base["trainer"] for m in found} >= {2, 4}
    assert all(m.nbytes <= 0.35 * whole for m in found)
    check(url)


async def test_a_change_of_schema_begins_anew(url):
    model = small_model()
    with Publisher(url, on_busy="wait", skips=ALL) as publisher:
        publish(publisher, model, range(10))
        model.register_buffer("extra", torch.ones(3))
        publish(publisher, model, range(10, 20))
    messages = await history(url)
    assert [m.version for m in messages if m.kind is Kind.ANCHOR] == [1, 11]
    assert set(skips_of(messages)) == aligned(1, 10) | aligned(11, 20)
    check(url)


async def test_a_restarted_publisher_begins_anew_and_goes_on_with_deltas(url):
    model = small_model()
    with Publisher(url, on_busy="wait", skips=ALL, anchor="adaptive:100") as publisher:
        publish(publisher, model, range(11))
    with Publisher(url, have=model, on_busy="wait", skips=ALL, anchor="adaptive:100") as publisher:
        publish(publisher, model, range(11, 24))
    messages = await history(url)
    assert [m.version for m in messages if m.kind is Kind.ANCHOR] == [1]
    assert set(skips_of(messages)) == aligned(1, 11) | aligned(11, 24)
    check(url)


async def test_a_failed_step_is_in_the_skips_that_follow(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", skips=ALL) as publisher:
        publish(publisher, model, range(6))
        faults.before = once(StorageFullError("the disk is full", url=url), "put", "delta")
        train(model, 6)
        assert publisher.publish(6, model)._future.exception(LIMIT) is not None
        with pytest.raises(Exception, match="disk is full"):
            publisher.flush(LIMIT)
        publish(publisher, model, range(7, 18))
    messages = await history(url)
    assert set(skips_of(messages)) == aligned(1, max(m.version for m in messages))
    check(url)
    follower = small_model(99)
    (await first_update(url, None)).apply(follower)
    assert bits(follower) == bits(model)


async def test_a_skip_that_cannot_be_stored_is_left_out_and_fails_nothing(url, monkeypatch, caplog):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", skips=ALL, anchor="never") as publisher:
        publish(publisher, model, range(3))
        faults.before = once(StorageFullError("the disk is full", url=url), "put", "skip")
        with caplog.at_level(logging.WARNING):
            publish(publisher, model, range(3, 16))
    assert "no skip delta to version 4: " in caplog.text
    messages = await history(url)
    assert set(skips_of(messages)) == aligned(4, 16)
    assert [m.version for m in messages if m.kind is Kind.ANCHOR] == [1]
    check(url)


async def test_a_skip_whose_answer_is_lost_costs_no_anchor(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", skips=ALL, anchor="never") as publisher:
        publish(publisher, model, range(3))
        appends = []

        def lose(operation, name):
            if operation == "append":
                appends.append(name)
                if len(appends) == 2:  # the first is the delta's
                    raise StorageFullError("the answer says that there is no room, and is wrong", url=url)

        faults.after = lose
        publish(publisher, model, range(3, 4))
        publish(publisher, model, range(4, 12))
    messages = await history(url)
    assert (2, 4) in skips_of(messages)
    assert [m.version for m in messages if m.kind is Kind.ANCHOR] == [1]
    assert [m.version for m in messages if m.kind is Kind.DELTA and m.version - m.base["trainer"] == 1] == list(
        range(2, 13)
    )
    check(url)


async def test_publishing_waits_for_no_skip(url, monkeypatch):
    model, held = small_model(), threading.Event()

    def hold(operation, name):
        if operation == "put" and "skip" in name and not held.is_set():
            held.set()
            raise TransientTransportError("try again later, and later, and later", url=url)

    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", skips=ALL) as publisher:
        publish(publisher, model, range(3))
        stuck = threading.Event()
        original = skips_of_store(monkeypatch, stuck)
        publish(publisher, model, range(3, 20), flush=False)
        assert publisher.version == 20
        assert original.called.is_set()
        faults.before = hold
        stuck.set()
        publisher.flush(LIMIT)
        publish(publisher, model, range(20, 37))
    messages = await history(url)
    assert max(b for _, b in skips_of(messages)) == 36
    check(url)


class skips_of_store:
    """Holds the first skip's upload until an event is set."""

    def __init__(self, monkeypatch, stuck):
        self.called = threading.Event()
        store = skips_module.store_payload

        async def held(*args, **options):
            self.called.set()
            while not stuck.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.002)
            return await store(*args, **options)

        monkeypatch.setattr(skips_module, "store_payload", held)


async def test_closing_at_any_moment_leaves_a_topic_that_verifies(url, monkeypatch):
    model = small_model()
    publisher = Publisher(url, on_busy="wait", skips=ALL)
    publish(publisher, model, range(3))
    stuck = threading.Event()
    holder = skips_of_store(monkeypatch, stuck)
    publish(publisher, model, range(3, 5), flush=False)
    wait_until(holder.called.is_set)
    publisher.close(LIMIT)
    assert publisher.version == 5
    check(url)
    assert skips_of(await history(url)) == []


async def test_a_publisher_that_was_replaced_stops(url):
    model = small_model()
    old = Publisher(url, on_busy="wait", skips=ALL)
    publish(old, model, range(6))
    with Publisher(url, have=model, on_busy="wait", skips=ALL) as new:
        publish(new, model, range(6, 12))
    train(model, 100)
    with pytest.raises(FencedError):
        old.publish(100, model).result(LIMIT)
    with pytest.raises(FencedError):
        old.close()
    check(url)


async def test_an_append_of_unknown_fate_before_a_skip(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", skips=ALL) as publisher:
        publish(publisher, model, range(7))
        faults.after = once(AppendUnknownError("no answer", url=url), "append")
        publish(publisher, model, range(7, 17))
    check(url)
    follower = small_model(99)
    (await first_update(url, None)).apply(follower)
    assert bits(follower) == bits(model)


@pytest.mark.parametrize(("module", "kind"), [(skips_module, "skip"), (sender_module, "anchor")])
async def test_a_delta_that_is_found_by_what_goes_on_beside_is_built_on(tmp_path, monkeypatch, caplog, module, kind):
    url, model = f"file://{tmp_path}/topic", small_model()
    held, released = threading.Event(), threading.Event()
    store = module.store_payload

    async def hold(*args, name):
        while name.endswith(kind) and not released.is_set():
            held.set()
            await asyncio.sleep(0.002)
        return await store(*args, name=name)

    options = {"skips": ALL} if kind == "skip" else {"skips": "off"}
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", anchor="never", **options) as publisher:
        publish(publisher, model, range(3))
        monkeypatch.setattr(module, "store_payload", hold)
        if kind == "anchor":
            publisher.request_anchor()
        publish(publisher, model, [3], flush=False)
        wait_until(held.is_set)
        faults.after = once(StorageFullError("the answer says that there is no room, and is wrong", url=url), "append")
        train(model, 4)
        assert publisher.publish(4, model)._future.exception(LIMIT) is not None
        released.set()
        wait_until(lambda: "by an append whose answer was lost" in caplog.text)
        with pytest.raises(PublishError, match="an earlier step"):
            publisher.flush(LIMIT)
        publish(publisher, model, [5])
    messages = await history(url)
    assert [m.version for m in messages if m.position in (3, 4)] == [4, 5]
    for message in messages:  # whoever is at version 5 is not led round it
        assert not (message.base.get("trainer") == 4 and message.version > 5), message
    check(url)
    follower = small_model(99)
    (await first_update(url, None)).apply(follower)
    assert bits(follower) == bits(model)


async def test_a_damaged_skip_is_found_and_harms_nothing_else(tmp_path):
    url = (tmp_path / "topic").as_uri()
    model = small_model()
    with Publisher(url, on_busy="wait", skips=ALL, anchor="never") as publisher:
        publish(publisher, model, range(12))
    messages = await history(url)
    skip = next(m for m in messages if m.base and m.version - m.base["trainer"] == 4)
    path = tmp_path / "topic" / skip.blobs[0].key
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = verify_topic(url)
    assert [problem.position for problem in report.problems] == [skip.position]
    assert report.replayed == len(messages) - 1
    assert report.unreachable == 0


def test_the_log_says_where_a_skip_starts_from(url, capsys):
    model = small_model()
    with Publisher(url, on_busy="wait", skips=ALL, anchor="never") as publisher:
        publish(publisher, model, range(4))
    print_log(read_log(url, now=0.0))
    assert ["delta", "from", "2"] in [line.split()[4:7] for line in capsys.readouterr().out.splitlines()]
