"""Signed topics: what publishers, subscribers and commands do with keys, against real topics."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import MessageFormatError, SignatureError, UsageError
from deltabus.bus.message import decode_message, encode_message
from deltabus.bus.signing import Scheme, SigningKey, parse_key, seal_of
from deltabus.cli.app import app
from deltabus.keys import SIGNING_KEY, VERIFY_KEYS, make_key
from deltabus.transports import open_transport
from deltabus.transports.memory import drop_topic

from .cli_topic import Net, as_ints, one_line, pulled, same
from .support import LIMIT, Trainer, bits, faulty, small_model

OLD, NEW = SigningKey(Scheme.ED25519, b"o" * 32), SigningKey(Scheme.ED25519, b"n" * 32)
SHARED = SigningKey(Scheme.HMAC_SHA256, b"s" * 32)
BOTH = [OLD.verify_key.text, NEW.verify_key.text]


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    for name in (SIGNING_KEY, VERIFY_KEYS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["memory", "file"])
def urls(request, tmp_path):
    """Makes addresses of topics, by a name."""
    names = []

    def make(name):
        if request.param == "file":
            return (tmp_path / name).as_uri()
        names.append(f"{request.node.name.replace('[', '-').replace(']', '')}-{name}")
        return f"memory://{names[-1]}"

    yield make
    for name in names:
        drop_topic(name)


def publish(url, steps, *, key=OLD, have=None, **options):
    """Publish a few steps, and return the trainer."""
    with Trainer(url, key=key, have=have, **options) as trainer:
        if have is not None:
            trainer.model = have
        trainer.publish(steps)
    return trainer


async def records_of(url):
    async with open_transport(url) as transport:
        return [record.data for record in await transport.read("trainer")]


async def lay_out(source, target, records):
    """Make a topic that has the blobs of another and these records, as whoever may write the storage can."""
    async with open_transport(source) as there, open_transport(target) as here:
        for message in map(decode_message, await records_of(source)):
            for blob in (message.schema, *message.blobs):
                await here.put(blob.key, await there.get(blob.key))
        for position, record in enumerate(records):
            await here.append("trainer", position, record)


async def newest(url, keys):
    """The bits that a newcomer gets."""
    model = small_model(9)
    async with Subscriber(url, keys=keys, idle_timeout=LIMIT, gap_timeout=0) as subscriber:
        (await anext(subscriber)).apply(model)
    return bits(model)


async def refused(monkeypatch, url, keys, *, match, kind=SignatureError):
    """Hold that a newcomer refuses a topic before it fetches anything that a message names."""
    with faulty(monkeypatch) as faults:
        with pytest.raises(kind, match=match):
            await newest(url, keys)
        assert faults.count("read") > 0
        assert faults.count("get") == 0


@pytest.mark.parametrize("key", [OLD, SHARED], ids=["ed25519", "hmac-sha256"])
async def test_a_signed_topic_is_followed_with_the_key_and_without(urls, key, caplog):
    url = urls("topic")
    trainer = await asyncio.to_thread(publish, url, 3, key=key)
    assert await newest(url, key.verify_key) == trainer.states[2]
    assert not [record for record in caplog.records if "signed" in record.message]
    assert await newest(url, None) == trainer.states[2]
    assert len([record for record in caplog.records if "nobody checks them" in record.message]) == 1


async def test_a_follower_checks_each_message_as_it_comes(urls):
    url = urls("topic")
    with Trainer(url, key=OLD) as trainer:
        trainer.publish()
        async with Subscriber(url, keys=OLD.verify_key, latest=False, idle_timeout=LIMIT) as subscriber:
            model = small_model(9)
            for _ in range(3):
                update = await anext(subscriber)
                update.apply(model)
                assert bits(model) == trainer.states[update.step]
                await asyncio.to_thread(trainer.publish)
            (await anext(subscriber)).apply(model)
            forged = decode_message((await records_of(url))[-1])
            async with open_transport(url) as transport:
                changed = {name: getattr(forged, name) for name in forged.__struct_fields__}
                changed |= {"position": 4, "version": 5, "base": {"trainer": 4}, "digest_before": forged.digest_after}
                await transport.append("trainer", 4, encode_message(type(forged)(**changed)))
            with pytest.raises(SignatureError, match=r"record 4 .* was changed after key"):
                await anext(subscriber)
        assert bits(model) == trainer.states[3]
        for _ in range(2):  # at the handle, and from then on at each call
            with pytest.raises(SignatureError, match=r"record 4 .* was changed after key"):
                await asyncio.to_thread(trainer.publish)


async def test_keys_are_exchanged_without_stopping_a_follower(urls):
    url = urls("topic")
    async with Subscriber(url, keys=BOTH, latest=False, idle_timeout=LIMIT) as subscriber:
        model = small_model(9)
        trainer = await asyncio.to_thread(publish, url, 2)
        with pytest.raises(SignatureError, match=f"only {NEW.id.hex()} are accepted"):
            Publisher(url, key=NEW)
        heir = await asyncio.to_thread(publish, url, 2, key=NEW, keys=OLD.verify_key, have=trainer.model)
        states = list(trainer.states.values()) + list(heir.states.values())
        for _ in range(4):
            update = await anext(subscriber)
            update.apply(model)
            assert bits(model) == states[update.version - 1]
            if update.version == 4:
                break
    signers = [seal_of(decode_message(record)).key_id for record in await records_of(url)]
    assert signers == [OLD.id, OLD.id, NEW.id, NEW.id]
    kinds = [decode_message(record).kind for record in await records_of(url)]
    assert kinds == ["anchor", "delta", "delta", "delta"]


async def test_what_a_retired_or_foreign_key_signed_is_refused(urls, monkeypatch):
    url = urls("topic")
    await asyncio.to_thread(publish, url, 2)
    await refused(monkeypatch, url, NEW.verify_key, match=f"record 0 .* is signed by key {OLD.id.hex()}")
    heir = await asyncio.to_thread(publish, url, 1, key=NEW, keys=OLD.verify_key)
    await refused(monkeypatch, url, OLD.verify_key, match=f"record 2 .* is signed by key {NEW.id.hex()}")
    assert await newest(url, BOTH) == heir.states[0]


async def test_an_unsigned_message_put_in_by_hand_is_refused(urls, monkeypatch):
    good, bad, plain = urls("good"), urls("bad"), urls("plain")
    await asyncio.to_thread(publish, good, 3)
    records = await records_of(good)
    bare = decode_message(records[2])
    fields = {name: getattr(bare, name) for name in bare.__struct_fields__} | {"signature": None}
    await lay_out(good, bad, [*records[:2], encode_message(type(bare)(**fields))])
    await refused(monkeypatch, bad, OLD.verify_key, match="record 2 .* is not signed")
    await asyncio.to_thread(publish, plain, 1, key=None)
    await refused(monkeypatch, plain, OLD.verify_key, match="record 0 .* is not signed")


@pytest.mark.parametrize(
    ("order", "kind", "match"),
    [
        ([0, 1, 3], MessageFormatError, "stands at position 3"),
        ([0, 2, 1, 3], MessageFormatError, "stands at position 2"),
        ([1, 2, 3], MessageFormatError, "stands at position 1"),
        ([0, 1, 2, 2], MessageFormatError, "stands at position 2"),
    ],
    ids=["removed", "swapped", "beginning-removed", "twice"],
)
async def test_records_that_were_moved_are_refused(urls, monkeypatch, order, kind, match):
    good, bad = urls("good"), urls("bad")
    await asyncio.to_thread(publish, good, 4)
    records = await records_of(good)
    await lay_out(good, bad, [records[place] for place in order])
    await refused(monkeypatch, bad, OLD.verify_key, kind=kind, match=match)


async def test_records_of_another_topic_of_the_same_key_are_refused(urls, monkeypatch):
    good, other, bad = urls("good"), urls("other"), urls("bad")
    await asyncio.to_thread(publish, good, 3)
    await asyncio.to_thread(publish, other, 3)
    ours, theirs = await records_of(good), await records_of(other)
    await lay_out(good, bad, [*ours[:2], theirs[2]])
    await refused(monkeypatch, bad, OLD.verify_key, match="record 2 .* is signed, but for another log")


async def test_a_record_in_another_log_is_refused(urls, monkeypatch):
    good, bad = urls("good"), urls("bad")
    await asyncio.to_thread(publish, good, 1)
    async with open_transport(bad) as transport:
        await transport.append("rank-1", 0, (await records_of(good))[0])
    await refused(monkeypatch, bad, OLD.verify_key, kind=MessageFormatError, match="belongs to the log of 'trainer'")


async def test_blobs_that_were_exchanged_are_refused(tmp_path):
    trainer = await asyncio.to_thread(publish, tmp_path / "topic", 1)
    (blob,) = decode_message((await records_of(tmp_path / "topic"))[0]).blobs
    other = await asyncio.to_thread(publish, tmp_path / "other", 2)
    assert other.states[0] == trainer.states[0]
    foreign = decode_message((await records_of(tmp_path / "other"))[1]).blobs[0]
    (tmp_path / "topic" / blob.key).write_bytes((tmp_path / "other" / foreign.key).read_bytes())
    with pytest.raises(Exception, match="is damaged"):
        await newest(tmp_path / "topic", OLD.verify_key)


async def test_a_record_removed_in_the_middle_ends_the_log_there_and_shows_in_verify(tmp_path):
    trainer = await asyncio.to_thread(publish, tmp_path, 4)
    records = sorted((tmp_path / "logs" / "trainer").iterdir())
    records[2].unlink()
    assert await newest(tmp_path, OLD.verify_key) == trainer.states[1]
    ended = run("verify", tmp_path, "--keys", OLD.verify_key.text)
    assert ended.exit_code == 1
    assert "position 2 is missing" in ended.output
    records[3].rename(records[2])
    with pytest.raises(MessageFormatError, match="stands at position 3"):
        await newest(tmp_path, OLD.verify_key)


async def test_a_later_subscriber_goes_on_where_an_earlier_one_stopped(urls):
    url, copy, other = urls("topic"), urls("copy"), urls("other")
    trainer = await asyncio.to_thread(publish, url, 2)
    async with Subscriber(url, keys=OLD.verify_key, idle_timeout=LIMIT) as subscriber:
        await anext(subscriber)
        seen = subscriber.seen
    await lay_out(url, copy, await records_of(url))
    heir = await asyncio.to_thread(publish, url, 2, have=trainer.model)
    await asyncio.to_thread(publish, other, 4)
    for place in (url, copy):
        async with Subscriber(place, keys=OLD.verify_key, seen=seen, idle_timeout=LIMIT) as subscriber:
            model = small_model(9)
            (await anext(subscriber)).apply(model)
            newer = subscriber.seen
            assert bits(model) == (heir.states[1] if place == url else trainer.states[1])
            assert (newer == seen) == (place == copy)
    with pytest.raises(SignatureError, match="for another log"):
        async with Subscriber(other, keys=OLD.verify_key, seen=seen):
            pass
    with pytest.raises(UsageError, match="give keys too"):
        Subscriber(url, seen=seen)
    with pytest.raises(UsageError, match="does not say where a log stands"):
        Subscriber(url, keys=OLD.verify_key, seen="trainer")


async def test_keys_come_from_the_environment(urls, monkeypatch):
    url = urls("topic")
    monkeypatch.setenv(SIGNING_KEY, OLD.text)
    trainer = await asyncio.to_thread(publish, url, 1, key=None)
    monkeypatch.setenv(VERIFY_KEYS, f"{NEW.verify_key.text}, {OLD.verify_key.text}")
    assert await newest(url, None) == trainer.states[0]
    monkeypatch.setenv(VERIFY_KEYS, NEW.verify_key.text)
    with pytest.raises(SignatureError):
        await newest(url, None)
    assert await newest(url, OLD.verify_key) == trainer.states[0]
    monkeypatch.setenv(VERIFY_KEYS, "")
    with pytest.raises(UsageError, match=f"{VERIFY_KEYS} is there, but has no key"):
        Subscriber(url)


def test_a_publisher_that_no_reader_would_believe_does_not_begin(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="give it a signing key"):
        Publisher(tmp_path / "topic", keys=OLD.verify_key)
    with pytest.raises(UsageError, match="a public key, where one key to sign with belongs"):
        Publisher(tmp_path / "topic", key=OLD.verify_key)
    publish(tmp_path / "topic", 1)
    with pytest.raises(SignatureError, match="this publisher has no key"):
        Publisher(tmp_path / "topic")
    with pytest.raises(SignatureError, match="is signed by key"):
        Publisher(tmp_path / "topic", key=NEW)


# the command line


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="deltabus")


def test_keygen_writes_a_pair_that_commands_use(tmp_path):
    from safetensors.torch import save_file

    made = run("keygen", tmp_path / "key")
    assert made.exit_code == 0, made.output
    secret = (tmp_path / "key").read_text().splitlines()[1]
    assert secret.startswith("ed25519:")
    assert secret not in made.output
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    public = (tmp_path / "key.pub").read_text().splitlines()[1]
    assert public in made.output
    assert parse_key(public) == parse_key(secret).verify_key

    model, url = Net(), (tmp_path / "topic").as_uri()
    states = []
    for step in range(3):
        model.move()
        states.append(as_ints({name: tensor.clone() for name, tensor in model.state_dict().items()}))
        del states[-1]["head.weight"]
        save_file(
            {k: v.clone() for k, v in model.state_dict().items() if k != "head.weight"},
            tmp_path / f"step-{step}.safetensors",
        )
    checkpoints = [tmp_path / f"step-{step}.safetensors" for step in range(3)]
    pushed = run("push", url, *checkpoints[:2], "--key", tmp_path / "key", "--json")
    assert pushed.exit_code == 0, pushed.output
    key_id = parse_key(public).id.hex()
    assert {message["key"] for message in json.loads(pushed.stdout)["messages"]} == {key_id}
    more = run("push", url, *checkpoints, "--key", tmp_path / "key", "--json")
    assert [held["step"] for held in json.loads(more.stdout)["held"]] == [0, 1]

    for keys in (tmp_path / "key.pub", public, tmp_path / "key"):
        shown = run("log", url, "--keys", keys)
        assert shown.exit_code == 0, shown.output
        assert key_id in shown.output
    assert run("verify", url, "--keys", public).exit_code == 0
    ended = run("pull", url, tmp_path / "out", "--keys", NEW.verify_key.text, "--keys", tmp_path / "key.pub")
    assert ended.exit_code == 0, ended.output
    assert same(pulled(tmp_path / "out"), states[2])

    for arguments in (["log", url], ["pull", url, tmp_path / "no"]):
        ended = run(*arguments, "--keys", NEW.verify_key.text)
        assert ended.exit_code == 1
        assert one_line(ended.stderr, "record 0 of log trainer", f"is signed by key {key_id}")
    ended = run("verify", url, "--keys", NEW.verify_key.text)
    assert ended.exit_code == 1
    assert ended.stdout.count(f"is signed by key {key_id}") == 3
    assert "3 problems found" in ended.stdout
    ended = run("push", url, checkpoints[2])
    assert ended.exit_code == 1
    assert one_line(ended.stderr, "this publisher has no key")
    record = sorted((tmp_path / "topic" / "logs" / "trainer").iterdir())[0]
    assert f"by key {key_id}, not checked" in run("inspect", record).output


def test_verify_tells_each_record_that_does_not_belong_once(tmp_path):
    publish(tmp_path, 4)
    path = sorted((tmp_path / "logs" / "trainer").iterdir())[1]
    message = decode_message(path.read_bytes())
    fields = {name: getattr(message, name) for name in message.__struct_fields__} | {"signature": None}
    path.write_bytes(encode_message(type(message)(**fields)))
    ended = run("verify", tmp_path, "--keys", OLD.verify_key.text, "--json")
    problems = json.loads(ended.stdout)["problems"]
    assert [problem["position"] for problem in problems] == [1, 2]
    assert "is not signed" in problems[0]["what"]
    assert "behind another record" in problems[1]["what"]
    assert run("verify", tmp_path).exit_code == 0


def test_keygen_makes_shared_secrets_and_prints_what_no_file_takes(tmp_path):
    shown = run("keygen", "--hmac", "--json")
    made = json.loads(shown.stdout)
    assert made["public_key"] is None
    assert parse_key(made["secret_key"]).id.hex() == made["id"]
    pair = json.loads(run("keygen", "--json").stdout)
    assert parse_key(pair["secret_key"]).verify_key == parse_key(pair["public_key"])
    assert pair["secret_key"] in run("keygen", "--help").output + json.dumps(pair)
    written = run("keygen", "--hmac", tmp_path / "shared")
    assert written.exit_code == 0
    assert not (tmp_path / "shared.pub").exists()
    assert "can write them too" in written.output
    assert parse_key((tmp_path / "shared").read_text().splitlines()[1]).scheme is Scheme.HMAC_SHA256


def test_keygen_writes_over_nothing(tmp_path):
    (tmp_path / "key.pub").write_text("mine")
    ended = run("keygen", tmp_path / "key")
    assert ended.exit_code == 2
    assert one_line(ended.stderr, "key.pub is there already")
    assert [path.name for path in Path(tmp_path).iterdir()] == ["key.pub"]
    (tmp_path / "other").write_text("mine")
    assert run("keygen", tmp_path / "other").exit_code == 2
    assert (tmp_path / "other").read_text() == "mine"
    assert run("keygen", tmp_path / "nowhere" / "key").exit_code == 2


def test_a_key_that_was_made_signs(tmp_path):
    made = make_key(tmp_path / "key")
    trainer = publish(tmp_path / "topic", 1, key=made.file)
    assert asyncio.run(newest(tmp_path / "topic", made.public_file)) == trainer.states[0]
    assert os.stat(made.public_file).st_mode & 0o777 & ~0o022 == 0o644  # noqa: PTH116
