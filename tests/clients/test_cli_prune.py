from __future__ import annotations

import asyncio
import json
import os

import msgspec
import pytest
from typer.testing import CliRunner

from deltabus.bus.leases import Lease
from deltabus.bus.message import Kind
from deltabus.cli.app import app
from deltabus.cli.pull import pull_version
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from .cli_topic import make_topic, one_line, pulled, same

GARBAGE = "blobs/trainer/000000000002-delta-0000-0123456789abcdef"


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return make_topic(tmp_path_factory.mktemp("prune") / "topic", anchor=2)


@pytest.fixture
def topic(origin, tmp_path):
    """A copy, of which all is a day old."""
    copy = origin.copy(tmp_path / "copy")
    for path in copy.path.rglob("*"):
        os.utime(path, (path.stat().st_mtime - 86400,) * 2)
    return copy


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="deltabus")


def files(topic):
    return {str(path.relative_to(topic.path)) for path in topic.path.rglob("*") if path.is_file()}


def put(topic, key, data):
    async def write():
        async with open_transport(topic.url) as transport:
            await transport.put(key, data)

    asyncio.run(write())


def test_a_dry_run_shows_what_would_go_and_changes_nothing(topic):
    before = files(topic)
    shown = run("prune", topic.url, "--keep-anchors", 1, "--dry-run")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert files(topic) == before
    assert "would go" in shown.stdout
    assert "nothing was changed" in shown.stdout
    told = json.loads(run("prune", topic.url, "--keep-anchors", 1, "--dry-run", "--json").stdout)
    assert told["dry_run"]
    assert told["bytes"] > 0


def test_what_goes_is_what_was_told_and_the_rest_is_whole(topic, tmp_path):
    before, messages = files(topic), topic.messages
    options = ["--keep-anchors", 1, "--grace", 0]
    planned = json.loads(run("prune", topic.url, *options, "--dry-run", "--json").stdout)
    shown = run("prune", topic.url, *options, "--json")
    assert (shown.exit_code, shown.stderr) == (0, "")
    told = json.loads(shown.stdout)
    assert {**told, "dry_run": True} == planned
    (log,) = told["logs"]
    first = log["first_position"]
    kept = messages[first:]
    # An anchor may come into the log behind the deltas that go on from it.
    anchor = max((m for m in messages if m.kind is Kind.ANCHOR), key=lambda m: m.version)
    assert first == min(m.position for m in messages if m == anchor or m.version > anchor.version)
    assert log["removed"]["messages"] == first
    assert log["kept"]["messages"] == len(messages) - first
    named = {blob.key for message in kept for blob in (message.schema, *message.blobs)}
    assert files(topic) - before == {f"trims/trainer/{first:020}"}
    assert before - files(topic) == {f"logs/trainer/{position:020}" for position in range(first)} | {
        blob.key for message in messages[:first] for blob in message.blobs if blob.key not in named
    }
    assert verify_topic(topic.url).ok
    for version in {message.version for message in kept}:
        pull_version(topic.url, tmp_path / f"{version}", version=version)
        assert same(pulled(tmp_path / f"{version}"), topic.states[version])
    assert "freed 0 B" in run("prune", topic.url, *options).stdout


def test_by_age_and_by_bytes(topic):
    for options in (["--max-age", "2d"], ["--max-bytes", "1GB"], ["--keep-anchors", 99]):
        told = json.loads(run("prune", topic.url, "--dry-run", "--json", *options).stdout)
        assert told["logs"][0]["removed"]["messages"] == 0
    for options in (["--max-age", "12h"], ["--max-bytes", "1B"]):
        told = json.loads(run("prune", topic.url, "--dry-run", "--json", *options).stdout)
        assert told["logs"][0]["kept"]["anchors"] == 1


def test_what_was_written_within_the_grace_stays(origin):
    told = json.loads(run("prune", origin.url, "--keep-anchors", 1, "--dry-run", "--json").stdout)
    assert told["logs"][0]["removed"]["messages"] == 0
    told = json.loads(run("prune", origin.url, "--keep-anchors", 1, "--grace", 0, "--dry-run", "--json").stdout)
    assert told["logs"][0]["removed"]["messages"] > 0


def test_a_live_lease_keeps_what_its_holder_needs(topic):
    lease = Lease(reader="engine-3", holds={"trainer": 2}, seconds=600.0)
    put(topic, f"leases/{7:016x}/{1:012}", msgspec.msgpack.encode(lease))
    shown = run("prune", topic.url, "--keep-anchors", 1)
    assert "lease of engine-3: holds version 2 of trainer" in shown.stdout
    assert "keeps more than you asked for" in shown.stdout
    messages = topic.messages
    assert {message.version for message in messages} >= set(range(3, max(topic.states) + 1))
    assert 1 not in {message.version for message in messages}


def test_garbage_is_removed_when_it_is_old_enough(topic):
    put(topic, GARBAGE, b"x" * 1000)
    assert GARBAGE in files(topic)
    run("prune", topic.url, "--keep-anchors", 99)
    assert GARBAGE in files(topic)
    shown = run("prune", topic.url, "--keep-anchors", 99, "--garbage-age", 0)
    assert "1 blob that no message names: 1.0 kB" in shown.stdout
    assert GARBAGE not in files(topic)
    assert verify_topic(topic.url).ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["what to keep"]),
        (["--max-age", "7y"], ["7y"]),
        (["--max-bytes", "lots"], ["lots"]),
        (["--keep-anchors", "1", "--grace", "x"], ["x"]),
    ],
)
def test_misuse_is_told_in_one_line(topic, options, words):
    before = files(topic)
    ended = run("prune", topic.url, *options)
    assert ended.exit_code == 2
    assert one_line(ended.stderr, *words)
    assert files(topic) == before


def test_a_topic_without_messages_is_an_error(tmp_path):
    ended = run("prune", tmp_path / "nothing", "--keep-anchors", 1)
    assert ended.exit_code == 1
    assert one_line(ended.stderr, "nothing was published")
    assert list(tmp_path.iterdir()) == []
