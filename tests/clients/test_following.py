"""A directory that follows a topic: whole versions, a switch, a command, restarts, several writers, adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deltabus import Group, Publisher, TensorSlice
from deltabus.bus.errors import ClientError, CorruptPayloadError, RetentionGapError, UsageError
from deltabus.cli.app import app
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.following import follow
from deltabus.versions import MANIFEST

from .cli_topic import as_ints, make_topic, one_line, same
from .killed_follower import THREE, changed, checked
from .support import LIMIT
from .test_crash import lines_of


@pytest.fixture
def topic(tmp_path):
    return tmp_path / "topic"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def following(topic, out, **options):
    return follow(topic, out, idle_timeout=LIMIT, **options)


def names_in(out):
    return sorted(path.name for path in out.iterdir() if not path.name.startswith("."))


def inodes(directory):
    return {name: (directory / f"model-0000{n}-of-00003.safetensors").stat().st_ino for n, name in enumerate("abc", 1)}


def test_each_update_becomes_the_current_version_and_a_command_hears_of_it(topic, out, tmp_path):
    heard = tmp_path / "heard"
    command = f"echo $DELTABUS_STEP $DELTABUS_VERSION $DELTABUS_DIR $(readlink {out}/current) >> {heard}"
    state, at = dict(THREE), []
    with Publisher(topic, on_busy="wait", anchor="never", workers=1) as publisher:
        publisher.publish(10, state).result(LIMIT)
        updates = following(topic, out, keep=2, shard_bytes=1, command=f"{command}; test $DELTABUS_VERSION != 2")
        for step, name in ((11, "a"), (12, "b"), (13, "")):
            done = next(updates)
            assert (done.step, done.version, done.directory) == (step - 1, step - 10, out / str(step - 10))
            assert ("status 1" in done.failure) == (done.version == 2), "told, and following goes on"
            assert same(as_ints(load_checkpoint(out / "current")), as_ints(state))
            at.append(inodes(done.directory))
            state = changed(state, name)
            publisher.publish(step, state).result(LIMIT)
        updates.close()
    assert heard.read_text().splitlines() == [f"{9 + v} {v} {out}/{v} {v}" for v in (1, 2, 3)]
    assert names_in(out) == ["2", "3", "current"]
    assert [name for name in "abc" if at[0][name] != at[1][name]] == ["a"], "what did not change is linked"
    assert [name for name in "abc" if at[1][name] != at[2][name]] == ["b"]


def test_a_restart_goes_on_from_what_is_there(topic, out, tmp_path):
    state = {"w": torch.randn(100_000).bfloat16()}
    with Publisher(topic, anchor="never", on_busy="wait", workers=1) as publisher:
        anchor = publisher.publish(0, state).result(LIMIT).nbytes
        assert [
            done.version for done in following(topic, out, once=True, command="sleep 100", command_timeout=0.2)
        ] == [1]
        with Path.open(out / ".lock") as lock:
            assert lock.read() == ""
        ran = list(following(topic, out, once=True, command=f"touch {tmp_path}/ran"))
        assert [(done.version, done.total, done.failure) for done in ran] == [(1, 0, "")], (
            "what was killed is run again"
        )
        assert (tmp_path / "ran").exists()
        assert list(following(topic, out, once=True, command="false")) == [], "nothing is new"

        state = changed(state, "w")
        publisher.publish(1, state).result(LIMIT)
        (done,) = following(topic, out, once=True)
        assert done.version == 2 and done.changed == 10 and done.nbytes < anchor / 100

        file = out / "current" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-2] + b"\1\1")
        state = changed(state, "w")
        publisher.publish(2, state).result(LIMIT)
        (done,) = following(topic, out, once=True)
        assert done.version == 3 and done.nbytes > anchor / 2, "what is damaged is not built upon"
        assert same(as_ints(load_checkpoint(out / "current")), as_ints(state))

        state = {"w": state["w"][:50].clone(), "v": torch.zeros(3)}
        publisher.publish(3, state).result(LIMIT)
        (done,) = following(topic, out, once=True)
        assert same(as_ints(load_checkpoint(out / "current")), as_ints(state)), "other tensors come whole"

        updates = following(topic, out)
        publisher.publish(4, changed(state, "w")).result(LIMIT)
        next(updates)
        with pytest.raises(ClientError, match="another process keeps"):
            next(following(topic, out, once=True))
        updates.close()
    (out / "current" / MANIFEST).write_text("[]")
    with pytest.raises(CorruptPayloadError, match=r"deltabus\.json"):
        next(following(topic, out, once=True))


def test_a_topic_that_was_begun_anew_gets_names_of_its_own(tmp_path, out):
    for name in ("one", "other"):
        with Publisher(tmp_path / name, workers=1) as publisher:
            publisher.publish(1, {"w": torch.full((5,), float(len(name)))}).result(LIMIT)
        (done,) = following(tmp_path / name, out, once=True)
        assert load_checkpoint(out / "current")["w"][0] == len(name)
    assert done.directory.name == "1-2"
    assert names_in(out) == ["1", "1-2", "current"]


def test_slices_of_several_writers_become_whole_tensors(topic, out):
    whole = torch.randn(8, 4).bfloat16()
    group = Group.of_ranks("rank", 2, generation=1)
    publishers = [Publisher(topic, writer=writer, group=group, workers=1) for writer in group.members]
    for step in (1, 2):
        for rank, publisher in enumerate(publishers):
            rows = TensorSlice(whole[4 * rank : 4 * rank + 4], start=(4 * rank, 0), whole=(8, 4))
            publisher.publish(step, {"weight": rows, f"own{rank}": torch.full((2,), float(step))}).result(LIMIT)
        (done,) = following(topic, out, once=True)
        assert (done.step, done.version) == (step, 2 * step)
        held = load_checkpoint(out / "current")
        assert torch.equal(held["weight"].view(torch.int16), whole.view(torch.int16))
        assert held.keys() == {"weight", "own0", "own1"} and held["own1"][0] == step
        whole = whole * 2
    for publisher in publishers:
        publisher.close()


def test_base_and_adapter_are_one_version(topic, out):
    config, name = '{"peft_type": "LORA", "r": 2}', "base_model.model.q.lora_A.weight"
    state = {"q.weight": torch.randn(6, 6), name: torch.randn(2, 6)}
    with Publisher(topic, on_busy="wait", workers=1) as publisher:
        publisher.publish(1, state).result(LIMIT)
        with pytest.raises(UsageError, match="adapter_metadata"):
            next(following(topic, out, form="adapter"))
        assert names_in(out) == []
        publisher.publish(2, state, metadata={"adapter_config": config}).result(LIMIT)
        updates = following(topic, out, form="adapter")
        first = next(updates)
        state = changed(state, name)
        publisher.publish(3, state).result(LIMIT)
        second = next(updates)
        updates.close()
    for done in (first, second):
        assert (done.directory / "adapter_config.json").read_text() == config, "the newest that is known"
    assert as_ints(load_checkpoint(out / "current")).keys() == {name}
    found = load_checkpoint(out / "current") | load_checkpoint(out / "current" / "base")
    assert same(as_ints(found), as_ints(state))
    base = [done.directory / "base" / "model.safetensors" for done in (first, second)]
    assert base[0].samefile(base[1])


def test_the_command_prints_a_line_for_each_version(tmp_path, out):
    topic = make_topic(tmp_path / "topic")

    def run(*arguments):
        return CliRunner().invoke(app, ["follow", topic.url, str(out), "--once", *arguments])

    ended = run("--json", "--run", "echo heard; exit 3")
    assert ended.exit_code == 1, "the command failed"
    told = json.loads(ended.stdout)
    assert (told["version"], told["step"], Path(told["directory"])) == (8, 7, out / "8")
    assert "status 3" in told["failure"]
    assert same(as_ints(load_checkpoint(out / "8")), topic.states[8])
    assert run().exit_code == 0 and names_in(out) == ["8", "current"]
    for arguments in (["--format", "gguf"], ["--keep", "0"], ["--run-timeout", "0"], ["--shard-size", "many"]):
        ended = run(*arguments)
        assert ended.exit_code == 2 and one_line(ended.stderr)
    (out / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        next(following(topic.path, out / "file"))
    with pytest.raises(RetentionGapError, match="nothing was published"):
        next(following(tmp_path / "empty", out, once=True))


@pytest.mark.timeout(300)
def test_a_follower_killed_at_any_call_leaves_whole_versions_and_is_continued(place):
    with lines_of("killed_follower.py", place) as lines:
        deaths = [json.loads(line) for line in lines]
    assert all(checked(death) for death in deaths)
    calls = {death["call"] for death in deaths}
    assert {"fsync", "rename", "link", "symlink", "mkdir", "rmdir"} <= calls
    assert {death["left"] for death in deaths} == {1, 2}, "before the switch the old version, after it the new one"
