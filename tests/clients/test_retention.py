"""Publishers that prune as they go, and readers that go on whatever was removed, lost or damaged."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deltabus import Subscriber, gaps
from deltabus.bus.errors import (
    CorruptPayloadError,
    KeyNotFoundError,
    RetentionGapError,
    SignatureError,
    TransientTransportError,
    UsageError,
)
from deltabus.bus.leases import read_leases
from deltabus.bus.message import Kind, decode_message
from deltabus.bus.pruner import Pruner
from deltabus.bus.retention import Retention
from deltabus.bus.retry import Retry
from deltabus.bus.signing import KeyRing
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from .support import LIMIT, Trainer, bits, faulty, once, small_model, wait_until
from .test_signatures import NEW, OLD

NOW = Retention(keep_anchors=1, grace=0)


async def prune(url, policy=NOW):
    async with open_transport(url) as transport:
        return (await Pruner(transport, policy).prune()).removal


async def messages_of(url):
    async with open_transport(url) as transport:
        records = await transport.read("trainer")
    return [decode_message(record.data) for record in records]


async def delete(url, message):
    async with open_transport(url) as transport:
        await transport.delete([blob.key for blob in message.blobs])


async def leased(url, version):
    """Wait until all leases say that their readers hold a version."""
    async with open_transport(url) as transport, asyncio.timeout(LIMIT):
        while True:
            leases = await read_leases(transport, retry=Retry(), now=0.0)
            if leases and all(lease.holds == {"trainer": version} for lease in leases):
                return
            await asyncio.sleep(0.005)


def anchored(trainer):
    """Publish one more step, with an anchor beside it, and wait for that."""
    trainer.publisher.request_anchor()
    published = trainer.publish()
    trainer.publisher.flush(LIMIT)
    return published


def plain(url, **options):
    return Trainer(url, anchor="never", skips="off", **options)


# Publishers


async def test_a_publisher_prunes_as_anchors_come(tmp_path):
    with plain(tmp_path, retention=Retention(keep_anchors=2, grace=0)) as trainer:
        for _ in range(4):
            trainer.publish(2)
            await asyncio.to_thread(anchored, trainer)
        records = tmp_path / "logs" / "trainer"
        await asyncio.to_thread(wait_until, lambda: f"{0:020}" not in {path.name for path in records.iterdir()})
        trainer.publish(2)
        await asyncio.to_thread(anchored, trainer)

        def two_are_left():
            try:
                found = [decode_message(path.read_bytes()) for path in sorted(records.glob("[0-9]*"))]
            except FileNotFoundError:  # removed meanwhile
                return False
            return sum(message.kind is Kind.ANCHOR for message in found) == 2

        await asyncio.to_thread(wait_until, two_are_left)
    report = verify_topic(tmp_path.as_uri())
    assert report.ok, report.problems
    held = small_model(9)
    async with Subscriber(tmp_path, idle_timeout=LIMIT) as subscriber:
        (await anext(subscriber)).apply(held)
    assert bits(held) == trainer.states[trainer.step]


async def test_pruning_goes_on_after_any_failure(url, monkeypatch, caplog):
    with faulty(monkeypatch) as faults:
        faults.before = once(ValueError("a fault of ours"), "trim")
        with plain(url, retention=Retention(keep_anchors=1, grace=0)) as trainer:
            trainer.publish(2)
            await asyncio.to_thread(anchored, trainer)
            await asyncio.to_thread(wait_until, lambda: "was not pruned" in caplog.text)
            trainer.publish(2)
            await asyncio.to_thread(anchored, trainer)
            await asyncio.to_thread(wait_until, lambda: faults.count("trim") > 1)
    assert "ValueError: a fault of ours" in caplog.text


async def test_a_pruned_topic_is_continued_by_the_next_publisher(url):
    with plain(url) as trainer:
        trainer.publish(3)
        anchored(trainer)
        trainer.publish(1)
    await prune(url)
    first = await messages_of(url)
    with plain(url, have=trainer.model) as second:
        second.model, second.step, second.states = trainer.model, trainer.step, trainer.states
        published = second.publish()
    assert (published.kind, published.version) == ("delta", first[-1].version + 1)
    assert first[0].position > 0


async def test_a_prune_that_fails_is_told_and_holds_nothing_up(tmp_path, monkeypatch, caplog):
    with faulty(monkeypatch) as faults, plain(tmp_path, retention=NOW) as trainer:
        faults.before = once(TransientTransportError("the disk is away"), "blobs")
        trainer.publish(2)
        await asyncio.to_thread(anchored, trainer)
        log = tmp_path / "logs" / "trainer"
        await asyncio.to_thread(wait_until, lambda: len(list(log.iterdir())) < 3)
        trainer.publish(1)
    assert verify_topic(tmp_path.as_uri()).ok


async def test_a_signed_topic_is_pruned_and_still_believed(tmp_path):
    with plain(tmp_path, key=OLD, retention=NOW) as trainer:
        trainer.publish(2)
        await asyncio.to_thread(anchored, trainer)
        log = tmp_path / "logs" / "trainer"
        await asyncio.to_thread(wait_until, lambda: len(list(log.iterdir())) < 3)
        trainer.publish(1)
    held = small_model(9)
    async with Subscriber(tmp_path, keys=OLD.verify_key, idle_timeout=LIMIT) as subscriber:
        (await anext(subscriber)).apply(held)
    assert bits(held) == trainer.states[trainer.step]
    async with open_transport(tmp_path) as transport:
        with pytest.raises(SignatureError):
            await Pruner(transport, NOW, keys=KeyRing([NEW.verify_key])).prune()


@pytest.mark.parametrize("retention", ["", "steps:3", 0, "anchors:0"])
def test_a_retention_that_is_none_is_refused(url, retention):
    with pytest.raises(UsageError):
        Trainer(url, retention=retention)


# Readers that fell behind


@pytest.mark.parametrize("latest", [True, False])
async def test_a_reader_that_comes_back_too_late_starts_from_an_anchor(url, latest):
    held = small_model(9)
    with plain(url) as trainer:
        trainer.publish(2)
        async with Subscriber(url, latest=latest, idle_timeout=LIMIT) as subscriber:
            while (update := await anext(subscriber)).step < 1:
                update.apply(held)
            update.apply(held)
        trainer.publish(3)
        anchored(trainer)
        trainer.publish(1)
        await prune(url)
        async with Subscriber(url, have=held, latest=latest, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            assert update.detours == ()  # it holds none of the states that are there: a newcomer like any other
            update.apply(held)
    assert bits(held) == trainer.states[update.step]


@pytest.mark.parametrize("latest", [True, False])
async def test_a_reader_that_fell_behind_goes_on_from_an_anchor_and_says_so(url, latest, caplog):
    held = small_model(9)
    with plain(url) as trainer:
        trainer.publish(2)
        async with Subscriber(url, latest=latest, idle_timeout=LIMIT) as subscriber:
            while (update := await anext(subscriber)).step < 1:
                update.apply(held)
            update.apply(held)
            # From here on the reader hears nothing until the log was cut off in front of it.
            following = subscriber._tasks[0]
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            trainer.publish(3)
            anchored(trainer)
            trainer.publish(1)
            removal = await prune(url)
            assert removal.trims["trainer"] > 2
            subscriber._tasks[0] = asyncio.create_task(subscriber._guard(subscriber._intake._follow))
            detours = []
            while update.step < trainer.step:
                update = await anext(subscriber)
                update.apply(held)
                detours += update.detours
                assert bits(held) == trainer.states[update.step]
    assert "retention removed what led on from version 2" in detours[0]
    assert "retention removed what led on from version 2" in caplog.text


async def test_a_lease_keeps_what_a_reader_needs_until_it_ends(url):
    held = small_model(9)
    with plain(url) as trainer:
        trainer.publish(2)
        async with Subscriber(url, lease=600, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            await leased(url, 2)
            trainer.publish(3)
            anchored(trainer)
            assert (await prune(url)).trims == {"trainer": 2}  # what leads beyond version 2 stays
            seen = []
            while not seen or seen[-1].step < trainer.step:
                seen.append(await anext(subscriber))
                seen[-1].apply(held)
            assert [update.detours for update in seen] == [()] * len(seen)
            assert all(message.kind is Kind.DELTA for update in seen for message in update.messages)
            await subscriber._intake._lease.renew()
            assert (await prune(url)).trims == {"trainer": 6}
        async with open_transport(url) as transport:
            assert await read_leases(transport, retry=Retry(), now=0.0) == []
    assert bits(held) == trainer.states[trainer.step]


async def test_a_reader_of_some_writers_holds_nothing_of_the_others_back(url):
    with plain(url) as trainer, plain(url, writer="other") as other:
        for each in (trainer, other):
            await asyncio.to_thread(each.publish, 2)
        async with Subscriber(url, writers=["trainer"], lease=600, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(small_model(9))
            await leased(url, 2)
            for each in (trainer, other):
                await asyncio.to_thread(each.publish, 2)
                await asyncio.to_thread(anchored, each)
            lags = [await asyncio.to_thread(each.publisher.readers) for each in (trainer, other)]
            assert [[(lag.version, lag.behind) for lag in found] for found in lags] == [[(2, 3)], []]
            assert (await prune(url)).trims == {"trainer": 2, "other": 5}


async def test_a_reader_with_nothing_yet_leases_its_way_from_the_anchor_on(url):
    with plain(url) as trainer:
        trainer.publish(2)
        anchored(trainer)
        async with Subscriber(url, lease=600, idle_timeout=LIMIT) as subscriber:
            async with open_transport(url) as transport:
                (lease,) = await read_leases(transport, retry=Retry(), now=0.0)
            await anext(subscriber)
    assert lease.holds["trainer"] in (2, 3)  # in front of the anchor, or at it already


async def test_a_lease_keeps_the_anchor_that_a_newcomer_is_downloading(url, monkeypatch):
    held = small_model(9)
    begun, gate = asyncio.Event(), asyncio.Event()
    with plain(url) as trainer:
        trainer.publish(3)
        subscriber = Subscriber(url, lease=600, idle_timeout=LIMIT)
        fetch = subscriber._reader.fetch

        async def slowly(blob):
            begun.set()
            await gate.wait()
            return await fetch(blob)

        monkeypatch.setattr(subscriber._reader, "fetch", slowly)
        async with subscriber, asyncio.timeout(LIMIT):
            await begun.wait()
            await asyncio.to_thread(anchored, trainer)
            while subscriber._intake._navigator.router.next(None, starts={}).messages[0].version != 4:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
            await subscriber._intake._lease.renew()
            assert (await prune(url)).trims == {}
            gate.set()
            update = await anext(subscriber)
            update.apply(held)
            assert update.detours == ()
            assert bits(held) == trainer.states[update.step]


@pytest.mark.parametrize("adopts", [False, True])
async def test_no_update_waits_for_a_lease(url, monkeypatch, adopts):
    tried = asyncio.Event()

    def refuse(operation, name):
        if operation == "put" and name.startswith("leases/") and not name.endswith(f"{1:012}"):
            tried.set()
            raise TransientTransportError("busy", url=url)

    with plain(url) as trainer:
        trainer.publish(2)
        have = trainer.model if adopts else None
        with faulty(monkeypatch) as faults:
            faults.before = refuse
            async with Subscriber(url, have=have, lease=600, idle_timeout=5.0) as subscriber:
                async with asyncio.timeout(LIMIT):
                    await tried.wait()
                trainer.publish(1)
                while (update := await anext(subscriber)).step < trainer.step:
                    pass
                assert update.state == {"trainer": 3}


@pytest.mark.parametrize("options", [{"lease": 0}, {"lease": 1e9}, {"gap_timeout": -1}])
def test_times_that_make_no_sense_are_refused(url, options):
    with pytest.raises(UsageError):
        Subscriber(url, **options)


# What is missing or damaged


async def test_a_missing_delta_is_gone_round_by_an_anchor(url, caplog):
    held = small_model(9)
    with plain(url) as trainer:
        trainer.publish(2)
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
        trainer.publish(2)
        anchored(trainer)
    await delete(url, (await messages_of(url))[3])
    async with Subscriber(url, have=held, latest=False, idle_timeout=LIMIT) as subscriber:
        seen = []
        while not seen or seen[-1].step < trainer.step:
            seen.append(await anext(subscriber))
            seen[-1].apply(held)
            assert bits(held) == trainer.states[seen[-1].step]
    assert [update.version for update in seen] == [3, 5]
    assert seen[0].detours == ()
    assert "missing or damaged" in " ".join(seen[1].detours)
    assert "Looking for another way" in caplog.text


async def test_a_missing_anchor_is_gone_round_by_an_older_one(url):
    held = small_model(9)
    with plain(url) as trainer:
        trainer.publish(2)
        anchored(trainer)
        trainer.publish(1)
    (newest,) = [m for m in await messages_of(url) if m.kind is Kind.ANCHOR and m.version == 3]
    await delete(url, newest)
    async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
        update = await anext(subscriber)
        update.apply(held)
    assert update.version == 4
    assert bits(held) == trainer.states[3]
    assert newest not in update.messages


async def test_a_newcomer_waits_for_the_next_anchor_where_nothing_leads_on(url, caplog):
    held = small_model(9)
    with plain(url) as trainer:
        trainer.publish(3)
        for message in (await messages_of(url))[:2]:
            await delete(url, message)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            coming = asyncio.create_task(anext(subscriber))
            async with asyncio.timeout(LIMIT):
                while "Waiting up to 300 s for an anchor" not in caplog.text:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.005)
            assert not coming.done()
            await asyncio.to_thread(anchored, trainer)
            update = await coming
            update.apply(held)
    assert update.version == 4
    assert bits(held) == trainer.states[3]


async def test_a_blob_that_comes_back_is_looked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gaps, "_LOOK_AGAIN", 0.01)
    held = small_model(9)
    with plain(tmp_path) as trainer:
        message = trainer.publish().message
    blob = tmp_path / message.blobs[0].key
    data = blob.read_bytes()
    blob.unlink()
    async with Subscriber(tmp_path, idle_timeout=LIMIT) as subscriber:
        coming = asyncio.create_task(anext(subscriber))
        async with asyncio.timeout(LIMIT):
            while subscriber._intake._navigator.gaps._began is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        blob.write_bytes(data)
        (await coming).apply(held)
    assert bits(held) == trainer.states[0]


@pytest.mark.parametrize(("look_again", "gap_timeout"), [(1.0, LIMIT), (LIMIT, 2.0)])
async def test_a_blob_that_comes_back_is_looked_for_again_however_many_steps_come(
    url, monkeypatch, look_again, gap_timeout
):
    monkeypatch.setattr(gaps, "_LOOK_AGAIN", look_again)
    away, found = threading.Event(), threading.Event()
    away.set()

    def hide(operation, name):
        if operation == "get" and "000000000002-delta" in name and away.is_set():
            raise KeyNotFoundError("it is away for a moment", url=url)

    def go_on(trainer):
        while not found.is_set():
            trainer.publish()

    with faulty(monkeypatch) as faults, plain(url) as trainer:
        trainer.publish()
        faults.before = hide
        async with Subscriber(url, idle_timeout=LIMIT, gap_timeout=gap_timeout) as subscriber:
            assert (await anext(subscriber)).version == 1
            publishing = asyncio.create_task(asyncio.to_thread(go_on, trainer))
            try:
                async with asyncio.timeout(LIMIT):
                    while subscriber._intake._navigator.gaps._began is None:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.005)
                away.clear()
                update = await anext(subscriber)
            finally:
                found.set()
                await publishing
    assert update.message.kind is Kind.DELTA
    assert update.version >= 2


async def test_after_the_limit_it_is_an_error_that_says_what_is_missing(url):
    with plain(url) as trainer:
        message = trainer.publish().message
    await delete(url, message)
    async with Subscriber(url, idle_timeout=LIMIT, gap_timeout=0.05) as subscriber:
        for _ in range(2):
            with pytest.raises(RetentionGapError, match=message.blobs[0].key):
                await anext(subscriber)


async def test_a_damaged_schema_is_an_error_after_the_limit(tmp_path):
    with plain(tmp_path) as trainer:
        message = trainer.publish().message
    (tmp_path / message.schema.key).write_bytes(b"{}")
    async with Subscriber(tmp_path, idle_timeout=LIMIT, gap_timeout=0, have=trainer.model) as subscriber:
        with pytest.raises(CorruptPayloadError, match=message.schema.key):
            await anext(subscriber)
