"""What trainer and workers agree on: the settings, the problems with their reward, the model, and who samples what.

A problem is a row of digits, and its answer the same digits sorted: `31415=11345`. Anybody can verify an answer.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

EQUALS = 10
"""The token behind the digits, which are their own tokens."""
VOCABULARY = 11
_NOISE = 0.2
"""The share of digits in the pretraining text that are drawn at random, so that something is left to learn."""


@dataclass(frozen=True)
class Settings:
    """One run. Every process is given the same, and everything that is sampled follows from them.

    Attributes:
        url: Below which the run's topics lie.
        sync: How weights travel: `delta`, by deltabus, or `checkpoint`, whole.
        engine: What workers sample with: `transformers`, `vllm`, or `auto`, which `choice.py` decides.
        base: The file of the pretrained weights; the trainer alone reads it. Without one, `run.py` makes it.
        steps: Training steps.
        staleness: Batch t is sampled with the weights of step max(0, t - staleness).
        workers: Rollout workers.
        prompts: Problems that each worker takes for a batch.
        group: Answers to each problem, which are compared with each other.
        learning_rate: Of AdamW.
        seed: Of problems and answers.
        digits: The length of a problem.
        width: Of the model's hidden states.
        layers: Of the model.
        limit: The longest wait for another process, in seconds.
    """

    url: str = "async-rl"
    sync: str = "delta"
    engine: str = "auto"
    base: str = ""
    steps: int = 240
    staleness: int = 1
    workers: int = 2
    prompts: int = 8
    group: int = 8
    learning_rate: float = 2e-5
    seed: int = 0
    digits: int = 5
    width: int = 256
    layers: int = 2
    limit: float = 120.0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Let a command line take each setting."""
        for field in dataclasses.fields(cls):
            default = field.default
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(default), default=default)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return what was given on a command line.

        Raises:
            SystemExit: If a number makes no sense.
        """
        settings = cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})
        least = {"steps": 1, "staleness": 0, "workers": 1, "prompts": 1, "group": 2, "digits": 1, "layers": 1}
        for name, number in least.items():
            if getattr(settings, name) < number:
                raise SystemExit(f"--{name} {getattr(settings, name)} is less than {number}")
        for name, choices in {"sync": ("delta", "checkpoint"), "engine": ("auto", "transformers", "vllm")}.items():
            if getattr(settings, name) not in choices:
                raise SystemExit(f"--{name} {getattr(settings, name)} is not one of {', '.join(choices)}")
        if settings.width < 32 or settings.width % 32:
            raise SystemExit(f"--width {settings.width} is not a multiple of 32")
        return settings

    def weights_for(self, batch: int) -> int:
        """Return the step whose weights a batch is sampled with."""
        return max(0, batch - self.staleness)

    def seed_of(self, batch: int, worker: int) -> int:
        """Return the seed of a worker's part of a batch: the same in every run, whenever the worker gets to it."""
        return (self.seed * self.steps + batch) * self.workers + worker


def make_model(settings: Settings) -> Qwen3ForCausalLM:
    """Return a small causal model with random float32 weights."""
    torch.manual_seed(settings.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=settings.width,
            intermediate_size=3 * settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.width // 32,
            num_key_value_heads=settings.width // 32,
            head_dim=32,
            max_position_embeddings=2 * settings.digits + 1,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_prompts(settings: Settings, count: int, generator: torch.Generator) -> Tensor:
    """Return problems, one a row."""
    digits = torch.randint(10, (count, settings.digits), generator=generator)
    return torch.cat([digits, torch.full((count, 1), EQUALS)], dim=1)


def reward_of(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return 1 for each answer that is right, else 0."""
    return (prompts[:, :-1].sort(dim=1).values == answers).all(dim=1).float()


def pretrain(model: nn.Module, settings: Settings, steps: int, batch: int = 128) -> float:
    """Teach a model the form of the answers from text with many mistakes, and return the last loss."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
    loss = torch.zeros(())
    for _ in range(steps):
        prompts = make_prompts(settings, batch, generator)
        answers = prompts[:, :-1].sort(dim=1).values
        wrong = torch.rand(answers.shape, generator=generator) < _NOISE
        text = torch.where(wrong, torch.randint(10, answers.shape, generator=generator), answers)
        logits = model(torch.cat([prompts, text], dim=1)).logits[:, settings.digits : -1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss.item()
