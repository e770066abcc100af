"""Sharded trainers under `torchrun`: each rank publishes its own part, and a follower without ranks has the whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltabus import Subscriber
from deltabus.codecs.state import as_integers

pytestmark = pytest.mark.timeout(400)
SCRIPT = Path(__file__).with_name("sharded_trainer.py")
LIMIT = 180


@contextlib.contextmanager
def torchrun(ranks: int, directory: Path, *runs: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, str(directory), *runs], env=environment) as job:
        try:
            yield job
        finally:
            job.kill()


async def follow(place: Path, last: int) -> list[tuple[int, int]]:
    """Apply every update up to a step, comparing bits; return each one's step and number of writers."""
    model: dict[str, torch.Tensor] = {}
    found = []
    async with Subscriber(place / "topic", latest=False, workers=1) as subscriber:
        async for update in subscriber:
            expected = load_file(place / f"{update.step}.safetensors")
            model = model or {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            update.apply(model)
            assert sorted(model) == sorted(expected)
            wrong = [n for n in model if not torch.equal(as_integers(model[n]), as_integers(expected[n]))]
            assert wrong == []
            # No element is published twice, and none left out; tied weights count once.
            tied = expected["embed.weight"].numel() if "embed.weight" in expected else 0
            assert update.total == sum(t.numel() for t in expected.values()) - tied
            found.append((update.step, len(update.state)))
            if update.step == last:
                break
    return found


async def test_a_follower_has_the_whole_of_each_step(tmp_path):
    last_steps = {"resharded": 5, "hybrid": 2, "switched": 4, "told": 3, "experts": 0}
    for name in last_steps:
        (tmp_path / name).mkdir()
    jobs = [
        (4, "fsdp:1:3:resharded", "hsdp:1:2:hybrid"),
        (
            2,
            "fsdp:4:5:resharded",
            "tp:1:2:switched",
            "ddp:3:4:switched",
            "follow-tp:5:5:resharded",
            "follow-fsdp:4:4:switched",
            "callback:1:3:told",
            "experts:0:0:experts",
        ),
    ]
    async with asyncio.timeout(LIMIT):
        following = [asyncio.create_task(follow(tmp_path / name, last)) for name, last in last_steps.items()]
        for ranks, *runs in jobs:
            with torchrun(ranks, tmp_path, *runs) as job:
                assert await asyncio.to_thread(job.wait, LIMIT) == 0
        resharded, hybrid, switched, told, experts = await asyncio.gather(*following)
    # A newcomer begins with the newest step that is there when it comes, and then misses none.
    assert resharded == [(1, 4), (2, 4), (3, 4), (4, 2), (5, 2)][-len(resharded) :]
    assert hybrid == [(1, 4), (2, 4)][-len(hybrid) :]
    assert switched == [(1, 2), (2, 2), (3, 2), (4, 2)][-len(switched) :]
    assert told == [(1, 2), (2, 2), (3, 2)][-len(told) :]
    assert experts == [(0, 2)]
    assert len(resharded) > 2
