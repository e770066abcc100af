"""Optimizers of every kind that torch has, and a small model that they step over."""

import torch
from torch import nn


def layers():
    torch.manual_seed(5)
    return nn.ModuleDict({name: nn.Linear(12, 12, bias=False) for name in ("a", "b", "frozen")})


def step_with(optimizer, model):
    optimizer.zero_grad()
    x = torch.randn(4, 12)
    for layer in model.values():
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}
