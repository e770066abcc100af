"""The parts of the fault scenario that are processes of their own, and the model that they train and follow.

A trainer publishes steps, a reader follows every version and keeps what it holds in a file, a racer publishes a history
of its own. Each tells on standard output, line by line, what happened, and `done` when it ended well.

`OPENBLAS_NUM_THREADS=1 python scenario.py` is the process that they are forked from, because to import and compile
everything takes it seconds: it has a socket as standard input, takes a part, its arguments as JSON, and the child's
standard streams, and answers with the child's id.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import FencedError
from deltabus.transports import open_transport

if __package__:
    from .support import fingerprint, train, wait_until
else:
    from support import fingerprint, train, wait_until

LIMIT = 90.0
"""Seconds without any progress after which something is wrong; a server may take 20 to come back."""

_SHARE = 0.01
_MOST = 1 << 16


def new_model(seed=0):
    """A model of 361 thousand parameters, two of its tensors tied."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict(
        {
            "inner": nn.Linear(300, 600),
            "norm": nn.LayerNorm(600),
            "outer": nn.Linear(600, 300, bias=False),
            "tied": nn.Linear(600, 300, bias=False),
        }
    ).bfloat16()
    model["tied"].weight = model["outer"].weight
    model.register_buffer("counter", torch.zeros((), dtype=torch.int64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def advance(model, step):
    """Do one step of training, the same in every process."""
    train(model, step, _SHARE)


def model_at(step):
    """The model as it is after a step; before the first one for -1."""
    model = new_model()
    for earlier in range(step + 1):
        advance(model, earlier)
    return model


def tell(*words):
    print(*words, flush=True)


def run_trainer(url, first, last):
    """Publish steps; the first one of all waits until the word comes that readers have seen it."""
    model = model_at(first - 1)
    have = model if first else None
    with Publisher(url, have=have, on_busy="wait", workers=1, timeout=LIMIT) as publisher:
        for step in range(first, last + 1):
            advance(model, step)
            published = publisher.publish(step, model).result(LIMIT)
            tell(published.version, published.step, fingerprint(model))
            if step == 0:
                sys.stdin.readline()


def run_reader(url, saved, last):
    path = Path(saved)
    model, have = new_model(99), None
    if path.exists():
        with safe_open(path, "pt") as file:
            model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            tell("held", file.metadata()["version"])
        have = model
    for update in Subscriber(url, have=have, latest=False, idle_timeout=LIMIT, workers=1).sync():
        update.apply(model)
        # A clone of each, because the file takes no tensors that share their memory.
        held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(held, path.with_suffix(".new"), {"version": str(update.version)})
        path.with_suffix(".new").replace(path)
        tell("whole" if update.whole else "onward", update.version, update.step, fingerprint(model))
        if update.step == last:
            return


def run_racer(url, name, count):
    """Publish when the word comes, unless somebody else is faster."""
    model = new_model(sum(name.encode()))
    try:
        with Publisher(url, on_busy="wait", workers=1, timeout=LIMIT) as publisher:
            tell("ready")
            sys.stdin.readline()
            for step in range(count):
                advance(model, step)
                published = publisher.publish(step, model, metadata={"racer": name}).result(LIMIT)
                tell(published.version, published.step, fingerprint(model))
    except FencedError as error:
        tell("fenced", error)


PARTS = {"trainer": run_trainer, "reader": run_reader, "racer": run_racer}


def warm_up():
    """Load and compile what the parts use, and leave no thread behind, so that children may be forked."""
    torch.set_num_threads(1)
    for url in ("s3://bucket/run", "nats://host/run"):
        open_transport(url)  # connects to nothing; that of the Hub brings a thread along
    model = new_model()
    with tempfile.TemporaryDirectory() as directory:
        with Publisher(directory, anchor=1, workers=1) as publisher:
            for step in range(3):
                advance(model, step)
                publisher.publish(step, model).result(LIMIT)
        for update in Subscriber(directory, have=new_model(1), idle_timeout=LIMIT, workers=1).sync():
            update.apply(model)
            break
    wait_until(lambda: len(os.listdir("/proc/self/task")) == 1)  # noqa: PTH208


def play(part, arguments, streams):
    """Play a part in a child process, and return the child's id."""
    process = os.fork()
    if process:
        return process
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        logging.basicConfig(level=logging.INFO)
        PARTS[part](*arguments)
        tell("done")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main():
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: they tell how they ended
    with socket.socket(fileno=os.dup(0)) as orders:
        orders.sendall(b"ready\n")
        while True:
            order, streams, *_ = socket.recv_fds(orders, _MOST, 3)
            if not order:
                return
            part, *arguments = json.loads(order)
            orders.sendall(b"%d\n" % play(part, arguments, streams))
            for stream in streams:
                os.close(stream)


if __name__ == "__main__":
    main()
