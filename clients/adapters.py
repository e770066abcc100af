"""Adapters (LoRA and the like) in a topic: which tensors are theirs, and where their configuration travels.

An adapter's tensors are called as in PEFT's files (`adapter_model.safetensors`), all of which begin with `base_model.`;
a base model that is published beside it has its own names. The configuration is text in a message's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from deltabus.bus.errors import UsageError

__all__ = ["ADAPTER_CONFIG", "adapter_name", "config_in", "is_adapter", "split_adapter"]

ADAPTER_CONFIG = "adapter_config"
"""The key of a message's metadata with the text of `adapter_config.json`."""

_PREFIX = "base_model."
_MARKS = ("lora_", "ia3_", "oft_", "hada_", "vera_", "boft_", "fourierft_", "modules_to_save", "trainable_tokens")


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a model with adapters is an adapter's; for `Publisher(select=)`.

    >>> is_adapter("base_model.model.layers.0.q_proj.lora_A.default.weight")
    True
    >>> is_adapter("base_model.model.layers.0.q_proj.base_layer.weight")
    False
    """
    return any(part.startswith(_MARKS) for part in name.split("."))


def adapter_name(name: str, adapter: str = "default") -> str:
    """Return what a tensor of an adapter is called in a file: without the adapter's own name.

    >>> adapter_name("base_model.model.layers.0.q_proj.lora_A.default.weight")
    'base_model.model.layers.0.q_proj.lora_A.weight'
    >>> adapter_name("base_model.model.score.modules_to_save.default.weight")
    'base_model.model.score.weight'
    """
    parts = name.split(".")
    kept = []
    for place, part in enumerate(parts):
        if part == adapter and place and parts[place - 1].startswith(_MARKS):
            continue
        if part != "modules_to_save":
            kept.append(part)
    return ".".join(kept)


def split_adapter(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which of a topic's tensors are an adapter's, and which a base model's.

    Where none is called as PEFT calls them, as in prompt tuning, all are the adapter's.

    >>> split_adapter(["base_model.model.q.lora_A.weight", "q.weight"])
    (['base_model.model.q.lora_A.weight'], ['q.weight'])
    """
    ours = [name for name in names if name.startswith(_PREFIX)]
    if not ours:
        return list(names), []
    return ours, [name for name in names if not name.startswith(_PREFIX)]


def config_in(metadata: Mapping[str, str]) -> str | None:
    """Return the text of an adapter's configuration, checked to be a JSON object; None when there is none.

    Raises:
        UsageError: If it is something else.
    """
    text = metadata.get(ADAPTER_CONFIG)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the metadata {ADAPTER_CONFIG!r} are no JSON: {error}; publish adapter_metadata(model)"
        ) from error
    if not isinstance(found, dict):
        raise UsageError(f"the metadata {ADAPTER_CONFIG!r} are no JSON object; publish adapter_metadata(model)")
    return text
