"""The example of asynchronous RL: both ways of the weights make the same run, and a process that dies ends it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

RUN = Path(__file__).parents[2] / "examples" / "async_rl" / "run.py"
SMALL = ["--digits", "2", "--width", "64", "--layers", "1", "--pretraining", "40"]
LIMIT_S = 200

pytestmark = pytest.mark.timeout(300)


def start(directory, *options):
    command = [sys.executable, str(RUN), *SMALL, *options]
    # Of its own session, so that whatever it started can be ended with it.
    return subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


def test_deltas_and_checkpoints_make_the_same_run(tmp_path):
    running = start(tmp_path, "--steps", "5", "--staleness", "2", "--learning-rate", "1e-4")
    try:
        said, errors = running.communicate(timeout=LIMIT_S)
    finally:
        end(running)
    assert running.returncode == 0, said + errors
    out = tmp_path / "async-rl"
    ours, theirs = (json.loads((out / f"{sync}.json").read_text()) for sync in ("delta", "checkpoint"))

    curves = [[(step["reward"], step["loss"]) for step in run["steps"]] for run in (ours, theirs)]
    assert len(curves[0]) == 5 and curves[0] == curves[1]
    assert sum(loss != 0 for _, loss in curves[0]) >= 3, "nothing was learned, and nothing compared"
    assert ours["masters"] == theirs["masters"]

    assert len(ours["sent"]) == len(theirs["sent"]) == 6
    assert all(one["nbytes"] < other["nbytes"] for one, other in zip(ours["sent"], theirs["sent"], strict=True))
    assert any(step["changed"] for step in ours["sent"])
    assert (out / "async-rl.png").stat().st_size


def test_a_worker_that_is_killed_ends_the_run(tmp_path):
    running = start(tmp_path, "--steps", "100000", "--megabits", "50")
    try:
        said = next(line for line in running.stdout if line.startswith("deltabus:"))
        pids = dict(re.findall(r"(\S+) is process (\d+)", said))
        assert sorted(pids) == ["trainer", "worker-0", "worker-1"]
        next(line for line in running.stdout if "reward" in line)  # so it is in the midst of it
        os.kill(int(pids["worker-1"]), signal.SIGKILL)
        _, errors = running.communicate(timeout=LIMIT_S)
    finally:
        end(running)
    assert running.returncode == 1
    assert "worker-1 was killed by SIGKILL" in errors
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.values())
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if "serve" in command and "async-rl/topics" in command]
