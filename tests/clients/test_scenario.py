"""On every backend: servers, trainers and readers are killed, answers lost, and no step that was durable is missing."""

import asyncio
import contextlib
import time
from functools import cache, partial

import pytest

from deltabus import Subscriber
from deltabus.bus.core import TopicReader
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from ..transports.proxy import Proxy
from .backends import BACKENDS
from .players import Company, Player, states
from .scenario import LIMIT, advance, new_model
from .support import fingerprint

pytestmark = pytest.mark.timeout(600)
STEPS = 200
LATENCY = 0.01
RACE_STEPS = 5


@pytest.fixture(scope="module")
def company(tmp_path_factory):
    with Company(tmp_path_factory.mktemp("home")) as company:
        company.wait()
        yield company


@pytest.fixture(params=BACKENDS)
def backend(request, backends):
    return backends(request.param)


@cache
def prints():
    """The fingerprint of the model after each step."""
    model, found = new_model(), []
    for step in range(STEPS):
        advance(model, step)
        found.append(fingerprint(model))
    return found


async def follow(url, seen):
    """Apply every version up to the last step."""
    model = new_model(99)
    async with Subscriber(url, latest=False, idle_timeout=LIMIT, workers=1) as subscriber:
        async for update in subscriber:
            update.apply(model)
            seen.append((update.version, update.step, fingerprint(model)))
            if update.step == STEPS - 1:
                return


class Run:
    """One run of the scenario.

    Attributes:
        told: What the trainers were told is durable: version, step, fingerprint.
        early: What a reader applied that was there from the beginning.
        late: What one applied that joined in the middle.
        lives: What a process told that was killed while it read, and what it told when it was started again.
    """

    def __init__(self, backend, company, directory):
        self.backend = backend
        self.topic = backend.new_topic()
        self.told, self.early, self.late, self.lives = [], [], [], []
        self.proxy = None
        self._company = company
        self._saved = str(directory / "saved")

    @property
    def url(self):
        return self.backend.url(self.topic, port=self.proxy and self.proxy.port)

    async def play(self):
        async with contextlib.AsyncExitStack() as stack:
            if self.backend.port is not None:
                self.proxy = await stack.enter_async_context(Proxy(self.backend.port))
            readers = await stack.enter_async_context(asyncio.TaskGroup())
            readers.create_task(follow(self.url, self.early))
            readers.create_task(self.kill_a_reader())
            await self.train(readers)

    async def kill_a_reader(self):
        """Follow in a process, kill it while it follows, and go on from what it saved."""
        arguments = "reader", self.url, self._saved, STEPS - 1
        async with Player(self._company, *arguments) as reader:
            self.lives.append(reader.lines)
            await reader.until(lambda lines: len(lines) >= STEPS // 3)
        async with Player(self._company, *arguments) as reader:
            self.lives.append(reader.lines)
            await reader.end()

    async def train(self, readers):
        """Let a trainer publish all steps; things go wrong at the same steps every time."""
        plot = self.plot(readers)
        for last in (*self.deaths(), STEPS - 1):
            first = self.told[-1][1] + 1 if self.told else 0
            async with Player(self._company, "trainer", self.url, first, STEPS - 1) as trainer:
                if not first:
                    await self.wait_for_readers()
                    trainer.say("go")
                while plot and plot[0][0] <= last:
                    mark, action = plot.pop(0)
                    await trainer.until(partial(has_come_to, mark))
                    await action()
                if last == STEPS - 1:
                    await trainer.end()
                else:
                    await trainer.until(partial(has_come_to, last))
                    await trainer.kill()
            self.told += states(trainer.lines)

    async def wait_for_readers(self):
        """Wait until all that follow from the beginning have the first version."""
        async with asyncio.timeout(LIMIT):
            while not (self.early and self.lives and self.lives[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def deaths(self):
        """The steps after which the trainer is killed, where there is no server that could be."""
        return () if self.backend.kills else (STEPS // 3, 2 * STEPS // 3)

    def plot(self, readers):
        """What goes wrong, by step."""
        plot = [(STEPS // 2, partial(self.join, readers))]
        if self.proxy is not None:
            plot += [(mark, self.lose_answers) for mark in (STEPS // 10, STEPS // 5, 9 * STEPS // 10)]
            plot += [(STEPS // 4, partial(self.slow_down, LATENCY)), (7 * STEPS // 10, partial(self.slow_down, 0))]
            kills = (3 * STEPS // 10, 6 * STEPS // 10)
            plot += [(mark, self.restart_the_server) for mark in kills[: self.backend.kills]]
        return sorted(plot, key=lambda pair: pair[0])

    async def join(self, readers):
        readers.create_task(follow(self.url, self.late))

    async def lose_answers(self):
        for request, answer in self.backend.writes(self.topic):
            self.proxy.drop(request, answer=answer)

    async def slow_down(self, seconds):
        self.proxy.latency = seconds

    async def restart_the_server(self):
        await asyncio.to_thread(self.backend.kill)
        await asyncio.to_thread(self.backend.start)


def has_come_to(step, lines):
    return lines and int(lines[-1][1]) >= step


async def test_every_durable_step_is_read_in_order_once_and_exact(backend, company, tmp_path):
    begun = time.monotonic()
    run = Run(backend, company, tmp_path)
    await run.play()

    seen = run.early
    assert [version for version, _, _ in seen] == list(range(1, len(seen) + 1))
    assert [print_ for _, step, print_ in seen] == [prints()[step] for _, step, _ in seen]
    assert [step for _, step, _ in run.told] == list(range(STEPS))
    if backend.kills:
        assert run.told == seen
        assert run.proxy.dropped == 3 * len(backend.writes(run.topic))
    else:
        # A trainer that dies between the commit and its report publishes that step once more.
        assert [state for state in seen if state in run.told] == run.told
        assert len(seen) <= STEPS + 2

    assert 0 < len(run.late) <= STEPS // 2 + 2
    assert run.late == seen[-len(run.late) :]

    killed, (held, *onward) = run.lives
    assert killed[0][0] == "whole" and {line[0] for line in (*killed[1:], *onward)} <= {"onward", "whole"}
    assert states(killed) == seen[states(killed)[0][0] - 1 : states(killed)[-1][0]]
    assert held[0] == "held" and int(held[1]) - states(killed)[-1][0] in (0, 1)
    assert onward[0][0] == "onward", "what it had saved was not recognised"
    assert states(onward) == seen[int(held[1]) :]

    url = backend.url(run.topic)
    report = await asyncio.to_thread(verify_topic, url)
    assert report.ok, report.problems
    assert report.replayed >= len(seen) and not report.unreachable
    print(f"{backend.scheme}: {time.monotonic() - begun:.1f} s, {report.records} records")


async def test_of_two_trainers_of_one_log_one_is_fenced(backend, company):
    url = backend.url(backend.new_topic())
    async with (
        Player(company, "racer", url, "ann", RACE_STEPS) as ann,
        Player(company, "racer", url, "bob", RACE_STEPS) as bob,
    ):
        for racer in (ann, bob):
            await racer.until(lambda lines: lines == [["ready"]])
        for racer in (ann, bob):
            racer.say("go")
        for racer in (ann, bob):
            await racer.end()
        lines = {name: racer.lines[1:] for name, racer in (("ann", ann), ("bob", bob))}
    fenced = [name for name in lines if lines[name][-1][0] == "fenced"]
    assert len(fenced) == 1, lines
    (winner,) = lines.keys() - set(fenced)
    assert len(lines[fenced[0]]) == 1, "something was durable for whoever was fenced"
    assert [(version, step) for version, step, _ in states(lines[winner])] == [(n + 1, n) for n in range(RACE_STEPS)]

    async with open_transport(url) as transport:
        history = await TopicReader(transport).load()
    assert {(message.metadata["racer"], message.epoch) for message in history} == {(winner, 1)}
    seen = []
    model = new_model(99)
    async with Subscriber(url, latest=False, idle_timeout=LIMIT, workers=1) as subscriber:
        async for update in subscriber:
            update.apply(model)
            seen.append((update.version, update.step, fingerprint(model)))
            if update.step == RACE_STEPS - 1:
                break
    assert seen == states(lines[winner])[-len(seen) :]
    report = await asyncio.to_thread(verify_topic, url)
    assert report.ok, report.problems
    assert report.replayed >= RACE_STEPS and not report.unreachable
