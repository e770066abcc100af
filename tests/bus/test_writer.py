from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from deltabus.bus.core import LogWriter, TopicReader
from deltabus.bus.errors import (
    AccessDeniedError,
    AppendUnknownError,
    ConflictError,
    FencedError,
    KeyExistsError,
    MessageFormatError,
    OvertakenError,
    PositionTakenError,
    StorageFullError,
    TransientTransportError,
    UsageError,
)
from deltabus.bus.group import Group
from deltabus.bus.message import MAX_BLOB_BYTES, Blob, Kind, Message, Stats, encode_message
from deltabus.bus.sequencer import Sequencer

from .support import LIMIT, OTHER_SCHEMA, FakeTransport, Store, Time, anchor, chain, delta, digest

LOST = AppendUnknownError("the answer was lost", url="fake://topic")
BUSY = TransientTransportError("busy", url="fake://topic")


@pytest.fixture
def store() -> Store:
    return Store()


async def opened(
    store: Store, writer: str = "a", *, transport: FakeTransport | None = None, **options: Any
) -> LogWriter:
    options.setdefault("retry", Time().retry())
    log = LogWriter(transport or FakeTransport(store), writer, clock=lambda: 7.0, **options)
    await log.open()
    return log


async def publish(
    log: LogWriter, *, version: int | None = None, base: int | dict[str, int] = 0, mark: int = 0
) -> Message:
    """Publish an anchor, or a delta from `base`, with a payload of its own; `mark` makes histories differ."""
    others = base if isinstance(base, dict) else {}
    base = 0 if isinstance(base, dict) else base
    version = version or log.next_version
    blob = await log.store(b"payload %d %d" % (version, mark), name=f"{version:012d}-0000")
    schema = await log.store_schema(b"{}")
    return await log.commit(
        kind=Kind.DELTA if base else Kind.ANCHOR,
        step=version,
        version=version,
        base={**others, log.writer: base} if base else others,
        schema=schema,
        digest_before=digest(log.writer, base) if base else None,
        digest_after=digest(log.writer, version),
        blobs=[blob],
        stats=Stats(changed=1, total=2),
        metadata={"mark": str(mark)},
    )


async def history(store: Store, writer: str = "a") -> list[Message]:
    """The log as a reader sees it, held to the sequencer's rules."""
    messages = [m for m in await TopicReader(FakeTransport(store)).load() if m.writer == writer]
    sequencer = Sequencer()
    for message in messages:
        sequencer.feed(message)
    assert list(sequencer.messages) == messages
    return messages


def write(store: Store, *messages: Message) -> None:
    for message in messages:
        store.records[message.writer][message.position] = encode_message(message)


async def test_a_new_log(store):
    log = await opened(store)
    assert (log.last, log.epoch, log.next_version, log.history) == (None, 1, 1, [])
    first = await publish(log)
    second = await publish(log, base=1)
    assert [first, second] == await history(store) == log.history
    assert log.last == second
    assert (second.position, second.epoch, second.version, second.created) == (1, 1, 2, 7.0)
    assert (second.writer, second.group, second.metadata) == ("a", ("a",), {"mark": "0"})


async def test_blobs_are_there_before_the_record(store):
    await publish(await opened(store))
    (message,) = await history(store)
    assert store.order[-1] == "a@0"
    assert {blob.key for blob in (*message.blobs, message.schema)} == set(store.order[:-1])


async def test_keys_are_named_by_their_content(store):
    log = await opened(store)
    data = b"x" * (1 << 18)
    digest_of_data = hashlib.sha256(data).digest()
    blob = await log.store(memoryview(data), name="part")
    assert blob == Blob(key=f"blobs/a/part-{digest_of_data.hex()[:16]}", size=len(data), checksum=digest_of_data)
    assert await log.store(bytearray(data), name="part") == blob
    schema = await log.store_schema(b"{}")
    assert schema.key == f"schemas/{hashlib.sha256(b'{}').hexdigest()}.json"
    assert store.blobs == {blob.key: data, schema.key: b"{}"}


async def test_a_restart_goes_on_with_the_next_epoch(store):
    await publish(await opened(store))
    log = await opened(store)
    assert (log.epoch, log.next_version, log.last.version) == (2, 2, 1)
    await publish(log, base=1)
    assert [(m.epoch, m.version, m.position) for m in await history(store)] == [(1, 1, 0), (2, 2, 1)]


async def test_a_log_whose_beginning_was_removed_is_continued(store):
    for message in chain(9):
        write(store, message)
    for position in range(6):
        del store.records["a"][position]
    log = await opened(store)
    assert [message.position for message in log.history] == [6, 7, 8]
    assert (await publish(log, base=9)).position == 9


async def test_a_long_log_is_read_in_pages(store):
    write(store, *chain(2500))
    log = await opened(store)
    assert (log.last.position, log.next_version, len(log.history)) == (2499, 2501, 2500)


async def test_history_begins_with_the_state_of_the_newest_anchor(store):
    write(store, *chain(6), anchor(6, 4))
    log = await opened(store)
    assert [message.position for message in log.history] == [3, 4, 5, 6]
    await publish(log, version=5)
    assert [message.version for message in log.history] == [5, 6, 5]
    await publish(log, version=2)
    assert log.next_version == 7


async def test_the_anchor_of_an_earlier_step_must_have_its_digest(store):
    log = await opened(store)
    await publish(log)
    await publish(log, base=1)
    wrong = {"step": 1, "version": 1, "base": {}, "digest_before": None, "digest_after": 1}
    with pytest.raises(UsageError, match="a new state is version 3"):
        await commit(log, kind=Kind.ANCHOR, **wrong)
    assert len(await history(store)) == 2
    await publish(log, version=1)
    assert [m.version for m in await history(store)] == [1, 2, 1]


async def commit(log: LogWriter, **fields: Any) -> Message:
    blob, schema = await log.store(b"payload", name="x"), await log.store_schema(b"{}")
    options: dict[str, Any] = {"schema": schema, "blobs": [blob], "stats": Stats(changed=0, total=0), **fields}
    return await log.commit(**options)


@pytest.mark.parametrize(
    "fields",
    [
        {"base": {"a": 7}},
        {"digest_before": 5},
        {"digest_before": None},
        {"schema": OTHER_SCHEMA},
        {"kind": Kind.ANCHOR, "version": 1, "digest_after": digest("a", 1), "base": {}, "digest_before": None}
        | {"schema": OTHER_SCHEMA},
        {"version": 1},
        {"version": 0},
        {"step": 1 << 70},
        {"digest_after": 1 << 64},
        {"metadata": {"a": "x" * (1 << 20)}},
    ],
)
async def test_a_message_that_does_not_fit_is_refused_before_it_is_written(store, fields):
    log = await opened(store)
    await publish(log)
    good = {
        "kind": Kind.DELTA,
        "step": 2,
        "version": 2,
        "base": {"a": 1},
        "digest_before": digest("a", 1),
        "digest_after": digest("a", 2),
    }
    with pytest.raises(UsageError):
        await commit(log, **{**good, **fields})
    assert len(await history(store)) == 1
    assert (await commit(log, **good)).position == 1


async def test_a_writer_is_opened_first_and_once(store):
    log = LogWriter(FakeTransport(store), "a")
    assert log.epoch == 0
    with pytest.raises(UsageError, match="open the log"):
        await publish(log)
    assert store.blobs == {}
    await log.open()
    with pytest.raises(UsageError, match="open already"):
        await log.open()


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a b", "x" * 201, "a\n"])
async def test_bad_blob_names_are_refused(store, name):
    with pytest.raises(UsageError, match="blob name"):
        await (await opened(store)).store(b"", name=name)


async def test_a_blob_that_no_message_may_name_is_not_stored(store):
    log = await opened(store)
    zeros = bytes(MAX_BLOB_BYTES + 1)
    with pytest.raises(UsageError, match="split it into parts"):
        await log.store(zeros, name="large")
    with pytest.raises(UsageError, match="split it into parts"):
        await log.store_schema(zeros)
    assert store.blobs == {}


@pytest.mark.parametrize(("writer", "group"), [("a/b", None), ("a", Group(["b"])), ("a", Group(["b", "c"], 2))])
def test_bad_names_and_groups_are_refused(store, writer, group):
    with pytest.raises(UsageError):
        LogWriter(FakeTransport(store), writer, group=group)


@pytest.mark.parametrize("generation", [1, 3, 4])
async def test_an_incarnation_of_a_group_has_a_generation_of_its_own(store, generation):
    await publish(await opened(store, "a", group=Group(["a", "b"], 3)))
    log = LogWriter(FakeTransport(store), "a", group=Group(["a", "c"], generation))
    if generation > 3:
        await log.open()
        return
    with pytest.raises(UsageError, match="with a generation of 4 or more"):
        await log.open()


async def test_what_a_log_rests_on_stays_said(store):
    log = await opened(store)
    await publish(log, base={"b": 3})
    assert (await publish(log, base={"c": 2})).needs == {"b": 3, "c": 2}
    assert (await publish(await opened(store))).needs == {"b": 3, "c": 2}


async def test_a_group_travels_with_every_message(store):
    log = await opened(store, "b", group=Group(["a", "b"], 7))
    message = await publish(log)
    assert (message.group, message.members, message.generation) == (("a", "b"), {"a", "b"}, 7)
    log = await opened(store, "rank-2", group=Group.of_ranks("rank", 1000, generation=1))
    message = await publish(log)
    assert (message.group, len(message.members), message.ranks) == ((), 1000, 1000)
    assert len(encode_message(message)) < 1000


# Faults


@pytest.mark.parametrize("method", ["put", "append", "read"])
@pytest.mark.parametrize("late", [False, True])
async def test_faults_that_pass_are_tried_again(store, method, late):
    transport = FakeTransport(store)
    transport.fail(method, BUSY, BUSY, late=late and method != "read")
    log = await opened(store, transport=transport)
    await publish(log)
    await publish(log, base=1)
    assert [m.version for m in await history(store)] == [1, 2]


@pytest.mark.parametrize("late", [False, True])
async def test_a_lost_answer_is_settled_by_appending_once_more(store, late):
    """The record is there (late), or it is not: the writer need not know. Being there is not yet being durable."""
    transport = FakeTransport(store)
    log = await opened(store, transport=transport)
    transport.fail("append", LOST, LOST, late=late)
    first = await publish(log)
    await publish(log, base=1)
    assert [m.version for m in await history(store)] == [1, 2]
    assert first == log.history[0]
    assert transport.calls.count("append") == 4


async def test_a_backend_that_does_not_know_its_own_record_is_settled_by_comparing(store):
    """A transient fault after the record was written, and then "taken" although the bytes are the same."""
    transport = FakeTransport(store)
    log = await opened(store, transport=transport)
    transport.fail("append", BUSY, late=True)
    transport.fail("append", None, PositionTakenError("taken", url="fake://topic"))
    await publish(log)
    assert len(await history(store)) == 1


@pytest.mark.parametrize("fault", [AccessDeniedError("no"), StorageFullError("full")])
@pytest.mark.parametrize("method", ["put", "append"])
async def test_a_permanent_fault_is_raised_at_once_and_leaves_the_log_usable(store, method, fault):
    time, transport = Time(), FakeTransport(store)
    log = await opened(store, transport=transport, retry=time.retry())
    await publish(log)
    transport.fail(method, fault)
    with pytest.raises(type(fault)) as caught:
        await publish(log, base=1)
    assert caught.value is fault
    assert time.slept == []
    assert len(await history(store)) == 1
    await publish(log, base=1)
    assert [m.version for m in await history(store)] == [1, 2]


async def test_a_key_that_holds_other_bytes_is_an_error(store):
    log = await opened(store)
    blob = await log.store(b"right", name="x")
    store.blobs[blob.key] = b"wrong"
    with pytest.raises(KeyExistsError):
        await log.store(b"right", name="x")


async def test_a_crash_between_blob_and_record_leaves_a_topic_that_goes_on(store):
    crashed = await opened(store)
    await publish(crashed)
    await crashed.store(b"payload of a step that never was", name="000000000002-0000")
    log = await opened(store)
    await publish(log, base=1)
    assert [(m.version, m.epoch) for m in await history(store)] == [(1, 1), (2, 2)]


async def test_a_record_that_came_to_be_after_its_commit_had_failed_is_found(store):
    transport = FakeTransport(store)
    log = await opened(store, transport=transport, retry=Time().retry(limit=0.0))
    await publish(log)
    transport.fail("append", LOST, late=True)
    with pytest.raises(AppendUnknownError, match="limit is 0 s"):
        await publish(log, base=1, mark=1)
    with pytest.raises(OvertakenError, match=r"an append whose answer was lost.* an anchor of version 3") as caught:
        await publish(log, base=1, mark=2)
    assert (caught.value.topic, caught.value.writer) == ("fake://topic", "a")
    assert log.history == await history(store)
    await publish(log)
    assert [(m.version, m.metadata["mark"]) for m in await history(store)] == [(1, "0"), (2, "1"), (3, "0")]


async def test_a_backend_that_shows_a_hole_is_read_again(store):
    write(store, *chain(4))
    transport = FakeTransport(store)
    transport.hidden = {2}

    async def appear() -> None:
        transport.hidden = set()

    transport.fail("read", None, appear)
    log = await opened(store, transport=transport)
    assert len(log.history) == 4


async def test_a_hole_that_stays_is_an_error_with_a_limit(store):
    write(store, *chain(4))
    transport = FakeTransport(store)
    transport.hidden = {2}
    with pytest.raises(TransientTransportError, match=r"limit is 60 s: .* position 3 but not 2; the backend lags"):
        await opened(store, transport=transport, retry=Time().retry(limit=60.0))


async def test_what_is_no_log_is_not_opened(store):
    store.records["a"][0] = b"something else"
    with pytest.raises(MessageFormatError, match="is the URL that of a topic"):
        await opened(store)


# Several processes


async def test_a_zombie_is_fenced_for_good(store):
    zombie = await opened(store)
    await publish(zombie)
    heir = await opened(store)
    await publish(heir)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"'a' of fake://topic .* epoch 2's, this process is epoch 1") as caught:
            await publish(zombie, base=1, mark=9)
        assert (caught.value.topic, caught.value.writer) == ("fake://topic", "a")
    blobs = dict(store.blobs)
    with pytest.raises(FencedError):
        await zombie.store(b"more", name="more")
    assert store.blobs == blobs
    await publish(heir, base=2)
    assert [(m.epoch, m.version) for m in await history(store)] == [(1, 1), (2, 2), (2, 3)]


async def test_an_heir_that_was_overtaken_goes_on_with_an_anchor(store):
    old = await opened(store)
    await publish(old)
    heir = await opened(store)
    await publish(old, base=1, mark=1)
    await publish(old, base=2, mark=1)
    with pytest.raises(OvertakenError, match=r"an earlier incarnation \(epoch 1\); go on .* anchor of version 4"):
        await publish(heir, base=1, mark=2)
    assert (heir.next_version, heir.epoch, heir.last.version) == (4, 2, 3)
    assert heir.history == await history(store)
    await publish(heir, mark=2)
    with pytest.raises(FencedError):
        await publish(old, base=3)
    assert [(m.epoch, m.version) for m in await history(store)] == [(1, 1), (1, 2), (1, 3), (2, 4)]


async def test_an_heir_that_was_overtaken_and_succeeded_is_fenced(store):
    old = await opened(store)
    await publish(old)
    heir = await opened(store)
    await publish(old, base=1)
    third = await opened(store)
    await publish(third)
    with pytest.raises(FencedError, match="position 1 is epoch 2's, this process is epoch 2"):
        await publish(heir, mark=1)
    assert [m.epoch for m in await history(store)] == [1, 1, 2]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("turn", range(8))
async def test_of_two_that_race_with_one_epoch_exactly_one_makes_history(store, turn, lost):
    transports = FakeTransport(store), FakeTransport(store)
    writers = [await opened(store, transport=transport) for transport in transports]
    if lost:
        for transport in transports:
            transport.fail("append", LOST, late=True)
    published: dict[int, list[Message]] = {0: [], 1: []}

    async def run(number: int) -> None:
        for _ in range(turn if number else 0):
            await asyncio.sleep(0)
        base = 0
        for _ in range(5):
            message = await publish(writers[number], base=base, mark=number)
            published[number].append(message)
            base = message.version

    results = await asyncio.gather(run(0), run(1), return_exceptions=True)
    loser = 0 if isinstance(results[0], FencedError) else 1
    assert isinstance(results[loser], FencedError)
    assert results[1 - loser] is None
    assert published[loser] == []
    assert published[1 - loser] == await history(store)


async def test_many_commits_at_once_are_written_one_by_one(store):
    log = await opened(store)
    await publish(log)
    blob = await log.store(b"payload", name="x")

    async def repeat() -> Message:
        state = {"step": 1, "version": 1, "base": {}, "digest_before": None, "digest_after": digest("a", 1)}
        return await commit(log, kind=Kind.ANCHOR, blobs=[blob], **state)

    messages = await asyncio.gather(*(repeat() for _ in range(20)))
    assert sorted(m.position for m in messages) == list(range(1, 21))
    assert len(await history(store)) == 21


# Cancellation


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["put", "append", "read"])
async def test_cancelled_at_any_wait_the_log_goes_on(store, method, late):
    transport = FakeTransport(store)
    log = await opened(store, transport=transport)
    await publish(log)
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    if method == "read":
        taken = PositionTakenError("taken", url="fake://topic")
        transport.fail("append", *([None, taken] if late else [taken]))
        transport.fail("append", *([BUSY] if late else []), late=True)
        transport.fail("read", hang)
    else:
        transport.fail(method, hang, late=late)
    task = asyncio.create_task(publish(log, base=1, mark=1))
    async with asyncio.timeout(LIMIT):
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    if method != "put" and late:
        with pytest.raises(OvertakenError):
            await publish(log, base=1, mark=2)
        await publish(log, mark=3)
        assert [m.metadata["mark"] for m in await history(store)] == ["0", "1", "3"]
    else:
        await publish(log, base=1, mark=2)
        assert [m.metadata["mark"] for m in await history(store)] == ["0", "2"]


async def test_cancelled_while_opening_it_can_be_opened(store):
    transport = FakeTransport(store)
    write(store, *chain(3))
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    transport.fail("read", None, hang)
    log = LogWriter(transport, "a")
    task = asyncio.create_task(log.open())
    async with asyncio.timeout(LIMIT):
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await log.open()
    assert (log.epoch, log.next_version, len(log.history)) == (2, 4, 3)


async def test_a_history_written_by_hand_is_not_hidden_by_the_writer(store):
    write(store, anchor(0, 1), delta(1, 2, digest_before=1))
    log = await opened(store)
    assert log.next_version == 3
    with pytest.raises(ConflictError):
        await history(store)
