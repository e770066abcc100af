"""The demo's trainer, a process of its own: fine-tune, publish, keep a checkpoint; after a crash, go on from it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deltabus import Publisher
from deltabus.bus.message import encode_message

from .reports import TOPIC, Ready, Stagehand, StepPublished
from .training import FineTuning, as_bf16, load_pretrained, read_sentences, write_atomically

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainer until its last step is durable.

    The pretrained weights are published as step 0, and then every step of training.

    Args:
        arguments: As on the command line; None takes them from there. The environment holds the topic.

    Raises:
        DeltabusError: If the topic cannot be written.
    """
    parser = argparse.ArgumentParser(description="Fine-tune the demo's model and publish each step.")
    parser.add_argument("--directory", required=True, type=Path, help="where the checkpoint and references lie")
    parser.add_argument("--run", required=True, help="the name of this run of the demo")
    parser.add_argument("--life", required=True, type=int, help="how many times this trainer was started")
    parser.add_argument("--steps", required=True, type=int, help="the last training step")
    parser.add_argument("--limit", required=True, type=float, help="the longest wait, in seconds")
    options = parser.parse_args(arguments)

    stage = Stagehand()
    torch.set_num_threads(1)  # the same sums in the same order, also after a restart
    checkpoint: Path = options.directory / "checkpoint.safetensors"
    training = FineTuning(load_pretrained(), read_sentences())
    resumes = checkpoint.exists()
    if resumes:
        training.load(checkpoint)
    have = training.model if resumes else None

    with Publisher(
        os.environ[TOPIC], have=have, dtype=torch.bfloat16, on_busy="wait", timeout=options.limit
    ) as publisher:
        stage.report(Ready(held=training.step if resumes else None))
        stage.wait_for_go(options.limit)
        loss, trained = None, 0.0
        advance = resumes  # a step in a checkpoint was published, or is contained in the next one
        while not advance or training.step < options.steps:
            if advance:
                started = time.perf_counter()
                loss = training.advance()
                trained = time.perf_counter() - started
            advance = True

            # The name tells two lives apart: after a crash a step may be trained and published twice.
            reference = f"reference-{options.life}-{training.step:06d}.safetensors"
            weights = as_bf16(training.model)
            write_atomically(options.directory / reference, weights)
            metadata = {"run": options.run, "reference": reference, "called": repr(time.time())}
            publication = publisher.publish(training.step, training.model, metadata=metadata)
            training.save(checkpoint)  # takes place while the step is encoded and stored in the background
            published = publication.result(options.limit)
            stage.report(
                StepPublished(
                    step=published.step,
                    version=published.version,
                    kind=published.kind,
                    nbytes=published.nbytes + len(encode_message(published.message)),
                    full_nbytes=sum(tensor.nbytes for tensor in weights.values()),
                    changed=published.changed,
                    total=published.total,
                    loss=loss,
                    reference=reference,
                    train=trained,
                    blocked=published.seconds["blocked"],
                    encode=published.seconds["encode"],
                    upload=published.seconds["upload"],
                )
            )


if __name__ == "__main__":
    main()
