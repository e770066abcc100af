"""What workers sample with: transformers, or vLLM, which follows the weights by itself (`vllm_engine.py`).

Both are opened with `async with`, and look the same from outside. What they sample is a function of the weights, the
prompts and the seed alone.
"""

from pathlib import Path
from typing import Protocol, Self

import torch
from task import Settings, make_model
from torch import Tensor
from transfer import RECEIVERS
from transformers import GenerationConfig


class Engine(Protocol):
    """What a worker needs of an engine."""

    async def __aenter__(self) -> Self:
        """Get it ready to load weights."""

    async def __aexit__(self, *error: object) -> None:
        """Let go of all that it holds."""

    async def load(self, step: int) -> None:
        """Wait for the weights of just this step, and sample with them from now on."""

    def sample(self, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Answer prompts, one a row, and return the answers' tokens and their log-probabilities.

        Args:
            prompts: Their tokens.
            seed: What answers are drawn with, unless from torch's own generator, which was seeded with it.
        """


class TransformersEngine:
    """Samples with `generate`, from weights that a receiver brings."""

    def __init__(self, settings: Settings) -> None:
        self._digits = settings.digits
        self._model = make_model(settings).eval()
        self._weights = {name: tensor.bfloat16() for name, tensor in self._model.state_dict().items()}
        self._receiver = RECEIVERS[settings.sync](settings)

    async def __aenter__(self) -> Self:
        await self._receiver.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._receiver.__aexit__(*error)

    async def load(self, step: int) -> None:
        """Wait for the weights of just this step, and sample with them from now on."""
        await self._receiver.receive(step, self._weights)
        self._model.load_state_dict(self._weights)  # as float32, in which most CPUs are several times as fast

    @torch.inference_mode()
    def sample(self, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Answer prompts with what torch's own generator draws."""
        how = GenerationConfig(
            do_sample=True,
            max_new_tokens=self._digits,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        sampled = self._model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=how)
        answers = sampled.sequences[:, prompts.shape[1] :]
        logprobs = torch.stack(sampled.logits, dim=1).float().log_softmax(-1)
        return answers, logprobs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def open_engine(settings: Settings, directory: Path) -> Engine:
    """Return the engine that the settings name, for use as `async with`; its files lie in a directory of its own."""
    if settings.engine == "vllm":
        from vllm_engine import VllmEngine  # here, because it is not everywhere

        return VllmEngine(settings, directory)
    return TransformersEngine(settings)
