"""Made-up states: the exact tensors of known models, filled with random weights that move as Adam moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltabus.codecs.schema import Schema, TensorSpec

from .states import Pair, Weights, chunks

__all__ = ["QWEN3_LAYERS", "SHAPES", "minilm", "qwen3", "synthetic", "tiny"]

QWEN3_LAYERS = 28
"""Layers of Qwen3-0.6B."""

_VOCABULARY, _HIDDEN, _INTERMEDIATE, _QUERIES, _KEYS, _HEAD = 151_936, 1024, 3072, 16, 8, 128
_CALIBRATION = 1 << 21

_Floats = npt.NDArray[np.float32]


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
    return _bf16(shapes)


def minilm() -> Schema:
    """Return the schema of all-MiniLM-L6-v2 in bf16.

    Shapes: `config.json` of sentence-transformers/all-MiniLM-L6-v2 (BERT: 30522 words, 512 places, width 384, 6 layers
    of 1536).

    >>> minilm().total
    22713216
    """
    width, wide = 384, 1536
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (30_522, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    linear = {"pooler.dense": (width, width)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(6):
        at = f"encoder.layer.{layer}."
        linear |= dict.fromkeys((f"{at}attention.self.{name}" for name in ("query", "key", "value")), (width, width))
        linear |= {
            f"{at}attention.output.dense": (width, width),
            f"{at}intermediate.dense": (wide, width),
            f"{at}output.dense": (width, wide),
        }
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return _bf16(shapes)


def tiny() -> Schema:
    """Return the schema of a model of one narrow layer, to see that something works; its figures mean little."""
    return qwen3(1, vocabulary=512, hidden=64)


SHAPES: Mapping[str, Callable[[], Schema]] = MappingProxyType({"qwen3-0.6b": qwen3, "minilm": minilm, "tiny": tiny})
"""The schemas that have a name."""


def _bf16(shapes: Mapping[str, tuple[int, ...]]) -> Schema:
    return Schema.of(TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in shapes.items())


def synthetic(schema: Schema, density: float, *, seed: int = 0, workers: int = 2) -> Pair:
    """Return a made-up step: Gaussian weights with a scale for each tensor, in float32, moved like Adam moves them.

    An Adam update has about the same size for every weight, whatever the weight's own size; here it is Gaussian. Its
    scale is chosen so that the wanted share of the bf16 values changes.

    Args:
        schema: What to fill; all in bf16.
        density: The share of elements that change, above 0 and to about a half.
        seed: Of everything random.
        workers: Threads that make numbers.
    """
    scales = np.random.default_rng([seed, 1])
    # Norms lie around 1, matrices around 0; widths of real ones are spread about as widely.
    means = [1.0 if len(spec.shape) == 1 else 0.0 for spec in schema.tensors]
    widths = [0.1 if mean else float(0.03 * np.exp(0.4 * scales.standard_normal())) for mean in means]
    size = _step_size(schema, means, widths, density, seed)
    before, after = Weights.empty(schema), Weights.empty(schema)
    (old,), (new,) = before.lines, after.lines

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
    return Pair(f"{density:.2%}", before, after)


def _masters(random: np.random.Generator, count: int, size: float) -> tuple[_Floats, _Floats]:
    return random.standard_normal(count, np.float32), random.standard_normal(count, np.float32) * np.float32(size)


def _rounded(
    master: _Floats, moved: _Floats, mean: float, width: float
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    before = torch.from_numpy(master * np.float32(width) + np.float32(mean))
    after = before + torch.from_numpy(moved)
    return _bits(before), _bits(after)


def _bits(values: Tensor) -> npt.NDArray[np.uint16]:
    bits: npt.NDArray[np.uint16] = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return bits


def _step_size(schema: Schema, means: list[float], widths: list[float], density: float, seed: int) -> float:
    """Find the step's scale at which the wanted share of a sample changes; the share grows with the scale."""
    random = np.random.default_rng([seed, 3])
    share = min(1.0, _CALIBRATION / schema.total)
    counts = [max(1, int(share * spec.size)) for spec in schema.tensors]
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
