"""SGLang's hook gets a model and named tensors, in each worker, and writes all of an update or nothing."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import CorruptPayloadError, DivergedError, UsageError
from deltabus.integrations.sglang import LOAD_FORMAT, load_patches, named_patches

from .engines import bits, checkpoint, fresh, train


async def test_patches_travel_through_the_hook(tmp_path):
    module, _, name = LOAD_FORMAT.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is load_patches
    assert list(inspect.signature(load_patches).parameters) == ["model", "named_tensors"]
    tensors, url = checkpoint(), (tmp_path / "topic").as_uri()
    base = {name: tensor.clone() for name, tensor in tensors.items()}
    engines = [fresh(base, rank=rank, ranks=2) for rank in range(2)]
    drifted = fresh(base)
    with Publisher(url, on_busy="wait") as publisher:
        publisher.publish(0, tensors)
        publisher.flush()
        async with Subscriber(url, idle_timeout=110) as newcomer:
            with pytest.raises(UsageError, match="whole state"):
                named_patches(await anext(newcomer))
        async with Subscriber(url, have=base, latest=False, idle_timeout=110) as subscriber:
            for step in (1, 2):
                publisher.publish(step, train(tensors, step))
                update = await anext(subscriber)
                sent = named_patches(update)
                assert all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in sent)
                for engine in engines:
                    load_patches(engine, sent)
                update.mark_applied()
                assert [bits(engine) for engine in engines] == [
                    bits(fresh(tensors, rank=rank, ranks=2)) for rank in range(2)
                ]
                before = bits(drifted)
                if step == 2:
                    with pytest.raises(DivergedError):
                        load_patches(drifted, sent)
                    assert bits(drifted) == before
    with pytest.raises(CorruptPayloadError, match="named_patches"):
        load_patches(engines[0], [("model.norm.weight", torch.zeros(3))])
    moved = [(name, tensor + 10**6 if name.endswith("positions") else tensor) for name, tensor in sent]
    with pytest.raises(CorruptPayloadError, match="increase within"):
        load_patches(engines[0], moved)
    with pytest.raises(CorruptPayloadError, match="differ in length"):
        load_patches(engines[0], [(name, tensor[:1] if name.endswith("old") else tensor) for name, tensor in sent])


async def test_ranks_take_an_update_together_or_not_at_all(tmp_path):
    tensors, url = checkpoint(), (tmp_path / "topic").as_uri()
    base = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.save(base, tmp_path / "base.pt")
    with Publisher(url, on_busy="wait") as publisher:
        publisher.publish(0, tensors)
        publisher.flush()
        async with Subscriber(url, have=base, latest=False, idle_timeout=110) as subscriber:
            for step in (1, 2, 3):  # the last is not taken
                taken = {name: tensor.clone() for name, tensor in tensors.items()}
                publisher.publish(step, train(tensors, step))
                update = await anext(subscriber)
                torch.save(named_patches(update), tmp_path / f"update-{step}.pt")
                update.mark_applied()
    script = str(Path(__file__).with_name("engine_ranks.py"))
    ranks = [
        subprocess.Popen([sys.executable, script, str(tmp_path), str(rank)])  # noqa: ASYNC220 - nothing else runs
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in (0, 1):
        assert torch.load(tmp_path / f"rank-{rank}.pt") == bits(fresh(taken, rank=rank, ranks=2))
