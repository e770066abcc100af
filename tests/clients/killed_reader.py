"""Readers that are killed: `OPENBLAS_NUM_THREADS=1 python killed_reader.py TOPIC STATE`.

The weights of a reader lie in a file that is mapped into memory, as an engine's may lie in shared memory: they outlive
the reader, as far as they were written. Before each call by which a reader downloads, applies a delta, or loads a whole
state, one reader dies; then another one goes on from what the memory holds. STATE is the checkpoint of an old version
of the topic, which readers hold at first where they hold anything.
"""

import itertools
import json
import mmap
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from killed_trainer import fork, warm_up, was_killed
from support import LIMIT, fingerprint, small_model

from deltabus import Subscriber
from deltabus.codecs import apply
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.patches import _HostPatch
from deltabus.transports.file import FileTransport

PLACES = {"download": (FileTransport, "get"), "apply": (_HostPatch, "write"), "load": (apply, "_overwrite")}


def mapped(path):
    """The tensors of the model in a file that is mapped into memory."""
    tensors, offset, known = {}, 0, {}
    model = small_model()
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with path.open("a+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: -item[1].element_size()):
        if tensor.data_ptr() not in known:
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            known[tensor.data_ptr()] = flat.view(tensor.shape)
            offset += tensor.nbytes
        tensors[name] = known[tensor.data_ptr()]
    return tensors


def state_of(path):
    model = small_model()
    model.load_state_dict(mapped(path))
    return fingerprint(model)


def dying(function, number):
    """A function that kills the process when it is called for a certain time, counted from 0."""
    calls = itertools.count()

    def call(*arguments, **options):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


def read(topic, path, report, strike=lambda: None):
    """Bring the memory to the topic's newest state, and tell how."""
    strike()
    tensors = mapped(path)
    for update in Subscriber(topic, have=tensors, workers=1, idle_timeout=LIMIT).sync():
        update.apply(tensors)
        report.write_text(json.dumps({"whole": update.whole, "base": str(update.base), "version": update.version}))
        return


def kill(topic, state, directory, *, place, holding, number):
    """Kill one reader, let another go on, and tell what became of the memory; None if the first one survived."""
    path, report = directory / "memory", directory / "report"
    path.unlink(missing_ok=True)
    for name, tensor in mapped(path).items():
        tensor.copy_(state[name]) if holding else tensor.zero_()
    owner, name = PLACES[place]
    strike = partial(setattr, owner, name, dying(getattr(owner, name), number))
    if not was_killed(fork(partial(read, topic, path, report, strike))):
        return None
    left = state_of(path)
    assert not was_killed(fork(partial(read, topic, path, report)))
    return {**json.loads(report.read_text()), "left": left, "reached": state_of(path)}


def main(topic, checkpoint):
    state = load_checkpoint(checkpoint)
    for place, holding in (("download", True), ("download", False), ("apply", True), ("load", False)):
        number = 0
        while found := kill(topic, state, checkpoint.parent, place=place, holding=holding, number=number):
            print(json.dumps({"place": place, "holding": holding, **found}), flush=True)
            number += 1


if __name__ == "__main__":
    warm_up()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
