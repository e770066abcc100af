"""What is measured: pairs of consecutive states, real and made up, all in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.shadow import Shadow
from deltabus.codecs.state import collect

__all__ = [
    "QWEN3_LAYERS",
    "Line",
    "Pair",
    "Run",
    "line_of",
    "qwen3",
    "real_runs",
    "shadow_over",
    "synthetic",
    "tensors",
]

Line = npt.NDArray[np.uint16]
"""The bits of all elements of a state, tensor after tensor in the schema's order."""

QWEN3_LAYERS = 28
_VOCABULARY, _HIDDEN, _INTERMEDIATE, _QUERIES, _KEYS, _HEAD = 151_936, 1024, 3072, 16, 8, 128
_CHUNK = 1 << 22
_CALIBRATION = 1 << 21


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive states.

    Attributes:
        label: What it is called in tables.
        schema: Of both.
        old: The earlier one.
        new: The later one.
    """

    label: str
    schema: Schema
    old: Line
    new: Line

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return sum(int(np.count_nonzero(self.old[s] != self.new[s])) for s in chunks(self.old.size))

    def arrays(self, line: Line) -> Iterator[Line]:
        """Yield a line's tensors, in their shapes, as views."""
        start = 0
        for spec in self.schema.tensors:
            yield line[start : start + spec.size].reshape(spec.shape)
            start += spec.size


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
            yield Pair(f"{self.label}, step {number}", self.schema, old, new)
            old = new


def chunks(size: int) -> Iterator[slice]:
    """Yield slices that cover `size` elements, small enough that no copy of a model is ever made."""
    for start in range(0, size, _CHUNK):
        yield slice(start, min(size, start + _CHUNK))


def tensors(schema: Schema, line: Line) -> dict[str, Tensor]:
    """Return a line's tensors by name; they share its memory."""
    flat = torch.from_numpy(line.view(np.int16)).view(torch.bfloat16)
    found, start = {}, 0
    for spec in schema.tensors:
        found[spec.name] = flat[start : start + spec.size].view(spec.shape)
        start += spec.size
    return found


def shadow_over(schema: Schema, line: Line) -> Shadow:
    """Return a shadow that shares the line's memory."""
    found, start = [], 0
    for segment in schema.segments:
        found.append(line[start : start + segment.size])
        start += segment.size
    return Shadow(schema, list(found))


def line_of(schema: Schema, state: Mapping[str, Tensor]) -> Line:
    """Return the bits of a bf16 state, copied."""
    return np.concatenate(
        [state[spec.name].view(torch.int16).numpy().view(np.uint16).ravel() for spec in schema.tensors]
    )


def qwen3(layers: int = QWEN3_LAYERS, *, vocabulary: int = _VOCABULARY, hidden: int = _HIDDEN) -> Schema:
    """Return the schema of Qwen3-0.6B in bf16, or of one with fewer or narrower layers; its head is tied.

    Shapes: `config.json` of Qwen/Qwen3-0.6B (151936 words, width 1024, 28 layers, 16 query and 8 key heads of 128).

    >>> qwen3().total
    596049920
    """
    wide = _INTERMEDIATE * hidden // _HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (_QUERIES * _HEAD, hidden),
            f"{at}self_attn.k_proj.weight": (_KEYS * _HEAD, hidden),
            f"{at}self_attn.v_proj.weight": (_KEYS * _HEAD, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, _QUERIES * _HEAD),
            f"{at}self_attn.q_norm.weight": (_HEAD,),
            f"{at}self_attn.k_norm.weight": (_HEAD,),
            f"{at}mlp.gate_proj.weight": (wide, hidden),
            f"{at}mlp.up_proj.weight": (wide, hidden),
            f"{at}mlp.down_proj.weight": (hidden, wide),
        }
    return Schema.of(TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in shapes.items())


def synthetic(schema: Schema, density: float, *, seed: int = 0, workers: int = 2) -> Pair:
    """Return a made-up step: Gaussian weights with a scale for each tensor, in float32, moved like Adam moves them.

    An Adam update has about the same size for every weight, whatever the weight's own size; here it is Gaussian. Its
    scale is chosen so that the wanted share of the bf16 values changes.

    Args:
        schema: What to fill.
        density: The share of elements that change, to a few percent.
        seed: Of everything random.
        workers: Threads that make numbers.
    """
    scales = np.random.default_rng([seed, 1])
    # Norms lie around 1, matrices around 0; widths of real ones are spread about as widely.
    means = [1.0 if len(spec.shape) == 1 else 0.0 for spec in schema.tensors]
    widths = [0.1 if mean else float(0.03 * np.exp(0.4 * scales.standard_normal())) for mean in means]
    size = _step_size(schema, means, widths, density, seed)
    old, new = np.empty(schema.total, np.uint16), np.empty(schema.total, np.uint16)

    def fill(job: tuple[int, int, slice]) -> None:
        number, tensor, place = job
        master, moved = _masters(np.random.default_rng([seed, 2, number]), place.stop - place.start, size)
        old[place], new[place] = _rounded(master, moved, means[tensor], widths[tensor])

    jobs: list[tuple[int, int, slice]] = []
    start = 0
    for tensor, spec in enumerate(schema.tensors):
        for part in chunks(spec.size):
            jobs.append((len(jobs), tensor, slice(start + part.start, start + part.stop)))
        start += spec.size
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(fill, jobs):
            pass
    return Pair(f"{density:.2%}", schema, old, new)


_Floats = npt.NDArray[np.float32]


def _masters(random: np.random.Generator, count: int, size: float) -> tuple[_Floats, _Floats]:
    return random.standard_normal(count, np.float32), random.standard_normal(count, np.float32) * np.float32(size)


def _rounded(master: _Floats, moved: _Floats, mean: float, width: float) -> tuple[Line, Line]:
    before = torch.from_numpy(master * np.float32(width) + np.float32(mean))
    after = before + torch.from_numpy(moved)
    return _bits(before), _bits(after)


def _bits(values: Tensor) -> Line:
    bits: Line = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return bits


def _step_size(schema: Schema, means: list[float], widths: list[float], density: float, seed: int) -> float:
    """Find the step's scale at which the wanted share of a sample changes; the share grows with the scale."""
    random = np.random.default_rng([seed, 3])
    counts = [max(1, _CALIBRATION * spec.size // schema.total) for spec in schema.tensors]
    sample = [_masters(random, count, 1.0) for count in counts]
    low, high = 1e-12, 1.0
    for _ in range(30):
        size = math.sqrt(low * high)
        changed = 0
        for (master, moved), mean, width in zip(sample, means, widths, strict=True):
            before, after = _rounded(master, moved * np.float32(size), mean, width)
            changed += int(np.count_nonzero(before != after))
        low, high = (size, high) if changed < density * sum(counts) else (low, size)
    return math.sqrt(low * high)


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
