"""Adapters of PEFT models, as their tensors and configuration are published.

with Publisher(url) as publisher:
    publisher.publish(step, adapter_tensors(model), metadata=adapter_metadata(model))
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch import Tensor, nn

from deltabus.adapters import ADAPTER_CONFIG, is_adapter
from deltabus.bus.errors import UsageError

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["adapter_metadata", "adapter_tensors", "base_tensors"]

_PREFIX = "base_model.model."


def adapter_tensors(model: PeftModel, adapter: str = "default") -> dict[str, Tensor]:
    """Return the tensors of an adapter under the names of `adapter_model.safetensors`; they are the model's own.

    Args:
        model: Has the adapter.
        adapter: Its name in the model.

    Raises:
        UsageError: If the model has no such adapter.
    """
    from peft import get_peft_model_state_dict

    _check(model, adapter)
    # `save_embedding_layers="auto"` would ask the Hub about the base model at every step.
    tensors = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def adapter_metadata(model: PeftModel, adapter: str = "default") -> dict[str, str]:
    """Return the metadata that carry an adapter's configuration, for inference, as `adapter_config.json` has it.

    Args:
        model: Has the adapter.
        adapter: Its name in the model.

    Raises:
        UsageError: If the model has no such adapter.
    """
    _check(model, adapter)
    config = model.peft_config[adapter].to_dict()
    config["inference_mode"] = True
    return {ADAPTER_CONFIG: json.dumps(config, default=_as_json, sort_keys=True)}


def base_tensors(model: PeftModel) -> dict[str, Tensor]:
    """Return the tensors of a model without its adapters, under the names that the base model has by itself.

    Those that an adapter holds a trained copy of (`modules_to_save`) are the originals.
    """
    tensors = {}
    for name, tensor in _state_of(model).items():
        inner = name.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".\0.")
        inner = inner.replace(".original_module.", ".")
        if "\0" not in inner and not is_adapter(inner):
            tensors[inner] = tensor
    return tensors


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def _check(model: PeftModel, adapter: str) -> None:
    there = getattr(model, "peft_config", {})
    if adapter not in there:
        known = ", ".join(there) or "none at all"
        raise UsageError(f"{type(model).__name__} has no adapter {adapter!r}; it has {known}")


def _as_json(value: object) -> object:
    """Return sets as sorted lists, and what else JSON lacks, such as enums and dtypes, as text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
