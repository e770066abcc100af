"""`kill -9` at every moment: of a trainer, of a reader, of a trainer that is followed, and two trainers at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deltabus import Publisher, Subscriber
from deltabus.bus.message import Kind
from deltabus.codecs.checkpoint import save_checkpoint
from deltabus.codecs.state import collect

from .history import check_topic, messages_in, model_at
from .support import LIMIT, fingerprint, small_model, train
from .system import CALLS

pytestmark = pytest.mark.timeout(300)
STEPS = 3
ROUNDS = 8
RACES = 8
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # so that a process has no threads and may fork


def command(script, *arguments):
    return [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]


def end(process):
    """End a script that was started in a session of its own, and its children with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def lines_of(script, *arguments):
    """What a script prints, line by line while it runs; it must end well."""
    with subprocess.Popen(
        command(script, *arguments), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        try:
            yield process.stdout
            assert process.wait(LIMIT) == 0
        finally:
            end(process)


def told_in(path):
    """What trainers were told is durable: versions, steps and fingerprints."""
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {(int(version), int(step), print_) for version, step, print_ in words}


def restart(topic, found, holding):
    """Let a new trainer go on, holding the newest state, an older one of another branch, or nothing."""
    newest = max((message for message, _ in found), key=lambda message: message.version, default=None)
    step, version, epoch = (newest.step, newest.version, found[-1][0].epoch) if newest else (-1, 0, 0)
    model, branch = model_at(step), 0
    if holding == "older":
        model, branch = model_at(step - 1), 1000
        train(model, branch)  # no version of the topic holds it
    published = []
    with Publisher(topic, have=None if holding == "nothing" else model, anchor="never", workers=1) as publisher:
        for later in (step + 1, step + 2):
            train(model, branch + later)
            message = publisher.publish(later, model).result(LIMIT).message
            published.append((message, fingerprint(model)))
    first = Kind.DELTA if newest and holding == "newest" else Kind.ANCHOR
    assert [message.kind for message, _ in published] == [first, Kind.DELTA]
    assert [message.version for message, _ in published] == [version + 1, version + 2]
    assert {message.epoch for message, _ in published} == {epoch + 1}
    return published


def test_trainer_killed_at_any_call_leaves_a_topic_that_goes_on(place):
    prints = [fingerprint(model_at(step)) for step in range(STEPS)]
    deaths, restarts, left = Counter(), Counter(), 0
    with lines_of("killed_trainer.py", "calls", place, STEPS) as lines:
        for what, name, *call in map(str.split, lines):
            topic = place / name / "topic"
            number, moment = name.split("-")
            if what == "survived":
                survivor = int(number), topic
                continue
            found = check_topic(topic, told_in(place / name / "durable"))
            assert [print_ for _, print_ in found] == [prints[message.step] for message, _ in found]
            holding = ("newest", "nothing", "newest", "older")[(int(number) + (moment == "after")) % 4]
            published = restart(topic, found, holding)
            assert check_topic(topic, told_in(place / name / "durable")) == found + published
            left += any(topic.rglob(".tmp-*"))
            restarts[holding, bool(found)] += 1
            deaths[moment, *call] += 1
    number, topic = survivor
    kinds = [message.kind for message in messages_in(topic)]
    assert kinds == [Kind.ANCHOR, Kind.DELTA, Kind.DELTA, Kind.ANCHOR]
    files = sum(path.is_file() for path in topic.rglob("*"))
    assert files == 1 + 2 * len(kinds), "a schema, and a blob and a record for each message"
    for moment in ("before", "after"):
        assert sum(count for (when, _), count in deaths.items() if when == moment) == number
        assert deaths[moment, "link"] == deaths[moment, "unlink"] == files
        assert deaths[moment, "fsync"] >= 2 * files and deaths[moment, "write"] > files
        assert {call for when, call in deaths if when == moment} == CALLS
    assert left > number / 4, "hardly a trainer died while it wrote"
    assert len(restarts) == 6
    print(f"{sum(deaths.values())} deaths: {dict(deaths)}; restarts: {dict(restarts)}")


async def follow_live(topic, *, latest):
    """Follow until the last step, comparing every state with what its trainer said of it; the versions applied."""
    model, seen = small_model(99), []
    async with Subscriber(topic, latest=latest, idle_timeout=LIMIT, workers=1) as subscriber:
        async for update in subscriber:
            update.apply(model)
            assert fingerprint(model) == update.metadata["bits"]
            seen.append(update.version)
            if "last" in update.metadata:
                break
    return seen


async def test_readers_follow_a_trainer_that_is_killed_again_and_again(place):
    async def run():
        process = await asyncio.create_subprocess_exec(
            *command("killed_trainer.py", "rounds", place, ROUNDS), env=ENVIRONMENT, start_new_session=True
        )
        try:
            assert await process.wait() == 0
        finally:
            end(process)

    topic = place / "topic"
    async with asyncio.timeout(4 * LIMIT), asyncio.TaskGroup() as tasks:
        tasks.create_task(run())
        every, newest = (tasks.create_task(follow_live(topic, latest=latest)) for latest in (False, True))

    found = await asyncio.to_thread(check_topic, topic, told_in(place / "durable"))
    assert all(print_ == message.metadata["bits"] for message, print_ in found)
    versions = sorted({message.version for message, _ in found})
    assert versions == list(range(1, versions[-1] + 1))
    assert every.result() == versions[every.result()[0] - 1 :]
    assert newest.result() == sorted(set(newest.result())) and newest.result()[-1] == versions[-1]
    begun = {message.epoch: message.kind for message, _ in reversed(found)}
    assert sorted(begun) == list(range(1, ROUNDS + 2))
    assert set(list(begun.values())[:-1]) == set(Kind), "some went on with a delta, some had to publish an anchor"


def test_killed_reader_goes_on_from_what_its_memory_holds(place):
    with Publisher(place / "topic", anchor="never", workers=1) as publisher:
        for step in range(4):
            model = model_at(step)
            publisher.publish(step, model).result(LIMIT)
            if step == 1:
                state = collect(model)
                save_checkpoint(place / "old", state.schema, state.read)
                old = fingerprint(model)
    with lines_of("killed_reader.py", place / "topic", place / "old") as lines:
        deaths = list(map(json.loads, lines))
    counts = Counter((death["place"], death["holding"]) for death in deaths)
    # A schema and the payloads are downloaded; each tensor that is not tied is written.
    assert counts == {("download", True): 3, ("download", False): 5, ("apply", True): 6, ("load", False): 6}
    for death in deaths:
        assert (death["reached"], death["version"]) == (fingerprint(model), 4)
        assert death["whole"] == (death["left"] != old)
        assert death["base"] == ("None" if death["whole"] else "trainer@2")
        if death["place"] == "download":
            assert death["whole"] != death["holding"], "what lay in memory was not touched"
    torn = [death for death in deaths if death["place"] == "apply" and death["whole"]]
    assert len(torn) == 5, "each but the first left a mixture of two states"


def test_of_two_trainers_that_start_at_once_one_writes_history(place):
    with lines_of("killed_trainer.py", "races", place, RACES) as lines:
        assert list(lines) == []
    for number in range(RACES):
        directory = place / str(number)
        fenced, told = 0, set()
        for path in directory.glob("durable-*"):
            *lines, last = path.read_text().splitlines()
            fenced += last == "fenced"
            path.write_text("\n".join(lines if last == "fenced" else [*lines, last]))
            told |= told_in(path)
        found = check_topic(directory / "topic", told)
        assert all(print_ == message.metadata["bits"] for message, print_ in found)
        writers = {(message.epoch, message.metadata["racer"]) for message, _ in found}
        assert len(writers) == len(dict(writers))
        assert fenced == 1 if number % 2 == 0 else fenced <= 1
        if number % 2 == 0:
            assert len(writers) == 1 and [message.version for message, _ in found] == [1, 2, 3, 4, 5]
