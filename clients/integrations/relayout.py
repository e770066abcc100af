"""Where elements lie in weights that an engine lays out anew after loading, learned from what it does to them.

Kernels want some weights in an order of their own, block by block, such as expert by expert. What an engine does to a
block is run once on numbers instead of weights: each place then tells which element lies in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltabus.bus.errors import UnsupportedTensorError
from deltabus.codecs import dtypes

__all__ = ["Relay", "Relayout"]

Relay = Callable[[Tensor], Tensor]
"""What an engine does to blocks of a weight, stacked along the first dimension: it moves elements within each."""

_Indices = npt.NDArray[np.int64]


class Relayout:
    """Maps places in weights as the loader fills them to places in them as the engine keeps them.

    Args:
        relays: What is done to weights, by their names.
        weights: The engine's weights by name.

    Raises:
        UnsupportedTensorError: If something else is done to one than to move elements within its blocks.
    """

    def __init__(self, relays: Mapping[str, Relay], weights: Mapping[str, Tensor]) -> None:
        known: dict[tuple[object, ...], npt.NDArray[np.uint32]] = {}
        self._moved: dict[str, npt.NDArray[np.uint32]] = {}
        for name, relay in relays.items():
            weight = weights[name]
            if not weight.is_contiguous() or weight.untyped_storage().nbytes() != weight.nbytes:
                raise _refusal(name, "lies in memory otherwise than row after row")
            key = (relay, weight.shape[1:], weight.dtype)
            if key not in known:
                known[key] = _learn(name, weight, relay)
            self._moved[name] = known[key]

    def places_of(self, name: str, places: _Indices) -> _Indices:
        """Return where elements of a weight lie that its loader puts to some places."""
        moved = self._moved.get(name)
        if moved is None:
            return places
        block, inside = np.divmod(places, moved.size)
        return block * moved.size + moved[inside].astype(np.int64)


def _learn(name: str, weight: Tensor, relay: Relay) -> npt.NDArray[np.uint32]:
    """Return where each element of a block goes."""
    shape = (1, *weight.shape[1:])
    size, width = math.prod(shape), weight.element_size()
    if width not in {2, 4} or size >= 1 << 32:
        raise _refusal(name, f"has elements of {width} bytes, {size} in a block")
    numbers = np.arange(size, dtype=np.uint32)
    came = np.zeros(size, dtype=np.uint32)
    for shift in range(0, 32, 8 * width):
        codes = (numbers >> np.uint32(shift)).astype(f"u{width}")
        block = torch.from_numpy(codes.view(f"i{width}")).view(weight.dtype).view(shape).to(weight.device)
        moved = relay(block)
        if moved.shape != shape or moved.dtype != weight.dtype:
            raise _refusal(name, "changes its shape or dtype")
        bits = moved.contiguous().view(dtypes.INTEGERS[width]).reshape(-1).cpu().numpy().view(f"u{width}")
        came |= bits.astype(np.uint32) << np.uint32(shift)
    if not np.array_equal(np.sort(came), numbers):
        raise _refusal(name, "does not keep each element")
    gone = np.empty(size, dtype=np.uint32)
    gone[came] = numbers
    return gone


def _refusal(name: str, what: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"{name!r} is laid out anew after loading, in a way that {what}; deltabus cannot write it in place", tensor=name
    )
