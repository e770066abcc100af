"""`DeltabusCallback`: publishes what `transformers.Trainer`, and TRL's trainers, train.

Trainer(model, args, ..., callbacks=[DeltabusCallback("s3://bucket/run-7", every=1, dtype=torch.bfloat16)])
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltabus.bus.errors import ClientError, FencedError, ProtocolError, TransportError, UsageError
from deltabus.publication import Publication
from deltabus.publisher import Publisher

__all__ = ["DeltabusCallback", "checkpoint_tensors"]

_log = logging.getLogger("deltabus.integrations.transformers")


class DeltabusCallback(TrainerCallback):
    """Publishes a model while a trainer trains it.

    It does so at the beginning, every so many steps, on evaluation if wanted, and at the end. A trainer that resumes
    from a checkpoint goes on with the chain: what it holds is recognised, and where the topic is ahead it goes back
    there. Where all ranks hold the whole model, as in data parallel training, rank 0 publishes; where they hold shards
    (FSDP2), each publishes its own. Tensors have the names and shapes that `save_pretrained` gives them, since engines
    load those; most models hold them so, and others' are converted for each step.

    Args:
        url: The topic.
        every: The steps that are published are multiples of this; None publishes no steps by themselves.
        on_evaluate: Whether to publish the weights that an evaluation was about.
        at_begin: Whether to publish the weights that training begins with, so that engines need no checkpoint.
        at_end: Whether to publish the weights that training ends with, with nothing held back.
        adapter: Publish this adapter of a PEFT model, with its configuration; None is the whole model.
        names: Whose names and shapes tensors have: `"checkpoint"`, those of `save_pretrained`, or `"model"`, the
            model's own.
        on_failure: What a failing bus does to training: `"raise"` ends it, `"log"` lets it go on, and tries again at
            the next publication. Wrong arguments, and models that cannot be published, are raised always.
        options: As `Publisher` takes them, such as `dtype`, `anchor`, `key`, `retention`, `timeout`.

    Attributes:
        publication: The newest publication; None before the first.

    Raises:
        UsageError: If `every` is not positive, or `names` or `on_failure` is something else.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every: int | None = 1,
        on_evaluate: bool = False,
        at_begin: bool = True,
        at_end: bool = True,
        adapter: str | None = None,
        names: Literal["checkpoint", "model"] = "checkpoint",
        on_failure: Literal["raise", "log"] = "raise",
        **options: Any,  # noqa: ANN401 - the publisher checks them
    ) -> None:
        if every is not None and every < 1:
            raise UsageError(f"every={every} is not positive; every=1 publishes each step")
        if names not in ("checkpoint", "model"):
            raise UsageError(f"names={names!r} is not 'checkpoint' or 'model'")
        if on_failure not in ("raise", "log"):
            raise UsageError(f"on_failure={on_failure!r} is not 'raise' or 'log'")
        self._url, self._every, self._adapter = url, every, adapter
        self._on_evaluate, self._at_begin, self._at_end = on_evaluate, at_begin, at_end
        self._names, self._on_failure, self._options = names, on_failure, options
        self.publication: Publication | None = None
        self._publisher: Publisher | None = None
        self._published: int | None = None
        self._given_up = False
        self._converts = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Open the topic, find the model in it, and publish that.

        Raises:
            UsageError: If the model is sharded in a way that cannot be published, or in any way and must be converted.
            DeltabusError: As `Publisher` raises it, if the bus fails and that ends training.
        """
        self._published, self._given_up = None, False
        model = _model_in(kwargs)
        _check_readable(model)
        self._converts = self._names == "checkpoint" and self._adapter is None and _is_converted(model)
        if self._converts and _sharded(model):
            raise UsageError(
                "save_pretrained would convert names or shapes of this model's tensors, which takes whole ones, and "
                "ranks hold shards of them; names='model' publishes the shards by the model's own names"
            )
        if self._at_begin:
            self._publish(state, model)
        elif _publishes(state, model):
            self._guard(lambda: self._open(model))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Publish every so many steps.

        Raises:
            DeltabusError: As `Publisher.publish` raises it, if the bus fails and that ends training.
        """
        if self._every is not None and state.global_step % self._every == 0:
            self._publish(state, _model_in(kwargs))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Publish what was evaluated.

        Raises:
            DeltabusError: As `Publisher.publish` raises it, if the bus fails and that ends training.
        """
        # Somebody may evaluate before training, or after it.
        if self._on_evaluate and self._publisher is not None:
            self._publish(state, _model_in(kwargs))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Publish the last weights, wait until all is stored, and close.

        Raises:
            DeltabusError: As `Publisher.close` raises it, if the bus fails and that ends training.
        """
        if self._at_end:
            self._publish(state, _model_in(kwargs), last=True)
        self._guard(self.close)

    def close(self) -> None:
        """Store what is on its way, and close; for training that ended by an error, and may be called again.

        Raises:
            DeltabusError: As `Publisher.close` raises it.
        """
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _publish(self, state: TrainerState, model: nn.Module, *, last: bool = False) -> None:
        if self._given_up or not _publishes(state, model):
            return
        holds_back = bool(self._options.get("threshold") or self._options.get("budget"))
        if self._published == state.global_step and not (last and holds_back):
            return

        def work() -> None:
            publisher = self._open(model)
            tensors, metadata = self._said(model)
            self.publication = publisher.publish(state.global_step, tensors, metadata=metadata, everything=last)
            self._published = state.global_step

        self._guard(work)

    def _open(self, model: nn.Module) -> Publisher:
        if self._publisher is None:
            options = {"group": "ranks", **self._options} if _sharded(model) else self._options
            self._publisher = Publisher(self._url, have=self._said(model)[0], **options)
        return self._publisher

    def _said(self, model: nn.Module) -> tuple[nn.Module | Mapping[str, Tensor], dict[str, str]]:
        """Return what of a model is published, and the metadata that go with it."""
        if self._converts:
            return checkpoint_tensors(cast(PreTrainedModel, model)), {}
        if self._adapter is None:
            return model, {}
        from peft import PeftModel

        from .peft import adapter_metadata, adapter_tensors

        wrapped = cast(PeftModel, model)
        return adapter_tensors(wrapped, self._adapter), adapter_metadata(wrapped, self._adapter)

    def _guard(self, work: Any) -> None:  # noqa: ANN401 - a function without arguments
        """Do something with the bus; when that fails, do what the user chose."""
        try:
            work()
        except UsageError:
            raise
        except (TransportError, ProtocolError, ClientError) as error:
            if self._on_failure == "raise":
                raise
            self._given_up = isinstance(error, FencedError)
            ends = (
                "nothing is published any more"
                if self._given_up
                else "training goes on; the next publication tries again"
            )
            _log.error("%s: %s (%s)", self._url, error, ends)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a model's tensors by the names, and in the shapes, that `save_pretrained` gives them, and engines load.

    Most models hold them so; mixtures of experts hold all experts of a layer in one tensor, others have names of their
    own. What is returned may be copies, so call it for each step.

    Args:
        model: A model of transformers.
    """
    return _as_stored(model, model.state_dict())


def _as_stored(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors as `save_pretrained` would store them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors  # before transformers 5 models held them as their checkpoints do
    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted


def _is_converted(model: nn.Module) -> bool:
    """Return whether `save_pretrained` stores other names or shapes than the model has."""
    if not isinstance(model, PreTrainedModel):
        return False
    # Without memory: a model may be large, and sharded.
    held = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in model.state_dict().items()}
    stored = _as_stored(model, dict(held))
    return stored.keys() != held.keys() or any(stored[name] is not tensor for name, tensor in held.items())


def _model_in(kwargs: Mapping[str, object]) -> nn.Module:
    model = kwargs.get("model")
    if not isinstance(model, nn.Module):
        raise UsageError("the trainer gave its callbacks no model; use Publisher.publish in its loop")
    return model


def _sharded(model: nn.Module) -> bool:
    return any(type(parameter.data).__name__ == "DTensor" for parameter in model.parameters())


def _publishes(state: TrainerState, model: nn.Module) -> bool:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return state.is_world_process_zero or (several and _sharded(model))


def _check_readable(model: nn.Module) -> None:
    """Refuse a model whose parameters are not what they are called."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or name.rpartition(".")[2] == "_flat_param":
            raise UsageError(
                f"parameter {name!r} is sharded by DeepSpeed ZeRO-3 or the first FSDP, whose shards are no boxes of "
                "it; use FSDP2 (fsdp_version: 2), or gather the model and publish it with Publisher"
            )
