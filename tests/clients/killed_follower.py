"""Followers that are killed: `OPENBLAS_NUM_THREADS=1 python killed_follower.py DIRECTORY`.

A directory holds version 1 of a topic, and the topic has version 2. Before each call into the system that changes a
name, or forces something to disk, one follower dies; then another one goes on. A line tells what became of it.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from deltabus import Publisher
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.following import follow

CALLS = ("fsync", "rename", "link", "symlink", "mkdir", "rmdir")
THREE = {name: torch.arange(40, dtype=torch.bfloat16) + place for place, name in enumerate("abc")}


def changed(state, name):
    """The state with ten elements of a tensor changed, where there is such a tensor."""
    if name not in state:
        return state
    tensor = state[name].clone()
    tensor.view(-1)[:10] += 1
    return {**state, name: tensor}


def versions_in(out):
    """Which of the states 1 and 2 each version holds, bit for bit; 0 is neither."""
    states = {1: THREE, 2: changed(THREE, "b")}

    def of(directory):
        held = load_checkpoint(directory)
        same = (n for n, state in states.items() if all(torch.equal(held[k], v) for k, v in state.items()))
        return next(same, 0)

    return {path.name: of(path) for path in out.iterdir() if not path.name.startswith(".")}


def checked(death):
    """Whether what a killed follower left is whole, and what the next one made of it as it should be."""
    before, after = death["before"], death["after"]
    assert 0 not in before.values() and before["current"] == death["left"], death
    assert after == {"2": 2, "current": 2} and not death["hidden"], death
    return True


def strike(number):
    """Let a call that is due die; calls are counted from 0."""
    count = itertools.count()

    def dying(name, function):
        def call(*arguments, **options):
            if next(count) == number:
                os.write(1, f"{name}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, dying(name, getattr(os, name)))


def advance(topic, out, number=-1):
    strike(number)
    for _ in follow(topic, out, keep=1, shard_bytes=1, once=True, idle_timeout=30):
        pass


def main(root):
    from killed_trainer import fork, warm_up, was_killed

    warm_up()
    topic, first, out = root / "topic", root / "first", root / "out"
    for version, state in ((1, THREE), (2, changed(THREE, "b"))):
        with Publisher(topic, have=THREE, anchor="never", workers=1) as publisher:
            publisher.publish(version, state).result(30)
        if version == 1:
            assert not was_killed(fork(lambda: advance(topic, first)))
    for number in itertools.count():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(first, out, symlinks=True)
        read, write = os.pipe()

        def die(number=number, write=write):
            os.dup2(write, 1)
            advance(topic, out, number)

        killed = was_killed(fork(die))
        os.close(write)
        with os.fdopen(read) as told:
            call = told.read().strip()
        if not killed:
            break
        before = versions_in(out)
        assert not was_killed(fork(lambda: advance(topic, out)))
        hidden = [path.name for path in out.iterdir() if path.name.startswith(".") and path.name != ".lock"]
        death = {"call": call, "before": before, "after": versions_in(out), "hidden": hidden, "left": before["current"]}
        print(json.dumps(death), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
