"""Topics that deltabus writes, beside the bits that were published, for the second reader to be compared with."""

from __future__ import annotations

import random

import torch

from deltabus import Publisher, TensorSlice

LIMIT = 90  # compiled loops take half a minute, the first time
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.complex64: "C64",
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def snapshot(weights: dict[str, torch.Tensor]):
    """What the second reader has to find: dtype, shape and bits of each name."""

    def unsigned(weight: torch.Tensor) -> list[int]:
        return [bits % (1 << 8 * weight.element_size()) for bits in integers(weight.flatten()).tolist()]

    return {name: (DTYPES[weight.dtype], tuple(weight.shape), unsigned(weight)) for name, weight in weights.items()}


def found(topic, state: dict[str, int] | None = None):
    return {name: (w.dtype, w.shape, w.bits) for name, w in topic.tensors(state).items()}


class Weights(dict[str, torch.Tensor]):
    """Weights that move in small steps of their bits, each time otherwise."""

    def __init__(self, weights: dict[str, torch.Tensor], seed: int = 0) -> None:
        super().__init__(weights)
        self.random = torch.Generator().manual_seed(seed)

    def move(self, share: float = 0.05) -> None:
        # Tied tensors are one: they move once.
        for weight in {w.data_ptr(): w for w in self.values() if w.numel()}.values():
            bits = integers(weight).view(-1)
            chosen = torch.rand(len(bits), generator=self.random) < share
            chosen[int(torch.randint(len(bits), (), generator=self.random))] = True
            steps = torch.tensor([-2, -1, -1, 1, 1, 3])[torch.randint(6, (len(bits),), generator=self.random)]
            moved = 1 - bits if weight.dtype is torch.bool else bits + steps.to(bits.dtype)
            bits[chosen] = moved[chosen]


def of_every_dtype() -> Weights:
    """Bits of any pattern in every dtype, and what a trainer has: matrices, a tied one, scalars, empty tensors."""
    random = torch.Generator().manual_seed(1)

    def any_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.rand(count, generator=random) < 0.5
        size = torch.empty((), dtype=dtype).element_size()
        return torch.randint(256, (count * size,), dtype=torch.uint8, generator=random).view(dtype)

    weights = {f"any.{name}": any_bits(dtype, 100) for dtype, name in DTYPES.items()}
    weights |= small(random)
    weights |= {"empty": torch.zeros(3, 0), "scalar": torch.tensor(3), "tied": weights["matrix"]}
    return Weights(weights)


def small(random: torch.Generator | None = None) -> Weights:
    random = random or torch.Generator().manual_seed(2)
    matrix, rows = torch.randn(24, 24, generator=random) * 0.02, torch.randn(12, 5, generator=random)
    return Weights({"matrix": matrix.bfloat16(), "rows": rows.half(), "bias": rows[:, 0].clone()})


def publish(url: str, weights: Weights, steps, **options) -> dict[int, dict]:
    """Publish some steps, the weights as they are and moved after each, and return what each version is."""
    truth = {}
    with Publisher(url, on_busy="wait", workers=1, **options) as publisher:
        for step in steps:
            published = publisher.publish(step, weights).result(LIMIT)
            publisher.flush(LIMIT)
            truth[published.version] = snapshot(weights)
            weights.move()
    return truth


def halves(weights: Weights, rank: int, ranks: int) -> dict[str, object]:
    """What a rank owns: some columns of the matrix, some rows of `rows`; the bias is the first one's."""
    columns, rows = (
        range(24 // ranks * rank, 24 // ranks * (rank + 1)),
        range(12 // ranks * rank, 12 // ranks * (rank + 1)),
    )
    matrix, parts = weights["matrix"][:, columns.start : columns.stop], weights["rows"][rows.start : rows.stop]
    owned: dict[str, object] = {
        "matrix": TensorSlice(matrix.clone(), (0, columns.start), (24, 24)),
        "rows": TensorSlice(parts, (rows.start, 0), (12, 5)),
    }
    return owned | ({"bias": weights["bias"]} if rank == 0 else {})


def flipped(data: bytes, at: int, chosen: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << chosen.randrange(8)]) + data[at + 1 :]
