"""A trainer that comes back: at the newest version, at an older one, at none."""

from __future__ import annotations

import asyncio
import copy

import pytest

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import RetentionGapError
from deltabus.bus.message import Kind

from .support import LIMIT, bits, small_model, train


class Run:
    """A training run whose checkpoints are kept."""

    def __init__(self, url: str) -> None:
        self.url, self.model, self.kept = url, small_model(), {}

    def go(self, steps: range, *, seed: int = 0, have: object = None, **options: object) -> None:
        with Publisher(self.url, have=have, on_busy="wait", workers=1, **options) as publisher:
            for step in steps:
                train(self.model, 100 * seed + step)
                publisher.publish(step, self.model).result(LIMIT)
                self.kept[step] = copy.deepcopy(self.model)

    def back_to(self, step: int) -> object:
        self.model = copy.deepcopy(self.kept[step])
        return self.model


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path.as_uri())


async def take(subscriber):
    async with asyncio.timeout(LIMIT):
        return await anext(subscriber)


async def newest(subscriber, step, model):
    """Follow until a step is reached, applying all; return the updates."""
    updates = []
    while not updates or updates[-1].step != step:
        updates.append(await take(subscriber))
        updates[-1].apply(model)
    return updates


async def test_a_trainer_that_goes_back_takes_its_followers_with_it(run):
    run.go(range(1, 6), anchor="never", skips="off")
    model = small_model(9)
    async with Subscriber(run.url, latest=False, workers=1) as subscriber:
        updates = await newest(subscriber, 5, model)
        assert all(update.rewound_from is None for update in updates)
        run.go(range(4, 7), seed=1, have=run.back_to(3), anchor="never", skips="off")
        (back,) = await newest(subscriber, 3, model)
        assert (back.rewound_from, back.version, str(back.message.kind)) == (5, 6, "delta")
        assert bits(model) == bits(run.kept[3])
        for step in (4, 5, 6):
            (update,) = await newest(subscriber, step, model)
            assert (update.rewound_from, update.version) == (None, step + 3)
            assert bits(model) == bits(run.kept[step])


async def test_a_follower_that_holds_the_state_gone_back_to_downloads_nothing(run):
    run.go(range(1, 6), anchor="never", skips="off")
    with Publisher(run.url, have=run.back_to(3), anchor="never", workers=1) as publisher:
        publisher.flush(LIMIT)
        assert publisher.version == 6
    model = copy.deepcopy(run.kept[3])
    async with Subscriber(run.url, have=model, workers=1) as subscriber:
        train(run.model, 77)
        with Publisher(run.url, have=run.kept[3], anchor="never", workers=1) as publisher:
            published = publisher.publish(4, run.model).result(LIMIT)
            assert (published.kind, published.version) == ("delta", 7)
        updates = await newest(subscriber, 4, model)
        assert sum(update.nbytes for update in updates) == published.nbytes
    assert bits(model) == bits(run.model)


async def test_a_follower_that_is_behind_never_sees_the_branch_that_was_left(run):
    run.go(range(1, 6), anchor="never", skips="off")
    run.go(range(4, 5), seed=1, have=run.back_to(3), anchor="never", skips="off")
    model = copy.deepcopy(run.kept[2])
    async with Subscriber(run.url, have=model, workers=1) as subscriber:
        updates = await newest(subscriber, 4, model)
        steps = [message.step for update in updates for message in update.messages]
        assert steps == [3, 3, 4]
    assert bits(model) == bits(run.kept[4])


async def test_where_an_anchor_is_cheaper_it_is_an_anchor(run):
    run.go(range(1, 4), anchor="never", skips="off")
    run.go(range(4, 6), have=run.model, anchor=1, skips="off")
    model = small_model(9)
    async with Subscriber(run.url, workers=1) as subscriber:
        await newest(subscriber, 5, model)
        with Publisher(run.url, have=run.back_to(2), anchor="never", workers=1) as publisher:
            published = publisher.publish(2, run.model).result(LIMIT)
            assert (published.kind, published.version) == (str(Kind.ANCHOR), 6)
        (update,) = await newest(subscriber, 2, model)
        assert (update.whole, update.rewound_from) == (False, 5)
    assert bits(model) == bits(run.kept[2])


async def test_a_way_back_that_is_damaged_is_an_anchor(run, tmp_path):
    run.go(range(1, 6), anchor="never", skips="off")
    (blob,) = (tmp_path / "blobs" / "trainer").glob("000000000004-delta-*")
    blob.write_bytes(blob.read_bytes()[:-1])
    with Publisher(run.url, have=run.back_to(3), anchor="never", workers=1) as publisher:
        published = publisher.publish(4, run.model).result(LIMIT)
        assert published.kind == str(Kind.ANCHOR)
    model = small_model(9)
    async with Subscriber(run.url, workers=1) as subscriber:
        await newest(subscriber, 4, model)
    assert bits(model) == bits(run.kept[3])


async def test_a_way_around_what_is_missing_never_ends_at_an_older_version(run, tmp_path):
    """From version 5 it leads over the anchor of version 4, and what leads on from there is missing too."""
    with Publisher(run.url, on_busy="wait", anchor="never", skips="all", workers=1) as publisher:
        for step in range(1, 9):
            train(run.model, step)
            if step == 4:
                publisher.request_anchor()
            publisher.publish(step, run.model).result(LIMIT)
            publisher.flush(LIMIT)
            run.kept[step] = copy.deepcopy(run.model)
    for version in (6, 7, 8):
        for blob in tmp_path.glob(f"blobs/trainer/00000000000{version}-*"):
            blob.unlink()
    model = copy.deepcopy(run.kept[5])
    async with Subscriber(run.url, have=model, gap_timeout=0.1, workers=1) as subscriber:
        with pytest.raises(RetentionGapError):
            await take(subscriber)
        with Publisher(run.url, have=run.model, anchor="never", workers=1) as publisher:
            publisher.request_anchor()
            train(run.model, 9)
            publisher.publish(9, run.model).result(LIMIT)
    async with Subscriber(run.url, have=model, workers=1) as subscriber:
        await newest(subscriber, 9, model)
    assert bits(model) == bits(run.model)
