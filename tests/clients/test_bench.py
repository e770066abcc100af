"""`deltabus bench`: it measures every bit right, on any backend and checkpoints, and leaves nothing behind."""

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import deltabus.bench.run
import deltabus.cli.bench
from deltabus.bench import backend, peers
from deltabus.bench.backend import directory_of, plain_speed, remove_topic, topic_below
from deltabus.bench.memory import peak_of
from deltabus.bench.peer import Engine, Setup, Trainer
from deltabus.bench.peers import ProcessPeer
from deltabus.bench.run import Plan, Report, run_bench
from deltabus.bench.shapes import synthetic, tiny
from deltabus.bench.source import Source
from deltabus.bench.tables import ratio_text
from deltabus.bench.timing import measure, warm_up
from deltabus.bus.errors import (
    ClientError,
    ClosedError,
    CorruptPayloadError,
    KeyNotFoundError,
    PublishError,
    TransportError,
    UsageError,
    WaitTimeoutError,
)
from deltabus.cli.app import app
from deltabus.cli.bench import command_of
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.publisher import Publisher
from deltabus.transports import open_transport
from deltabus.transports.memory import MemoryTransport

from .support import lies_on_a_disk

MIB = 1 << 20


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], prog_name="deltabus")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two consecutive ones, of three dtypes, the second as a directory."""
    place = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(3)
    tensors = {
        "half": torch.randn(300, 20).half(),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "wide": torch.randn(70, 90),
    }
    save_file(tensors, place / "step-1.safetensors")
    moved = {name: tensor * 1.01 if tensor.is_floating_point() else tensor + 1 for name, tensor in tensors.items()}
    (place / "step-2").mkdir()
    save_file(moved, place / "step-2" / "model.safetensors")
    return place / "step-1.safetensors", place / "step-2"


@pytest.fixture(scope="module")
def local():
    """A measurement in this process, of formats and the way, and what it said meanwhile."""
    plan = Plan(source=Source(shape="tiny", density=0.05), url="memory://bench", repeats=2)
    said = []
    return plan, run_bench(plan, progress=said.append), said


def test_checkpoints_are_measured_between_processes_on_a_disk(checkpoints, tmp_path):
    place, figures = tmp_path / "disk", tmp_path / "figures.json"
    ended = run("--checkpoint", *checkpoints, "--url", place, "--repeats", 2, "--json", figures, "--no-formats")
    assert ended.exit_code == 0, ended.output
    report = msgspec.json.decode(figures.read_bytes(), type=Report)
    way = report.end_to_end
    assert report.exact
    assert (way.total, way.model) == (300 * 20 + 1 + 70 * 90, 300 * 20 * 2 + 8 + 70 * 90 * 4)
    assert 0 < way.changed <= way.total
    assert set(way.memory) == {f"{who}, {phase}" for who in ("trainer", "engine") for phase in ("anchor", "steps")}
    assert list(way.cached.stages) == ["save", "load", "copy"]
    assert way.cached.whole > max(way.cached.stages.values())
    if lies_on_a_disk(tmp_path):
        assert list(way.durable.stages) == ["save", "flush", "load", "copy"]
        assert way.durable.whole > max(way.durable.stages.values())
        assert way.durable.applied == way.applied + way.reread > way.applied
    assert min(way.applied, way.anchor_up, way.anchor_down, way.newcomer, way.plain.put, way.plain.get) > 0
    assert list(way.stages) == ["blocked", "encode", "upload", "download", "decode", "apply", "between"]
    assert list(place.iterdir()) == []
    assert report.left == ""
    for words in ("step-1.safetensors", "`apply` pauses the engine", "plain puts", "x plain", str(place)):
        assert words in ended.stdout


def test_a_topic_in_this_process_is_measured_in_this_process(local):
    plan, report, said = local
    assert report.exact
    assert len(said) == plan.count()
    assert (report.end_to_end.checkpoints, report.end_to_end.left_out, report.end_to_end.memory) == ({}, "", {})
    assert report.end_to_end.total == tiny().total
    assert report.left == ""


def test_every_format_is_measured_with_its_memory(local):
    _, report, _ = local
    names = [row.name for row in report.formats.rows]
    assert {f"deltabus, {name}" for name in ENCODINGS} <= set(names)
    for row in report.formats.rows:
        assert row.nbytes * 8 > report.formats.conditional
        assert min(row.encode, row.decode) > 0
        if sys.platform == "linux":
            assert row.encode_memory is not None
            assert row.decode_memory is not None


def test_memory_of_a_large_state_is_what_the_format_must_hold():
    """A format that sends the whole state holds it; one that sends a step holds far less."""
    pair = synthetic(Schema.of([TensorSpec(name="w", dtype="BF16", shape=(8 * MIB,))]), 0.01)
    warm_up(pair.schema)
    rows = {row.name: row for row in measure(pair, repeats=1).rows}
    full = rows["full safetensors"]
    assert full.encode_memory >= 0.95 * pair.old.nbytes
    assert rows["deltabus, overwrite"].decode_memory < 0.5 * pair.old.nbytes


@pytest.mark.parametrize("make", [lambda: np.ones(64 * MIB, np.uint8), lambda: torch.ones(64 * MIB, dtype=torch.uint8)])
def test_memory_counts_what_was_freed_again(make):
    def work():
        kept = make()
        return int(kept[-1])

    result, extra = peak_of(work)
    assert result == 1
    assert extra is None or 63 * MIB < extra < 80 * MIB
    assert peak_of(lambda: None)[1] in (None, *range(4 * MIB))


def test_a_wrong_bit_is_the_exit_status(local, monkeypatch):
    _, report, _ = local
    bad = dataclasses.replace(report.end_to_end, exact=False)
    monkeypatch.setattr(
        deltabus.cli.bench, "run_bench", lambda plan, progress: dataclasses.replace(report, end_to_end=bad)
    )
    ended = run("--shape", "tiny")
    assert ended.exit_code == 1
    assert "NOT EXACT" in ended.stdout
    rows = [dataclasses.replace(report.formats.rows[0], exact=False), *report.formats.rows[1:]]
    formats = dataclasses.replace(report.formats, rows=rows)
    assert report.exact
    assert not dataclasses.replace(report, formats=formats).exact


def test_what_is_left_behind_is_said(local, monkeypatch):
    _, report, _ = local
    left = dataclasses.replace(report, left="2 log records of x://y")
    monkeypatch.setattr(deltabus.cli.bench, "run_bench", lambda plan, progress: left)
    assert "left behind: 2 log records of x://y" in run("--shape", "tiny").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "huge"], "choose one of qwen3-0.6b, minilm, tiny"),
        (["--shape", "tiny", "--checkpoint", "a", "b"], "give one of the two"),
        (["--checkpoint", "a", "b", "--density", "0.1"], "leave it out"),
        (["--dtype", "bf16"], "--dtype is for checkpoints"),
        (["--checkpoint", "a", "b", "--dtype", "int3"], "'int3' is not one of"),
        (["--density", "2"], "density 2.0"),
        (["--repeats", "0"], "repeats=0"),
        (["--url", "gopher://x/y"], "gopher"),
        (["--url", "file:///x?pole=1"], "pole"),
        (["--url", "file://[x/y"], "malformed host"),
        (["--url", ""], "the URL is empty"),
        (["--checkpoint", "a", "b"], "there is no file"),
        (["--json", "no/such/directory/figures.json"], "cannot be written"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_is_measured(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert words in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_dtypes_are_written_as_push_writes_them(checkpoints):
    plan = deltabus.cli.bench.make_plan(
        url=None, shape=None, checkpoints=checkpoints, density=None, dtype="bf16", repeats=1, formats=False
    )
    assert plan.source.dtype == "bfloat16"
    assert command_of(plan).endswith("--dtype bfloat16 --repeats 1 --no-formats")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from deltabus.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "finally: assert not {'torch', 'numpy', 'numba', 'msgspec'} & sys.modules.keys(), 'heavy imports'"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "--checkpoint" in ended.stdout


def test_a_side_that_fails_says_why():
    source = Source(checkpoints=("/no/such.safetensors", "/no/other.safetensors"))
    with (
        pytest.raises(ClientError, match=r"the trainer: there is no file /no/such\.safetensors"),
        ProcessPeer(Setup(role="trainer", source=source, url="memory://x")) as peer,
    ):
        peer.answer()


def test_a_backend_that_cannot_be_written_is_told_and_left_as_it_was(tmp_path):
    (tmp_path / "file").write_bytes(b"here")
    with pytest.raises(UsageError, match="cannot be made"):
        run_bench(Plan(source=Source(shape="tiny"), url=str(tmp_path / "file"), repeats=1, formats=False))
    assert (tmp_path / "file").read_bytes() == b"here"


def test_an_engine_that_was_closed_waits_for_nothing():
    engine = Engine(Source(shape="tiny"), "memory://closed")
    engine.close()
    with pytest.raises(ClosedError, match="was closed"):
        engine.next()


def test_a_failure_in_this_process_ends_both_sides_and_leaves_nothing(monkeypatch):
    def fail(self, number):
        raise PublishError("no room")

    removed = []
    monkeypatch.setattr(Trainer, "_publish", fail)
    monkeypatch.setattr(deltabus.bench.run, "remove_topic", lambda url: removed.append(url) or "")
    with pytest.raises(PublishError, match="no room"):
        run_bench(Plan(source=Source(shape="tiny"), url="memory://fails", repeats=1, formats=False))
    assert len(removed) == 1
    # The engine waited for an update that never comes; its thread ends all the same.
    for thread in threading.enumerate():
        if thread.name.startswith("deltabus-bench"):
            thread.join(30)
            assert not thread.is_alive()


def test_a_failure_to_clean_up_does_not_hide_the_first_one(monkeypatch):
    def fail(*arguments, **options):
        raise PublishError("no room")

    def deny(url):
        raise TransportError("refused", url=url)

    monkeypatch.setattr(deltabus.bench.run, "remove_topic", deny)
    monkeypatch.setattr(deltabus.bench.run.end_to_end, "run", fail)
    with pytest.raises(PublishError, match="no room") as caught:
        run_bench(Plan(source=Source(shape="tiny"), url="memory://fails", repeats=1, formats=False))
    assert "could not be removed either: refused" in caught.value.__notes__[0]


def test_what_cannot_be_removed_is_no_failure(local, monkeypatch):
    _, report, _ = local

    def deny(url):
        raise TransportError("refused", url=url)

    monkeypatch.setattr(deltabus.bench.run, "remove_topic", deny)
    monkeypatch.setattr(deltabus.bench.run.end_to_end, "run", lambda *arguments, **options: report.end_to_end)
    done = run_bench(Plan(source=Source(shape="tiny"), url="memory://fails", repeats=1, formats=False))
    assert "refused" in done.left


def test_a_measurement_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(peers, "_RUN_LIMIT", 0.01)
    with (
        pytest.raises(WaitTimeoutError, match="not over after"),
        ProcessPeer(Setup(role="engine", source=Source(shape="tiny"), url="memory://x")) as peer,
    ):
        peer.answer()


def test_a_side_that_dies_is_told():
    setup = Setup(role="engine", source=Source(shape="tiny"), url="memory://x")
    with pytest.raises(ClientError, match="the engine ended with status"), ProcessPeer(setup) as peer:
        peer.answer()
        peer.ask("no_such_command")


@pytest.mark.parametrize(
    ("url", "before", "after"),
    [
        ("file:///data?poll=0.5", "file:///data/deltabus-bench-", "?poll=0.5"),
        ("file:///data/", "file:///data/deltabus-bench-", ""),
        ("memory://x", "memory://x/deltabus-bench-", ""),
        ("/a b", "file:///a%20b/deltabus-bench-", ""),
    ],
)
def test_topics_are_made_below_a_url(url, before, after):
    topic = topic_below(url)
    assert topic.startswith(before)
    assert topic.endswith(after)
    assert topic_below(url) != topic
    open_transport(topic)


def test_directories_are_those_of_files():
    assert str(directory_of("file:///a%20b/c?poll=1")) == "/a b/c"
    assert directory_of("memory://x") is None


def test_plain_bytes_are_measured_checked_and_deleted(monkeypatch):
    held = []
    put = MemoryTransport.put

    async def noted(self, key, data):
        held.append((key, len(data)))
        await put(self, key, data)

    monkeypatch.setattr(MemoryTransport, "put", noted)
    monkeypatch.setattr(backend, "_MOST_BYTES", 2500)
    speed = plain_speed("memory://plain", [1000, 1000, 1000, 1000], repeats=2)
    assert min(speed.put, speed.get) > 0
    assert [size for _, size in held] == [1000, 1000, 500] * 2

    async def look():
        async with open_transport("memory://plain") as transport:
            for key, _ in held:
                with pytest.raises(KeyNotFoundError):
                    await transport.get(key)

    asyncio.run(look())

    async def wrong(self, key, start=0, stop=None):
        return b"other"

    monkeypatch.setattr(MemoryTransport, "get", wrong)
    with pytest.raises(CorruptPayloadError, match="other bytes"):
        plain_speed("memory://plain", [10], repeats=1)


def test_a_topic_elsewhere_loses_its_blobs(tmp_path, monkeypatch):
    topic = tmp_path / "topic"
    with Publisher(topic) as publisher:
        publisher.publish(0, {"w": torch.ones(9)}).result(60)
    assert any(path.is_file() for path in (topic / "blobs").rglob("*"))
    # As if it were no directory, so that only what every transport can do is done.
    monkeypatch.setattr(backend, "directory_of", lambda url: None)
    left = remove_topic(topic.as_uri())
    assert left.startswith("1 log record of file://")
    assert [path for path in topic.rglob("*") if path.is_file() and "logs" not in path.parts] == []


def test_plans_refuse_what_measures_nothing():
    with pytest.raises(UsageError, match="repeats=0"):
        Plan(source=Source(shape="tiny"), repeats=0)


def test_ratios_have_words():
    assert [ratio_text(*each) for each in ((3, 2), (3, 0), (None, 2), (3, None))] == ["1.50", "-", "", ""]


def test_a_report_is_json(local):
    _, report, _ = local
    document = json.loads(msgspec.json.encode(report))
    assert document["end_to_end"]["exact"] is True
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
