"""What publishers and subscribers tell those who watch them."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
from prometheus_client import CollectorRegistry

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import PublishError, StorageFullError
from deltabus.events import Event, EventKind, LoggingListener, PrometheusListener

from .support import LIMIT, faulty, once, small_model, train


async def follow(url, events, *, last, **options):
    model = small_model(9)
    async with asyncio.timeout(4 * LIMIT), Subscriber(url, on_event=events, workers=1, **options) as subscriber:
        async for update in subscriber:
            update.apply(model)
            if update.step == last:
                return


async def test_each_step_is_told_where_it_is_published_received_and_applied(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    url, model, told, registry = tmp_path.as_uri(), small_model(), [], CollectorRegistry()
    listeners = [told.append, LoggingListener(), PrometheusListener(registry)]
    with Publisher(url, on_event=listeners, on_busy="wait", skips="off", workers=1) as publisher:
        following = asyncio.create_task(follow(url, listeners, last=3, latest=False))
        published = []
        for step in (1, 2, 3):
            train(model, step)
            published.append(await publisher.publish(step, model))
        await following
    by_kind = {kind: [event for event in told if event.kind == kind] for kind in EventKind}
    stored = [(e.step, e.version, e.nbytes, e.changed, e.total) for e in by_kind[EventKind.PUBLISHED]]
    assert stored == [(p.step, p.version, p.nbytes, p.changed, p.total) for p in published]
    assert [event.whole for event in by_kind[EventKind.PUBLISHED]] == [True, False, False]
    for kind in (EventKind.RECEIVED, EventKind.APPLIED):
        assert [event.step for event in by_kind[kind]][-1] == 3
        assert by_kind[kind][-1].behind == 0
    assert {"blocked", "encode", "upload", "total"} == set(by_kind[EventKind.PUBLISHED][0].seconds)
    assert {"download", "decode"} <= set(by_kind[EventKind.RECEIVED][0].seconds)
    assert "apply" in by_kind[EventKind.APPLIED][0].seconds

    labels = {"topic": url, "kind": "published"}
    assert registry.get_sample_value("deltabus_events_total", labels) == 3
    assert registry.get_sample_value("deltabus_payload_bytes_total", labels) == sum(p.nbytes for p in published)
    assert registry.get_sample_value("deltabus_version", {"topic": url, "kind": "applied"}) == 3
    assert registry.get_sample_value("deltabus_versions_behind", {"topic": url}) == 0
    lines = [record.getMessage() for record in caplog.records if record.name == "deltabus.events"]
    assert any(line.startswith(f"published {url}, step 2 version 2, ") for line in lines)


def test_what_fails_is_told_and_a_listener_that_fails_changes_nothing(tmp_path, monkeypatch, caplog):
    told: list[Event] = []

    def broken(event):
        raise RuntimeError("no")

    with faulty(monkeypatch) as faults:
        publisher = Publisher(tmp_path, on_event=[broken, told.append], workers=1)
        model = small_model()
        publisher.publish(1, model).result(LIMIT)
        faults.before = once(StorageFullError("the disk is full", url="file:///x"), "append")
        train(model, 2)
        with pytest.raises(PublishError):
            publisher.publish(2, model).result(LIMIT)
        with pytest.raises(PublishError):
            publisher.flush()
        publisher.flush()
        publisher.close()
    expected = [(EventKind.PUBLISHED, 1), (EventKind.FAILED, 2), (EventKind.PUBLISHED, 2)]
    assert [(event.kind, event.step) for event in told] == expected
    assert "the disk is full" in told[1].detail
    assert "the listener" in caplog.text


async def test_a_publisher_sees_how_far_behind_its_readers_are(tmp_path):
    url, model = tmp_path.as_uri(), small_model()
    with Publisher(url, on_busy="wait", skips="off", workers=1) as publisher:
        await publisher.publish(1, model)
        assert await asyncio.to_thread(publisher.readers) == []
        async with asyncio.timeout(LIMIT), Subscriber(url, lease=60, workers=1) as subscriber:
            await anext(subscriber)
            # The lease is renewed soon after the first state was taken.
            while [reader.version for reader in await asyncio.to_thread(publisher.readers)] != [1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for step in (2, 3):
                train(model, step)
                await publisher.publish(step, model)
            (reader,) = await asyncio.to_thread(publisher.readers)
            assert (reader.version, reader.behind) == (1, 2)
            assert str(os.getpid()) in reader.reader
        assert await asyncio.to_thread(publisher.readers) == []
