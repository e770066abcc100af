"""The training side, against real topics."""

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch

from deltabus import Publisher, Subscriber
from deltabus import publisher as publisher_module
from deltabus.bus.core import LogWriter
from deltabus.bus.errors import (
    UnknownSchemeError,
    UnsupportedTensorError,
    UsageError,
    WaitTimeoutError,
)
from deltabus.bus.message import Kind
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from .support import (
    LIMIT,
    Faults,
    FaultyTransport,
    bits,
    faulty,
    follow_to,
    history,
    small_model,
    train,
    wait_until,
)


async def test_each_step_becomes_a_version(url):
    model = small_model()
    with Publisher(url, on_busy="wait") as publisher:
        for step in range(5):
            state = bits(model)
            published = publisher.publish(step, model, metadata={"step": str(step)}).result(LIMIT)
            train(model, step)
            assert (published.step, published.version, published.position) == (step, step + 1, step)
            assert published.kind == ("delta" if step else "anchor")
            assert published.steps == (step,)
            assert set(published.seconds) == {"blocked", "encode", "upload", "total"}
    assert [message.metadata for message in await history(url)] == [{"step": str(step)} for step in range(5)]
    assert (await follow_to(url, 4))[0] == state
    assert verify_topic(url).ok


async def test_weights_may_change_as_soon_as_publish_returns(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        faults.gate.clear()
        publication = publisher.publish(0, model)
        expected = bits(model)
        train(model, 0, share=1.0)
        assert bits(model) != expected
        faults.gate.set()
        publication.result(LIMIT)
    assert (await follow_to(url, 0))[0] == expected


async def test_busy_publisher_folds_steps_into_one_message(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        publications = []
        for step in range(1, 7):
            train(model, step)
            publications.append(publisher.publish(step, model))
            if step == 1:
                wait_until(lambda: publisher._outbox.empty)
        assert not any(publication.done() for publication in publications)
        faults.gate.set()
        published = [publication.result(LIMIT) for publication in publications]
    assert published[-1].steps == (2, 3, 4, 5, 6)
    assert len({id(one.message) for one in published}) == 2
    assert [one.version for one in published] == [2, 3, 3, 3, 3, 3]
    assert (await follow_to(url, 6))[0] == bits(model)
    assert verify_topic(url).ok


def test_busy_publisher_can_wait_instead_and_has_a_limit(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults:
        publisher = Publisher(url, on_busy="wait", timeout=0.2)
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        for step in (1, 2):
            train(model, step)
            publisher.publish(step, model)
        with pytest.raises(WaitTimeoutError, match="coalesce"):
            publisher.publish(3, model)
        faults.gate.set()
        publisher.flush(LIMIT)
        assert publisher.version == 3
        publisher.close(LIMIT)


async def test_step_or_metadata_that_no_message_can_carry_are_refused_at_once(url):
    model = small_model()
    wrong = [
        (0.5, {}),
        (1 << 64, {}),
        (1, {"lr": 1e-6}),
        (1, {"text": "\ud800"}),
        (1, {"text": "x" * (1 << 16)}),
        (1, dict.fromkeys(map(str, range(257)), "")),
    ]
    with Publisher(url) as publisher:
        for step, metadata in wrong:
            with pytest.raises(UsageError):
                publisher.publish(step, model, metadata=metadata)
        published = publisher.publish(np.int64(1), model, metadata={"lr": "1e-6"}).result(LIMIT)
    assert (published.step, published.version, published.message.metadata) == (1, 1, {"lr": "1e-6"})


async def test_metadata_of_folded_steps_never_outgrow_a_message(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        for step in range(1, 5):
            publication = publisher.publish(step, model, metadata={f"{step} {i}": "" for i in range(100)})
        faults.gate.set()
        metadata = publication.result(LIMIT).message.metadata
    assert {f"4 {i}" for i in range(100)} <= metadata.keys()


async def test_anchor_that_is_asked_for_while_another_is_on_its_way_comes_later(url, monkeypatch):
    model, go_on = small_model(), threading.Event()

    class Slow(FaultyTransport):
        async def put(self, key, data):
            if "2-anchor" in key:
                assert await asyncio.to_thread(go_on.wait, LIMIT)
            await super().put(key, data)

    monkeypatch.setattr(publisher_module, "open_transport", lambda url: Slow(open_transport(url), Faults()))
    with Publisher(url, anchor="never") as publisher:
        publisher.publish(0, model).result(LIMIT)
        for step in (1, 2):
            publisher.request_anchor()
            train(model, step)
            publisher.publish(step, model).result(LIMIT)
        go_on.set()
        publisher.flush(LIMIT)
        for step in (3, 4):
            publisher.publish(step, model).result(LIMIT)
            publisher.flush(LIMIT)
    assert [m.version for m in await history(url) if m.kind is Kind.ANCHOR] == [1, 2, 4]


async def test_restart_with_what_it_holds_goes_on_with_deltas(url):
    model = small_model()
    with Publisher(url) as publisher:
        publisher.publish(0, model)
    with Publisher(url, have=model) as publisher:
        train(model, 1)
        published = publisher.publish(1, model).result(LIMIT)
    assert (published.kind, published.version, published.message.epoch) == ("delta", 2, 2)
    assert (await follow_to(url, 1))[0] == bits(model)
    assert verify_topic(url).ok


async def test_restart_without_a_word_compares_the_first_publication(url):
    model = small_model()
    with Publisher(url) as publisher:
        publisher.publish(0, model)
    with Publisher(url) as publisher:
        published = publisher.publish(1, model).result(LIMIT)
        assert (published.kind, published.changed, published.nbytes, published.version) == ("delta", 0, 0, 2)
    assert (await follow_to(url, 1))[0] == bits(model)


@pytest.mark.parametrize("given", [False, True])
async def test_restart_with_other_weights_publishes_an_anchor(url, given):
    model = small_model()
    with Publisher(url) as publisher:
        publisher.publish(10, model)
    other = small_model(5)
    with Publisher(url, have=other if given else None) as publisher:
        published = publisher.publish(5, other).result(LIMIT)
    assert (published.kind, published.version, published.message.epoch) == ("anchor", 2, 2)
    assert (await follow_to(url, 5))[0] == bits(other)
    assert verify_topic(url).ok


async def test_periodic_anchors_stand_beside_deltas(url):
    model = small_model()
    with Publisher(url, anchor=3, skips="off", on_busy="wait") as publisher:
        for step in range(9):
            publisher.publish(step, model).result(LIMIT)
            publisher.flush(LIMIT)
            train(model, step)
    messages = await history(url)
    versions = {kind: [m.version for m in messages if m.kind is kind] for kind in Kind}
    assert versions[Kind.DELTA] == list(range(2, 10))
    assert len(versions[Kind.ANCHOR]) >= 3 and versions[Kind.ANCHOR][0] == 1
    _, update = await follow_to(url, 8)
    newest = versions[Kind.ANCHOR][-1]
    assert [m.version for m in update.messages] == list(range(newest, 10)), "a newcomer begins at the newest anchor"
    assert verify_topic(url).ok


async def test_anchor_shows_its_own_version_though_training_goes_on(url, monkeypatch):
    model = small_model()
    states = {}
    with faulty(monkeypatch) as faults, Publisher(url, anchor="never") as publisher:
        publisher.publish(0, model).result(LIMIT)
        publisher.request_anchor()
        train(model, 1)
        states[1] = bits(model)
        delta_stored = threading.Event()

        def hold_anchor(operation, name):
            if operation == "append":
                faults.gate.clear()
                delta_stored.set()

        faults.after = hold_anchor
        publication = publisher.publish(1, model)
        publication.result(LIMIT)
        assert delta_stored.wait(LIMIT)
        faults.after = lambda operation, name: None
        for step in (2, 3):
            train(model, step, share=0.5)
            publisher.publish(step, model)
        faults.gate.set()
        publisher.flush(LIMIT)
    anchors = [m for m in await history(url) if m.kind is Kind.ANCHOR]
    assert [m.version for m in anchors] == [1, 2]
    assert verify_topic(url).ok
    assert (await follow_to(url, 3))[0] == bits(model)


async def test_other_shapes_start_a_new_schema_and_an_anchor(url):
    with Publisher(url, on_busy="wait") as publisher:
        publisher.publish(0, {"a": torch.arange(10.0)}).result(LIMIT)
        publisher.publish(1, {"a": torch.arange(12.0)}).result(LIMIT)
        published = publisher.publish(2, {"a": torch.arange(12.0) + 1}).result(LIMIT)
    assert published.kind == "delta"
    assert [m.kind for m in await history(url)] == [Kind.ANCHOR, Kind.ANCHOR, Kind.DELTA]
    held = {"a": torch.zeros(12)}
    async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
        (await anext(subscriber)).apply(held)
    assert held["a"].tolist() == (torch.arange(12.0) + 1).tolist()
    assert verify_topic(url).ok


async def test_masters_are_published_in_another_dtype(url):
    masters = small_model(dtype=torch.float32)
    with Publisher(url, dtype=torch.bfloat16) as publisher:
        publisher.publish(0, masters).result(LIMIT)
        train(masters, 1)
        publisher.publish(1, masters).result(LIMIT)
    state, _ = await follow_to(url, 1)
    rounded = small_model()
    rounded.load_state_dict(
        {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in masters.state_dict().items()}
    )
    assert state == bits(rounded)


async def test_selected_tensors_alone_are_published(url):
    model, held = small_model(), small_model(4)
    before = bits(held)
    with Publisher(url, select=["inner.*"]) as publisher:
        published = publisher.publish(0, model).result(LIMIT)
    assert published.total == 40 * 60 + 60
    async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
        (await anext(subscriber)).apply(held)
    after = bits(held)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"inner.weight", "inner.bias"}
    assert all(after[name] == bits(model)[name] for name in changed)


@pytest.mark.parametrize("encoding", ["conditional", "overwrite", "step", "dense"])
async def test_every_encoding_can_be_forced(url, encoding):
    model = small_model()
    with Publisher(url, encoding=encoding) as publisher:
        publisher.publish(0, model).result(LIMIT)
        train(model, 1)
        published = publisher.publish(1, model).result(LIMIT)
        assert set(published.message.stats.encodings) == {encoding}
    assert (await follow_to(url, 1))[0] == bits(model)


def test_handle_can_be_awaited(url):
    async def main(publisher):
        return await publisher.publish(0, small_model())

    with Publisher(url) as publisher:
        assert asyncio.run(main(publisher)).version == 1


def test_wrong_arguments_are_refused_at_once(url):
    with pytest.raises(UnknownSchemeError):
        Publisher("pigeon://run-7")
    for wrong in ({"on_busy": "drop"}, {"encoding": "smallest"}, {"writer": "a/b"}, {"anchor": "often"}):
        with pytest.raises(UsageError):
            Publisher(url, **wrong)
    with Publisher(url) as publisher:
        with pytest.raises(UsageError):
            publisher.publish(0, [torch.zeros(3)])
        with pytest.raises(UnsupportedTensorError, match="'odd'"):
            publisher.publish(0, {"odd": torch.zeros(3, dtype=torch.complex128)})
        assert publisher.publish(0, {"even": torch.zeros(3)}).result(LIMIT).version == 1


def test_publish_by_two_threads_at_once_is_an_error(url, monkeypatch):
    model, inside, go_on = small_model(), threading.Event(), threading.Event()
    from deltabus import publisher as module

    real = module.collect

    def slow(source, **options):
        inside.set()
        assert go_on.wait(LIMIT)
        return real(source, **options)

    monkeypatch.setattr(module, "collect", slow)
    with Publisher(url) as publisher:
        other = threading.Thread(target=publisher.publish, args=(0, model))
        other.start()
        assert inside.wait(LIMIT)
        with pytest.raises(UsageError, match="two threads"):
            publisher.publish(1, model)
        go_on.set()
        other.join(LIMIT)


def test_no_thread_stays_behind(url):
    before = set(threading.enumerate())
    with Publisher(url) as publisher:
        publisher.publish(0, small_model()).result(LIMIT)
    gc.collect()
    assert set(threading.enumerate()) <= before


async def test_log_writer_and_publisher_agree_on_the_end(url):
    with Publisher(url) as publisher:
        publisher.publish(0, small_model()).result(LIMIT)
    async with open_transport(url) as transport:
        log = LogWriter(transport, "trainer")
        await log.open()
        assert (log.epoch, log.next_version) == (2, 2)
