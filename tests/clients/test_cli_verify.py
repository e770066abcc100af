from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deltabus import sender as sender_module
from deltabus.bus.errors import DeltabusError
from deltabus.bus.message import Kind
from deltabus.bus.retention import Retention
from deltabus.cli.app import app
from deltabus.cli.history import check_log, decode_log
from deltabus.cli.prune import prune_topic
from deltabus.cli.verify import verify_topic
from deltabus.publisher import Publisher

from .cli_topic import make_topic
from .support import LIMIT, small_model, train


@pytest.fixture(scope="module")
def topic(tmp_path_factory):
    return make_topic(tmp_path_factory.mktemp("verify") / "topic")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """One anchor, then seven deltas."""
    return make_topic(tmp_path_factory.mktemp("verify") / "chain", anchor="never")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="deltabus")


def found_in(topic):
    report = verify_topic(topic.url)
    assert report.ok == (not report.problems)
    return [(problem.position, problem.key) for problem in report.problems], report


def test_a_topic_as_it_was_published_is_whole(topic):
    places, report = found_in(topic)
    assert places == []
    assert (report.records, report.replayed, report.unreachable) == (len(topic.records), len(topic.records), 0)
    assert any(m.kind is Kind.ANCHOR for m in topic.messages[1:])
    assert report.blobs == len(topic.records) + 1
    assert report.nbytes == sum(path.stat().st_size for path in topic.path.rglob("*/*") if _is_blob(topic, path))
    shown = run("verify", topic.url)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.endswith("the topic is whole\n")


def _is_blob(topic, path):
    return path.is_file() and "logs" not in path.relative_to(topic.path).parts


def test_a_flipped_byte_is_found_and_what_follows_is_still_looked_at(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    for position in (2, 5):
        content = bytearray(copy.blob(position).read_bytes())
        content[len(content) // 2] ^= 16
        copy.blob(position).write_bytes(content)
    places, report = found_in(copy)
    assert places == [(p, copy.messages[p].blobs[0].key) for p in (2, 5)]
    assert (report.replayed, report.unreachable) == (2, 4)


def test_an_anchor_takes_the_chain_up_again(topic, tmp_path):
    copy = topic.copy(tmp_path / "copy")
    copy.blob(1).unlink()
    second = [m for m in copy.messages if m.kind is Kind.ANCHOR][1]
    places, report = found_in(copy)
    assert places == [(1, copy.messages[1].blobs[0].key)]
    # Deltas that were published while the anchor was on its way stand before it, and go on from what it holds.
    between = [m for m in copy.messages if 1 < m.position < second.position and m.kind is Kind.DELTA]
    lost = [m for m in between if m.base["trainer"] < second.version]
    assert lost
    assert report.unreachable == len(lost)
    assert report.replayed == len(copy.records) - 1 - len(lost)


def test_a_missing_blob_and_a_missing_schema_are_found(chain, tmp_path):
    copy = chain.copy(tmp_path / "blob")
    copy.blob(3).unlink()
    assert found_in(copy)[0] == [(3, copy.messages[3].blobs[0].key)]

    copy = chain.copy(tmp_path / "schema")
    key = copy.messages[0].schema.key
    (copy.path / key).unlink()
    places, report = found_in(copy)
    assert places == [(0, key)]
    assert (report.replayed, report.unreachable) == (0, len(copy.records))


def test_a_truncated_record_is_found_and_says_no_more_than_it_must(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    record = copy.records[4]
    record.write_bytes(record.read_bytes()[:-3])
    places, report = found_in(copy)
    assert places == [(4, None)]
    assert (report.replayed, report.unreachable) == (4, 3)


def test_swapped_records_are_found(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    third, fourth = copy.records[3].read_bytes(), copy.records[4].read_bytes()
    copy.records[3].write_bytes(fourth)
    copy.records[4].write_bytes(third)
    assert found_in(copy)[0] == [(3, None), (4, None)]


def test_a_key_that_no_blob_can_have_is_found(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    key = "logs/trainer/00000000000000000000"
    (blob,) = copy.messages[6].blobs
    copy.rewrite(6, blobs=(msgspec.structs.replace(blob, key=key),))
    places, report = found_in(copy)
    assert places == [(6, key)]
    assert (report.records, report.replayed, report.unreachable) == (8, 6, 1)


def test_a_hole_in_the_log_is_found(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    for record in copy.records[3:5]:
        record.unlink()
    places, report = found_in(copy)
    assert places == [(3, None)]
    assert "3 to 4" in report.problems[0].what
    assert (report.records, report.replayed, report.unreachable) == (6, 3, 3)


def test_a_wrong_digest_is_found_where_it_is_and_where_it_is_built_on(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    copy.rewrite(2, digest_after=copy.messages[2].digest_after ^ 1)
    places, report = found_in(copy)
    assert places == [(2, copy.messages[2].blobs[0].key), (3, None)]
    assert "digest" in report.problems[0].what


def test_an_anchor_beside_a_delta_is_compared_with_what_the_deltas_led_to(topic, tmp_path):
    copy = topic.copy(tmp_path / "copy")
    anchors = [m for m in copy.messages if m.kind is Kind.ANCHOR]
    assert len(anchors) > 2
    # The first anchor's payload is sound, but of another state.
    copy.rewrite(anchors[1].position, blobs=anchors[0].blobs)
    places, report = found_in(copy)
    assert places == [(anchors[1].position, anchors[0].blobs[0].key)]
    assert "reached by deltas" in report.problems[0].what
    assert report.replayed == len(copy.records) - 1


def test_all_problems_are_told_at_once_in_order(chain, tmp_path):
    copy = chain.copy(tmp_path / "copy")
    copy.rewrite(2, epoch=3)
    copy.blob(6).write_bytes(b"")
    copy.blob(1).unlink()
    copy.records[5].write_bytes(b"DBM1")
    ended = run("verify", copy.url, "--json")
    assert (ended.exit_code, ended.stderr) == (1, "")
    said = json.loads(ended.stdout)
    assert not said["ok"]
    assert [problem["position"] for problem in said["problems"]] == [1, 3, 5, 6]
    shown = run("verify", copy.url, "--writer", "trainer")
    assert shown.exit_code == 1
    assert "4 problems found" in shown.stdout
    assert "epoch 1 follows epoch 3" in shown.stdout


def test_a_pruned_topic_is_whole(topic, tmp_path):
    copy = topic.copy(tmp_path / "copy")
    pruned = prune_topic(copy.url, Retention(keep_anchors=1, grace=0))
    first = pruned.pruning.removal.trims["trainer"]
    places, report = found_in(copy)
    assert (places, report.records) == ([], len(topic.records) - first)
    assert report.replayed >= 1


def test_a_pruned_log_may_begin_with_deltas_before_their_anchor(tmp_path, monkeypatch):
    released, store = threading.Event(), sender_module.store_payload

    async def hold(*args, name):
        while name.endswith("anchor") and not name.startswith("000000000001-") and not released.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.002)
        return await store(*args, name=name)

    monkeypatch.setattr(sender_module, "store_payload", hold)
    url, model = str(tmp_path / "topic"), small_model()
    with Publisher(url, on_busy="wait", anchor="never", skips="off") as publisher:
        for step in range(1, 8):
            train(model, step)
            if step == 4:
                publisher.request_anchor()
            publisher.publish(step, model).result(LIMIT)
        released.set()
        publisher.flush(LIMIT)
        train(model, 8)
        publisher.publish(8, model).result(LIMIT)
    assert prune_topic(url, Retention(keep_anchors=1, grace=0)).pruning.removal.trims["trainer"] == 4
    report = verify_topic(url)
    # Deltas to 5, 6 and 7, the anchor of 4, the delta to 8.
    assert (report.records, report.problems, report.replayed, report.unreachable) == (5, (), 5, 0)


@pytest.mark.parametrize("pruned", [False, True])
def test_a_beginning_that_retention_did_not_remove_is_missed(topic, tmp_path, pruned):
    copy = topic.copy(tmp_path / "copy")
    first = 0
    if pruned:
        first = prune_topic(copy.url, Retention(keep_anchors=2, grace=0)).pruning.removal.trims["trainer"]
    copy.records[0].unlink()
    report = verify_topic(copy.url)
    (problem,) = report.problems
    assert (problem.position, problem.key) == (first, None)
    assert f"position {first} is missing" in problem.what
    copy.records[0].unlink()
    (problem,) = verify_topic(copy.url).problems
    assert f"position {first} to {first + 1} is missing" in problem.what


def test_states_of_other_shapes_follow_each_other(tmp_path):
    with Publisher(tmp_path / "new", on_busy="wait") as publisher:
        for size in (3, 5, 5, 3):
            publisher.publish(size, {"w": torch.full((size,), float(size))}).result(60)
        publisher.publish(9, {}).result(60)
    report = verify_topic((tmp_path / "new").as_uri())
    assert (report.problems, report.replayed, report.unreachable) == ((), report.records, 0)


def test_memory_is_that_of_one_state(tmp_path):
    weights = torch.from_numpy(np.random.default_rng(0).integers(-30000, 30000, (24, 1 << 20)).astype(np.int16))
    with Publisher(tmp_path / "new", on_busy="wait", anchor=1) as publisher:
        for step in range(3):
            weights[step, :100] += 1
            publisher.publish(step, {"w": weights}).result(60)
    state = weights.numel() * 2
    del weights
    tracemalloc.start()
    try:
        assert verify_topic((tmp_path / "new").as_uri()).ok
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The state, a part as it was fetched, and the segments that are decoded ahead of it.
    assert peak < 3 * state


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_anywhere_goes_unnoticed(chain, tmp_path_factory, data):
    files = [path for path in sorted(chain.path.rglob("*")) if path.is_file()]
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    copy = chain.copy(tmp_path_factory.mktemp("flip") / "copy")
    (copy.path / path.relative_to(chain.path)).write_bytes(content)
    assert not verify_topic(copy.url).ok


def changed(message, **fields):
    return type(message)(**{name: getattr(message, name) for name in message.__struct_fields__} | fields)


@pytest.mark.parametrize(
    ("position", "fields", "words"),
    [
        (3, {"epoch": 9}, "epoch 2 follows epoch 9"),
        (3, {"group": ("trainer", "other")}, "group"),
        (3, {"version": 99}, "follows version 99"),
        (3, {"version": 3, "base": {"trainer": 2}}, "leads once more to version 3"),
        (3, {"base": {"trainer": 1}}, "starts from version 1 with digest"),
        (3, {"digest_before": 1}, "starts from version 3 with digest"),
        (3, {"digest_after": 1}, "starts from version 4 with digest"),
        (0, {"version": 2}, "starts from version 1, which no message leads to"),
    ],
)
def test_messages_that_contradict_each_other_are_found(chain, position, fields, words):
    messages = chain.messages
    assert check_log(messages, whole=True) == []
    messages[position] = changed(messages[position], **fields)
    problems = check_log(messages, whole=True)
    assert any(words in problem.what for problem in problems), problems
    assert all(problem.writer == "trainer" and problem.key is None for problem in problems)


def test_a_log_that_begins_late_may_begin_with_deltas(chain):
    assert check_log(chain.messages[3:], whole=False) == []
    assert len(check_log(chain.messages[3:], whole=True)) == 1


def test_what_leads_once_more_to_a_removed_version_is_no_problem(chain):
    first, second, third = (changed(message, epoch=1) for message in chain.messages[3:6])
    anchor = changed(first, position=6, kind=Kind.ANCHOR, base={}, digest_before=None)
    assert check_log([second, third, anchor], whole=False) == []
    (problem,) = check_log([changed(second, position=0), third, anchor], whole=False)
    assert f"version {anchor.version} is new" in problem.what
    # Known by the delta that starts from it, though the log begins with a message of an older version.
    older = changed(first, version=1, position=4, kind=Kind.ANCHOR, base={}, digest_before=None)
    assert check_log([older, changed(second, position=5), anchor], whole=False) == []
    (problem,) = check_log([older, changed(third, position=5), anchor], whole=False)
    assert f"version {anchor.version} is new" in problem.what


def test_records_that_cannot_be_read_are_left_out(chain):
    from deltabus.bus.transport import Record

    records = [Record(position, path.read_bytes()) for position, path in enumerate(chain.records)]
    messages, problems = decode_log("memory://x", "trainer", records)
    assert (messages, problems) == (chain.messages, [])
    messages, problems = decode_log("memory://x", "other", records[:2])
    assert (messages, [problem.position for problem in problems]) == ([], [0, 1])


def test_what_cannot_be_reached_is_an_error_and_no_report(tmp_path):
    (tmp_path / "logs").write_bytes(b"")
    with pytest.raises(DeltabusError, match="logs"):
        verify_topic(tmp_path.as_uri())
