"""One rank of a sharded training job; started by `torchrun`.

Arguments: a directory, and then runs as `<how the model is spread>:<first step>:<last step>:<topic>`, any number. What
the whole model was after each step is kept in the topic's directory.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import UsageError
from deltabus.codecs.state import as_integers, canonical_name
from deltabus.integrations.transformers import DeltabusCallback


class Net(nn.Module):
    """Odd sizes, a tied weight, a buffer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.down(torch.relu(self.up(hidden))) * self.scale)


def spread(model: nn.Module, how: str) -> nn.Module:
    size = dist.get_world_size()
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if how == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
    if how == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    if how == "ddp":
        return DistributedDataParallel(model)
    raise ValueError(how)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full tensors, on every rank, as published."""
    found = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[canonical_name(name)] = full.to(torch.bfloat16).clone()
    return found


def shift(model: nn.Module, step: int) -> None:
    """Change a few weights, the same on every rank that holds them."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        noise = torch.randn(parameter.shape, generator=generator) * (
            torch.rand(parameter.shape, generator=generator) < 0.2
        )
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                noise = distribute_tensor(noise, mesh, [Replicate()] * mesh.ndim)
                noise = noise.redistribute(mesh, parameter.placements)
            parameter.add_(noise * 0.01)


def keep(model: nn.Module, place: Path, step: int) -> None:
    """Store what the whole model is after a step."""
    full = whole(model)
    if dist.get_rank() == 0:
        save_file(full, place / f"{step}.safetensors")
    dist.barrier()


def train(place: Path, how: str, steps: range) -> None:
    torch.manual_seed(steps.start)
    model = spread(Net(), how)
    with Publisher(place / "topic", group="ranks", dtype=torch.bfloat16, workers=1) as publisher:
        for step in steps:
            shift(model, step)
            keep(model, place, step)
            publisher.publish(step, model).result(60)


def train_with_callback(place: Path, steps: range) -> None:
    """Tell the callback of each step, as `transformers.Trainer` does, whose own FSDP2 takes GPUs alone."""
    torch.manual_seed(steps.start)
    model = spread(Net(), "fsdp")
    callback = DeltabusCallback(place / "topic", dtype=torch.bfloat16, on_busy="wait", workers=1)
    trainer = CallbackHandler([callback], model, None, None, None)
    state, control = TrainerState(is_world_process_zero=dist.get_rank() == 0), TrainerControl()
    for step in steps:
        shift(model, step)
        keep(model, place, step)
        state.global_step = step
        if step == steps.start:
            trainer.on_train_begin(None, state, control)
        else:
            trainer.on_step_end(None, state, control)
        callback.publication.result(60)
    trainer.on_train_end(None, state, control)


def train_experts_with_callback(place: Path) -> None:
    """Shards of tensors that checkpoints have otherwise are published by the model's own names, if that is wanted."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    model = fully_shard(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, moe_intermediate_size=4)))
    state, control = TrainerState(is_world_process_zero=dist.get_rank() == 0), TrainerControl()
    refused = CallbackHandler([DeltabusCallback(place / "refused", workers=1)], model, None, None, None)
    try:
        refused.on_train_begin(None, state, control)
    except UsageError as error:
        assert "names='model'" in str(error)
    else:
        raise AssertionError("shards were published by names that no engine loads")
    callback = DeltabusCallback(place / "topic", names="model", dtype=torch.bfloat16, workers=1)
    taken = CallbackHandler([callback], model, None, None, None)
    keep(model, place, 0)
    taken.on_train_begin(None, state, control)
    taken.on_train_end(None, state, control)


def follow(place: Path, how: str, step: int) -> None:
    """Take a step into a model that is spread otherwise, and compare all of it."""
    model = spread(Net().to(torch.bfloat16), how)
    for update in Subscriber(place / "topic", workers=1).sync():
        update.apply(model)
        if update.step == step:
            break
    expected, held = load_file(place / f"{step}.safetensors"), whole(model)
    assert held.keys() == expected.keys()
    assert [n for n in held if not torch.equal(as_integers(held[n]), as_integers(expected[n]))] == []


def main() -> None:
    dist.init_process_group("gloo")
    directory, *runs = sys.argv[1:]
    for run in runs:
        how, first, last, topic = run.split(":")
        if how.startswith("follow-"):
            follow(Path(directory, topic), how.removeprefix("follow-"), int(last))
        elif how == "callback":
            train_with_callback(Path(directory, topic), range(int(first), int(last) + 1))
        elif how == "experts":
            train_experts_with_callback(Path(directory, topic))
        else:
            train(Path(directory, topic), how, range(int(first), int(last) + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
