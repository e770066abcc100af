"""A trainer whose disk fails at each call in turn: what passes is not noticed, what does not is told and made good."""

import errno
from collections import Counter
from functools import partial

import pytest

from deltabus import Publisher, publisher
from deltabus.bus.core import LogWriter
from deltabus.bus.errors import PublishError, StorageFullError
from deltabus.bus.message import Kind
from deltabus.bus.retry import Retry
from deltabus.transports import atomic

from .history import check_topic
from .support import LIMIT, fingerprint, small_model, train
from .system import CALLS, Disk, failing

pytestmark = pytest.mark.timeout(300)
STEPS = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(atomic, "CHUNK", 4096)
    monkeypatch.setattr(publisher, "LogWriter", partial(LogWriter, retry=Retry(pause=0.001)))


def opened(topic, have=None):
    return Publisher(topic, have=have, anchor="never", on_busy="wait", workers=1)


def note(told, model, published):
    told.add((published.version, published.step, fingerprint(model)))


def publish_all(topic, disk, monkeypatch):
    """Publish an anchor, a delta, and a delta with an anchor beside it; what was told to be durable."""
    model, told = small_model(), set()
    with monkeypatch.context() as patch, opened(topic) as trainer:
        patch.setattr(atomic, "os", disk)
        for step in range(STEPS):
            train(model, step)
            if step == STEPS - 1:
                trainer.request_anchor()
            note(told, model, trainer.publish(step, model).result(LIMIT))
            if step == STEPS - 1:
                trainer.flush(LIMIT)
            assert not disk.unforced, "what is called durable must survive the loss of power"
    return told


@pytest.fixture
def calls(place, monkeypatch):
    """The calls of a trainer that nothing happens to."""
    disk = Disk()
    told = publish_all(place / "dry", disk, monkeypatch)
    found = check_topic(place / "dry", told)
    assert [message.kind for message, _ in found] == [Kind.ANCHOR, Kind.DELTA, Kind.DELTA, Kind.ANCHOR]
    assert set(disk.calls) == CALLS and disk.calls.count("link") == 1 + 2 * len(found)
    return disk.calls


@pytest.mark.parametrize("moment", ["before", "after"])
def test_fault_that_passes_is_not_noticed(place, monkeypatch, calls, moment):
    struck = Counter()
    for number, name in enumerate(calls):
        # What has no effect that lasts, or is a descriptor that would be lost, fails before it is done.
        if moment == "before" or name in {"mkdir", "link"}:
            disk = failing(number, errno.EIO, moment=moment)
            topic = place / str(number)
            found = check_topic(topic, publish_all(topic, disk, monkeypatch))
            assert [message.kind for message, _ in found] == [Kind.ANCHOR, Kind.DELTA, Kind.DELTA, Kind.ANCHOR]
            struck[name] += 1
    expected = Counter(calls)
    assert struck == (expected if moment == "before" else {name: expected[name] for name in ("mkdir", "link")})


def test_fault_that_stays_is_told_and_made_good(place, monkeypatch, calls):
    struck, told_at = Counter(), Counter()
    for number in range(len(calls)):
        topic, model, told = place / str(number), small_model(), set()
        disk = failing(number, errno.ENOSPC)
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "os", disk)
            trainer = opened(topic)
            for step in range(STEPS):
                train(model, step)
                if step == STEPS - 1:
                    trainer.request_anchor()
                try:
                    note(told, model, trainer.publish(step, model).result(LIMIT))
                except PublishError as error:
                    assert isinstance(error.__cause__, StorageFullError)
                    told_at["handle", *disk.struck] += 1
                    with pytest.raises(PublishError) as again:
                        trainer.publish(step, model) if number % 2 else trainer.close()
                    assert isinstance(again.value.__cause__, StorageFullError)
                    trainer = trainer if number % 2 else opened(topic, have=model)
                    note(told, model, trainer.publish(step, model).result(LIMIT))
            try:
                trainer.flush(LIMIT)
            except PublishError as error:
                assert isinstance(error.__cause__, StorageFullError)
                told_at["flush", *disk.struck] += 1
            train(model, STEPS)
            note(told, model, trainer.publish(STEPS, model).result(LIMIT))
            trainer.close()
        struck.update(disk.struck)
        found = check_topic(topic, told)
        newest = max(found, key=lambda pair: pair[0].version)
        assert (newest[0].step, newest[1]) == (STEPS, fingerprint(model))
        assert sum(message.kind is Kind.ANCHOR for message, _ in found) > 1, "the anchor that was asked for"
    # A temporary name that stays is no fault, and a directory that was not forced is forced in another attempt.
    told = Counter(name for _, name in told_at.elements())
    assert struck.pop("unlink") > 0 and struck.pop("fsync of a name") > 0
    assert told == struck
    assert {place for place, _ in told_at} == {"handle", "flush"}


def test_disk_that_stays_full_loses_only_what_was_told_to_be_lost(place, monkeypatch, calls):
    kinds = Counter()
    for number in range(len(calls)):
        topic, model, told = place / str(number), small_model(), set()
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "os", failing(number, errno.ENOSPC, last=1 << 30))
            trainer = opened(topic)
            with pytest.raises(PublishError) as caught:
                for step in range(2 * STEPS):
                    train(model, step)
                    note(told, model, trainer.publish(step, model).result(LIMIT))
            assert isinstance(caught.value.__cause__, StorageFullError)
            with pytest.raises(PublishError):
                trainer.publish(step, model)
            with pytest.raises(PublishError):
                trainer.publish(step, model).result(LIMIT)
            with pytest.raises(PublishError):
                trainer.close()
            trainer.close()
        before = check_topic(topic, told)
        with opened(topic, have=model) as trainer:
            published = trainer.publish(step, model).result(LIMIT)
        # What was told to have failed may be there nevertheless, when only the last answer was a fault.
        survived = fingerprint(model) in {print_ for _, print_ in before}
        assert published.kind == ("delta" if survived else "anchor")
        assert published.message.epoch == (1 if not before else 2)
        kinds[published.kind] += 1
        note(told, model, published)
        assert check_topic(topic, told)[: len(before)] == before
    assert kinds["anchor"] > kinds["delta"] > 0
