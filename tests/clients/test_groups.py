"""Several writers of one topic: ranks that each publish a slice, and writers that rest on one another."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from deltabus import Group, Publisher, Subscriber, TensorSlice
from deltabus.bus.errors import (
    ConflictError,
    DivergedError,
    RetentionGapError,
    SchemaMismatchError,
    StragglerError,
    UsageError,
    WaitTimeoutError,
)
from deltabus.bus.progress import Progress
from deltabus.cli.pull import pull_version
from deltabus.cli.verify import verify_topic
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.state import as_integers
from deltabus.stragglers import StragglerWatch

from .ranks import Ranks, blank, following, make_weights, move, same, shards, take
from .support import LIMIT


async def nothing_comes(subscriber: Subscriber, url: str) -> bool:
    """Return whether there is no update, once all that is in the topic was looked at."""
    waiting = asyncio.ensure_future(anext(subscriber))
    async with Subscriber(url, workers=1) as other:  # what it finds while opening, the first one has found too by then
        ends = {m.writer: m.position for m in other._intake._sequencer.messages}
    async with asyncio.timeout(LIMIT):
        while {m.writer: m.position for m in subscriber._intake._sequencer.messages} != ends:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0)
    arrived = waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return not arrived


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("latest", [True, False])
async def test_a_step_comes_complete_or_not_at_all(tmp_path, along, latest):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 3, 1, along=along) as ranks:
        ranks.publish(1, weights)
        async with following(url, latest=latest) as subscriber:
            update = await take(subscriber)
            assert (update.whole, update.step, update.total) == (True, 1, sum(w.numel() for w in weights.values()))
            update.apply(model)
            assert same(model, weights)
            for step in (2, 3):
                move(weights, step)
                ranks.publish(step, weights, ranks=[2, 0])
                assert await nothing_comes(subscriber, url)
                ranks.publish(step, weights, ranks=[1])
                update = await take(subscriber)
                assert (update.step, update.whole, update.version) == (step, False, 3 * step)
                assert len(update.messages) == 3
                update.apply(model)
                assert same(model, weights)


async def test_updates_that_were_not_applied_fold_into_the_next(tmp_path):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1) as ranks:
        ranks.publish(1, weights)
        async with following(url, latest=False) as subscriber:
            for step in (2, 3, 4):
                await take(subscriber)
                move(weights, step)
                ranks.publish(step, weights)
            update = await take(subscriber)
            update.apply(model)
            assert (update.whole, update.step) == (True, 4)
    assert same(model, weights)


async def test_the_group_may_grow_and_shrink_between_restarts(tmp_path, caplog):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    async with following(url) as subscriber:
        step = 0
        for generation, (count, along) in enumerate([(4, 0), (8, 1), (3, 0), (3, 0)], start=1):
            with Ranks(url, count, generation, along=along) as ranks:
                for _ in range(2):
                    step += 1
                    move(weights, step)
                    ranks.publish(step, weights)
                    update = await take(subscriber)
                    update.apply(model)
                    assert (update.step, len(update.state)) == (step, count)
                    assert same(model, weights)
    newcomer = blank()
    async with following(url) as subscriber:
        update = await take(subscriber)
        update.apply(newcomer)
        assert (update.step, len(update.state)) == (step, 3)
    assert same(newcomer, weights)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_halves_of_two_incarnations_are_never_put_together(tmp_path):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1) as ranks:
        ranks.publish(1, weights)
        checkpoint = {name: weight.clone() for name, weight in weights.items()}
        move(weights, 2)
        ranks.publish(2, weights, ranks=[0])  # and rank 1 dies
    async with following(url) as subscriber:
        update = await take(subscriber)
        update.apply(model)
        assert same(model, checkpoint)
        weights = checkpoint
        with Ranks(url, 2, 2) as ranks:
            move(weights, 200)  # step 2 is taken again, and comes out differently
            ranks.publish(2, weights, ranks=[1])
            assert await nothing_comes(subscriber, url)
            ranks.publish(2, weights, ranks=[0])
            update = await take(subscriber)
            assert update.step == 2
            update.apply(model)
            assert same(model, weights)


async def test_a_restarted_group_that_holds_what_was_published_goes_on_with_deltas(tmp_path):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1) as ranks:
        ranks.publish(1, weights)
    async with following(url) as subscriber:
        (await take(subscriber)).apply(model)
        with Ranks(url, 2, 2) as ranks:
            move(weights, 2)
            ranks.publish(2, weights)
            # The first publication of a publisher without `have` is an anchor, unless the model is what it left.
            update = await take(subscriber)
            update.apply(model)
            move(weights, 3)
            ranks.publish(3, weights)
            update = await take(subscriber)
            assert not update.whole
            update.apply(model)
    assert same(model, weights)


async def test_ranks_that_go_back_take_the_step_that_they_publish(tmp_path):
    """What rank 0 holds at step 1 is what it held at step 3 too, so that it cannot tell which it goes back to."""
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1, anchor="never", skips="off") as ranks:
        for step in (1, 2, 3, 4):
            rows = weights["embed"][:7].clone(), weights["layer.weight"][:5].clone(), weights["layer.bias"][:5].clone()
            move(weights, step)
            if step in (2, 3):
                for name, kept in zip(("embed", "layer.weight", "layer.bias"), rows, strict=True):
                    weights[name][: len(kept)] = kept
            ranks.publish(step, weights)
            if step == 1:
                checkpoint = {name: weight.clone() for name, weight in weights.items()}
    async with following(url) as subscriber:
        (await take(subscriber)).apply(model)
        weights = checkpoint
        with ExitStack() as stack:
            group = Group.of_ranks("trainer", 2, generation=2)
            ranks = [
                stack.enter_context(
                    Publisher(url, writer=writer, group=group, have=shards(weights, rank, 2), anchor="never", workers=1)
                )
                for rank, writer in enumerate(group.members)
            ]
            for step in (2, 3):
                move(weights, 100 + step)
                ranks[1].publish(step, shards(weights, 1, 2)).result(LIMIT)
            assert await nothing_comes(subscriber, url)
            published = ranks[0].publish(3, shards(weights, 0, 2)).result(LIMIT)
            assert (published.kind, published.step) == ("delta", 3)
            update = await take(subscriber)
            assert (update.step, update.rewound_from) == (3, 4)
            update.apply(model)
    assert same(model, weights)


async def test_an_engine_that_holds_the_weights_downloads_none(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    model = {name: weight.clone() for name, weight in weights.items()}
    with Ranks(url, 3, 1) as ranks:
        ranks.publish(1, weights)
        move(weights, 2)
        ranks.publish(2, weights)
        async with following(url, have=model) as subscriber:
            update = await take(subscriber)
            assert (update.whole, update.step) == (False, 2)
            assert {str(message.kind) for message in update.messages} == {"delta"}
            update.apply(model)
    assert same(model, weights)


async def test_a_group_is_followed_as_a_whole_and_takes_each_step_once(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    with Ranks(url, 2, 3) as ranks:
        ranks.publish(2, weights)
        for step in (1, 2):
            with pytest.raises(UsageError, match=f"step {step} comes behind step 2"):
                ranks.publish(step, weights)
        with pytest.raises(UsageError, match="is in a group with trainer-0"):
            async with following(url, writers=["trainer-1"]):
                pass


def test_a_generation_is_used_once(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    with Ranks(url, 2, 3) as ranks:
        ranks.publish(1, weights)
    for generation in (2, 3):
        with pytest.raises(UsageError, match=r"trainer-0.*generation 3 .*generation of 4 or more"):
            Ranks(url, 2, generation)
    with pytest.raises(UsageError, match=r"no group was given"):
        Publisher(url, writer="trainer-1")
    with pytest.raises(UsageError, match="coalesce"):
        Publisher(url, writer="trainer-0", group=Group(["trainer-0", "b"], 4), on_busy="coalesce")
    with pytest.raises(UsageError, match=r"no member 'c'"):
        Publisher(url, writer="c", group=Group(["a", "b"], 4))


def test_each_group_has_a_time_of_its_own():
    def waits(group: str, step: int, generation: int = 1) -> Progress:
        return Progress(step, (f"{group}-1",), 2, {f"{group}-1": step - 1}, f"{group}-0", generation)

    watch = StragglerWatch("fake://topic", limit=10.0, tell=lambda event: None, first_report=100.0)
    for second in range(9):  # a group that goes on hides none that does not
        assert watch.look([waits("a", second), waits("b", 5)], second) == 10 - second
    assert watch.look([waits("b", 5, generation=2)], 9) == 10
    assert watch.look([], 10) is None
    for second in range(20, 30):
        watch.look([waits("a", second), waits("b", 6)], second)
    with pytest.raises(StragglerError, match="step 6") as told:
        watch.look([waits("a", 30), waits("b", 6)], 30)
    assert told.value.writers == ("b-1",)


def quick_reports(monkeypatch) -> None:
    monkeypatch.setattr("deltabus.subscriber.StragglerWatch", partial(StragglerWatch, first_report=0.02))


async def test_a_rank_that_dies_is_named_after_a_limit(tmp_path, caplog, monkeypatch):
    quick_reports(monkeypatch)
    url, weights = tmp_path.as_uri(), make_weights()
    with Ranks(url, 3, 1) as ranks:
        ranks.publish(1, weights)
        async with following(url, straggler_timeout=0.3) as subscriber:
            await take(subscriber)
            ranks.publish(2, weights, ranks=[0, 2])
            with pytest.raises(
                StragglerError, match=r"step 2 is there from 2 of 3 .* trainer-1 \(last step 1\)"
            ) as told:
                await take(subscriber)
            assert told.value.writers == ("trainer-1",)
    assert any("waits for trainer-1" in record.getMessage() for record in caplog.records)


async def test_a_rank_that_is_slow_is_waited_for(tmp_path, caplog, monkeypatch):
    quick_reports(monkeypatch)
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1) as ranks:
        ranks.publish(1, weights, ranks=[1])
        async with following(url, idle_timeout=0.2) as subscriber:
            with pytest.raises(WaitTimeoutError):
                await take(subscriber)
        async with following(url) as subscriber:
            ranks.publish(1, weights, ranks=[0])
            (await take(subscriber)).apply(model)
    assert same(model, weights)
    assert any("trainer-0 (last step none)" in record.getMessage() for record in caplog.records)


async def test_apply_writes_the_parts_of_all_writers_or_none(tmp_path):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1) as ranks:
        ranks.publish(1, weights)
        async with following(url) as subscriber:
            (await take(subscriber)).apply(model)
            move(weights, 2)
            ranks.publish(2, weights)
            model["embed"][12] += 1  # a row of the second rank's
            before = {name: weight.clone() for name, weight in model.items()}
            update = await take(subscriber)
            with pytest.raises(DivergedError, match="embed"):
                update.apply(model)
            assert same(model, before)


async def test_a_write_that_fails_midway_takes_all_parts_back(tmp_path, monkeypatch):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Ranks(url, 2, 1) as ranks:
        ranks.publish(1, weights)
        async with following(url) as subscriber:
            (await take(subscriber)).apply(model)
            before = {name: weight.clone() for name, weight in model.items()}
            move(weights, 2)
            ranks.publish(2, weights)
            update = await take(subscriber)
            from deltabus.codecs import patches

            real, calls = patches.compare.scatter, []

            def failing(*arguments):
                calls.append(1)
                if len(calls) == 4:
                    raise KeyboardInterrupt
                return real(*arguments)

            monkeypatch.setattr(patches.compare, "scatter", failing)
            with pytest.raises(KeyboardInterrupt):
                update.apply(model)
            assert len(calls) > 4
            assert same(model, before)
            monkeypatch.undo()
            update.apply(model)
    assert same(model, weights)


async def test_writers_that_own_the_same_elements_are_a_conflict(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    group = Group(["left", "right"], 1)
    rows = TensorSlice(weights["embed"][:7], (0, 0), (13, 6))
    more = TensorSlice(weights["embed"][6:], (6, 0), (13, 6))
    with (
        Publisher(url, writer="left", group=group) as left,
        Publisher(url, writer="right", group=group) as right,
    ):
        left.publish(1, {"embed": rows}).result(LIMIT)
        right.publish(1, {"embed": more, "scale": weights["scale"]}).result(LIMIT)
        async with following(url) as subscriber:
            with pytest.raises(ConflictError, match=r"'left' \(version 1\).*'right' \(version 1\).*'embed'"):
                await take(subscriber)


async def test_writers_that_had_applied_each_other_in_a_circle_are_a_conflict(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    for writer, other in (("a", "b"), ("b", "c"), ("c", "a")):
        with Publisher(url, writer=writer, workers=1) as publisher:
            publisher.publish(1, weights, after={other: 1}).result(LIMIT)
    async with following(url) as subscriber:
        with pytest.raises(ConflictError, match="all around"):
            await take(subscriber)


async def test_what_rests_on_another_writer_comes_after_it(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    base, adapter = {"embed": weights["embed"]}, {"scale": weights["scale"]}
    model = blank()
    with Publisher(url, writer="base") as first, Publisher(url, writer="adapter") as second:
        first.publish(1, base).result(LIMIT)
        async with following(url) as subscriber:
            update = await take(subscriber)
            assert update.state == {"base": 1}
            second.publish(1, adapter, after={"base": 2}).result(LIMIT)
            assert await nothing_comes(subscriber, url)
            move(base, 2)
            first.publish(2, base).result(LIMIT)
            async with asyncio.timeout(LIMIT):
                async for update in subscriber:
                    assert update.state.of("base") >= 2 or not update.state.of("adapter")
                    if update.state == {"base": 2, "adapter": 1}:
                        break
            update.apply(model)
            move(adapter, 3)
            second.publish(2, adapter).result(LIMIT)
            update = await take(subscriber)
            assert update.state == {"base": 2, "adapter": 2}
            update.apply(model)
    assert same(base, model)
    assert same(adapter, model)


async def test_what_a_step_rests_on_and_never_comes_is_named_after_a_limit(tmp_path, caplog, monkeypatch):
    quick_reports(monkeypatch)
    url, weights, told = tmp_path.as_uri(), make_weights(), []
    with Publisher(url, writer="base") as first, Publisher(url, writer="adapter") as second:
        first.publish(1, {"embed": weights["embed"]}).result(LIMIT)
        second.publish(4, {"scale": weights["scale"]}, after={"base": 9}).result(LIMIT)
        async with following(url, straggler_timeout=0.3, on_event=told.append) as subscriber:
            assert (await take(subscriber)).state == {"base": 1}
            with pytest.raises(
                StragglerError, match=r"step 4 of adapter .* version 9 of base \(newest version 1\)"
            ) as e:
                await take(subscriber)
            assert e.value.writers == ("base",)
    assert any("version 9 of base" in record.getMessage() for record in caplog.records)
    assert any(event.step == 4 and "version 9 of base" in event.detail for event in told)


async def test_a_reader_may_follow_some_of_the_writers(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    with Publisher(url, writer="base") as first, Publisher(url, writer="adapter") as second:
        second.publish(1, {"scale": weights["scale"]}, after={"base": 5}).result(LIMIT)
        first.publish(1, {"embed": weights["embed"]}).result(LIMIT)
        for writers, expected in ((["base"], {"base": 1}), (["adapter"], {"adapter": 1})):
            async with following(url, writers=writers) as subscriber:
                assert (await take(subscriber)).state == expected
    with pytest.raises(UsageError):
        Subscriber(url, writers=["no/name"])


async def test_the_later_of_two_writers_of_a_tensor_counts_once_it_had_applied_the_other(tmp_path):
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    with Publisher(url, writer="first") as first, Publisher(url, writer="second") as second:
        first.publish(1, weights).result(LIMIT)
        async with following(url) as subscriber:
            update = await take(subscriber)
            update.apply(model)
            tuned = {name: weight.clone() for name, weight in weights.items()}
            for step in (2, 3):
                move(tuned, step)
                second.publish(step, tuned, after=update.state).result(LIMIT)
                update = await take(subscriber)
                update.apply(model)
                assert same(model, tuned)
            move(weights, 4)
            first.publish(4, weights).result(LIMIT)  # it knows nothing of the second's
            with pytest.raises(ConflictError, match=r"'first' \(version 2\).*'second' \(version 2\)"):
                await take(subscriber)


def test_names_that_make_no_group_are_refused():
    for names, generation in ((["a", "a"], 1), ([], 1), (["a", "b"], 0), (["a", "b/c"], 1)):
        with pytest.raises(UsageError):
            Group(names, generation)
    for count, generation in ((0, 1), (1 << 20, 1), (4, 0)):
        with pytest.raises(UsageError):
            Group.of_ranks("trainer", count, generation=generation)


def test_pull_puts_the_parts_of_all_writers_together(tmp_path):
    url, weights, states = (tmp_path / "topic").as_uri(), make_weights(), {}
    with Ranks(url, 3, 1) as ranks:
        for step in (1, 2):
            move(weights, step)
            ranks.publish(step, weights)
            states[step] = {name: weight.clone() for name, weight in weights.items()}
        ranks.publish(3, weights, ranks=[0])
    for version, step in ((None, 2), (3, 1)):
        pulled = pull_version(url, tmp_path / f"checkpoint-{step}", version=version)
        assert (pulled.step, pulled.version) == (step, 3 * step)
        assert same(load_checkpoint(pulled.directory), states[step])
    with pytest.raises(RetentionGapError, match="no version 4 of all writers"):
        pull_version(url, tmp_path / "none", version=4)
    with pytest.raises(SchemaMismatchError, match="no writer has"):
        pull_version(url, tmp_path / "part", writer="trainer-1")
    assert verify_topic(url).ok


async def test_a_sharded_engine_may_say_what_it_holds_and_come_late(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    with Ranks(url, 2, 1) as trainers:
        trainers.publish(1, weights)
        part = weights["embed"][:, :4].clone()
        engine = {**blank(), "embed": TensorSlice(part, (0, 0), (13, 6))}
        async with following(url, have=engine) as subscriber:
            update = await take(subscriber)
            assert update.whole  # of a part of the weights there is no digest
            update.apply(engine)
            move(weights, 2)
            trainers.publish(2, weights)
            update = await take(subscriber)
            update.apply(engine)
            assert torch.equal(as_integers(part), as_integers(weights["embed"][:, :4]))
            move(weights, 3)
            trainers.publish(3, weights)
            await take(subscriber)
            other = {**blank(), "embed": TensorSlice(torch.ones_like(part), (0, 0), (13, 6))}
            with pytest.raises(DivergedError):
                update.apply(other)


@pytest.mark.parametrize(("ranks", "along"), [(2, 1), (3, 0)])
async def test_a_sharded_engine_takes_what_it_owns(tmp_path, ranks, along):
    """It is cut otherwise than the trainer, whose ranks own rows."""
    url, weights = tmp_path.as_uri(), make_weights()
    with Ranks(url, 4, 1) as trainers:
        trainers.publish(1, weights)
        engines = [
            {
                name: dataclasses.replace(part, tensor=torch.zeros_like(part.tensor))
                if isinstance(part, TensorSlice)
                else torch.zeros_like(part)
                for name, part in {**weights, **shards(weights, rank, ranks, along=along)}.items()
            }
            for rank in range(ranks)
        ]

        def expected(engine):
            return {
                name: weights[name][tuple(slice(a, a + n) for a, n in zip(part.start, part.tensor.shape, strict=True))]
                if isinstance(part, TensorSlice)
                else weights[name]
                for name, part in engine.items()
            }

        def held(engine):
            return {name: part.tensor if isinstance(part, TensorSlice) else part for name, part in engine.items()}

        async with following(url, verify="full", verify_every=2) as subscriber:
            for step in (1, 2, 3, 4):
                if step > 1:
                    move(weights, step)
                    trainers.publish(step, weights)
                update = await take(subscriber)
                for engine in engines:
                    update.apply(engine)
                    assert same(held(engine), expected(engine))
                assert update.whole == (step == 1)
            cut = next(part for part in engines[-1].values() if isinstance(part, TensorSlice))
            cut.tensor[0] += 1
            move(weights, 5)
            trainers.publish(5, weights)
            update = await take(subscriber)
            update.apply(engines[0])
            before = {name: tensor.clone() for name, tensor in held(engines[-1]).items()}
            with pytest.raises(DivergedError, match="embed"):
                update.apply(engines[-1])
            assert same(held(engines[-1]), before)
