"""The example of asynchronous RL: both ways of the weights make the same run, and a process that dies ends it."""

import importlib.util
import os
import re
import runpy
import signal

import psutil
import pytest

from .async_rl import EXAMPLE, LIMIT_S, end, run_both_ways, start

pytestmark = pytest.mark.timeout(300)


def test_deltas_and_checkpoints_make_the_same_run(tmp_path):
    run_both_ways(tmp_path, 5, "--staleness", "2", "--learning-rate", "1e-4")


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


def test_workers_take_vllm_where_it_works(monkeypatch, tmp_path, capfd):
    choose = runpy.run_path(str(EXAMPLE / "choice.py"))["choose_engine"]
    with monkeypatch.context() as nowhere:
        nowhere.setattr(importlib.util, "find_spec", lambda name: None)
        assert choose("auto") == choose("transformers") == "transformers"
        with pytest.raises(SystemExit, match=r"install vLLM 0\.32\.0 in the environment that deltabus is in"):
            choose("vllm")
    # One that has no weight-transfer engines yet.
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert choose("auto") == "transformers"
    assert "this environment has no vLLM with weight-transfer engines" in capfd.readouterr().out
    assert choose("vllm") == "vllm"
