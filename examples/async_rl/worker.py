"""A rollout worker: follows the weights, answers problems with those of the step that is due, and hands answers in."""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from choice import choose_engine
from engines import Engine, open_engine
from safetensors.torch import save
from task import Settings, make_prompts, reward_of
from torch import Tensor
from transfer import Rollouts

from deltabus import DeltabusError


def answer(engine: Engine, settings: Settings, seed: int) -> dict[str, Tensor]:
    """Sample several answers to each of some problems, and return them with their rewards."""
    torch.manual_seed(seed)
    prompts = make_prompts(settings, settings.prompts, torch.default_generator).repeat_interleave(settings.group, dim=0)
    answers, logprobs = engine.sample(prompts, seed)
    return {
        "tokens": torch.cat([prompts, answers], dim=1),
        "logprobs": logprobs,
        "rewards": reward_of(prompts, answers),
    }


async def work(settings: Settings, index: int, directory: Path) -> None:
    """Do this worker's part of each batch."""
    async with open_engine(settings, directory) as engine, Rollouts(settings) as rollouts:
        for batch in range(settings.steps):
            began = time.perf_counter()
            step = settings.weights_for(batch)
            await engine.load(step)
            waited = time.perf_counter() - began
            # In a thread, so that the next weights come in meanwhile.
            part = await asyncio.to_thread(answer, engine, settings, settings.seed_of(batch, index))
            part |= {"weights": torch.tensor(step), "waited": torch.tensor(waited, dtype=torch.float64)}
            await rollouts.send(index, batch, save(part))


def run(settings: Settings, index: int, directory: Path) -> None:
    """Work until the last batch is handed in; files of the engine's own lie in the directory meanwhile.

    Raises:
        SystemExit: If that fails, with the reason.
    """
    torch.set_num_threads(1)  # the same sums in the same order, whatever else runs
    try:
        asyncio.run(work(settings, index, directory))
    except DeltabusError as error:
        sys.exit(f"worker-{index}: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    Settings.add_options(parser)
    parser.add_argument("--index", type=int, default=0, help="which worker this is, from 0")
    options = parser.parse_args()
    settings = Settings.of(options)
    settings = replace(settings, engine=choose_engine(settings.engine))
    with tempfile.TemporaryDirectory() as directory:
        run(settings, options.index, Path(directory))
