"""Tiny random models with a tokenizer, and training steps of theirs; no network."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORDS = 512
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def make_model(kind, *, seed=0, tied=False):
    """Return a tiny model with weights large enough that greedy text is not degenerate."""
    torch.manual_seed(seed)
    sizes = SIZES | {"tie_word_embeddings": tied}
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(torch.bfloat16)


def save(model, directory):
    """Write a model, as Hugging Face does, with a tokenizer of words."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(WORDS - 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)
    model.save_pretrained(directory, safe_serialization=True)


def train(model, step, share=0.01):
    """Change a share of all weights, as a step would."""
    generator = torch.Generator().manual_seed(1000 + step)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(chosen * 0.02 * torch.randn(parameter.shape, generator=generator))
