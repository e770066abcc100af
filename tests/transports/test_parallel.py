"""Several calls at a time, none of which outlives the whole."""

import asyncio

import pytest

from deltabus.transports.parallel import run_parallel

from .conformance import LIMIT, until


class Calls:
    """Calls that wait until they are let go, and count how many of them run."""

    def __init__(self, count):
        self.go = asyncio.Event()
        self.running = self.most = self.ended = 0
        self.all = [self.call(number) for number in range(count)]

    def call(self, number):
        async def run():
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.go.wait()
                return number
            finally:
                self.running -= 1
                self.ended += 1

        return run


@pytest.mark.parametrize(("count", "width"), [(0, 3), (1, 3), (3, 3), (10, 3), (10, 1)])
async def test_answers_come_in_order_and_no_more_than_so_many_run(count, width):
    calls = Calls(count)
    task = asyncio.create_task(run_parallel(calls.all, width=width))
    for _ in range(5):
        await asyncio.sleep(0)
    calls.go.set()
    assert await asyncio.wait_for(task, LIMIT) == list(range(count))
    assert calls.most == min(count, width)


async def test_a_failure_ends_the_others_first():
    calls = Calls(2)

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        await asyncio.wait_for(run_parallel([*calls.all, fail], width=3), LIMIT)
    assert (calls.running, calls.ended) == (0, 2)


async def test_a_cancelled_caller_leaves_nothing_behind():
    calls = Calls(3)
    task = asyncio.create_task(run_parallel(calls.all, width=2))
    await until(lambda: calls.running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (calls.running, calls.ended) == (0, 2)
