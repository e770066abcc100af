"""What a real server holds and says after each update is what a fresh one does that loads the same version."""

import json
import shutil
import threading

import pytest
import requests

from deltabus import Publisher
from deltabus.integrations.transformers import checkpoint_tensors

from . import tiny
from .servers import LONG, deltabus, driving, serving

WAIT = 300
"""Seconds until what a server does is done, on a machine that does much else."""


def checkpoint(base, topic, version, place):
    """Pull a version, with the configuration and tokenizer that the base model has."""
    status, said = deltabus("pull", topic, place, "--version", version)
    assert status == 0, said
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, place)
    return place


def drive(server, topic, *more):
    status, said = deltabus("drive", "vllm", server.url, "--follow", topic, "--once", "--json", "--timeout", 120, *more)
    return status, [json.loads(line) for line in said.splitlines() if line.startswith("{")] or said


@pytest.mark.parametrize(
    ("kind", "ranks", "updates"),
    [("qwen3", 1, 2), ("tied", 1, 1), ("moe", 1, 1), ("llama", 2, 1)],
    ids=["qwen3", "tied", "moe", "llama-tp2"],
)
def test_a_server_that_follows_equals_a_fresh_one(tmp_path, kind, ranks, updates):
    base, topic = tmp_path / "base", (tmp_path / "topic").as_uri()
    model = tiny.make_model("qwen3" if kind == "tied" else kind, tied=kind == "tied")
    tiny.save(model, base)
    states = {}
    with Publisher(topic, on_busy="wait") as publisher, serving(base, tmp_path / "live", ranks=ranks) as live:
        publisher.publish(0, checkpoint_tensors(model))
        publisher.flush()
        status, told = drive(live, topic)
        assert status == 0, str(told)
        assert live.version() == "1"
        before = live.completions()
        for step in range(1, updates + 1):
            tiny.train(model, step)
            publisher.publish(step, checkpoint_tensors(model))
            publisher.flush()
            status, told = drive(live, topic)
            assert status == 0, str(told)
            print(kind, told[-1])
            assert told[-1]["changed"] > 0
            assert live.version() == str(step + 1)
            assert not live.paused()
            states[step + 1] = live.checksums(), live.completions()
            assert states[step + 1][1] != before
    for version, state in states.items():
        pulled = checkpoint(base, topic, version, tmp_path / f"version-{version}")
        with serving(pulled, tmp_path / f"fresh-{version}", ranks=ranks) as fresh:
            assert (fresh.checksums(), fresh.completions()) == state


def test_a_stream_goes_on_over_an_update_and_a_refused_one_changes_nothing(tmp_path):
    base, topic = tmp_path / "base", (tmp_path / "topic").as_uri()
    model = tiny.make_model("qwen3")
    tiny.save(model, base)
    with Publisher(topic, on_busy="wait") as publisher, serving(base, tmp_path / "live") as live:
        publisher.publish(0, model)
        publisher.flush()
        status, told = drive(live, topic)
        assert status == 0, str(told)
        before, said = live.checksums(), live.completions()
        # Another run's topic, of another model: refused before anything is written.
        other = (tmp_path / "other").as_uri()
        with Publisher(other) as stranger:
            stranger.publish(0, {"model.norm.weight": model.state_dict()["model.norm.weight"][:64].clone()})
        status, told = drive(live, other)
        assert status == 1
        assert told[0]["failure"]
        assert (live.checksums(), live.completions(), live.version()) == (before, said, "1")
        chunks, begun = [], threading.Event()

        def stream():
            body = {"model": "tiny", "prompt": "w1 w2", "max_tokens": LONG, "ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True}
            with requests.post(f"{live.url}/v1/completions", json=body, stream=True, timeout=WAIT) as answer:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        chunks.append(json.loads(line.removeprefix(b"data: ")))
                        begun.set()

        streaming = threading.Thread(target=stream)
        with driving(live, topic) as told:
            assert told.get(timeout=WAIT)["version"] == 1
            streaming.start()
            assert begun.wait(WAIT)
            tiny.train(model, 1)
            publisher.publish(1, model)
            done = told.get(timeout=WAIT)
            assert streaming.is_alive(), "the update came too late to meet the stream"
            streaming.join(WAIT)
        assert (done["failure"], done["version"]) == ("", 2), done
        *_, last, end = chunks
        assert (last["choices"][0]["finish_reason"], end["usage"]["completion_tokens"]) == ("length", LONG)
        assert live.version() == "2"
        assert live.checksums() != before
