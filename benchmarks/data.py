"""What is measured beside made-up states: real training runs, in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from deltabus.bench.states import Pair, Weights
from deltabus.codecs.schema import Schema
from deltabus.codecs.state import collect

__all__ = ["Line", "Run", "line_of", "real_runs"]

Line = npt.NDArray[np.uint16]
"""The bits of all elements of a state, tensor after tensor in the schema's order."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive states of a real training run.

    Attributes:
        label: What it is called in tables.
        schema: Of all states.
        start: The first state.
        steps: Positions and new bits of each step, counted in the line.
    """

    label: str
    schema: Schema
    start: Line
    steps: tuple[tuple[npt.NDArray[np.uint32], Line], ...]

    def pairs(self) -> Iterator[Pair]:
        """Yield each step with the state before and after it."""
        old = self.start
        for number, (positions, bits) in enumerate(self.steps, 1):
            new = old.copy()
            new[positions] = bits
            yield Pair(f"{self.label}, step {number}", *(Weights(self.schema, (line,)) for line in (old, new)))
            old = new


def line_of(schema: Schema, state: Mapping[str, Tensor]) -> Line:
    """Return the bits of a bf16 state, copied."""
    return np.concatenate(
        [state[spec.name].view(torch.int16).numpy().view(np.uint16).ravel() for spec in schema.tensors]
    )


def real_runs(cache: Path, rates: tuple[float, ...], *, steps: int, log: Callable[[str], object]) -> Iterator[Run]:
    """Yield a fine-tuning run of the demo's model for each learning rate; made once, then read from `cache`.

    float32 masters, AdamW, unsupervised SimCSE, published as bf16: see `deltabus.demo.training`.
    """
    for rate in rates:
        path = cache / f"finetuning-{rate:g}-{steps}.safetensors"
        if not path.exists():
            log(f"fine-tuning the demo's model at learning rate {rate:g} for {steps} steps; kept in {path.parent}")
            cache.mkdir(parents=True, exist_ok=True)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # the same sums in the same order, however many cores there are
            try:
                kept = _fine_tune(rate, steps)
            finally:
                torch.set_num_threads(threads)
            partial = path.with_name(f"{path.name}.partial")
            save_file(kept, partial)
            partial.replace(path)
        kept = load_file(path)
        moves = tuple((kept[f"{n}.positions"], kept[f"{n}.bits"]) for n in range(steps))
        yield Run(f"lr {rate:g}", Schema.decode(kept["schema"].tobytes()), kept["start"], moves)


def _fine_tune(rate: float, steps: int) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    from deltabus.demo.training import FineTuning, as_bf16, load_pretrained, read_sentences

    training = FineTuning(load_pretrained(), read_sentences(), learning_rate=rate)

    def floats() -> dict[str, Tensor]:
        return {name: tensor for name, tensor in as_bf16(training.model).items() if tensor.is_floating_point()}

    schema = collect(floats()).schema
    held = line_of(schema, floats())
    kept: dict[str, npt.NDArray[np.unsignedinteger]] = {
        "schema": np.frombuffer(schema.encode(), np.uint8),
        "start": held,
    }
    for number in range(steps):
        training.advance()
        now = line_of(schema, floats())
        positions = np.flatnonzero(held != now).astype(np.uint32)
        kept |= {f"{number}.positions": positions, f"{number}.bits": now[positions]}
        held = now
    return kept
