"""A topic that is published again for engines that keep no shadow, and such engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess

import pytest
import torch

from deltabus import DeltabusError, Publisher, Subscriber
from deltabus.bus.core import TopicReader
from deltabus.bus.errors import (
    ConflictError,
    DivergedError,
    KeyNotFoundError,
    RetentionGapError,
    SignatureError,
    StaleUpdateError,
    UsageError,
    WaitTimeoutError,
)
from deltabus.bus.group import Group
from deltabus.bus.message import Kind
from deltabus.cli.serve import transcoder
from deltabus.cli.verify import verify_topic
from deltabus.direct import DirectSubscriber
from deltabus.events import EventKind
from deltabus.fetching import Fetcher
from deltabus.keys import make_key
from deltabus.transcoding import transcode
from deltabus.transports import open_transport

from .support import LIMIT, bits, small_model, train


class Running:
    """A transcoder in this process; what it tells can be awaited."""

    def __init__(self, source, target, **options):
        self.done = asyncio.Queue()
        self.told = []
        self._work = transcode(source, target, tell=self._note, workers=1, **options)

    def _note(self, done):
        self.told.append(done)
        self.done.put_nowait(done)

    async def __aenter__(self):
        self.task = asyncio.create_task(self._work)
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeltabusError):
            await self.task

    async def until(self, version):
        async with asyncio.timeout(LIMIT):
            while True:
                getting = asyncio.ensure_future(self.done.get())
                await asyncio.wait((getting, self.task), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    self.task.result()
                done = getting.result()
                if done.kind != "held" and done.version >= version:
                    return done


async def messages_of(url):
    async with open_transport(url) as transport:
        return await TopicReader(transport).load()


def blank(model):
    """The same tensors, with other bits."""
    other = small_model(77)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


@pytest.mark.timeout(300)
async def test_every_state_comes_out_the_same_and_restarts_go_on_without_an_anchor(tmp_path):
    source, target = (tmp_path / "source").as_uri(), (tmp_path / "target").as_uri()
    model, events = small_model(), []
    options = {"anchor": "never", "on_event": events.append}
    with Publisher(source, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(1, model, metadata={"run": "a"})
        async with Running(source, target, **options) as running:
            await running.until(1)
            for step in (2, 3):
                train(model, step)
                await publisher.publish(step, model, metadata={"step": str(step)})
                done = await running.until(step)
                assert done.seconds["since"] < LIMIT
        # Nobody runs meanwhile; what piles up becomes one delta.
        for step in (4, 5):
            train(model, step)
            await publisher.publish(step, model)
        async with Running(source, target, **options) as running:
            done = await running.until(5)
        assert [(done.kind, done.version) for done in running.told] == [("held", 3), ("delta", 5)]
    there = {message.version: message for message in await messages_of(source)}
    here = await messages_of(target)
    assert [(m.kind, m.version, m.step) for m in here] == [
        (Kind.ANCHOR, 1, 1),
        (Kind.DELTA, 2, 2),
        (Kind.DELTA, 3, 3),
        (Kind.DELTA, 5, 5),
    ]
    for message in here:
        same = there[message.version]
        assert (message.digest_after, message.schema) == (same.digest_after, same.schema)
        assert message.writer == same.writer
        assert message.kind is Kind.ANCHOR or set(message.stats.encodings) == {"overwrite"}
    assert [message.metadata for message in here] == [{"run": "a"}, {"step": "2"}, {"step": "3"}, {}]
    assert [m.nbytes for m in here][1:] > [m.nbytes for m in there.values()][1:]
    assert (await asyncio.to_thread(verify_topic, target)).ok
    assert [event.step for event in events if event.kind is EventKind.PUBLISHED] == [1, 2, 3, 5]
    async with asyncio.timeout(LIMIT), Subscriber(target, workers=1) as subscriber:
        follower = small_model(9)
        (await anext(subscriber)).apply(follower)
    assert bits(follower) == bits(model)


async def test_an_engine_without_a_shadow_follows_refuses_drift_and_recovers(tmp_path):
    source, target = (tmp_path / "source").as_uri(), (tmp_path / "target").as_uri()
    model, events = small_model(), []
    with Publisher(source, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(1, model)
        engine = blank(model)
        async with (
            Running(source, target) as running,
            DirectSubscriber(target, engine, idle_timeout=LIMIT, on_event=events.append, workers=1) as subscriber,
        ):
            update = await anext(subscriber)
            assert update.whole
            await update.apply()
            await subscriber.verify()
            assert bits(engine) == bits(model)
            with pytest.raises(StaleUpdateError):
                await update.apply()
            for step in (2, 3, 4):
                train(model, step)
                await publisher.publish(step, model, metadata={"step": str(step)})
                await running.until(step)
                update = await anext(subscriber)
                if step == 3:
                    continue  # not applied: the next one leads on from where the model is
                while update.version < step:
                    update = await anext(subscriber)
                assert not update.whole
                assert update.metadata == {"step": str(step)}
                await update.apply()
                assert bits(engine) == bits(model)
                assert subscriber.version == step
            assert len(update.messages) == 2
            assert update.seconds.keys() == {"download", "apply"}

            # Somebody else writes where the next update does: nothing is changed, and it is made good.
            train(model, 5)
            with torch.no_grad():
                engine.inner.weight.add_(1)
            before = bits(engine)
            await publisher.publish(5, model)
            await running.until(5)
            update = await anext(subscriber)
            with pytest.raises(DivergedError, match="somebody else wrote"):
                await update.apply()
            assert bits(engine) == before
            update = await anext(subscriber)
            assert update.whole
            await update.apply()
            assert bits(engine) == bits(model)

            # Where no update touches it, a comparison finds it.
            with torch.no_grad():
                engine.norm.bias.add_(1)
            with pytest.raises(DivergedError, match="its digest is another"):
                await subscriber.verify()
            await (await anext(subscriber)).apply()
            await subscriber.verify()
        # A new one recognises what its model holds, and needs no download.
        async with DirectSubscriber(target, engine, idle_timeout=0.2, workers=1) as subscriber:
            assert subscriber.version == 5
            with pytest.raises(WaitTimeoutError):
                await anext(subscriber)
    assert {event.step for event in events if event.kind is EventKind.APPLIED} == {1, 2, 4, 5}


async def test_without_a_shadow_every_encoding_is_read(tmp_path):
    url, model = tmp_path.as_uri(), small_model()
    engine = dict(blank(model).state_dict())
    with Publisher(url, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(1, model)
        async with DirectSubscriber(url, engine, idle_timeout=LIMIT, workers=1) as subscriber:
            await (await anext(subscriber)).apply()
            train(model, 2)
            published = await publisher.publish(2, model)
            assert "overwrite" not in published.message.stats.encodings
            await (await anext(subscriber)).apply()
            await subscriber.verify()
    assert all(torch.equal(tensor, engine[name]) for name, tensor in model.state_dict().items())


async def test_an_engine_that_holds_what_the_trainer_came_back_to_fetches_nothing(tmp_path):
    url, model, engine = tmp_path.as_uri(), small_model(), small_model(5)
    with Publisher(url, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(1, model)
        async with DirectSubscriber(url, engine, idle_timeout=LIMIT, workers=1) as subscriber:
            await (await anext(subscriber)).apply()
            train(model, 2)
            await publisher.publish(2, model)
            publisher.close()
            before = bits(engine)
            with Publisher(url, have=small_model(), on_busy="wait", skips="off", workers=1) as resumed:
                resumed.flush()
                assert resumed.version == 3
                shutil.rmtree(tmp_path / "blobs")
                while (update := await anext(subscriber)).version < 3:
                    pass
                await update.apply()
            assert (subscriber.version, bits(engine)) == (3, before)


async def test_a_source_that_went_back_or_lost_what_leads_on_is_followed(tmp_path):
    source, target = (tmp_path / "source").as_uri(), (tmp_path / "target").as_uri()
    model = small_model()
    old = small_model()
    with Publisher(source, on_busy="wait", skips="off", workers=1) as publisher:
        for step in (1, 2):
            await publisher.publish(step, model)
            train(model, step)
        train(model, 3)
        async with Running(source, target, anchor="every:1") as running:
            await running.until(2)
    old.load_state_dict(small_model().state_dict())
    with Publisher(source, have=old, on_busy="wait", skips="off", workers=1) as publisher:
        train(old, 9)
        await publisher.publish(9, old)
        newest = publisher.version
        async with Running(source, target, anchor="every:1", retention="anchors:1") as running:
            await running.until(newest)
    follower = small_model(5)
    async with asyncio.timeout(LIMIT), Subscriber(target, workers=1) as subscriber:
        (await anext(subscriber)).apply(follower)
    assert bits(follower) == bits(old)


async def test_another_history_groups_and_several_writers_are_refused(tmp_path):
    source, other, target = ((tmp_path / name).as_uri() for name in ("source", "other", "target"))
    for url, steps, seed in ((source, (1, 2, 3), 0), (other, (1, 2), 4)):
        model = small_model(seed)
        with Publisher(url, on_busy="wait", skips="off", workers=1) as publisher:
            for step in steps:
                train(model, step)
                await publisher.publish(step, model)
    async with Running(source, target) as running:
        await running.until(3)
    with pytest.raises(ConflictError, match="not in the history"):
        async with Running(other, target) as running:
            await running.until(1)
    grouped = (tmp_path / "grouped").as_uri()
    for name in ("a", "b"):
        with Publisher(grouped, writer=name, group=Group(("a", "b"), generation=1), workers=1) as publisher:
            await publisher.publish(1, {f"{name}.weight": torch.ones(4)})
    with pytest.raises(UsageError, match="a group of writers"):
        async with Running(grouped, (tmp_path / "elsewhere").as_uri()) as running:
            await running.until(1)
    with pytest.raises(UsageError, match="writers"):
        async with DirectSubscriber(grouped, {"a.weight": torch.ones(4), "b.weight": torch.ones(4)}):
            pass
    with pytest.raises(UsageError, match="one of"):
        await transcode(source, target, encoding="no")


async def test_signatures_are_checked_on_the_way_in_and_made_on_the_way_out(tmp_path):
    source, target = (tmp_path / "source").as_uri(), (tmp_path / "target").as_uri()
    trainer, site, old, stranger = (make_key(tmp_path / name).key for name in ("trainer", "site", "old", "stranger"))
    model = small_model()
    with Publisher(source, key=trainer, on_busy="wait", workers=1) as publisher:
        await publisher.publish(1, model)
    with pytest.raises(SignatureError):
        async with Running(source, target, keys=stranger.verify_key, key=site) as running:
            await running.until(1)
    assert await messages_of(target) == []
    # It goes on in a log that it signed itself, and after a rotation in one that its old key signed.
    with Publisher(source, have=small_model(), key=trainer, on_busy="wait", skips="off", workers=1) as publisher:
        for step, key, accepted in ((2, old, None), (3, old, None), (4, site, old.verify_key)):
            train(model, step)
            await publisher.publish(step, model)
            async with Running(source, target, keys=trainer.verify_key, key=key, accepted=accepted) as running:
                done = await running.until(publisher.version)
                assert done.kind == ("anchor" if step == 2 else "delta")
    with pytest.raises(SignatureError):  # without the old key nobody goes on in it
        async with Running(source, target, keys=trainer.verify_key, key=site) as running:
            await running.until(4)
    both = [site.verify_key, old.verify_key]
    follower = small_model(5)
    async with asyncio.timeout(LIMIT), Subscriber(target, keys=both, workers=1) as subscriber:
        (await anext(subscriber)).apply(follower)
    assert bits(follower) == bits(model)
    with pytest.raises(SignatureError):  # who trusts the trainer alone is not told otherwise by the site
        async with DirectSubscriber(target, small_model(6), keys=trainer.verify_key, workers=1):
            pass


async def test_without_a_way_an_engine_says_so_after_the_limit(tmp_path):
    url, model = tmp_path.as_uri(), small_model()
    with Publisher(url, on_busy="wait", skips="off", workers=1) as publisher:
        published = await publisher.publish(1, model)
        (tmp_path / published.message.blobs[0].key).unlink()
        async with DirectSubscriber(url, blank(model), idle_timeout=LIMIT, gap_timeout=0.1, workers=1) as subscriber:
            with pytest.raises(RetentionGapError, match="No anchor came"):
                while update := await anext(subscriber):
                    with pytest.raises(KeyNotFoundError):
                        await update.apply()


async def test_copies_of_a_tied_tensor_that_differ_are_made_good(tmp_path):
    url, tied = tmp_path.as_uri(), torch.arange(100, dtype=torch.bfloat16)
    engine = {"embed": torch.zeros_like(tied), "head": torch.ones_like(tied)}

    async def take(step, publisher, subscriber):
        tied[step] += 1
        await publisher.publish(step, {"embed": tied, "head": tied})
        while (update := await anext(subscriber)).step < step:
            pass
        return update

    async def make_good(subscriber):
        update = await anext(subscriber)
        assert update.whole
        await update.apply()
        await subscriber.verify()
        assert torch.equal(engine["embed"], tied)
        assert torch.equal(engine["head"], tied)

    options = {"idle_timeout": LIMIT, "workers": 1}
    with Publisher(url, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(0, {"embed": tied, "head": tied})
        async with DirectSubscriber(url, engine, **options) as subscriber:
            assert subscriber.version == 0
            await make_good(subscriber)
            update = await take(1, publisher, subscriber)
            assert not update.whole
            await update.apply()
            # A copy drifts where no update touches it, and is found by a comparison; what was fetched is not used.
            engine["head"][50] = 7
            with pytest.raises(DivergedError, match="copies of tensor 'embed' differ"):
                await subscriber.verify()
            await make_good(subscriber)
            # It drifts where the next update touches it.
            engine["head"][2] = 7
            update = await take(2, publisher, subscriber)
            assert not update.whole
            with pytest.raises(DivergedError):
                await update.apply()
            assert engine["head"][2] == 7
            await make_good(subscriber)
        async with DirectSubscriber(url, engine, **options) as subscriber:
            assert subscriber.version == publisher.version


async def test_what_takes_longer_than_the_limit_is_not_begun_anew(tmp_path, monkeypatch):
    """The limit is for the wait for news; a caller's own limit ends his call, not the download."""
    source, tensors = tmp_path.as_uri(), {"weight": torch.arange(100, dtype=torch.bfloat16)}
    engine = {"weight": tensors["weight"].clone()}
    open_gate, fetched, told = asyncio.Event(), asyncio.Event(), []
    fetch = Fetcher.fetch

    async def held_up(fetcher, blobs):
        told.append(blobs)
        fetched.set()
        await open_gate.wait()
        return await fetch(fetcher, blobs)

    async def patient():
        while True:
            with contextlib.suppress(WaitTimeoutError):
                return await anext(subscriber)

    monkeypatch.setattr(Fetcher, "fetch", held_up)
    with Publisher(source, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(0, tensors)
        async with DirectSubscriber(source, engine, idle_timeout=0.2, workers=1) as subscriber:
            assert subscriber.version == 1
            with pytest.raises(WaitTimeoutError):
                await anext(subscriber)
            tensors["weight"][1] = 7
            await publisher.publish(1, tensors)
            async with asyncio.timeout(LIMIT):
                waiting = asyncio.create_task(patient())
                await fetched.wait()
                waiting.cancel()
                with pytest.raises(TimeoutError):  # and no WaitTimeoutError, which says that there is nothing new
                    await asyncio.wait_for(anext(subscriber), 0.5)
            open_gate.set()
            await (await anext(subscriber)).apply()
            assert len(told) == 1
            # What is on its way when the model turns out to hold something else is given up.
            open_gate.clear()
            fetched.clear()
            tensors["weight"][2] = 7
            await publisher.publish(2, tensors)
            waiting = asyncio.create_task(patient())
            async with asyncio.timeout(LIMIT):
                await fetched.wait()
                engine["weight"][50] = 7
                with pytest.raises(DivergedError):
                    await subscriber.verify()
                open_gate.set()
                update = await waiting
                assert update.whole
                await update.apply()
                await subscriber.verify()
            # Nobody waits for what closing ends.
            open_gate.clear()
            fetched.clear()
            tensors["weight"][3] = 7
            await publisher.publish(3, tensors)
            waiting = asyncio.create_task(patient())
            async with asyncio.timeout(LIMIT):
                await fetched.wait()
        async with asyncio.timeout(LIMIT):
            with pytest.raises(StopAsyncIteration):
                await waiting


def test_the_command_of_a_service_takes_its_keys_and_ends_with_it(tmp_path):
    source, target = (tmp_path / "source").as_uri(), (tmp_path / "target").as_uri()
    with Publisher(source, workers=1) as publisher:
        publisher.publish(1, small_model()).result(LIMIT)
    make_key(tmp_path / "site")
    old = make_key(tmp_path / "old")

    async def begin():
        async with Running(source, target, key=old.key) as running:
            await running.until(1)

    asyncio.run(begin())
    command, variables = transcoder(key=tmp_path / "site", keys=(), accepted=(str(old.public_file),))
    command, environment = [*command, source, target], {**os.environ, **variables}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        told = json.loads(process.stdout.readline())
        assert (told["version"], told["kind"], told["writer"]) == (1, "held", "trainer")
        process.stdin.close()
        assert process.wait(LIMIT) == 0
