"""One of two ranks of an engine that take updates together: `python engine_ranks.py DIRECTORY RANK`.

The directory has `base.pt`, a checkpoint, and `update-1.pt` to `update-3.pt`, what `named_patches` returned of the
updates that follow. The first two are taken after tries that fail in one of the ranks; while the last is written, rank
1 dies, and rank 0 does not take it. What the ranks hold in the end is written to `rank-0.pt` and `rank-1.pt`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from engines import bits, fresh

from deltabus.bus.errors import DivergedError, EngineError
from deltabus.integrations.live_weights import StagedWrite
from deltabus.integrations.sglang import load_together

LIMIT = timedelta(seconds=60)


@contextmanager
def drifted(model: torch.nn.Module) -> Iterator[type[Exception]]:
    """Somebody else wrote to the weights."""
    memory = model.qkv.data.view(torch.int16)
    memory ^= 1
    yield DivergedError
    memory ^= 1


@contextmanager
def broken(model: torch.nn.Module) -> Iterator[type[Exception]]:
    """Writing fails when all is written; taking it back works."""
    put, struck = StagedWrite._put, []

    def failing(staged, values):
        put(staged, values)
        if not struck:
            struck.append(True)
            raise OSError("a device failed")

    StagedWrite._put = failing
    yield OSError
    StagedWrite._put = put


@contextmanager
def sound(model: torch.nn.Module) -> Iterator[type[Exception]]:
    """All is well here, and not in the other rank."""
    yield EngineError


def main(directory: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2, timeout=LIMIT)
    model = fresh(torch.load(directory / "base.pt"), rank=rank, ranks=2)
    for number in (1, 2):
        update = torch.load(directory / f"update-{number}.pt")
        for fault in (drifted, broken):
            for failing in (0, 1):
                with (fault if failing == rank else sound)(model) as expected:
                    before = bits(model)
                    try:
                        load_together(model, update, dist.group.WORLD)
                    except expected as error:
                        assert expected is not EngineError or f"rank {failing} of the engine" in str(error), error
                    else:
                        raise AssertionError("the update was taken")
                    assert bits(model) == before
        load_together(model, update, dist.group.WORLD)
    torch.save(bits(model), directory / f"rank-{rank}.pt")
    if rank == 1:
        StagedWrite._put = lambda *_: os._exit(0)
    try:
        load_together(model, torch.load(directory / "update-3.pt"), dist.group.WORLD)
    except EngineError as error:
        assert "could not tell each other" in str(error), error
    else:
        raise AssertionError("the update was taken without the other rank")
    torch.save(bits(model), directory / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
