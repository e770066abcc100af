from __future__ import annotations

import asyncio

import pytest

from deltabus.bus.errors import AccessDeniedError, AppendUnknownError, TransientTransportError, UsageError
from deltabus.bus.retry import Retry

from .support import LIMIT, Time


class Work:
    """Fails as told, then returns."""

    def __init__(self, *faults: BaseException) -> None:
        self.faults = list(faults)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return "done"


def passing(count: int) -> list[BaseException]:
    return [TransientTransportError(f"fault {n}", url="fake://topic") for n in range(count)]


async def test_what_succeeds_is_called_once():
    time, work = Time(), Work()
    assert await time.retry().call("work", work) == "done"
    assert (work.calls, time.slept) == (1, [])


async def test_faults_that_pass_are_tried_again_with_growing_pauses():
    time, work = Time(), Work(*passing(6))
    assert await time.retry(pause=1.0, longest=8.0, limit=1000.0).call("work", work) == "done"
    assert work.calls == 7
    assert len(time.slept) == 6
    for seconds, longest in zip(time.slept, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0 <= seconds <= longest


async def test_pauses_are_drawn_at_random():
    drawn = set()
    for _ in range(5):
        time = Time()
        await time.retry(pause=8.0).call("work", Work(*passing(1)))
        drawn.add(time.slept[0])
    assert len(drawn) > 1


@pytest.mark.parametrize(
    "fault", [AccessDeniedError("no"), UsageError("no"), AppendUnknownError("no"), ValueError("no")]
)
async def test_what_does_not_pass_is_raised_at_once(fault):
    time, work = Time(), Work(fault)
    with pytest.raises(type(fault)) as caught:
        await time.retry().call("work", work)
    assert caught.value is fault
    assert (work.calls, time.slept) == (1, [])


async def test_the_limit_is_named_and_the_last_fault_is_chained():
    time, faults = Time(), passing(10_000)
    work = Work(*faults)
    with pytest.raises(TransientTransportError, match=r"storing it failed \d+ times .* limit is 30 s: fault") as caught:
        await time.retry(limit=30.0).call("storing it", work)
    assert time.now <= 30.0
    assert work.calls > 3
    assert caught.value.__cause__ is faults[work.calls - 1]
    assert caught.value.url == "fake://topic"


async def test_a_limit_of_zero_is_one_attempt():
    work = Work(*passing(5))
    with pytest.raises(TransientTransportError, match="1 times"):
        await Time().retry(limit=0.0, pause=1.0).call("work", work)
    assert work.calls == 1


async def test_a_lost_answer_is_tried_again_only_where_asked():
    faults = (AppendUnknownError("lost", url="fake://topic"), *passing(1))
    both = (TransientTransportError, AppendUnknownError)
    assert await Time().retry().call("work", Work(*faults), on=both) == "done"
    with pytest.raises(AppendUnknownError, match="the limit is 0 s: lost"):
        await Time().retry(limit=0.0).call("work", Work(*faults), on=both)


async def test_cancellation_passes_at_once_while_working_and_while_pausing():
    for faults in ((), passing(1)):
        work, waiting, calls = Work(*faults), asyncio.Event(), 0

        async def sleep(_: float, waiting: asyncio.Event = waiting) -> None:
            waiting.set()
            await asyncio.Event().wait()

        async def attempt(work: Work = work, waiting: asyncio.Event = waiting) -> str:
            nonlocal calls
            calls += 1
            if not work.faults:
                await sleep(0, waiting)
            return await work()

        task = asyncio.create_task(Retry(sleep=sleep).call("work", attempt))
        async with asyncio.timeout(LIMIT):
            await waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert calls == 1


@pytest.mark.parametrize("option", ["limit", "pause", "longest"])
def test_times_are_not_negative(option):
    with pytest.raises(UsageError, match="negative"):
        Retry(**{option: -1.0})
