"""A small model that keeps its weights as inference engines do: fused, sliced for a rank, padded, tied."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS, KEYS, INNER, WORDS = 8, 8, 4, 12, 20


def checkpoint(seed=0, dtype=torch.bfloat16):
    """The tensors of a model as it is trained, by the names that checkpoints have."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (WORDS, WIDTH),
        "attention.q.weight": (HEADS, WIDTH),
        "attention.k.weight": (KEYS, WIDTH),
        "attention.v.weight": (KEYS, WIDTH),
        "attention.out.weight": (WIDTH, HEADS),
        "mlp.gate.weight": (INNER, WIDTH),
        "mlp.up.weight": (INNER, WIDTH),
        "mlp.down.weight": (WIDTH, INNER),
        "experts.0.weight": (INNER, WIDTH),
        "experts.1.weight": (INNER, WIDTH),
        "norm.weight": (WIDTH,),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    tensors["scale"] = torch.randn((), generator=generator).to(dtype)
    return tensors


def relaid(blocks):
    """What a kernel wants of each expert: its columns in pairs, backwards."""
    pairs = blocks.reshape(*blocks.shape[:2], -1, 2)
    return pairs.flip(2).transpose(1, 2).reshape(blocks.shape).contiguous()


class EngineModel(nn.Module):
    """What one rank of several holds; `norm.weight` is kept in another dtype."""

    def __init__(self, rank=0, ranks=1, *, tied=True, relaid=False, dtype=torch.bfloat16):
        super().__init__()
        self.rank, self.ranks, self.tied, self.relaid = rank, ranks, tied, relaid

        def weight(*shape, kind=dtype):
            return nn.Parameter(torch.zeros(shape, dtype=kind), requires_grad=False)

        self.embed = weight(WORDS // ranks + 3, WIDTH)  # with rows of padding
        self.head = self.embed if tied else weight(WORDS // ranks + 3, WIDTH)
        self.qkv = weight((HEADS + 2 * KEYS) // ranks, WIDTH)
        self.out = weight(WIDTH, HEADS // ranks)
        self.gate_up = weight(2 * INNER // ranks, WIDTH)
        self.down = weight(INNER // ranks, WIDTH).T  # not contiguous
        self.down = nn.Parameter(self.down, requires_grad=False)
        self.experts = weight(2, WIDTH, INNER // ranks)  # transposed
        self.norm = weight(WIDTH, kind=torch.float32)
        self.scales = weight(3)

    def _padded(self, weight, loaded):
        size = loaded.shape[0] // self.ranks
        weight.data[size:].fill_(0)
        self._rows(weight, loaded, 0)

    def _rows(self, weight, loaded, start):
        size = loaded.shape[0] // self.ranks
        weight.data.narrow(0, start, size).copy_(loaded.narrow(0, self.rank * size, size))

    def load_weights(self, weights):
        for name, loaded in weights:
            match name.split("."):
                case ["embed", _]:
                    self._padded(self.embed, loaded)
                case ["head", _]:
                    if not self.tied:
                        self._padded(self.head, loaded)
                case ["attention", "out", _]:
                    size = HEADS // self.ranks
                    self.out.data.copy_(loaded.narrow(1, self.rank * size, size))
                case ["attention", which, _]:
                    start = {"q": 0, "k": HEADS, "v": HEADS + KEYS}[which] // self.ranks
                    self._rows(self.qkv, loaded, start)
                case ["mlp", "down", _]:
                    size = INNER // self.ranks
                    self.down.data.copy_(loaded[:, self.rank * size : (self.rank + 1) * size])
                case ["mlp", which, _]:
                    self._rows(self.gate_up, loaded, {"gate": 0, "up": INNER}[which] // self.ranks)
                case ["experts", number, _]:
                    size = INNER // self.ranks
                    part = loaded.narrow(0, self.rank * size, size)
                    self.experts.data[int(number)].copy_(part.t())
                case ["norm", _]:
                    self.norm.data.copy_(loaded)
                case ["scale"]:
                    self.scales.data[:] = loaded  # one element, three times

    def load(self, tensors):
        """Load a checkpoint, and do what an engine does after loading."""
        self.load_weights(iter(tensors.items()))
        if self.relaid:
            self.experts = nn.Parameter(relaid(self.experts.data), requires_grad=False)
        return self


def fresh(tensors, **options):
    return EngineModel(**options).load(tensors)


def bits(model):
    """All memory of a model's weights, as integers, padding included."""
    return {name: bytes(weight.data.untyped_storage()) for name, weight in model.named_parameters()}


def train(tensors, step, share=0.2):
    """Change a share of all weights, in place."""
    generator = torch.Generator().manual_seed(100 + step)
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor.add_(chosen * torch.randn(tensor.shape, generator=generator))
    return tensors
