"""The ranks of a sharded trainer, and small weights that they share."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, asynccontextmanager

import torch

from deltabus import Group, Publisher, Subscriber, TensorSlice
from deltabus.codecs.state import as_integers

from .support import LIMIT

SHAPES = {"embed": (13, 6), "layer.weight": (9, 11), "layer.bias": (9,), "scale": (), "empty": (0, 4)}


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def move(weights: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        chosen = torch.rand(weight.shape, generator=generator) < 0.3
        weight[chosen] = weight[chosen] * 1.01 + 0.001


def shards(weights: dict[str, torch.Tensor], rank: int, ranks: int, *, along: int = 0) -> dict[str, object]:
    """What one rank owns: a run of rows or columns of every tensor that has them, and a share of the others."""
    owned: dict[str, object] = {}
    for number, (name, weight) in enumerate(weights.items()):
        if weight.dim() <= along or weight.numel() == 0:
            if number % ranks == rank:
                owned[name] = weight
            continue
        size = -(-weight.shape[along] // ranks)
        start = min(rank * size, weight.shape[along])
        part = weight.narrow(along, start, min(size, weight.shape[along] - start))
        if part.numel():
            owned[name] = TensorSlice(
                part, tuple(start * (d == along) for d in range(weight.dim())), tuple(weight.shape)
            )
    return owned


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(as_integers(ours[name]), as_integers(theirs[name])) for name in ours)


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}


class Ranks:
    """The publishers of one incarnation of a group."""

    def __init__(self, url: str, count: int, generation: int, *, along: int = 0, **options: object) -> None:
        self._stack = ExitStack()
        self._along = along
        group = Group.of_ranks("trainer", count, generation=generation)
        self.publishers = [
            self._stack.enter_context(Publisher(url, writer=writer, group=group, workers=1, **options))
            for writer in group.members
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def publish(self, step: int, weights: dict[str, torch.Tensor], *, ranks: list[int] | None = None) -> None:
        count = len(self.publishers)
        chosen = range(count) if ranks is None else ranks
        handles = [
            self.publishers[rank].publish(step, shards(weights, rank, count, along=self._along)) for rank in chosen
        ]
        for handle in handles:
            handle.result(LIMIT)


@asynccontextmanager
async def following(url: str, **options: object):
    async with Subscriber(url, workers=1, **options) as subscriber:
        yield subscriber


async def take(subscriber: Subscriber):
    async with asyncio.timeout(LIMIT):
        return await anext(subscriber)
