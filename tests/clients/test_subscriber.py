"""The inference side, against real topics: what comes, in which order, and how it ends."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from deltabus import Publisher, Subscriber
from deltabus import subscriber as subscriber_module
from deltabus.bus.errors import (
    ClosedError,
    ConflictError,
    CorruptPayloadError,
    MessageFormatError,
    UnknownSchemeError,
    WaitTimeoutError,
)
from deltabus.bus.message import decode_message, encode_message
from deltabus.codecs.checkpoint import save_checkpoint
from deltabus.codecs.state import collect
from deltabus.staged import StagedState
from deltabus.transports import open_transport

from .support import LIMIT, Faults, FaultyTransport, Trainer, bits, faulty, small_model, train


async def test_newcomer_gets_the_newest_state_in_one_update(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish(5)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            update.apply(held)
    assert (update.step, update.version, update.whole, update.base) == (4, 5, True, None)
    assert [message.version for message in update.messages] == [1, 2, 3, 4, 5]
    assert update.nbytes == sum(message.nbytes for message in update.messages)
    assert {"download", "decode", "apply"} == set(update.seconds)
    assert update.applied
    assert bits(held) == trainer.states[4]


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_follower_gets_each_step_once_and_in_order(url, tmp_path, scheme):
    url = url if scheme == "memory" else tmp_path.as_uri()
    held, seen = small_model(9), []
    async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
        with Trainer(url) as trainer:
            trainer.publish()
            publishing = asyncio.create_task(asyncio.to_thread(trainer.publish, 20))
            async for update in subscriber:
                update.apply(held)
                assert bits(held) == trainer.states[update.step]
                seen.append(update.step)
                if update.step == 20:
                    break
            await publishing
    assert seen == list(range(21))


async def test_follower_forgets_what_it_needs_no_more(url):
    held = small_model(9)
    with Trainer(url, anchor="never", skips="off") as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            for step in range(24):
                update = await anext(subscriber)
                update.apply(held)
                assert bits(held) == trainer.states[update.step]
                if step % 4 == 3:
                    trainer.publisher.request_anchor()
                await asyncio.to_thread(trainer.publish)
                await asyncio.to_thread(trainer.publisher.flush, LIMIT)
            assert len(subscriber._intake._sequencer.messages) <= 12  # of 31
            assert (await anext(subscriber)).step == 24


async def test_latest_folds_what_has_piled_up(url):
    held = small_model(9)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            trainer.publish(10)
            steps = []
            while not steps or steps[-1] != 10:
                update = await anext(subscriber)
                update.apply(held)
                assert bits(held) == trainer.states[update.step]
                assert not update.whole
                steps.append(update.step)
    assert steps == sorted(set(steps))


async def test_update_that_is_taken_while_the_next_is_folded_into_it_stays_whole(url, monkeypatch):
    held, folding, go_on = small_model(9), threading.Event(), threading.Event()
    real = StagedState.followed_by

    def slow(self, later):
        folding.set()
        assert go_on.wait(LIMIT)
        return real(self, later)

    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            trainer.publish()
            await asyncio.wait_for(waiting_in(subscriber), LIMIT)
            monkeypatch.setattr(StagedState, "followed_by", slow)
            trainer.publish()
            assert await asyncio.to_thread(folding.wait, LIMIT), "the loop goes on while updates are folded"
            (await anext(subscriber)).apply(held)
            assert bits(held) == trainer.states[1]
            go_on.set()
            (await anext(subscriber)).apply(held)
            assert bits(held) == trainer.states[2]


@pytest.mark.parametrize("applied", [False, True])
async def test_the_loop_goes_on_while_a_skipped_update_is_folded_and_a_cancelled_call_takes_nothing(
    url, monkeypatch, applied
):
    held, folding, go_on = small_model(9), threading.Event(), threading.Event()
    real = StagedState.followed_by

    def slow(self, later):
        folding.set()
        assert go_on.wait(LIMIT)
        return real(self, later)

    with Trainer(url, anchor="never", skips="off") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            trainer.publish(2)
            skipped = await anext(subscriber)
            monkeypatch.setattr(StagedState, "followed_by", slow)
            taking = asyncio.create_task(anext(subscriber))
            assert await asyncio.to_thread(folding.wait, LIMIT), "the loop goes on while updates are folded"
            taking.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await taking
            if applied:
                skipped.apply(held)
            update = await anext(subscriber)
            assert (update.base, update.state) == ({"trainer": 2 if applied else 1}, {"trainer": 3})
            update.apply(held)
    assert bits(held) == trainer.states[2]


async def waiting_in(subscriber):
    """Wait until an update lies ready."""
    handover = subscriber._handover
    async with handover._changed:
        await handover._changed.wait_for(lambda: handover._ready)


async def test_restarted_follower_goes_on_from_what_its_model_holds(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish(3)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
        trainer.publish(3)
        async with Subscriber(url, have=held, latest=False, idle_timeout=LIMIT) as subscriber:
            versions = []
            for _ in range(3):
                update = await anext(subscriber)
                assert not update.whole
                update.apply(held)
                assert bits(held) == trainer.states[update.step]
                versions.append(update.version)
    assert versions == [4, 5, 6]


async def test_local_checkpoint_that_is_recognised_saves_the_anchor(url, tmp_path, monkeypatch):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish(2)
        state = collect(trainer.model)
        save_checkpoint(tmp_path / "checkpoint", state.schema, state.read)
        held.load_state_dict(trainer.model.state_dict())
        trainer.publish(2)
        with faulty(monkeypatch) as faults:
            async with Subscriber(url, have=tmp_path / "checkpoint", idle_timeout=LIMIT) as subscriber:
                update = await anext(subscriber)
                update.apply(held)
    assert str(update.base) == "trainer@2"
    assert bits(held) == trainer.states[3]
    assert not [key for operation, key in faults.calls if operation == "get" and "anchor" in key]


async def test_unknown_weights_are_replaced_and_said_to_be_unknown(url, caplog):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish(2)
        async with Subscriber(url, have=held, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            update.apply(held)
    assert update.whole and bits(held) == trainer.states[1]
    assert "none of the topic's states" in caplog.text


async def test_reader_may_come_before_the_topic(url, tmp_path):
    held = small_model(9)
    topic = tmp_path / "later"
    async with Subscriber(topic, have=held, idle_timeout=LIMIT) as subscriber:
        waiting = asyncio.create_task(anext(subscriber))
        with Trainer(topic) as trainer:
            await asyncio.to_thread(trainer.publish)
            (await waiting).apply(held)
    assert bits(held) == trainer.states[0]


async def test_other_branch_of_a_restarted_trainer_is_taken_as_a_difference(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish(3)
        other = small_model()
        for step in (0, 1, 50):
            train(other, step)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            with Publisher(url) as successor:
                assert successor.publish(1, other).result(LIMIT).kind == "anchor"
            update = await anext(subscriber)
            update.apply(held)
    assert not update.whole and update.changed < update.total / 2
    assert bits(held) == bits(other)


async def test_wait_has_a_limit_and_can_be_taken_up_again(url):
    held = small_model(9)
    async with Subscriber(url, idle_timeout=0.05) as subscriber:
        with pytest.raises(WaitTimeoutError, match="no update"):
            await anext(subscriber)
        with Trainer(url) as trainer:
            trainer.publish()
        subscriber._idle_timeout = LIMIT
        (await anext(subscriber)).apply(held)
    assert bits(held) == trainer.states[0]


async def test_cancelled_wait_loses_nothing(url):
    held = small_model(9)
    async with Subscriber(url, latest=False) as subscriber:
        for _ in range(3):
            waiting = asyncio.create_task(anext(subscriber))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        with Trainer(url) as trainer:
            trainer.publish(3)
        for step in range(3):
            update = await asyncio.wait_for(anext(subscriber), LIMIT)
            update.apply(held)
            if step == 0:
                assert update.step in range(3)
            if update.step == 2:
                break
    assert bits(held) == trainer.states[2]


async def test_damaged_blob_stops_the_follower_before_anything_is_written(tmp_path):
    held = small_model(9)
    with Trainer(tmp_path, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(tmp_path, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
        published = trainer.publish()
    blob = tmp_path / published.message.blobs[0].key
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    before = bits(held)
    async with Subscriber(tmp_path, have=held, idle_timeout=LIMIT, gap_timeout=0) as subscriber:
        for _ in range(2):
            with pytest.raises(CorruptPayloadError, match=published.message.blobs[0].key):
                await anext(subscriber)
    assert bits(held) == before


async def test_payload_that_leads_elsewhere_than_its_message_says_is_refused(tmp_path):
    with Trainer(tmp_path) as trainer:
        message = trainer.publish(2).message
    lie = replace(message, digest_after=message.digest_after ^ 1)
    (tmp_path / "logs" / "trainer" / f"{1:020}").write_bytes(encode_message(lie))
    async with Subscriber(tmp_path, idle_timeout=LIMIT, gap_timeout=0) as subscriber:
        assert (await anext(subscriber)).version == 1
        with pytest.raises(CorruptPayloadError, match="leads to digest"):
            await anext(subscriber)


async def test_foreign_and_contradicting_topics_are_refused(tmp_path):
    log = tmp_path / "foreign" / "logs" / "trainer"
    log.mkdir(parents=True)
    (log / f"{0:020}").write_bytes(b"something else")
    with pytest.raises(MessageFormatError):
        async with Subscriber(tmp_path / "foreign"):
            pass
    with Trainer(tmp_path / "topic") as trainer:
        trainer.publish(2)
    async with open_transport(tmp_path / "topic") as transport:
        last = decode_message((await transport.read("trainer"))[1].data)
        rewritten = replace(last, position=2, version=2, digest_after=last.digest_after ^ 1)
        await transport.append("trainer", 2, encode_message(rewritten))
    with pytest.raises(ConflictError):
        async with Subscriber(tmp_path / "topic"):
            pass


async def test_followers_share_their_loop_s_threads(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.publish(2)
    # Downloads need these threads; whoever holds one while it waits for a download waits for ever.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    async def follow():
        async with Subscriber(tmp_path, idle_timeout=LIMIT / 3) as subscriber:
            return (await anext(subscriber)).step

    assert await asyncio.gather(*(follow() for _ in range(4))) == [1] * 4


async def test_downloads_end_before_the_transport_is_closed(url, monkeypatch):
    begun, order = asyncio.Event(), []

    class Lingering(FaultyTransport):
        async def get(self, key, start=0, stop=None):
            if not key.startswith("blobs"):
                return await super().get(key, start, stop)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(100):
                    await asyncio.sleep(0)
                order.append("download")

        async def close(self):
            order.append("transport")
            await super().close()

    with Trainer(url) as trainer:
        trainer.publish()
    monkeypatch.setattr(subscriber_module, "open_transport", lambda url: Lingering(open_transport(url), Faults()))
    tasks = asyncio.all_tasks()
    async with Subscriber(url) as subscriber:
        await asyncio.wait_for(begun.wait(), LIMIT)
    assert order == ["download", "transport"]
    assert asyncio.all_tasks() == tasks and subscriber._handover._failure is None


async def test_closed_subscriber_ends_the_loop(url):
    subscriber = Subscriber(url)
    with pytest.raises(ClosedError, match="async with"):
        await anext(subscriber)
    async with subscriber:
        waiting = asyncio.create_task(anext(subscriber, None))
        await asyncio.sleep(0)
        await subscriber.aclose()
        assert await waiting is None
    with pytest.raises(ClosedError):
        async with subscriber:
            pass
    with pytest.raises(UnknownSchemeError):
        Subscriber("pigeon://run-7")


async def test_nothing_runs_on_behind_a_closed_subscriber(url):
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    with Trainer(url) as trainer:
        trainer.publish(3)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            await anext(subscriber)
        async with Subscriber(url):
            pass
    assert asyncio.all_tasks() == tasks
    left = {thread.name for thread in threading.enumerate() if thread not in threads}
    assert not [name for name in left if not name.startswith("asyncio_")]


def test_synchronous_loop(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        for update in Subscriber(url, idle_timeout=LIMIT).sync():
            update.apply(held)
            assert bits(held) == trainer.states[update.step]
            if update.step == 3:
                break
            trainer.publish()
        left = [thread.name for thread in threading.enumerate()]
        ours = ("deltabus subscriber", "deltabus-decode", "deltabus-stage")
        assert not [name for name in left if name.startswith(ours)]
        with pytest.raises(WaitTimeoutError):
            for _ in Subscriber(url, have=held, idle_timeout=0.05).sync():
                pass
