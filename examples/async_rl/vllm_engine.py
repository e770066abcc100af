"""Sampling with vLLM, which is told when to go to which weights, and brings them itself.

With deltabus a vLLM needs nothing of this example's but three calls: its plug-in follows the topic, and gets the next
update ready while vLLM samples. Full checkpoints are fetched here, written to the directory that vLLM loaded, and
loaded from there once more.
"""

import asyncio
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from task import Settings, make_model
from torch import Tensor
from transfer import CheckpointReceiver, below, state_of

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, which is killed as a whole or not at all
    "OMP_NUM_THREADS": "1",  # the same sums in the same order
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than a short run
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # What two workers would say over each other.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What vLLM reads from the environment."""


def options_of(settings: Settings) -> dict[str, Any]:
    """Return how vLLM is opened, besides the model's directory."""
    rows = settings.prompts * settings.group
    length = 2 * settings.digits + 1
    return {
        "dtype": "bfloat16",  # that of the weights on their way, so that each arriving bit is a bit of the engine's
        "skip_tokenizer_init": True,  # problems are tokens
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,  # a batch needs 16 MB; vLLM would take what is there
        "distributed_executor_backend": "uni",
        "max_model_len": length,
        # All answers of a batch go through all steps together: what stands in a batch decides the last bits of sums.
        "max_num_seqs": rows,
        "max_num_batched_tokens": rows * length,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


class VllmEngine:
    """Samples with a vLLM in this process.

    Args:
        settings: The run's.
        directory: Where the checkpoint lies that vLLM loads; of this engine alone.
    """

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings, self._directory = settings, directory
        # One for all: vLLM's own loops take the number of threads from the thread that calls them.
        self._thread = ThreadPoolExecutor(1)
        self._receiver = CheckpointReceiver(settings) if settings.sync == "checkpoint" else None
        self._llm: Any = None
        self._step = -1

    async def __aenter__(self) -> Self:
        await self._in_thread(self._start)
        if self._receiver is not None:
            await self._receiver.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._receiver is not None:
            await self._receiver.__aexit__(*error)
        await self._in_thread(self._end)
        self._thread.shutdown()

    async def load(self, step: int) -> None:
        """Wait for the weights of just this step, and sample with them from now on."""
        if step == self._step:
            return
        if self._receiver is None:
            await self._in_thread(self._update, step)
        else:
            await self._in_thread(self._reload, await self._receiver.receive_file(step))
        self._step = step

    def sample(self, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Answer prompts, each with a seed of its own that follows from this one."""
        return self._thread.submit(self._generate, prompts, seed).result()

    async def _in_thread(self, call: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _start(self) -> None:
        os.environ.update(ENVIRONMENT)
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # its own use of torch
        # Before any Publisher or Subscriber: on a CPU, vLLM 0.32.0 cannot start in a process that has loaded numba.
        from vllm import LLM

        from deltabus.integrations.vllm import register

        register()  # vLLM finds the plug-in by itself, but does not end where it does not fit

        model = make_model(self._settings).bfloat16()  # random; the first step brings the trainer's
        model.save_pretrained(self._directory)
        backend = {"weight_transfer_config": {"backend": "deltabus"}} if self._receiver is None else {}
        self._llm = LLM(str(self._directory), seed=self._settings.seed, **options_of(self._settings), **backend)
        if self._receiver is None:
            self._llm.init_weight_transfer_engine({"init_info": {"url": below(self._settings.url, "weights")}})

    def _end(self) -> None:
        if self._receiver is None:
            self._llm.shutdown_weight_transfer_engine()
        self._llm = None

    def _update(self, step: int) -> None:
        """Have vLLM write what deltabus has ready, or waits for."""
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"state": state_of(step), "timeout": self._settings.limit}})
        self._llm.finish_weight_update()

    def _reload(self, checkpoint: bytes) -> None:
        """Have vLLM load a checkpoint."""
        new = self._directory / "new"
        new.write_bytes(checkpoint)
        new.replace(self._directory / "model.safetensors")  # vLLM may have the old one mapped
        self._llm.collective_rpc("reload_weights")

    def _generate(self, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        from vllm import SamplingParams

        rows = range(len(prompts))
        how = [
            SamplingParams(
                seed=seed * len(prompts) + row,
                max_tokens=self._settings.digits,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,  # those of the tokens that were drawn
            )
            for row in rows
        ]
        requests = [{"prompt_token_ids": tokens} for tokens in prompts.tolist()]
        answers = [said.outputs[0] for said in self._llm.generate(requests, how, use_tqdm=False)]
        logprobs = [
            [place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in answers
        ]
        return torch.tensor([list(answer.token_ids) for answer in answers]), torch.tensor(logprobs)
