"""The inference side, against real topics."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from deltabus import Publisher, Subscriber
from deltabus import subscriber as subscriber_module
from deltabus.bus.errors import (
    ClosedError,
    ConflictError,
    CorruptPayloadError,
    DivergedError,
    MessageFormatError,
    SchemaMismatchError,
    StaleUpdateError,
    UnknownSchemeError,
    WaitTimeoutError,
)
from deltabus.bus.message import decode_message, encode_message
from deltabus.codecs.checkpoint import save_checkpoint
from deltabus.codecs.state import collect
from deltabus.transports import open_transport
from deltabus.transports.memory import drop_topic
from deltabus.update import Staged

from .support import LIMIT, Faults, FaultyTransport, bits, faulty, small_model, train


@pytest.fixture
def url(request):
    name = request.node.name.replace("[", "-").replace("]", "")
    yield f"memory://{name}"
    drop_topic(name)


class Trainer:
    """Publishes a small model step by step, and remembers every state."""

    def __init__(self, url, **options):
        self.model = small_model()
        self.states = {}
        self.step = -1
        self.publisher = Publisher(url, on_busy="wait", **options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.publisher.close()

    def publish(self, steps=1):
        for _ in range(steps):
            self.step += 1
            train(self.model, self.step)
            self.states[self.step] = bits(self.model)
            published = self.publisher.publish(self.step, self.model).result(LIMIT)
        return published


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
    real = Staged.followed_by

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
            monkeypatch.setattr(Staged, "followed_by", slow)
            trainer.publish()
            assert await asyncio.to_thread(folding.wait, LIMIT), "the loop goes on while updates are folded"
            (await anext(subscriber)).apply(held)
            assert bits(held) == trainer.states[1]
            go_on.set()
            (await anext(subscriber)).apply(held)
            assert bits(held) == trainer.states[2]


async def waiting_in(subscriber):
    """Wait until an update lies ready."""
    async with subscriber._handover:
        await subscriber._handover.wait_for(lambda: subscriber._ready)


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


async def test_update_that_was_not_applied_is_folded_into_the_next(url):
    held = small_model(9)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            first = await anext(subscriber)
            trainer.publish(3)
            second = await anext(subscriber)
            with pytest.raises(StaleUpdateError):
                first.apply(held)
            assert second.whole and second.step == 1
            second.apply(held)
            assert bits(held) == trainer.states[1]
            third, fourth = await anext(subscriber), await anext(subscriber)
            assert (third.step, fourth.step) == (2, 3)
            assert str(fourth.base) == "trainer@2"
            with pytest.raises(StaleUpdateError):
                third.apply(held)
            fourth.apply(held)
            assert bits(held) == trainer.states[3]


async def test_failed_apply_changes_nothing_and_can_be_made_good(url, monkeypatch):
    held = small_model(9)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            before = bits(held)
            trainer.publish(2)
            update = await anext(subscriber)
            real, calls = torch.Tensor.put_, []

            def failing(self, *arguments):
                calls.append(self)
                if len(calls) == 2:
                    raise RuntimeError("device lost")
                return real(self, *arguments)

            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "put_", failing)
                with pytest.raises(RuntimeError, match="device lost"):
                    update.apply(held)
            assert len(calls) > 2 and bits(held) == before and not update.applied
            later = await anext(subscriber)
            later.apply(held)
            assert bits(held) == trainer.states[2]


async def test_applying_twice_does_nothing_the_second_time(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            trainer.publish()
            update = await anext(subscriber)
            update.apply(held)
            update.apply(held)
    assert bits(held) == trainer.states[1]


async def test_drift_at_a_touched_element_is_refused_with_the_tensor_s_name(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            with torch.no_grad():
                held["inner"].weight.mul_(-1)
            before = bits(held)
            trainer.publish()
            update = await anext(subscriber)
            with pytest.raises(DivergedError, match=r"inner\.weight") as caught:
                update.apply(held)
            assert caught.value.tensor == "inner.weight"
            assert bits(held) == before


async def test_model_that_was_reloaded_in_place_is_noticed(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            first = await anext(subscriber)
            first.apply(held)
            held["inner"].weight.data = held["inner"].weight.data.clone()  # the same parameter, other memory
            with torch.no_grad():
                held["norm"].bias.add_(1)  # an element that the next update leaves alone, most likely
            first.apply(held)
            assert bits(held) == trainer.states[0], "the whole state is written again, not taken to be there"
            trainer.publish()
            update = await anext(subscriber)
            untouched = trainer.model["norm"].bias == held["norm"].bias
            assert untouched.any()
            with torch.no_grad():
                held["norm"].bias[untouched.nonzero()[0]] += 1
            before = bits(held)
            with pytest.raises(DivergedError):
                update.apply(held)
            assert bits(held) == before


async def test_model_that_was_never_seen_is_compared_whole(url):
    held, stranger = small_model(9), small_model(10)
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            twin = small_model(9)
            twin.load_state_dict(held.state_dict())
            trainer.publish()
            update = await anext(subscriber)
            before = bits(stranger)
            with pytest.raises(DivergedError, match="holds"):
                update.apply(stranger)
            assert bits(stranger) == before
            update.apply(twin)
            update.apply(held)
    assert bits(twin) == bits(held) == trainer.states[1]


async def test_model_that_missed_an_update_is_refused(url):
    one, two = small_model(9), small_model(10)
    with Trainer(url, anchor="never") as trainer:
        trainer.publish()
        async with Subscriber(url, latest=False, idle_timeout=LIMIT) as subscriber:
            first = await anext(subscriber)
            first.apply(one)
            first.apply(two)
            trainer.publish(2)
            (await anext(subscriber)).apply(one)
            update = await anext(subscriber)
            update.apply(one)
            with pytest.raises(DivergedError, match="trainer@1"):
                update.apply(two)
    assert bits(two) == trainer.states[0]


async def test_models_that_do_not_fit_are_refused_before_anything_is_written(url):
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            for wrong in (nn.Linear(40, 60), small_model(dtype=torch.float32)):
                before = bits(wrong)
                with pytest.raises(SchemaMismatchError):
                    update.apply(wrong)
                assert bits(wrong) == before


async def test_dict_and_wrapped_module_can_be_updated(url):
    held = small_model(9)
    wrapped = nn.Module()
    wrapped.module = small_model(8)
    tensors = {name: tensor.clone() for name, tensor in held.state_dict().items()}
    with Trainer(url) as trainer:
        trainer.publish()
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            for _ in range(2):
                update = await anext(subscriber)
                update.apply(tensors)
                update.apply(wrapped)
                trainer.publish()
    assert bits(wrapped.module) == trainer.states[update.step]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wrapped.module.state_dict().items())


async def test_other_branch_of_a_restarted_trainer_is_taken_as_a_difference(url):
    held = small_model(9)
    with Trainer(url) as trainer:
        trainer.publish(3)
        old = small_model()
        for step in range(2):
            train(old, step)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            with Publisher(url) as successor:
                assert successor.publish(1, old).result(LIMIT).kind == "anchor"
            update = await anext(subscriber)
            update.apply(held)
    assert not update.whole and update.changed < update.total / 2
    assert bits(held) == bits(old) == trainer.states[1]


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
    async with Subscriber(tmp_path, have=held, idle_timeout=LIMIT) as subscriber:
        for _ in range(2):
            with pytest.raises(CorruptPayloadError, match=published.message.blobs[0].key):
                await anext(subscriber)
    assert bits(held) == before


async def test_payload_that_leads_elsewhere_than_its_message_says_is_refused(tmp_path):
    with Trainer(tmp_path) as trainer:
        message = trainer.publish(2).message
    lie = replace(message, digest_after=message.digest_after ^ 1)
    (tmp_path / "logs" / "trainer" / f"{1:020}").write_bytes(encode_message(lie))
    async with Subscriber(tmp_path, idle_timeout=LIMIT) as subscriber:
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


async def test_models_that_share_a_tensor_are_told_apart(url):
    shared = torch.zeros(4)
    one, two = ({"a": shared, "b": torch.zeros(100)} for _ in range(2))
    state = {"a": torch.ones(4), "b": torch.arange(100.0)}
    with Publisher(url) as publisher:
        publisher.publish(0, state).result(LIMIT)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            update = await anext(subscriber)
            update.apply(one)
            update.apply(two)
    assert one["b"].tolist() == two["b"].tolist() == state["b"].tolist()


async def test_model_with_an_exchanged_tensor_is_compared_whole(url):
    held = {"a": torch.zeros(4), "b": torch.zeros(100)}
    state = {"a": torch.ones(4), "b": torch.arange(100.0)}
    with Publisher(url) as publisher:
        publisher.publish(0, state).result(LIMIT)
        async with Subscriber(url, idle_timeout=LIMIT) as subscriber:
            (await anext(subscriber)).apply(held)
            held["b"] = held["b"].clone()
            held["b"][7] = -1
            state["b"][5] = -1
            publisher.publish(1, state).result(LIMIT)
            update = await anext(subscriber)
            with pytest.raises(DivergedError, match="holds"):
                update.apply(held)
            held["b"][7] = 7
            update.apply(held)
    assert held["b"].tolist() == state["b"].tolist()


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
    assert asyncio.all_tasks() == tasks and subscriber._failure is None


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
