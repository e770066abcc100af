"""The trainer: GRPO on the batches that the workers sample, one step a batch, and each step's weights sent to them.

Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300): an answer's advantage is how much better it is
than the other answers to its problem. The weights that sampled a batch are some steps old and rounded to bf16, so the
probability ratio is taken against what the workers reported, and clipped.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from task import Settings, make_model
from torch import Tensor, nn
from transfer import SENDERS, Rollouts

from deltabus import DeltabusError

_CLIP = 0.2
_SHOWN = 10


@dataclass(frozen=True)
class Batch:
    """Answers with their problems, sampled with the weights of one step.

    Attributes:
        tokens: Problems and answers, one a row; the answers to one problem follow each other.
        logprobs: Of each token of the answers, as it was sampled.
        rewards: Of each answer.
        waited: Seconds that each worker waited for the weights, or took to load them.
    """

    tokens: Tensor
    logprobs: Tensor
    rewards: Tensor
    waited: list[float]

    @classmethod
    def of(cls, parts: list[bytes], *, weights: int) -> "Batch":
        """Return what the workers sent, put together in their order.

        Raises:
            SystemExit: If it was sampled with the weights of another step.
        """
        tensors = [load(part) for part in parts]
        for worker, part in enumerate(tensors):
            if part["weights"].item() != weights:
                raise SystemExit(f"worker-{worker} sampled with step {part['weights'].item()}, not with step {weights}")
        joined = {name: torch.cat([part[name] for part in tensors]) for name in ("tokens", "logprobs", "rewards")}
        return cls(**joined, waited=[part["waited"].item() for part in tensors])


def improve(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, *, group: int) -> float:
    """Do one step of GRPO, and return its loss."""
    rewards = batch.rewards.view(-1, group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    answers = batch.tokens[:, -batch.logprobs.shape[1] :]
    logits = model(batch.tokens[:, :-1]).logits[:, -answers.shape[1] :]
    logprobs = logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - batch.logprobs).exp()
    gain = torch.minimum(ratio * advantages.view(-1, 1), ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages.view(-1, 1))
    loss = -gain.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


async def train(settings: Settings) -> dict[str, Any]:
    """Train to the end, and return what to say about it."""
    model = make_model(settings)
    model.load_state_dict(load_file(settings.base))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    steps: list[dict[str, Any]] = []
    async with SENDERS[settings.sync](settings) as sender, Rollouts(settings) as rollouts:
        await sender.send(0, model)
        for number in range(settings.steps):
            began = time.perf_counter()
            batch = Batch.of(await rollouts.take(number), weights=settings.weights_for(number))
            came = time.perf_counter()
            # In a thread, so that uploads go on meanwhile.
            loss = await asyncio.to_thread(improve, model, optimizer, batch, group=settings.group)
            trained = time.perf_counter()
            await sender.send(number + 1, model)
            sent = time.perf_counter()
            steps.append(
                {
                    "reward": batch.rewards.mean().item(),
                    "loss": loss,
                    "workers_waited": batch.waited,
                    "waited": came - began,
                    "trained": trained - came,
                    "sending": sent - trained,
                }
            )
            if number % _SHOWN == 0 or number == settings.steps - 1:
                print(f"{settings.sync:>10}: batch {number:3}, reward {steps[-1]['reward']:.3f}", flush=True)
        sizes = [asdict(each) for each in await sender.finish()]
    return {"steps": steps, "sent": sizes, "masters": _hash_of(model)}


def _hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def run(settings: Settings, results: Path) -> None:
    """Train, and write what became of it to a JSON file.

    Raises:
        SystemExit: If that fails, with the reason.
    """
    torch.set_num_threads(1)  # the same sums in the same order, whatever else runs
    try:
        results.write_text(json.dumps(asyncio.run(train(settings))))
    except DeltabusError as error:
        sys.exit(f"trainer: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Settings.add_options(parser)
    parser.add_argument("--results", type=Path, default=Path("results.json"), help="where to write what became of it")
    options = parser.parse_args()
    run(Settings.of(options), options.results)
