"""A reader written from the pages in docs/ alone finds every bit of the topics that deltabus writes.

It refuses what is damaged. `test_payloads_and_records.py` looks at single payloads and records.
"""

from __future__ import annotations

import ast
import asyncio
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from deltabus import Group, Publisher
from deltabus.bus.signing import Scheme, SigningKey
from deltabus.transports import open_transport

from .published import LIMIT, Weights, flipped, found, halves, of_every_dtype, publish, small, snapshot
from .schema import RefusedError
from .topic import Topic

READER = ["message", "payload", "schema", "seals", "topic"]
ENCODINGS = ["conditional", "overwrite", "step", "dense"]
OLD, NEW = SigningKey(Scheme.ED25519, b"o" * 32), SigningKey(Scheme.ED25519, b"n" * 32)
SHARED = SigningKey(Scheme.HMAC_SHA256, b"s" * 32)


@pytest.mark.parametrize("name", READER)
def test_the_reader_stands_alone(name):
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(
                (node.module or "").partition(".")[0] if not node.level else f"{'.' * node.level}{node.module}"
            )
    assert imported <= sys.stdlib_module_names | {"zstandard"} | {f".{name}" for name in READER}


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    for name in ("DELTABUS_SIGNING_KEY", "DELTABUS_VERIFY_KEYS"):
        monkeypatch.delenv(name, raising=False)


def holds(topic: Topic, truth: dict[int, dict], writer: str = "trainer") -> bool:
    topic.check()
    assert topic.newest() == {writer: max(truth)}
    return all(found(topic, {writer: version}) == truth[version] for version in truth)


def messages(topic: Topic, writer: str = "trainer"):
    return topic.logs[writer].messages


# Topics of one writer


def test_every_dtype(tmp_path):
    weights = of_every_dtype()
    truth = publish(tmp_path.as_uri(), weights, range(9), anchor=4, skips="all")
    topic = Topic(tmp_path)
    assert holds(topic, truth)
    assert {message.kind for message in messages(topic)} == {"anchor", "delta"}
    assert any(message.version - message.base.get("trainer", message.version) > 1 for message in messages(topic))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(tmp_path, encoding):
    weights = of_every_dtype()
    truth = publish(tmp_path.as_uri(), weights, range(2), encoding=encoding, anchor="never")
    weights.move(0.9)
    truth |= publish(tmp_path.as_uri(), weights, [2], encoding=encoding, anchor="never")
    truth |= publish(tmp_path.as_uri(), weights, [3], encoding=encoding, anchor="never")
    assert holds(Topic(tmp_path), truth)


def test_nothing_and_next_to_nothing(tmp_path):
    truth = publish((tmp_path / "empty").as_uri(), Weights({"none": torch.zeros(0, 3)}), range(2))
    assert holds(Topic(tmp_path / "empty"), truth)
    one = Weights({"one": torch.tensor(1.0)})
    with Publisher((tmp_path / "one").as_uri(), on_busy="wait") as publisher:
        truth = {}
        for step in range(4):  # an anchor, a delta without changes, a change, and the change back
            one["one"].fill_(1.5 if step == 2 else 1.0)
            truth[publisher.publish(step, one).result(LIMIT).version] = snapshot(one)
    topic = Topic(tmp_path / "one")
    assert holds(topic, truth)
    assert [len(message.blobs) for message in messages(topic)] == [1, 0, 1, 1]


def test_restarts_going_back_and_another_schema(tmp_path):
    url, weights = tmp_path.as_uri(), small()
    truth = publish(url, weights, range(3))
    older = Weights({name: weight.clone() for name, weight in weights.items()}, seed=5)
    truth |= publish(url, older, [3, 4])
    truth |= publish(url, Weights({n: w.clone() for n, w in older.items()}), [5], have=older)
    truth |= publish(url, Weights({**older, "more": torch.ones(3)}), [6, 7])
    truth |= publish(url, Weights({**older, "more": torch.ones(4)}), [2, 3])
    topic = Topic(tmp_path)
    assert holds(topic, truth)
    assert {message.epoch for message in messages(topic)} == {1, 2, 3, 4, 5}
    assert len({message.schema.checksum for message in messages(topic)}) == 3


def test_a_log_that_was_cut_off_in_front(tmp_path):
    weights = small()
    truth = publish(tmp_path.as_uri(), weights, range(6), anchor=3)

    async def trim():
        async with open_transport(tmp_path.as_uri()) as transport:
            await transport.trim("trainer", anchor.position)

    anchor = [message for message in messages(Topic(tmp_path)) if message.kind == "anchor"][1]
    asyncio.run(trim())
    topic = Topic(tmp_path)
    assert topic.logs["trainer"].begin == anchor.position
    assert holds(topic, {version: bits for version, bits in truth.items() if version >= anchor.version})


# Several writers


def publish_ranks(url, weights, steps, *, ranks, generation):
    """Publish some steps of a group, and return the states by version of each of its members."""
    states = []
    group = Group.of_ranks("trainer", ranks, generation=generation)
    with ExitStack() as stack:
        publishers = [stack.enter_context(Publisher(url, writer=w, group=group, workers=1)) for w in group.members]
        for step in steps:
            waiting = [p.publish(step, halves(weights, rank, ranks)) for rank, p in enumerate(publishers)]
            versions = {w: p.result(LIMIT).version for w, p in zip(group.members, waiting, strict=True)}
            states.append((versions, snapshot(weights)))
            weights.move()
    return states


def test_ranks_and_their_next_incarnation(tmp_path):
    url, weights = tmp_path.as_uri(), small()
    states = publish_ranks(url, weights, [1, 2, 3], ranks=2, generation=1)
    with Publisher(url, writer="trainer-0", group=Group.of_ranks("trainer", 2, generation=2)) as alone:
        alone.publish(2, halves(weights, 0, 2)).result(LIMIT)  # and dies before the other one has published
    assert Topic(tmp_path).newest() == states[-1][0]
    states += publish_ranks(url, weights, [2, 3], ranks=3, generation=3)
    topic = Topic(tmp_path)
    topic.check()
    for state, bits in states:
        assert found(topic, state) == bits
    assert topic.newest() == states[-1][0]


def test_writers_that_rest_on_one_another(tmp_path):
    url, weights, tuned = tmp_path.as_uri(), small(), small()
    adapter = Weights({"adapter": torch.arange(6).bfloat16()})
    with (
        Publisher(url, writer="base", on_busy="wait") as base,
        Publisher(url, writer="adapter", on_busy="wait") as other,
        Publisher(url, writer="tuner", on_busy="wait") as tuner,
    ):
        base.publish(1, weights).result(LIMIT)
        other.publish(1, adapter, after={"base": 1}).result(LIMIT)
        tuner.publish(1, tuned, after={"base": 1}).result(LIMIT)
        first = snapshot(tuned) | snapshot(adapter)
        assert found(Topic(tmp_path)) == first
        adapter.move()
        other.publish(2, adapter, after={"base": 2}).result(LIMIT)
        assert found(Topic(tmp_path)) == first  # since the second version of the base is not there
        tuned.move()
        tuner.publish(2, tuned).result(LIMIT)
        assert found(Topic(tmp_path)) == first | snapshot(tuned)
        weights.move()
        base.publish(2, weights).result(LIMIT)
        assert Topic(tmp_path).newest() == {"base": 2, "adapter": 2, "tuner": 2}
        with pytest.raises(RefusedError, match="neither had applied the other"):
            Topic(tmp_path).tensors()


def test_a_tensor_that_nobody_has_whole(tmp_path):
    with Publisher(tmp_path.as_uri()) as publisher:
        publisher.publish(1, halves(small(), 0, 2)).result(LIMIT)
    topic = Topic(tmp_path)
    topic.check()
    with pytest.raises(RefusedError, match="no writer has all elements"):
        topic.tensors()


def test_a_group_without_a_step_in_common_is_not_waited_for(tmp_path):
    url, weights = tmp_path.as_uri(), small()
    group = Group.of_ranks("rank", 2, generation=1)
    with Publisher(url) as alone, Publisher(url, writer="rank-0", group=group) as rank:
        alone.publish(1, weights).result(LIMIT)
        rank.publish(1, {"more": torch.ones(3)}).result(LIMIT)
    assert found(Topic(tmp_path)) == snapshot(weights)


# Signatures


@pytest.mark.parametrize("key", [OLD, SHARED], ids=["ed25519", "hmac"])
def test_signed_topics(tmp_path, key):
    truth = publish((tmp_path / "signed").as_uri(), small(), range(3), key=key)
    assert holds(Topic(tmp_path / "signed", [NEW.verify_key.text, key.verify_key.text]), truth)
    assert holds(Topic(tmp_path / "signed", [key.text]), truth)
    assert holds(Topic(tmp_path / "signed"), truth)
    with pytest.raises(RefusedError, match="another key"):
        Topic(tmp_path / "signed", [NEW.verify_key.text])
    publish((tmp_path / "not").as_uri(), small(), range(1))
    with pytest.raises(RefusedError, match="not signed"):
        Topic(tmp_path / "not", [key.text])


def test_another_key_and_what_does_not_follow(tmp_path):
    weights, keys = small(), [OLD.verify_key.text, NEW.verify_key.text]
    for name in ("one", "two"):
        truth = publish((tmp_path / name).as_uri(), weights, range(2), key=OLD)
        truth |= publish((tmp_path / name).as_uri(), weights, range(2, 4), key=NEW, keys=OLD.verify_key)
        assert holds(Topic(tmp_path / name, keys), truth)
    place, other = ((tmp_path / name / "logs" / "trainer" / f"{2:020d}") for name in ("one", "two"))
    place.write_bytes(other.read_bytes())
    with pytest.raises(RefusedError, match="does not follow"):
        Topic(tmp_path / "one", keys)


# Damage


def files_of(place: Path) -> list[Path]:
    return [path for path in sorted(place.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("key", [None, SHARED], ids=["not signed", "signed"])
def test_a_flipped_byte_in_any_file_is_refused(tmp_path, key):
    publish(tmp_path.as_uri(), small(), range(4), anchor=2, skips="all", key=key)
    keys = [key.text] if key else []
    Topic(tmp_path, keys).check()
    chosen = random.Random(3)
    files = files_of(tmp_path)
    assert {path.relative_to(tmp_path).parts[0] for path in files} == {"blobs", "logs", "schemas"}
    for path in files:
        data = path.read_bytes()
        for at in {0, len(data) - 1, *(chosen.randrange(len(data)) for _ in range(4))}:
            path.write_bytes(flipped(data, at, chosen))
            with pytest.raises(RefusedError):
                Topic(tmp_path, keys).check()
        path.write_bytes(data[:-1])
        with pytest.raises(RefusedError):
            Topic(tmp_path, keys).check()
        path.write_bytes(data)


def test_a_way_around_what_is_damaged(tmp_path):
    truth = publish(tmp_path.as_uri(), small(), range(5), anchor=3)
    topic = Topic(tmp_path)
    (delta,) = (m for m in messages(topic) if m.kind == "delta" and m.version == 4)
    (tmp_path / delta.blobs[0].key).unlink()
    topic = Topic(tmp_path)
    assert found(topic) == truth[5]
    with pytest.raises(RefusedError, match="missing"):
        topic.check()


def test_a_hole_ends_a_log(tmp_path):
    truth = publish(tmp_path.as_uri(), small(), range(4))
    (tmp_path / "logs" / "trainer" / f"{2:020d}").unlink()
    topic = Topic(tmp_path)
    assert topic.newest() == {"trainer": 2}
    assert found(topic) == truth[2]
    with pytest.raises(RefusedError, match="hole"):
        topic.check()
