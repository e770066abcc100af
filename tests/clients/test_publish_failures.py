"""Publishers that fail, are replaced, interrupted, forked or forgotten, and what becomes of their steps."""

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from deltabus import Publisher
from deltabus import publisher as publisher_module
from deltabus.bus.errors import (
    AppendUnknownError,
    ClosedError,
    FencedError,
    PublishError,
    StorageFullError,
    UsageError,
    WaitTimeoutError,
)
from deltabus.bus.policy import AnchorPolicy
from deltabus.cli.verify import verify_topic
from deltabus.codecs.shadow import Shadow
from deltabus.transports import open_transport

from .support import (
    LIMIT,
    Faults,
    FaultyTransport,
    bits,
    faulty,
    follow_to,
    history,
    once,
    small_model,
    train,
    wait_until,
)


async def test_failed_upload_never_becomes_a_base(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.before = once(StorageFullError("the disk is full", url=url), "put", "delta")
        train(model, 1)
        with pytest.raises(PublishError, match="disk is full") as told:
            publisher.publish(1, model).result(LIMIT)
        assert isinstance(told.value.__cause__, StorageFullError)
        train(model, 2)
        with pytest.raises(PublishError, match="travel with the next step") as caught:
            publisher.publish(2, model)
        assert isinstance(caught.value.__cause__, StorageFullError)
        train(model, 3)
        published = publisher.publish(3, model).result(LIMIT)
        assert (published.version, published.kind) == (2, "delta")
    assert (await follow_to(url, 3))[0] == bits(model)
    assert verify_topic(url).ok


async def test_step_published_while_another_fails_gets_an_attempt_of_its_own(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        faults.before = once(StorageFullError("the disk is full", url=url), "put", "delta")
        train(model, 1)
        first = publisher.publish(1, model)
        wait_until(lambda: publisher._outbox.empty)
        train(model, 2)
        second = publisher.publish(2, model)
        faults.gate.set()
        with pytest.raises(PublishError):
            first.result(LIMIT)
        assert second.result(LIMIT).version == 2
        with pytest.raises(PublishError):
            publisher.flush()
    assert (await follow_to(url, 2))[0] == bits(model)


def test_no_handle_waits_for_ever_when_the_publisher_is_fenced(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults:
        zombie = Publisher(url, on_busy="wait")
        zombie.publish(0, model).result(LIMIT)
        with Publisher(url, have=model) as successor:
            train(model, 1)
            successor.publish(1, model).result(LIMIT)
        faults.gate.clear()
        publications = []
        for step in (2, 3):
            train(model, step)
            publications.append(zombie.publish(step, model))
        stopped = []

        def publish_once_more():
            try:
                zombie.publish(4, model)
            except FencedError as error:
                stopped.append(error)

        waiting = threading.Thread(target=publish_once_more)
        waiting.start()
        faults.gate.set()
        for publication in publications:
            with pytest.raises(FencedError):
                publication.result(LIMIT)
        waiting.join(LIMIT)
        assert len(stopped) == 1
        zombie.close()


def test_closing_has_a_limit_and_tells_every_handle(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults:
        publisher = Publisher(url)
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        publications = []
        for step in (1, 2):
            train(model, step)
            publications.append(publisher.publish(step, model))
        with pytest.raises(WaitTimeoutError, match="did not finish within"):
            publisher.close(timeout=0.1)
        for publication in publications:
            with pytest.raises(ClosedError):
                publication.result(LIMIT)
        faults.gate.set()


def test_handles_are_told_though_an_upload_takes_long_to_call_off(url, monkeypatch):
    model, held = small_model(), threading.Event()

    class Lingering(FaultyTransport):
        async def put(self, key, data):
            if held.is_set():
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.to_thread(threading.Event().wait, 0.3)
            await super().put(key, data)

    monkeypatch.setattr(publisher_module, "open_transport", lambda url: Lingering(open_transport(url), Faults()))
    publisher = Publisher(url, timeout=0.1)
    publisher.publish(0, model).result(LIMIT)
    held.set()
    publications = []
    for step in (1, 2):
        train(model, step)
        publications.append(publisher.publish(step, model))
        wait_until(lambda: publisher._outbox.empty or step == 2)  # noqa: B023 - called at once
    with pytest.raises(WaitTimeoutError):
        publisher.close()
    for publication in publications:
        with pytest.raises(ClosedError):
            publication.result(LIMIT)


async def test_waiting_publisher_goes_on_after_a_failure(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait", timeout=LIMIT / 3) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.before = once(StorageFullError("the disk is full", url=url), "put", "delta")
        train(model, 1)
        with pytest.raises(PublishError):
            publisher.publish(1, model).result(LIMIT)
        with pytest.raises(PublishError):
            publisher.publish(2, model)
        train(model, 2)
        assert publisher.publish(2, model).result(LIMIT).kind == "delta"
    assert (await follow_to(url, 2))[0] == bits(model)
    assert verify_topic(url).ok


def test_failing_anchor_policy_holds_up_no_step(url):
    class Failing(AnchorPolicy):
        def due_again(self, since, anchor):
            raise RuntimeError("a policy of one's own")

    with Publisher(url, anchor=Failing()) as publisher:
        publisher.publish(0, small_model()).result(LIMIT)
        assert publisher.publish(1, small_model()).result(LIMIT).version == 2
        with pytest.raises(PublishError, match="of one's own"):
            publisher.flush(LIMIT)


def test_publisher_that_cannot_be_made_leaves_nothing_open(url, monkeypatch):
    closed = []

    class Watched(FaultyTransport):
        async def close(self):
            closed.append(self)
            await super().close()

    monkeypatch.setattr(publisher_module, "open_transport", lambda url: Watched(open_transport(url), Faults()))
    before = set(threading.enumerate())
    with pytest.raises(UsageError):
        Publisher(url, have="/no/such/checkpoint")
    assert closed and set(threading.enumerate()) <= before


async def test_interrupted_publish_leaves_nothing_out(url, monkeypatch):
    model, real = small_model(), Shadow.advance

    def interrupted(self, changes, **options):
        real(self, changes, **options)
        raise KeyboardInterrupt

    with Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        train(model, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Shadow, "advance", interrupted)
            publisher.publish(1, model)
        train(model, 2)
        publisher.publish(2, model).result(LIMIT)
    assert (await follow_to(url, 2))[0] == bits(model)
    assert verify_topic(url).ok


async def test_failed_first_anchor_is_tried_again(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        faults.before = once(StorageFullError("the disk is full", url=url), "put", "anchor")
        with pytest.raises(PublishError):
            publisher.publish(0, model).result(LIMIT)
        with pytest.raises(PublishError):
            publisher.publish(1, model)
        train(model, 1)
        assert publisher.publish(2, model).result(LIMIT).kind == "anchor"
    assert (await follow_to(url, 2))[0] == bits(model)


async def test_flush_tries_once_more(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.before = once(StorageFullError("the disk is full", url=url), "append")
        train(model, 1)
        with pytest.raises(PublishError):
            publisher.publish(1, model).result(LIMIT)
        with pytest.raises(PublishError):
            publisher.flush()
        assert publisher.version == 2
    assert (await follow_to(url, 1))[0] == bits(model)


def test_failure_surfaces_at_close(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults:
        publisher = Publisher(url)
        publisher.publish(0, model).result(LIMIT)

        def always(operation, name):
            if operation == "append":
                raise StorageFullError("the disk is full", url=url)

        faults.before = always
        train(model, 1)
        publisher.publish(1, model)
        with pytest.raises(PublishError, match="the disk is full"):
            publisher.close()
        publisher.close()
        with pytest.raises(ClosedError):
            publisher.publish(2, model)


async def test_lost_answer_is_resolved_by_reading_back(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.after = once(AppendUnknownError("no answer", url=url), "append")
        train(model, 1)
        assert publisher.publish(1, model).result(LIMIT).version == 2
        train(model, 2)
        assert publisher.publish(2, model).result(LIMIT).version == 3
    assert [message.version for message in await history(url)] == [1, 2, 3]
    assert (await follow_to(url, 2))[0] == bits(model)


async def test_replaced_trainer_is_fenced_and_history_has_one_line(url):
    model = small_model()
    zombie = Publisher(url)
    zombie.publish(0, model).result(LIMIT)
    with Publisher(url, have=model) as successor:
        train(model, 1)
        successor.publish(1, model).result(LIMIT)
        expected = bits(model)
        train(model, 2)
        with pytest.raises(FencedError, match="taken over"):
            zombie.publish(2, model).result(LIMIT)
        with pytest.raises(FencedError):
            zombie.publish(3, model)
        zombie.close()
    messages = await history(url)
    assert [(message.epoch, message.step) for message in messages] == [(1, 0), (2, 1)]
    assert (await follow_to(url, 1))[0] == expected


async def test_successor_goes_on_behind_a_last_word_of_its_predecessor(url):
    model = small_model()
    zombie = Publisher(url)
    zombie.publish(0, model).result(LIMIT)
    with Publisher(url, have=model) as successor:
        late = small_model(3)
        zombie.publish(1, late).result(LIMIT)
        train(model, 1)
        published = successor.publish(1, model).result(LIMIT)
        assert (published.kind, published.version, published.message.epoch) == ("anchor", 3, 2)
        with pytest.raises(FencedError):
            zombie.publish(2, late).result(LIMIT)
        with pytest.raises(FencedError):
            zombie.close()
    assert (await follow_to(url, 1))[0] == bits(model)
    assert verify_topic(url).ok


def test_not_a_topic_is_refused(tmp_path):
    from deltabus.bus.errors import MessageFormatError

    log = tmp_path / "logs" / "trainer"
    log.mkdir(parents=True)
    (log / f"{0:020}").write_bytes(b"something else")
    with pytest.raises(MessageFormatError, match="not a deltabus message"):
        Publisher(tmp_path)


def test_publisher_that_is_never_closed_says_so(url, monkeypatch, caplog):
    with faulty(monkeypatch) as faults:
        publisher = Publisher(url)
        publisher.publish(0, small_model()).result(LIMIT)
        faults.gate.clear()
        for step in (1, 2):
            publisher.publish(step, small_model(step))
        loop, task = publisher._backstage._loop, publisher._backstage._sending
        with caplog.at_level(logging.ERROR, "deltabus"):
            publisher._farewell()
        faults.gate.set()
        assert "never closed" in caplog.text
        publisher.close()
        assert task.cancelled() and not loop._thread.is_alive()


_FORK = """
import os, sys, torch
from deltabus import Publisher
from deltabus.bus.errors import ClosedError

with Publisher(sys.argv[1]) as publisher:
    publisher.publish(0, {"a": torch.zeros(4)}).result(30)
    child = os.fork()
    if not child:
        try:
            publisher.publish(1, {"a": torch.ones(4)})
        except ClosedError:
            publisher.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert publisher.publish(1, {"a": torch.ones(4)}).result(30).version == 2
"""


def test_a_forked_process_is_refused_and_leaves_the_publisher_alone(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", _FORK, str(tmp_path / "topic")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    assert ended.returncode == 0, ended.stderr
