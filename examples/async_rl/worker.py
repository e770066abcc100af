"""A rollout worker: follows the weights, answers problems with those of the step that is due, and hands answers in."""

import argparse
import asyncio
import sys
import time

import torch
from safetensors.torch import save
from task import Settings, make_model, make_prompts, reward_of
from torch import Tensor, nn
from transfer import RECEIVERS, Rollouts
from transformers import GenerationConfig

from deltabus import DeltabusError


@torch.inference_mode()
def answer(model: nn.Module, settings: Settings, seed: int) -> dict[str, Tensor]:
    """Sample several answers to each of some problems, and return them with their rewards."""
    torch.manual_seed(seed)
    prompts = make_prompts(settings, settings.prompts, torch.default_generator).repeat_interleave(settings.group, dim=0)
    how = GenerationConfig(
        do_sample=True,
        max_new_tokens=settings.digits,
        top_k=0,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sampled = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=how)
    answers = sampled.sequences[:, prompts.shape[1] :]
    logprobs = torch.stack(sampled.logits, dim=1).float().log_softmax(-1)
    return {
        "tokens": sampled.sequences,
        "logprobs": logprobs.gather(-1, answers.unsqueeze(-1)).squeeze(-1),
        "rewards": reward_of(prompts, answers),
    }


async def work(settings: Settings, index: int) -> None:
    """Do this worker's part of each batch."""
    model = make_model(settings).eval()
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    async with RECEIVERS[settings.sync](settings) as receiver, Rollouts(settings) as rollouts:
        for batch in range(settings.steps):
            began = time.perf_counter()
            step = settings.weights_for(batch)
            await receiver.receive(step, weights)
            model.load_state_dict(weights)  # as float32, in which most CPUs are several times as fast
            waited = time.perf_counter() - began
            # In a thread, so that the next weights come in meanwhile.
            part = await asyncio.to_thread(answer, model, settings, settings.seed_of(batch, index))
            part |= {"weights": torch.tensor(step), "waited": torch.tensor(waited, dtype=torch.float64)}
            await rollouts.send(index, batch, save(part))


def run(settings: Settings, index: int) -> None:
    """Work until the last batch is handed in.

    Raises:
        SystemExit: If that fails, with the reason.
    """
    torch.set_num_threads(1)  # the same sums in the same order, whatever else runs
    try:
        asyncio.run(work(settings, index))
    except DeltabusError as error:
        sys.exit(f"worker-{index}: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    Settings.add_options(parser)
    parser.add_argument("--index", type=int, default=0, help="which worker this is, from 0")
    options = parser.parse_args()
    run(Settings.of(options), options.index)
