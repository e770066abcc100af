"""A follower of the demo, a process of its own: an engine whose weights are the trainer's, step by step.

It starts with random weights, or with those that it saved in an earlier life, and takes all else from the topic.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from deltabus import Subscriber, Update

from .reports import TOPIC, Ready, Stagehand, StepApplied
from .training import Encoder, as_bf16, count_differing, load_untrained, write_atomically

__all__ = ["main"]

_PAIR = ("The harbour was quiet before the storm.", "Nothing moved in the port until the wind rose.")


class _Follower:
    """One follower: its model, and what it does with each update."""

    def __init__(self, options: argparse.Namespace, stage: Stagehand) -> None:
        self._options = options
        self._stage = stage
        self._saved: Path = options.directory / f"{options.name}.safetensors"
        self.model = load_untrained()
        self.held = _load_saved(self.model, self._saved)
        self._encoder = Encoder(self.model)

    async def follow(self) -> None:
        """Take updates over until the run's last step."""
        have = None if self.held is None else self.model
        async with Subscriber(os.environ[TOPIC], have=have, latest=self._options.latest) as subscriber:
            self._stage.report(Ready(held=self.held))
            async for update in subscriber:
                update.apply(self.model)
                now = time.time()
                if update.metadata.get("run") != self._options.run:
                    continue  # left in the topic by an earlier run: its references are gone
                # In a thread, so that the next update is downloaded meanwhile.
                report = await asyncio.to_thread(self._use, update, now)
                self._stage.report(report)
                if update.step >= self._options.steps:
                    return

    @torch.inference_mode()
    def _use(self, update: Update, now: float) -> StepApplied:
        one, other = self._encoder(_PAIR)
        compared, differing = count_differing(self.model, self._options.directory / update.metadata["reference"])
        write_atomically(self._saved, as_bf16(self.model), {"step": str(update.step)})
        return StepApplied(
            step=update.step,
            version=update.version,
            whole=update.whole,
            nbytes=update.nbytes,
            apply=update.seconds["apply"],
            latency=now - float(update.metadata["called"]),
            compared=compared,
            differing=differing,
            similarity=float(one @ other),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a follower until it has taken over the last step of the run.

    Args:
        arguments: As on the command line; None takes them from there. The environment holds the topic.

    Raises:
        DeltabusError: If the topic cannot be read.
        TimeoutError: If the last step does not come within the limit.
    """
    parser = argparse.ArgumentParser(description="Follow the demo's trainer.")
    parser.add_argument("--directory", required=True, type=Path, help="where references and saved weights lie")
    parser.add_argument("--run", required=True, help="the name of this run of the demo")
    parser.add_argument("--name", required=True, help="the follower's name")
    parser.add_argument("--steps", required=True, type=int, help="the last training step")
    parser.add_argument("--limit", required=True, type=float, help="the longest time to run, in seconds")
    parser.add_argument("--latest", action="store_true", help="skip to the newest weights instead of taking every step")
    options = parser.parse_args(arguments)

    stage = Stagehand()
    torch.set_num_threads(1)
    follower = _Follower(options, stage)

    async def within_limit() -> None:
        async with asyncio.timeout(options.limit):
            await follower.follow()

    asyncio.run(within_limit())


def _load_saved(model: nn.Module, path: Path) -> int | None:
    """Load what an earlier life saved, and return its step; None when there is nothing."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return int(file.metadata()["step"])


if __name__ == "__main__":
    main()
