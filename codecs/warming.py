"""Warming: the loops of a type are compiled before the first step waits for them.

Compiling takes some seconds where it was never done on a machine; afterwards the loops come from a cache on disk.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from . import dtypes
from .apply import Target
from .changes import compose, reverse
from .container import decode_delta, encode_delta
from .digest import digest_delta
from .encodings import ENCODINGS
from .schema import Schema
from .shadow import Shadow, capture
from .state import collect

__all__ = ["warm_up"]

_ELEMENTS = 1024


def warm_up(schema: Schema) -> None:
    """Compile what deltas of a schema need, on a small state of each of its types; once in a process."""
    for name in sorted({tensor.dtype for tensor in schema.tensors}):
        _compile(name)


@functools.cache
def _compile(name: str) -> None:
    dtype = dtypes.by_name(name)
    patterns = np.arange(_ELEMENTS).astype(dtype.bits)
    before, after = ({"x": _tensor(bits, dtype.torch)} for bits in (patterns, patterns ^ (patterns % 7 == 0)))
    shadow = Shadow.of(collect(before))
    changes = capture(collect(after), shadow)
    for encoding in ENCODINGS:
        parts = encode_delta(changes, base=shadow.read, encoding=encoding)
        decode_delta((part.data for part in parts), shadow.schema, shadow.read)
    compose(changes, reverse(changes))
    Target.bind(before, shadow.schema).apply(changes, digest_delta=digest_delta(changes))
    shadow.advance(changes)
    shadow.digest()


def _tensor(bits: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8)).view(dtype)
