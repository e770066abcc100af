"""Asynchronous RL twice from the same seeds, weights sent by deltabus and as full checkpoints, and what that changes.

    python examples/async_rl/run.py
    python examples/async_rl/run.py --url s3://bucket/runs --steps 60

A small causal model is pretrained on text with mistakes; then a trainer and two rollout workers, processes that share
nothing but a URL, teach it by GRPO to make none. README.md beside this file says how it works.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from contextlib import nullcontext
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import trainer
import worker
from choice import choose_engine
from line import slow_service
from safetensors.torch import save_file
from task import Settings, make_model, pretrain
from transfer import below
from vllm_engine import ENVIRONMENT

_HEAVY = {
    "transformers": ["transformers.models.qwen3.modeling_qwen3", "deltabus.publisher", "deltabus.subscriber"],
    "vllm": ["transformers.models.qwen3.modeling_qwen3", "vllm.entrypoints.llm", "vllm.model_executor.models.qwen3"],
}
"""Loaded once, by the process that the others are forked from. That for vLLM loads nothing of deltabus: on a CPU vLLM
starts in no process forked from one that has loaded numba."""
_NAMES = {"delta": "deltabus", "checkpoint": "full checkpoints"}
_AVERAGED = 10
"""Batches at either end of a run whose mean reward the table shows."""
_STARTING = 10
"""Batches, at most, that times leave out: processes start, and load their compiled loops."""


def run_processes(settings: Settings, results: Path, directory: Path) -> dict[str, Any]:
    """Run a trainer and its workers to the end, and return what the trainer says.

    Args:
        settings: The run's; its engine is not `auto`.
        results: The file for what the trainer says.
        directory: For files that workers need meanwhile.

    Raises:
        SystemExit: If one of them failed or was killed; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY[settings.engine])
    processes = [context.Process(target=trainer.run, args=(settings, results), name="trainer")]
    for index in range(settings.workers):
        name = f"worker-{index}"
        processes.append(context.Process(target=worker.run, args=(settings, index, directory / name), name=name))
    try:
        for process in processes:
            process.start()
        named = ", ".join(f"{process.name} is process {process.pid}" for process in processes)
        print(f"{_NAMES[settings.sync]}: {named}", flush=True)
        waiting: dict[Any, Any] = {process.sentinel: process for process in processes}
        while waiting:  # it has an end, because each wait of theirs has
            for sentinel in connection.wait(waiting):
                process = waiting.pop(sentinel)
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{process.name} {_end_of(process.exitcode)}; the others were ended")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    told: dict[str, Any] = json.loads(results.read_text())
    return told


def _end_of(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}, see above"


def compare(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return in what the runs differ that should be the same, to the last bit."""
    ours, theirs = runs.values()
    faults = [
        f"{what} of batch {number} is {one[what]!r} and {other[what]!r}"
        for number, (one, other) in enumerate(zip(ours["steps"], theirs["steps"], strict=True))
        for what in ("reward", "loss")
        if one[what] != other[what]
    ]
    return faults + (["the float32 masters differ in the end"] if ours["masters"] != theirs["masters"] else [])


def idle(run: dict[str, Any]) -> dict[str, float]:
    """Return seconds a batch that processes did nothing but wait for, or hand over, weights or rollouts."""
    steps = _settled(run)
    return {
        "workers wait for weights": statistics.mean(statistics.mean(step["workers_waited"]) for step in steps),
        "trainer waits for rollouts": statistics.mean(step["waited"] for step in steps),
        "trainer hands weights over": statistics.mean(step["sending"] for step in steps),
    }


def _settled(run: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = run["steps"]
    return steps[min(_STARTING, len(steps) // 2) :]


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return the comparison as a Markdown table."""
    rows: dict[str, list[str]] = {}

    def add(name: str, text: str) -> None:
        rows.setdefault(name, []).append(text)

    for run in runs.values():
        rewards = [step["reward"] for step in run["steps"]]
        first, *later = run["sent"]
        begin, end = statistics.mean(rewards[:_AVERAGED]), statistics.mean(rewards[-_AVERAGED:])
        add(f"mean reward, first and last {_AVERAGED} batches", f"{begin:.3f}, {end:.3f}")
        add("first step, kB", f"{first['nbytes'] / 1e3:,.1f}")
        add("each later step, kB", f"{statistics.mean(step['nbytes'] for step in later) / 1e3:,.1f}")
        add("all steps, MB", f"{sum(step['nbytes'] for step in run['sent']) / 1e6:,.1f}")
        changed = [step["changed"] / step["total"] for step in later if step["changed"] is not None]
        add("bf16 weights that changed, a step", f"{statistics.mean(changed):.1%}" if changed else "not looked at")
        for name, seconds in idle(run).items():
            add(f"{name}, ms a batch", f"{1e3 * seconds:,.0f}")
        whole = statistics.mean(step["waited"] + step["trained"] + step["sending"] for step in _settled(run))
        add("a batch takes, ms", f"{1e3 * whole:,.0f}")
    lines = [["", *(_NAMES[sync] for sync in runs)], ["---", *("---:" for _ in runs)]]
    lines += [[name, *texts] for name, texts in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw reward and bytes over steps, and idle time."""
    from matplotlib.figure import Figure  # here, because the processes load this file as well

    figure = Figure(figsize=(13, 4), layout="constrained")
    rewards, sizes, waits = figure.subplots(1, 3)
    styles: list[dict[str, Any]] = [{"color": "tab:red", "linewidth": 4, "alpha": 0.5}, {"color": "black"}]
    for place, ((sync, run), style) in enumerate(zip(runs.items(), styles, strict=True)):
        rewards.plot([step["reward"] for step in run["steps"]], label=_NAMES[sync], **style)
        sizes.plot([step["nbytes"] / 1e3 for step in run["sent"]], label=_NAMES[sync], **style)
        names, seconds = zip(*idle(run).items(), strict=True)
        places = [number + 0.4 * place for number in range(len(names))]
        waits.barh(places, [1e3 * each for each in seconds], height=0.4, label=_NAMES[sync], color=style["color"])
    rewards.set(xlabel="batch", title="share of right answers", ylim=(0, 1))
    sizes.set(xlabel="step", title="kB sent", yscale="log")
    waits.set(xlabel="ms a batch", title="idle")
    waits.set_yticks([number + 0.2 for number in range(len(names))], [name.replace(" ", "\n", 1) for name in names])
    for axes in (rewards, sizes, waits):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _pretrain(settings: Settings, steps: int, path: Path) -> str:
    """Write pretrained weights to a file, and return its path."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # a small model gains little by a second thread, and loses much where cores are shared
    model = make_model(settings)
    loss = pretrain(model, settings, steps)
    save_file(model.state_dict(), path)
    millions = sum(tensor.numel() for tensor in model.state_dict().values()) / 1e6
    print(f"pretrained {millions:.1f} M weights in {time.perf_counter() - began:.0f} s, loss {loss:.3f}", flush=True)
    return str(path)


def main() -> None:
    """Pretrain, run both, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Settings.add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("async-rl"), help="where results, picture and logs go")
    parser.add_argument("--megabits", type=float, help="try it on a service behind a line of so many Mbit/s each way")
    parser.add_argument("--pretraining", type=int, default=150, help="steps of pretraining")
    options = parser.parse_args()
    settings = Settings.of(options)
    settings = dataclasses.replace(settings, engine=choose_engine(settings.engine))
    if settings.url.startswith("memory:"):
        sys.exit(f"{settings.url} lives in one process, and there are {settings.workers + 1}; use a directory")

    if settings.engine == "vllm":
        os.environ.update(ENVIRONMENT)  # of all processes, which load vLLM before they begin
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    print(f"workers sample with {settings.engine}", flush=True)
    base = settings.base or _pretrain(settings, options.pretraining, out / "base.safetensors")
    service = slow_service(out / "topics", options.megabits) if options.megabits else nullcontext(settings.url)
    with service as url, tempfile.TemporaryDirectory() as directory:
        run, runs = uuid.uuid4().hex[:8], {}
        for sync in _NAMES:
            this = dataclasses.replace(settings, url=below(url, f"{run}-{sync}"), sync=sync, base=base)
            runs[sync] = run_processes(this, out / f"{sync}.json", Path(directory) / sync)
    draw(runs, out / "async-rl.png")
    print(table(runs))
    faults = compare(runs)
    print("\n".join(faults) or f"rewards, losses and weights of both runs are the same to the last bit; see {out}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
