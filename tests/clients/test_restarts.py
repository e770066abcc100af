"""On every backend: groups that restart beside their own zombies, and trainers that go back to an older checkpoint."""

from __future__ import annotations

import asyncio

import pytest

from deltabus import Subscriber
from deltabus.bus.errors import FencedError
from deltabus.cli.verify import verify_topic

from .backends import BACKENDS
from .support import LIMIT, bits, small_model
from .test_groups import Ranks, blank, make_weights, move, same, shards
from .test_resume import Run, newest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=BACKENDS)
def url(request, backends):
    backend = backends(request.param)
    return backend.url(backend.new_topic())


async def test_a_group_restarts_beside_its_zombies_with_other_members(url):
    weights, model = make_weights(), blank()
    with Ranks(url, 2, 1) as zombies:
        for step in (1, 2):
            move(weights, step)
            await asyncio.to_thread(zombies.publish, step, weights)
        checkpoint = {name: weight.clone() for name, weight in weights.items()}
        move(weights, 3)
        await asyncio.to_thread(zombies.publish, 3, weights, ranks=[1])  # and rank 0 hangs
        async with Subscriber(url, workers=1, latest=False) as subscriber:
            async with asyncio.timeout(LIMIT):
                await newest(subscriber, 2, model)
            assert same(model, checkpoint)
            with Ranks(url, 3, 2, along=1) as ranks:
                for step in (3, 4):
                    move(checkpoint, 100 + step)
                    await asyncio.to_thread(ranks.publish, step, checkpoint)
                # It wakes up and finishes its step: nobody may put it beside what the others published.
                hand = zombies.publishers[0].publish(3, shards(weights, 0, 2))
                with pytest.raises(FencedError):
                    await asyncio.to_thread(hand.result, LIMIT)
                async with asyncio.timeout(LIMIT):
                    updates = await newest(subscriber, 4, model)
                assert [update.step for update in updates] == [3, 4]
                assert same(model, checkpoint)
        with pytest.raises(FencedError):
            await asyncio.to_thread(zombies.publishers[0].close)
    report = await asyncio.to_thread(verify_topic, url)
    assert (report.problems, len(report.writers)) == ((), 3)


async def test_a_trainer_goes_back_to_an_older_checkpoint(url):
    run, model = Run(url), small_model(9)
    await asyncio.to_thread(run.go, range(1, 5), anchor="never", skips="off")
    async with Subscriber(url, workers=1, latest=False) as subscriber:
        async with asyncio.timeout(LIMIT):
            await newest(subscriber, 4, model)
        await asyncio.to_thread(run.go, range(3, 5), seed=1, have=run.back_to(2), anchor="never", skips="off")
        async with asyncio.timeout(LIMIT):
            updates = await newest(subscriber, 4, model)
        told = [(update.step, update.rewound_from, update.whole) for update in updates]
        assert told == [(2, 4, False), (3, None, False), (4, None, False)]
        assert bits(model) == bits(run.kept[4])
    assert (await asyncio.to_thread(verify_topic, url)).ok
