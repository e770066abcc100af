from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import deltabus.cli.log
import deltabus.demo
from deltabus.bus.errors import DeltabusError, UsageError
from deltabus.cli.app import app
from deltabus.cli.inspect import inspect_file
from deltabus.cli.interrupts import importing
from deltabus.cli.log import read_log
from deltabus.cli.topic import choose_writer, version_ranges

from .cli_topic import make_topic, one_line

LIMIT = 60


@pytest.fixture(scope="module")
def topic(tmp_path_factory):
    return make_topic(tmp_path_factory.mktemp("cli") / "topic")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="deltabus")


def light(*arguments):
    """Run a command in a process of its own, which fails if torch gets loaded."""
    code = (
        "import sys; from deltabus.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'numpy', 'numba'} & sys.modules.keys(), 'heavy imports'"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_help_is_fast_to_start_and_names_every_command():
    ended = light("--help")
    assert ended.returncode == 0, ended.stderr
    assert all(name in ended.stdout for name in ("demo", "log", "pull", "push", "verify", "inspect"))


def test_the_module_runs_as_the_script_does(topic):
    command = [sys.executable, "-m", "deltabus.cli", "log", topic.url, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert len(json.loads(ended.stdout)["messages"]) == len(topic.records)
    assert ended.stderr == ""


def test_log_needs_no_torch(topic):
    ended = light("log", topic.url)
    assert ended.returncode == 0, ended.stderr


def test_version_is_printed():
    ended = run("--version")
    assert (ended.exit_code, ended.stdout.split(" ")[0].strip(",")) == (0, "deltabus")


def test_no_command_shows_the_help():
    ended = run()
    assert ended.exit_code == 2
    assert "Usage" in ended.output


def test_log_says_what_was_published(topic):
    log = read_log(topic.url, now=topic.messages[-1].created + 5)
    rows = log["messages"]
    assert [row["position"] for row in rows] == list(range(len(topic.records)))
    assert {row["version"] for row in rows} == set(topic.states) == set(range(1, 9))
    assert [row["step"] for row in rows if row["kind"] == "delta"] == [1, 2, 3, 4, 5, 6, 7]
    assert {row["epoch"] for row in rows} == {1, 2}
    assert rows[-1]["age"] == 5
    assert rows[0]["kind"] == "anchor"
    assert rows[0]["density"] == 1
    assert all(row["bytes"] == sum(blob.size for blob in m.blobs) for row, m in zip(rows, topic.messages, strict=True))
    deltas = [row for row in rows if row["kind"] == "delta"]
    assert log["totals"] == {
        "messages": len(rows),
        "versions": 8,
        "deltas": 7,
        "delta_bytes": sum(row["bytes"] for row in deltas),
        "anchors": len(rows) - 7,
        "anchor_bytes": sum(row["bytes"] for row in rows if row["kind"] == "anchor"),
        "density": sum(row["changed"] for row in deltas) / sum(row["total"] for row in deltas),
        "bits_per_changed_element": 8 * sum(row["bytes"] for row in deltas) / sum(row["changed"] for row in deltas),
    }


def test_log_prints_a_table_or_one_document(topic):
    table = run("log", topic.url, "--last", 2)
    assert table.exit_code == 0, table.output
    lines = [line for line in table.stdout.splitlines() if line.strip().startswith("trainer")]
    assert len(lines) == 2
    assert "note=[red]a" in lines[0]
    assert "8 versions" in table.stdout

    document = run("log", topic.url, "--json", "--last", 3, "--writer", "trainer")
    assert [row["position"] for row in json.loads(document.stdout)["messages"]] == [
        message.position for message in topic.messages[-3:]
    ]
    assert document.stderr == ""
    assert json.loads(run("log", topic.url, "--json", "--last", 0).stdout)["messages"] == []


def test_what_metadata_hold_does_nothing_to_the_terminal(topic, tmp_path):
    copy = topic.copy(tmp_path / "copy")
    copy.rewrite(1, metadata={"note": "\x1b[2J\nfaked"})
    shown = run("log", copy.url)
    assert "\x1b" not in shown.stdout
    assert r"note=\x1b[2J\nfaked" in shown.stdout


@pytest.mark.parametrize("command", ["log", "verify"])
def test_errors_are_one_line_and_a_status(topic, tmp_path, command):
    nothing = run(command, tmp_path / "nothing")
    assert nothing.exit_code == 1
    assert one_line(nothing.stderr, "nothing was published", "check the URL")
    assert list(tmp_path.iterdir()) == []
    scheme = run(command, "fyle:///x")
    assert scheme.exit_code == 2
    assert one_line(scheme.stderr, "fyle", "file://")
    stranger = run(command, topic.url, "--writer", "other")
    assert stranger.exit_code == 2
    assert one_line(stranger.stderr, "'other'", "trainer")
    assert run(command).exit_code == 2
    assert run(command, topic.url, "--wrong").exit_code == 2


def test_debug_shows_where_an_error_came_from(tmp_path):
    ended = run("--debug", "log", tmp_path / "nothing")
    assert isinstance(ended.exception, DeltabusError)


def test_an_interruption_has_its_own_status(topic, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(deltabus.cli.log, "read_log", interrupted)
    ended = run("log", topic.url)
    assert ended.exit_code == 130
    assert one_line(ended.stderr, "interrupted")


def test_an_interruption_is_held_back_while_modules_are_imported():
    before = signal.getsignal(signal.SIGINT)
    done = False
    with pytest.raises(KeyboardInterrupt), importing():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    done = False
    with pytest.raises(KeyboardInterrupt), importing():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done = True
    assert not done
    assert signal.getsignal(signal.SIGINT) is before


def test_a_damaged_record_is_a_clear_error_of_log(topic, tmp_path):
    copy = topic.copy(tmp_path / "copy")
    copy.records[1].write_bytes(copy.records[1].read_bytes()[:-1])
    ended = run("log", copy.url)
    assert ended.exit_code == 1
    assert one_line(ended.stderr, "record 1", "damaged")


def test_demo_is_handed_its_options(monkeypatch):
    calls = []

    def run_demo(url, steps, *, json, keep):
        calls.append((url, steps, json, keep))
        return 7

    monkeypatch.setattr(deltabus.demo, "run_demo", run_demo)
    assert run("demo").exit_code == 7
    assert run("demo", "--url", "file:///x", "--steps", 5, "--json", "--keep").exit_code == 7
    assert calls == [(None, 12, False, False), ("file:///x", 5, True, True)]


def test_a_writer_must_be_named_where_there_are_several():
    assert choose_writer("memory://x", {"a"}, None) == "a"
    assert choose_writer("memory://x", {"a", "b"}, "b") == "b"
    with pytest.raises(ValueError, match=r"2 writers.*--writer: a, b"):
        choose_writer("memory://x", {"a", "b"}, None)


def test_versions_are_told_as_ranges(topic):
    messages = topic.messages
    assert version_ranges(tuple(messages)) == "1-8"
    assert version_ranges(tuple(m for m in messages if m.version in {1, 2, 4, 8})) == "1-2, 4, 8"


def test_inspect_tells_the_three_kinds_of_file(topic):
    record = run("inspect", topic.records[1], "--json")
    message = topic.messages[1]
    assert record.exit_code == 0, record.output
    said = json.loads(record.stdout)
    assert (said["type"], said["message"]["version"]) == ("record", message.version)
    assert said["message"]["blobs"][0]["sha256"] == message.blobs[0].checksum.hex()
    assert f"{message.digest_after:016x}" in run("inspect", topic.records[1]).stdout

    part = json.loads(run("inspect", topic.blob(0), "--json").stdout)
    assert (part["type"], part["kind"], part["part"], part["valid"]) == ("part", "anchor", 0, True)
    assert part["schema"] == message.schema.checksum.hex()
    assert [segment["index"] for segment in part["segments"]] == [0, 1]
    assert sum(segment["bytes"] for segment in part["segments"]) == topic.messages[0].stats.encodings["full"]
    assert "whole" in run("inspect", topic.blob(1)).stdout

    path = topic.path / message.schema.key
    schema = json.loads(run("inspect", path, "--json").stdout)
    assert (schema["type"], schema["sha256"]) == ("schema", hashlib.sha256(path.read_bytes()).hexdigest())
    tied = next(tensor for tensor in schema["tensors"] if tensor["name"] == "embed.weight")
    assert tied == {"name": "embed.weight", "dtype": "BF16", "shape": [50, 12], "aliases": ["head.weight"]}
    assert "head.weight" in run("inspect", path).stdout


def test_inspect_says_which_segment_is_damaged(topic, tmp_path):
    damaged = bytearray(topic.blob(0).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "part").write_bytes(damaged)
    ended = run("inspect", tmp_path / "part", "--json")
    assert ended.exit_code == 1
    assert [segment["valid"] for segment in json.loads(ended.stdout)["segments"]] == [True, False]
    shown = run("inspect", tmp_path / "part")
    assert shown.exit_code == 1
    assert "DAMAGED" in shown.stdout


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 2, "no payload part, no record and no schema"),
        (b"hello, world", 2, "no payload part, no record and no schema"),
        (b'{"tensors": 3}', 1, "schema cannot be read"),
        (b"DBM1" + bytes(20), 1, "damaged"),
        (b"DBM1", 1, "not a deltabus message"),
        (bytes(8) + b"{", 1, "payload part"),
        (b"\x40" + bytes(7) + b"{}" + b" " * 62, 1, "header that cannot be read"),
        (b"DBM1" + bytes(1 << 20), 2, "more than"),
    ],
)
def test_inspect_refuses_other_files(tmp_path, content, status, words):
    (tmp_path / "file").write_bytes(content)
    ended = run("inspect", tmp_path / "file")
    assert ended.exit_code == status
    assert one_line(ended.stderr, str(tmp_path / "file"), words)


def test_inspect_reads_nothing_of_a_file_that_is_too_large(topic, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(topic.blob(0).read_bytes())
    os.truncate(file, 8 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="more than"):
            inspect_file(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_inspect_refuses_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        ended = run("inspect", path)
        assert ended.exit_code == 2
        assert one_line(ended.stderr, str(path), "cannot be read")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_inspect_of_a_damaged_file_is_an_error_or_says_so(topic, tmp_path, data):
    path = data.draw(st.sampled_from([topic.records[1], topic.blob(1), topic.blob(0)]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file = tmp_path / "file"
    file.write_bytes(content[: data.draw(st.sampled_from([None, None, len(content) // 2]))])
    try:
        assert not inspect_file(file)["valid"]
    except DeltabusError as error:
        assert str(file) in str(error)
