"""Runs the example of asynchronous RL, and compares what became of both ways of the weights."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_rl"
SMALL = ["--digits", "2", "--width", "64", "--layers", "1", "--pretraining", "40"]
LIMIT_S = 200


def start(directory, *options):
    command = [sys.executable, str(EXAMPLE / "run.py"), *SMALL, *options]
    # Of its own session, so that whatever it started can be ended with it.
    return subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


def run_both_ways(directory, steps, *options, limit=LIMIT_S):
    """Run the example to its end, check what should be the same, and return what it printed."""
    running = start(directory, "--steps", str(steps), *options)
    try:
        said, errors = running.communicate(timeout=limit)
    finally:
        end(running)
    assert running.returncode == 0, said + errors
    out = directory / "async-rl"
    ours, theirs = (json.loads((out / f"{sync}.json").read_text()) for sync in ("delta", "checkpoint"))

    curves = [[(step["reward"], step["loss"]) for step in run["steps"]] for run in (ours, theirs)]
    assert len(curves[0]) == steps and curves[0] == curves[1]
    assert sum(loss != 0 for _, loss in curves[0]) >= 3, "nothing was learned, and nothing compared"
    assert ours["masters"] == theirs["masters"]

    assert len(ours["sent"]) == len(theirs["sent"]) == steps + 1
    assert all(one["nbytes"] < other["nbytes"] for one, other in zip(ours["sent"], theirs["sent"], strict=True))
    assert any(step["changed"] for step in ours["sent"])
    assert (out / "async-rl.png").stat().st_size
    return said
