from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deltabus.cli.pull
from deltabus.bus.errors import (
    AccessDeniedError,
    ClientError,
    CorruptPayloadError,
    PublishError,
    RetentionGapError,
    StorageFullError,
    TransportError,
    UsageError,
)
from deltabus.cli.app import app
from deltabus.cli.pull import pull_version
from deltabus.cli.push import Checkpoint, find_steps, push_checkpoints
from deltabus.cli.verify import verify_topic
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.transports.file import FileTransport

from .cli_topic import as_ints, make_topic, one_line, pulled, same


@pytest.fixture(scope="module")
def topic(tmp_path_factory):
    return make_topic(tmp_path_factory.mktemp("pull") / "topic")


@pytest.fixture(scope="module")
def checkpoints(topic, tmp_path_factory):
    """Directories checkpoint-100 to checkpoint-800, one for each version."""
    place = tmp_path_factory.mktemp("checkpoints")
    for version in topic.states:
        pull_version(topic.url, place / f"checkpoint-{version * 100}", version=version)
    return place


@pytest.fixture
def out(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    return place / "out"


@pytest.fixture
def gets(monkeypatch):
    """The keys of all blobs that are read; set `fail_at` to let that read fail, counted from 0."""

    class Gets(list[str]):
        fail_at: int | None = None

    seen, get = Gets(), FileTransport.get

    async def watched(self, key, start=0, stop=None):
        if len(seen) == seen.fail_at:
            raise AccessDeniedError(f"not {key}")
        seen.append(key)
        return await get(self, key, start, stop)

    monkeypatch.setattr(FileTransport, "get", watched)
    return seen


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="deltabus")


def test_every_version_is_pulled_bit_for_bit(topic, checkpoints):
    for version, state in topic.states.items():
        assert same(pulled(checkpoints / f"checkpoint-{version * 100}"), state), version
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"checkpoint-{v}00" for v in topic.states]


def test_pull_says_what_it_did(topic, out):
    shown = run("pull", topic.url, out)
    assert shown.exit_code == 0, shown.output
    assert "version 8 (step 7)" in shown.stdout
    assert str(out) in shown.stdout
    said = json.loads(run("pull", topic.url, out, "--version", 3, "--force", "--json").stdout)
    assert (said["version"], said["step"], said["directory"], said["kept"]) == (3, 2, str(out), 0)
    assert [Path(file).parent for file in said["files"]] == [out]
    assert said["nbytes"] == sum(Path(file).stat().st_size for file in said["files"])
    assert same(pulled(out), topic.states[3])


def test_an_interrupted_pull_fetches_only_what_is_missing(tmp_path, out, gets):
    topic = make_topic(tmp_path / "chain", anchor="never")
    blobs = {blob.key: blob for message in topic.messages for blob in (message.schema, *message.blobs)}
    hidden = out.parent / ".out.deltabus-pull"
    gets.clear()
    pull_version(topic.url, out.parent / "other")
    needed = set(gets)
    assert len(needed) == len(gets) == 9
    for failing in range(len(needed)):
        gets.clear()
        gets.fail_at = failing
        with pytest.raises(AccessDeniedError, match="not "):
            pull_version(topic.url, out)
        assert not out.exists()
        # Reads that were on their way when one failed were called off.
        kept = {key for key in needed if (hidden / f"{blobs[key].checksum.hex()}.blob").exists()}
        assert len(kept) > failing - deltabus.cli.pull._DOWNLOADS
        gets.clear()
        gets.fail_at = None
        done = pull_version(topic.url, out)
        assert (len(gets), set(gets)) == (len(needed - kept), needed - kept)
        assert done.fetched == sum(blobs[key].size for key in gets)
        assert done.kept == sum(blobs[key].size for key in kept)
        assert same(pulled(out), topic.states[8])
        assert sorted(path.name for path in out.parent.iterdir()) == ["other", "out"]
        out.joinpath("model.safetensors").unlink()
        out.rmdir()


def test_a_full_disk_keeps_what_was_fetched(topic, out, gets, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(deltabus.cli.pull, "save_checkpoint", full)
        failed = run("pull", topic.url, out)
    assert failed.exit_code == 1
    assert one_line(failed.stderr, str(out), "No space left", "run the same command again")
    assert not out.exists()
    gets.clear()
    done = pull_version(topic.url, out)
    assert (gets, done.fetched) == ([], 0)
    assert same(pulled(out), topic.states[8])


@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.EROFS, AccessDeniedError), (errno.EIO, TransportError), (errno.EDQUOT, StorageFullError)],
)
def test_errors_of_the_disk_are_ours(topic, out, monkeypatch, code, error):
    def failing(self, *_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", failing)
    with pytest.raises(error, match=os.strerror(code)):
        pull_version(topic.url, out)
    assert list(out.parent.iterdir()) == []


def test_what_was_kept_is_checked_before_it_is_used(topic, out, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deltabus.cli.pull, "save_checkpoint", interrupted)
        assert run("pull", topic.url, out).exit_code == 130
    kept = sorted((out.parent / ".out.deltabus-pull").glob("*.blob"))
    assert len(kept) > 1
    kept[0].write_bytes(b"x" + kept[0].read_bytes()[1:])
    kept[1].write_bytes(kept[1].read_bytes()[:-1])
    pull_version(topic.url, out)
    assert same(pulled(out), topic.states[8])
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_directory_that_is_taken_is_refused_and_left_alone(topic, out):
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    refused = run("pull", topic.url, out)
    assert refused.exit_code == 2
    assert one_line(refused.stderr, str(out), "not empty", "--force")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="is a file"):
        pull_version(topic.url, out / "notes.txt", force=True)
    with pytest.raises(UsageError, match="cannot be replaced"):
        pull_version(topic.url, "/", force=True)
    with pytest.raises(UsageError, match="holds the topic"):
        pull_version(topic.url, topic.path, force=True)
    with pytest.raises(UsageError, match="holds the topic"):
        pull_version(topic.url, topic.path.parent, force=True)
    assert verify_topic(topic.url).ok


def test_an_empty_directory_is_taken(topic, out):
    out.mkdir()
    pull_version(topic.url, out, version=2)
    assert same(pulled(out), topic.states[2])


def test_force_replaces_only_once_the_new_one_is_there(topic, out, monkeypatch):
    pull_version(topic.url, out, version=1)
    rename = Path.rename

    def refuse(self, target):
        if self.name == "checkpoint":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(TransportError, match="Input/output error"):
            pull_version(topic.url, out, version=2, force=True)
    assert same(pulled(out), topic.states[1])

    # As if the process had been killed between the two renames.
    hidden = out.parent / ".out.deltabus-pull"
    out.rename(hidden / "replaced")
    with pytest.raises(UsageError, match="not empty"):
        pull_version(topic.url, out, version=2)
    assert same(pulled(out), topic.states[1])
    done = pull_version(topic.url, out, version=2, force=True)
    assert done.fetched == 0
    assert same(pulled(out), topic.states[2])
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_version_that_is_not_there_is_refused_before_anything_is_made(topic, out):
    with pytest.raises(RetentionGapError, match="does not hold version 9 of writer trainer; it holds 1-8"):
        pull_version(topic.url, out, version=9)
    assert list(out.parent.iterdir()) == []


def test_two_pulls_to_one_directory_do_not_mix(topic, out):
    hidden = out.parent / ".out.deltabus-pull"
    hidden.mkdir()
    with (hidden / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ClientError, match="another pull"):
            pull_version(topic.url, out)
    assert [path.name for path in hidden.iterdir()] == ["lock"]
    pull_version(topic.url, out)
    assert same(pulled(out), topic.states[8])


def test_a_damaged_payload_is_never_a_checkpoint(topic, tmp_path, out):
    copy = topic.copy(tmp_path / "copy")
    blob = copy.blob(1)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptPayloadError, match=r"blobs/trainer/.*damaged"):
        pull_version(copy.url, out, version=2)
    assert not out.exists()
    pull_version(copy.url, out, version=1)
    assert same(pulled(out), topic.states[1])


def test_a_state_that_is_not_what_the_message_says_is_never_a_checkpoint(topic, tmp_path, out):
    copy = topic.copy(tmp_path / "copy")
    copy.rewrite(1, digest_after=copy.messages[1].digest_after ^ 1)
    with pytest.raises(CorruptPayloadError, match="digest"):
        pull_version(copy.url, out, version=2)
    assert not out.exists()


def test_what_was_pushed_is_pulled(topic, checkpoints, tmp_path, out):
    paths = [checkpoints / f"checkpoint-{version}00" for version in (4, 1, 6)]
    pushed = run("push", tmp_path / "new", *paths, "--json")
    assert pushed.exit_code == 0, pushed.output
    deltas_and_first = [m for m in json.loads(pushed.stdout)["messages"] if m["kind"] == "delta" or m["version"] == 1]
    assert [(m["version"], m["step"]) for m in deltas_and_first] == [(1, 100), (2, 400), (3, 600)]
    for version, origin in enumerate((1, 4, 6), 1):
        pull_version((tmp_path / "new").as_uri(), out, version=version, force=True)
        assert same(pulled(out), topic.states[origin])
    assert verify_topic((tmp_path / "new").as_uri()).ok


def test_a_second_push_goes_on_with_the_chain(topic, checkpoints, tmp_path, out):
    url = (tmp_path / "new").as_uri()
    steps = find_steps([checkpoints / f"checkpoint-{version}00" for version in topic.states])
    first = push_checkpoints(url, steps[:3], anchor="never")
    assert [(m.version, str(m.kind), m.step) for m in first.messages] == [
        (1, "anchor", 100),
        (2, "delta", 200),
        (3, "delta", 300),
    ]
    second = push_checkpoints(url, steps[:5], anchor="never")
    assert second.held == tuple(steps[:3])
    assert [(m.version, str(m.kind), m.step, m.epoch) for m in second.messages] == [
        (4, "delta", 400, 2),
        (5, "delta", 500, 2),
    ]
    third = push_checkpoints(url, steps[:5], anchor="never")
    assert (third.held, third.messages) == (tuple(steps[:5]), ())
    # Without the checkpoint that the topic ends with there is nothing to go on from.
    fourth = push_checkpoints(url, steps[6:7], anchor="never")
    assert [(m.version, str(m.kind)) for m in fourth.messages] == [(6, "anchor")]
    pull_version(url, out)
    assert same(pulled(out), topic.states[7])
    assert verify_topic(url).ok


def test_push_shows_what_each_cost(checkpoints, tmp_path):
    shown = run("push", tmp_path / "new", checkpoints / "checkpoint-100", checkpoints / "checkpoint-200")
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines() if line.strip().startswith("trainer")]
    assert [(row[1], row[3]) for row in rows if row[4] == "delta" or row[1] == "1"] == [("1", "100"), ("2", "200")]
    again = run("push", tmp_path / "new", checkpoints / "checkpoint-200")
    assert again.stdout == "left out 1 checkpoint: the topic ends with step 200\n"


def test_push_rounds_floats_to_the_dtype_asked_for(checkpoints, tmp_path, out):
    url = (tmp_path / "new").as_uri()
    source = load_checkpoint(checkpoints / "checkpoint-300")
    push_checkpoints(url, [Checkpoint(checkpoints / "checkpoint-300", 5)], dtype="fp16", writer="rank-0")
    pull_version(url, out, writer="rank-0")
    assert same(pulled(out), as_ints({name: tensor.to(torch.float16) for name, tensor in source.items()}))
    again = push_checkpoints(url, [Checkpoint(checkpoints / "checkpoint-300", 5)], dtype="fp16", writer="rank-0")
    assert again.messages == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoint-100", "nowhere-7"], "there is no file"),
        (["checkpoint-100", "nowhere"], "has no step"),
        (["checkpoint-100", "checkpoint-100"], "both of step 100"),
        (["checkpoint-100", "--dtype", "int4"], "int4"),
        (["checkpoint-100", "--anchor", "sometimes"], "sometimes"),
        (["checkpoint-100", "--writer", "a/b"], "a/b"),
    ],
)
def test_push_refuses_before_anything_is_published(checkpoints, tmp_path, arguments, words):
    names = [checkpoints / a if a.startswith(("checkpoint", "nowhere")) else a for a in arguments]
    refused = run("push", tmp_path / "new", *names)
    assert refused.exit_code == 2
    assert one_line(refused.stderr, words)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_cannot_be_read_stops_push_before_anything_is_published(checkpoints, tmp_path):
    (tmp_path / "step-2.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage")
    refused = run("push", tmp_path / "new", checkpoints / "checkpoint-100", tmp_path / "step-2.safetensors")
    assert refused.exit_code == 1
    assert one_line(refused.stderr, "step-2.safetensors")
    assert not (tmp_path / "new").exists()


def test_push_that_fails_on_the_way_can_be_repeated(topic, checkpoints, tmp_path, out, monkeypatch):
    url = (tmp_path / "new").as_uri()
    steps = find_steps([checkpoints / f"checkpoint-{version}00" for version in (1, 2, 3)])
    append = FileTransport.append

    async def full(self, log, position, record):
        if position == 2:
            raise StorageFullError("no room", url=self.url)
        await append(self, log, position, record)

    with monkeypatch.context() as patch:
        patch.setattr(FileTransport, "append", full)
        with pytest.raises((PublishError, StorageFullError), match="no room"):
            push_checkpoints(url, steps, anchor="never")
    done = push_checkpoints(url, steps, anchor="never")
    assert done.held == tuple(steps[:2])
    assert [(m.position, m.version, str(m.kind)) for m in done.messages] == [(2, 3, "delta")]
    pull_version(url, out)
    assert same(pulled(out), topic.states[3])


def test_steps_come_from_names():
    names = [
        "b/global_step20",
        "run-3/model.safetensors",
        "c/iter_0000010.safetensors",
        "run-9/model-00001-of-2.safetensors",
    ]
    found = [(str(checkpoint.path), checkpoint.step) for checkpoint in find_steps([Path(name) for name in names])]
    assert found == [(names[1], 3), (names[3], 9), (names[2], 10), (names[0], 20)]
    counted = find_steps([Path("b"), Path("a")], 7)
    assert [(checkpoint.path.name, checkpoint.step) for checkpoint in counted] == [("b", 7), ("a", 8)]
