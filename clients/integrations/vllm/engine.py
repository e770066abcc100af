"""All that touches vLLM's own interface, which moves often; tested with vLLM 0.32.0.

It is imported in each process of vLLM, and imports vLLM when it is asked for something.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltabus.bus.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from ..relayout import Relay
    from .worker import EngineWorker

__all__ = ["register_engine"]

_CLASS = "DeltabusEngine"
_PREPACKING = "DELTABUS_VLLM_CPU_PREPACK"
"""Set to 1 it leaves vLLM's packing of linear weights on a CPU as it is, which deltabus then refuses."""


def register_engine(name: str) -> None:
    """Register the engine under a name, once.

    Raises:
        MissingExtraError: If this vLLM has no weight-transfer engines, or none is installed.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError as error:
        raise MissingExtraError(
            "this environment has no vLLM with weight-transfer engines; install vLLM 0.32.0 beside deltabus"
        ) from error
    if name not in Factory._registry:
        Factory.register_engine(name, __name__, _CLASS)
        _keep_weights_plain()


def __getattr__(name: str) -> object:
    if name == _CLASS:
        made = globals()[_CLASS] = _make_engine()
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_engine() -> type:
    """Return the engine's class, and give vLLM's workers the method that `deltabus drive` calls."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.logger import init_logger
    from vllm.v1.worker.worker_base import WorkerBase

    from .worker import EngineWorker

    logger = init_logger("vllm.deltabus")  # vLLM shows what is logged below its own name

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]
        url: str
        keys: list[str] | None = None
        shadow: str | None = None
        constants: list[str] = field(default_factory=list)

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        state: dict[str, int] | None = None
        timeout: float = 60.0

    class DeltabusEngine(WeightTransferEngine[Init, Update]):  # type: ignore[misc]
        init_info_cls = Init
        update_info_cls = Update
        supports_draft_weight_update = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as vLLM has it
            super().__init__(*args, **kwargs)
            self.deltabus: EngineWorker = EngineWorker(self.model, log=logger, relays=_relays_of(self.model))

        def init_transfer_engine(self, init_info: Init) -> None:
            self.deltabus.open(
                init_info.url,
                checkpoint=_checkpoint_of(self.vllm_config),
                keys=init_info.keys,
                shadow=init_info.shadow,
                constants=init_info.constants,
            )

        def start_weight_update(self) -> None:
            self.deltabus.check_open()

        def receive_weights(self, update_info: Update) -> None:
            if update_info.state is None and self.parallel_config.world_size > 1:
                raise UsageError("name the state to write, since each rank of this engine follows the topic by itself")
            self.deltabus.write(update_info.state, timeout=update_info.timeout)

        def finish_weight_update(self) -> None:
            self.deltabus.commit()

        def shutdown(self) -> None:
            self.deltabus.close()

    def deltabus(worker: Any, command: str) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
        engine = worker.weight_transfer_engine
        if not isinstance(engine, DeltabusEngine):
            return {"error": "this server was started without the weight-transfer backend deltabus"}
        said = engine.deltabus.command(json.loads(command))
        return {**said, "active": worker._weight_update_active}

    WorkerBase.deltabus = deltabus
    return DeltabusEngine


def _checkpoint_of(config: Any) -> Path:  # noqa: ANN401 - vLLM's
    """Return the directory that the engine's weights were loaded from.

    Raises:
        UsageError: If they were not loaded from safetensors files that are here.
    """
    model, loading = config.model_config.model, config.load_config
    if loading.load_format in {"auto", "safetensors", "hf"}:
        if Path(model).is_dir():
            return Path(model)
        from huggingface_hub import snapshot_download

        revision, cache = config.model_config.revision, loading.download_dir
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True, allow_patterns=patterns)
        )
    raise UsageError(
        f"the engine was started with --load-format {loading.load_format}; deltabus needs one that loads a safetensors "
        "checkpoint, by which it checks where the engine keeps its weights"
    )


def _relays_of(model: nn.Module) -> dict[str, Relay]:
    """Return what vLLM on a CPU does to the weights of experts after loading, by their names."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
            CPUUnquantizedExperts,
            cpu_prepack_moe_weight,
            is_zentorch_moe_supported,
        )
    except ImportError:
        return {}  # another version of vLLM; what it lays out anew is found out, and refused
    relays: dict[str, Relay] = {}
    prepacks: dict[str, Relay] = {}
    for prefix, module in model.named_modules():
        experts: Any = getattr(getattr(module, "quant_method", None), "experts_cls", None) or object
        if not issubclass(experts, CPUUnquantizedExperts):
            continue
        names = {"w13_weight", "w2_weight"} & module._parameters.keys()
        if names and not is_zentorch_moe_supported(module):  # which takes them as they are
            prepack = prepacks.setdefault(experts.isa, partial(cpu_prepack_moe_weight, isa=experts.isa))
            relays.update((f"{prefix}.{name}", prepack) for name in names)
    return relays


def _keep_weights_plain() -> None:
    """Keep vLLM on a CPU from packing linear weights, which leaves them empty, or a copy that is never renewed."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get(_PREPACKING) != "1":
        import vllm._custom_ops as operations
        import vllm.model_executor.layers.utils as layers

        operations._supports_onednn = False
        layers.check_cpu_sgl_kernel = lambda *_: False
