"""The real transformers, TRL and PEFT on tiny models, in one process beside this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    script = Path(__file__).with_name("trainer_runs.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("runs"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return {**json.loads(ended.stdout.splitlines()[-1]), "stderr": ended.stderr}


@pytest.mark.timeout(300)
def test_a_trainer_publishes_and_its_successor_goes_on_with_the_chain(runs):
    found = runs["train_and_resume"]
    assert found["exact"], "followers hold the trainer's weights, rounded, bit for bit"
    # At the beginning, every two steps, after the evaluation at step 3, and at the end.
    assert found["before"] == [["anchor", 0, 1], *(["delta", step, 1] for step in (2, 3, 4, 5))]
    assert found["step"] == 5
    # Back to step 4 by a delta, and on from there: nothing comes whole.
    kinds = {kind for kind, _, _ in found["after"]}
    steps = [step for _, step, _ in found["after"]]
    assert kinds == {"delta"} and {epoch for _, _, epoch in found["after"]} == {2}
    assert steps[0] == 4 and steps[-1] == 6


def test_experts_are_published_by_the_names_of_their_checkpoints_unless_the_models_own_are_wanted(runs):
    assert runs["train_experts"] == {"checkpoint": True, "model": True, "differ": True}


def test_a_failing_bus_ends_training_only_if_that_is_wanted(runs):
    assert runs["fail"] == [3, "PublishError"]
    assert "the next publication tries again" in runs["stderr"]


def test_an_adapter_that_trl_trains_is_published_alone_and_loaded_by_path(runs):
    assert runs["grpo"] == {"step": 2, "loaded": True, "files": True, "names": True, "elements": True}


def test_base_and_adapter_in_one_version_compute_the_same(runs):
    assert runs["base_and_adapter"] == {"logits": True, "refused": True}
