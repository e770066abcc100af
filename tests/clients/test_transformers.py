"""What is published of a model of transformers is what it would store itself."""

import shutil

import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from deltabus import Publisher
from deltabus.cli.pull import pull_version
from deltabus.integrations.transformers import checkpoint_tensors


def test_experts_are_published_and_pulled_as_their_checkpoint_has_them(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    with Publisher(tmp_path / "topic") as publisher:
        for step in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(-1)[step::7] += 1
            publisher.publish(step, checkpoint_tensors(model))
    model.save_pretrained(tmp_path / "theirs")
    pull_version(str(tmp_path / "topic"), tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in theirs
    assert ours.keys() == theirs.keys()
    assert all(ours[name].view(torch.int32).equal(theirs[name].view(torch.int32)) for name in theirs)
    shutil.copy(tmp_path / "theirs" / "config.json", tmp_path / "ours")
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in model.state_dict().items())
