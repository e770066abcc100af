"""Where the two states of a measurement come from: a shape that has a name, or a user's own checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch

from deltabus.bus.errors import UsageError
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.state import collect
from deltabus.workers import usable_cores

from .shapes import SHAPES, synthetic
from .states import Pair, Weights

__all__ = ["DTYPES", "Source", "load_pair", "schema_of", "warm_pair"]

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes in which floats may be measured, by torch's names."""

_SAMPLE = 4096


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Two consecutive states, in words that another process understands.

    Attributes:
        shape: One of `SHAPES`, filled with made-up weights; None where there are checkpoints.
        density: The share of a made-up state that changes.
        checkpoints: Two safetensors files or directories of them, the earlier one first.
        dtype: The dtype in which floats of checkpoints are published, one of `DTYPES`; None is each tensor's own.

    Raises:
        UsageError: If it is not one shape or two checkpoints, or a value is out of range.
    """

    shape: str | None = None
    density: float = 0.01
    checkpoints: tuple[str, str] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.checkpoints is None):
            raise UsageError("measure either a shape or two checkpoints; give one of the two")
        if self.shape is not None and self.shape not in SHAPES:
            raise UsageError(f"there is no shape {self.shape!r}; choose one of {', '.join(SHAPES)}")
        if self.shape is not None and self.dtype is not None:
            raise UsageError("a shape is measured in bf16; a dtype goes with checkpoints")
        if not 0 < self.density <= 0.6:
            raise UsageError(f"density {self.density} is not above 0 and at most 0.6; 0.01 is one percent")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.checkpoints is None:
            return f"{self.shape} at {self.density:.2%}"
        return " to ".join(Path(path).name or path for path in self.checkpoints)


def load_pair(source: Source) -> Pair:
    """Return the two states, in memory.

    Raises:
        UsageError: If a checkpoint is not there, or both hold the same bits, or no bits at all.
        CorruptPayloadError: If a checkpoint cannot be read.
        SchemaMismatchError: If the two have other names, shapes or dtypes, or one has a tensor twice.
        UnsupportedTensorError: If a tensor cannot be published.
    """
    if source.checkpoints is None:
        assert source.shape is not None
        pair = synthetic(SHAPES[source.shape](), source.density, workers=usable_cores())
        return Pair(source.label, pair.old, pair.new)
    states = [collect(load_checkpoint(path), dtype=_torch_dtype(source)) for path in source.checkpoints]
    pair = Pair(source.label, *map(Weights.of, states))
    if not pair.changed:
        first, second = source.checkpoints
        raise UsageError(f"{first} and {second} hold the same bits; give two checkpoints of one run that differ")
    return pair


def schema_of(source: Source) -> Schema:
    """Return the schema of the two states, without their bits.

    Raises:
        UsageError: If a checkpoint is not there.
        CorruptPayloadError: If a checkpoint cannot be read.
        SchemaMismatchError: If the earlier one has a tensor twice.
        UnsupportedTensorError: If a tensor cannot be published.
    """
    if source.checkpoints is None:
        assert source.shape is not None
        return SHAPES[source.shape]()
    return collect(load_checkpoint(source.checkpoints[0]), dtype=_torch_dtype(source)).schema


def warm_pair(schema: Schema) -> Pair:
    """Return a small pair with the same dtypes, to run everything with once before anything is timed."""
    kinds = dict.fromkeys(spec.dtype for spec in schema.tensors if spec.size)
    small = Schema.of(TensorSpec(name=dtype, dtype=dtype, shape=(_SAMPLE,)) for dtype in kinds)
    old = Weights.empty(small)
    for line in old.lines:
        # All classes of elements occur; a byte's patterns stay below 2, which is what a boolean may hold.
        line[:] = np.arange(_SAMPLE) % 2 if line.itemsize == 1 else np.arange(_SAMPLE) * 16
    new = old.copy()
    for line in new.lines:
        line[::50] ^= line.dtype.type(1)
    return Pair("warm-up", old, new)


def _torch_dtype(source: Source) -> torch.dtype | None:
    return None if source.dtype is None else getattr(torch, source.dtype)
