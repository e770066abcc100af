"""Train a small model and publish each step: `python examples/plain_loop.py URL [--steps N]`."""

import argparse

import torch
from torch import nn

from deltabus import Publisher


def make_model() -> nn.Module:
    """Return the model that trainer and engines agree on."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def main() -> None:
    """Learn the sum of the inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the topic, such as s3://bucket/run-7, or a directory")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(options.url, have=model, dtype=torch.bfloat16) as publisher:
        for step in range(1, options.steps + 1):
            inputs = torch.randn(64, 16)
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step, model, metadata={"loss": f"{loss.item():.4f}"})
        publisher.flush()
        print(f"published {options.steps} steps as version {publisher.version}")


if __name__ == "__main__":
    main()
