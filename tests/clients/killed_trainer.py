"""Trainers that are killed: `OPENBLAS_NUM_THREADS=1 python killed_trainer.py calls|rounds|races DIRECTORY COUNT`.

Each trainer is a forked child of one process that has loaded and compiled everything once. What a trainer was told is
durable it notes in a file before it goes on: a line with the version, the step, and the fingerprint of the bits.
"""

import os
import random
import select
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
from support import LIMIT, fingerprint, small_model, train, wait_until
from system import deadly

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import FencedError
from deltabus.transports import atomic
from deltabus.transports.memory import drop_topic

LAST_STEPS = 6
RACERS = 2
RACE_STEPS = 5


def warm_up():
    """Compile and load what a trainer uses, and leave no thread behind, so that children may be forked."""
    torch.set_num_threads(1)
    model = small_model()
    with Publisher("memory://warm-up", anchor=1, workers=1) as publisher:
        for step in range(3):
            train(model, step)
            publisher.publish(step, model).result(LIMIT)
    for update in Subscriber("memory://warm-up", have=small_model(1), idle_timeout=LIMIT).sync():
        update.apply(model)
        break
    drop_topic("warm-up")


def fork(work):
    """Run a function in a child process, and return the child's id."""
    # A lock that a thread holds would stay locked in the child.
    wait_until(lambda: len(os.listdir("/proc/self/task")) == 1)  # noqa: PTH208
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return process


def has_ended(process, limit):
    """Wait for a child, up to a limit in seconds."""
    handle = os.pidfd_open(process)
    try:
        return bool(select.select([handle], [], [], limit)[0])
    finally:
        os.close(handle)


def was_killed(process):
    """Wait for a child that ends, and return whether it was killed; that one failed by itself ends all."""
    if not has_ended(process, LIMIT):
        os.kill(process, signal.SIGKILL)
        sys.exit("a child did not end")
    _, status = os.waitpid(process, 0)
    if status not in (0, signal.SIGKILL):
        sys.exit("a child failed by itself")
    return status == signal.SIGKILL


def note(file, *words):
    os.write(file, (" ".join(map(str, words)) + "\n").encode())


def opened(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def publish_steps(directory, steps, system):
    """Publish an anchor, deltas, and an anchor beside a delta, one after the other."""
    durable = opened(directory / "durable")
    atomic.os = system
    atomic.CHUNK = 4096
    model = small_model()
    with Publisher(directory / "topic", anchor=2, on_busy="wait", workers=1) as publisher:
        for step in range(steps):
            train(model, step)
            published = publisher.publish(step, model).result(LIMIT)
            note(durable, published.version, step, fingerprint(model))
            publisher.flush(LIMIT)


def kill_at_each_call(root, steps):
    """Kill one trainer before and one after each call into the system, and tell where."""
    number, survived = 0, False
    while not survived:
        for moment in ("before", "after"):
            directory = root / f"{number:03}-{moment}"
            directory.mkdir(parents=True)
            report = opened(directory / "call")
            survived = not was_killed(fork(partial(publish_steps, directory, steps, deadly(number, moment, report))))
            os.close(report)
            if survived:
                print("survived", directory.name, flush=True)
            else:
                print("killed", directory.name, (directory / "call").read_text(), flush=True)
        number += 1


def resume(topic, checkpoint, number):
    """Return the model and the step that a restarted trainer has: the topic's newest, or those of a checkpoint."""
    model = small_model()
    if number % 2 and checkpoint.exists():
        held = torch.load(checkpoint)
        model.load_state_dict(held["model"])
        return model, held["step"]
    if any((topic / "logs" / "trainer").glob("[0-9]*")):
        for update in Subscriber(topic, idle_timeout=LIMIT).sync():
            update.apply(model)
            return model, update.step
    return model, -1


def train_on(directory, number, seed, steps):
    """Publish from where a trainer can resume; checkpoints are rare, so that they are behind the topic."""
    durable = opened(directory / "durable")
    checkpoint = directory / "checkpoint"
    model, before = resume(directory / "topic", checkpoint, number)
    have = model if before >= 0 and number % 4 < 2 else None
    waiting = []
    with Publisher(directory / "topic", have=have, anchor=4, workers=1) as publisher:
        for step in range(before + 1, before + 1 + steps):
            train(model, seed + step)
            metadata = {"bits": fingerprint(model)}
            if step == before + steps:
                metadata["last"] = "yes"
            waiting.append(publisher.publish(step, model, metadata=metadata))
            while waiting and waiting[0].done():
                published = waiting.pop(0).result()
                note(durable, published.version, published.step, published.message.metadata["bits"])
            if step % 7 == 0:
                torch.save({"model": model.state_dict(), "step": step}, directory / "new")
                (directory / "new").replace(checkpoint)


def kill_at_random(root, rounds):
    """Kill and restart the trainer of one topic at random moments; the last one ends by itself."""
    generator = random.Random(20)
    for number in range(rounds):
        process = fork(partial(train_on, root, number, generator.randrange(1 << 40), 100_000))
        enough = size_of(root / "durable") + generator.randrange(1, 1500)
        end = time.monotonic() + LIMIT
        while size_of(root / "durable") < enough and not has_ended(process, 0.001):
            assert time.monotonic() < end, "the trainer publishes nothing"
        has_ended(process, generator.uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        assert was_killed(process)
        print("killed", number, size_of(root / "durable"), flush=True)
    assert not was_killed(fork(partial(train_on, root, rounds, generator.randrange(1 << 40), LAST_STEPS)))


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def take_part(directory, racer, early, ready, go):
    """Publish a history of one's own when the signal comes, unless somebody else is faster."""
    durable = opened(directory / f"durable-{racer}")
    model = small_model(racer)
    publisher = Publisher(directory / "topic", workers=1) if early else None
    os.write(ready, b"r")
    os.read(go, 1)
    try:
        with publisher or Publisher(directory / "topic", workers=1) as publisher:
            for step in range(RACE_STEPS):
                train(model, 100 * racer + step)
                metadata = {"bits": fingerprint(model), "racer": str(racer)}
                published = publisher.publish(step, model, metadata=metadata).result(LIMIT)
                note(durable, published.version, step, fingerprint(model))
    except FencedError:
        note(durable, "fenced")


def race(root, races):
    """Start trainers of one writer at once: in even races when all have opened the topic, in odd ones before."""
    for number in range(races):
        directory = root / str(number)
        directory.mkdir(parents=True)
        ready, go = os.pipe(), os.pipe()

        def run(racer, directory=directory, number=number, ready=ready, go=go):
            os.close(go[1])
            take_part(directory, racer, number % 2 == 0, ready[1], go[0])

        processes = [fork(partial(run, racer)) for racer in range(RACERS)]
        for _ in processes:
            assert select.select([ready[0]], [], [], LIMIT)[0], "a trainer does not start"
            os.read(ready[0], 1)
        os.close(go[1])
        for process in processes:
            assert not was_killed(process)
        for end in (*ready, go[0]):
            os.close(end)


if __name__ == "__main__":
    warm_up()
    work = {"calls": kill_at_each_call, "rounds": kill_at_random, "races": race}[sys.argv[1]]
    work(Path(sys.argv[2]), int(sys.argv[3]))
