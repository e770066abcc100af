"""The example of asynchronous RL with vLLM workers: both ways of the weights make the same run, of the weights due."""

import asyncio

import torch
from safetensors.torch import load, load_file

from deltabus.cli.pull import pull_version
from deltabus.transports import open_transport

from ..clients.async_rl import EXAMPLE, SMALL, run_both_ways

STEPS = 5
# Without `--engine`: where vLLM is installed, workers sample with it.
OPTIONS = ["--prompts", "4", "--group", "4", "--learning-rate", "1e-3"]
LIMIT_S = 600
"""For the run, on a machine that does much else, of which half until the engines have started."""


async def parts_of(url):
    """What each worker handed in for each batch."""
    async with open_transport(url) as transport:
        records = [await transport.read(f"worker-{worker}") for worker in range(2)]
    return [[load(record.data) for record in each] for each in records]


@torch.inference_mode()
def distance(model, part):
    """How far the log-probabilities that vLLM gave a worker's answers are from those of a model, on the average."""
    count = part["logprobs"].shape[1]
    logits = model(part["tokens"][:, :-1]).logits[:, -count:]
    logprobs = logits.log_softmax(-1).gather(-1, part["tokens"][:, -count:].unsqueeze(-1)).squeeze(-1)
    return (logprobs - part["logprobs"]).abs().mean().item()


def test_vllm_workers_make_the_same_run_either_way_and_sample_with_the_weights_due(tmp_path, monkeypatch):
    said = run_both_ways(tmp_path, STEPS, *OPTIONS, "--limit", str(LIMIT_S // 2), limit=LIMIT_S)
    assert "workers sample with vllm" in said
    monkeypatch.syspath_prepend(EXAMPLE)
    from task import Settings, make_model

    (run,) = (tmp_path / "async-rl").glob("*-delta")
    settings = Settings(steps=STEPS, **dict(zip(("digits", "width", "layers"), map(int, SMALL[1:6:2]), strict=True)))
    models = []
    for step in range(STEPS):
        pulled = pull_version((run / "weights").as_uri(), tmp_path / f"step-{step}", version=step + 1)
        model = make_model(settings).eval()
        model.load_state_dict(load_file(pulled.files[0]))
        models.append(model)
    workers = asyncio.run(parts_of((run / "rollouts").as_uri()))
    assert [len(parts) for parts in workers] == [STEPS, STEPS]
    for parts in workers:
        for batch, part in enumerate(parts):
            due = settings.weights_for(batch)
            distances = [distance(model, part) for model in models]
            near, far = distances.pop(due), min(distances)
            assert 4 * near < far, f"batch {batch}: {near} from the weights of step {due}, {far} from others"
