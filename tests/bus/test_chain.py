"""Signed logs: what a reader and a writer with keys take for history, and what they refuse."""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.core import LogWriter, TopicReader
from deltabus.bus.errors import (
    AppendUnknownError,
    FencedError,
    MessageFormatError,
    OvertakenError,
    SignatureError,
    TransientTransportError,
    UsageError,
)
from deltabus.bus.logs import Link, admit, parse_seen, read_last, seen_text
from deltabus.bus.message import Message, encode_message
from deltabus.bus.signing import NO_RECORD, KeyRing, Scheme, SigningKey, seal_of, sign_message
from deltabus.bus.transport import Record

from .support import FakeTransport, Store, Time, anchor, chain, delta
from .test_reader import take
from .test_writer import opened, publish

OLD, NEW = SigningKey(Scheme.ED25519, b"o" * 32), SigningKey(Scheme.ED25519, b"n" * 32)
SHARED = SigningKey(Scheme.HMAC_SHA256, b"s" * 32)
BOTH = KeyRing([OLD.verify_key, NEW.verify_key])
HERE, THERE = b"h" * 16, b"t" * 16


def ring(*keys: SigningKey) -> KeyRing:
    return KeyRing(key.verify_key for key in keys)


def sealed(messages: list[Message], key: SigningKey = OLD, *, log_id: bytes = HERE, before: bytes = b"") -> list[bytes]:
    """The records of messages, each behind the one before it, the first behind the record `before`."""
    records: list[bytes] = []
    for message in messages:
        last = records[-1] if records else before
        previous = hashlib.sha256(last).digest() if last else NO_RECORD
        records.append(sign_message(message, key, log_id=log_id, previous=previous)[1])
    return records


def stored(records: list[bytes], *, at: int = 0, writer: str = "a") -> Store:
    store = Store()
    store.records[writer] = dict(enumerate(records, at))
    return store


async def loaded(store: Store, keys: KeyRing | None) -> list[Message]:
    return await TopicReader(FakeTransport(store), retry=Time().retry(), keys=keys).load()


def admitted(records: list[bytes], keys: KeyRing, *, at: int = 0) -> list[Message]:
    """What a reader makes of records that it finds at these places, one behind the other."""
    link: Link | None = None
    found = []
    for place, data in enumerate(records, at):
        entry = admit(Record(place, data), topic="fake://topic", writer="a", keys=keys, after=link)
        found.append(entry.message)
        link = entry.link
    return found


# readers


async def test_a_signed_log_is_read_by_whoever_has_the_key_and_by_those_who_have_none(caplog):
    store = stored(sealed(chain(3)))
    known = await loaded(store, ring(OLD))
    assert not caplog.records
    assert await loaded(store, None) == known
    assert [message.position for message in known] == [0, 1, 2]
    (warning,) = caplog.records
    assert "are signed, but no keys are given here" in warning.message


async def test_unsigned_logs_are_read_without_keys_in_silence(caplog):
    assert await loaded(stored([encode_message(message) for message in chain(3)]), None) == chain(3)
    assert not caplog.records


async def test_both_keys_are_accepted_while_they_are_exchanged():
    first = sealed(chain(2), OLD)
    store = stored([*first, *sealed(chain(4)[2:], NEW, before=first[-1])])
    assert len(await loaded(store, BOTH)) == 4
    for key, place, name in ((OLD, 2, NEW), (NEW, 0, OLD)):
        with pytest.raises(SignatureError, match=f"record {place} of log a .* is signed by key {name.id.hex()}"):
            await loaded(store, ring(key))


async def test_what_a_retired_key_signs_behind_its_retirement_is_refused():
    first = sealed(chain(2), OLD)
    store = stored([*first, *sealed(chain(3)[2:], OLD, before=first[-1])])
    for position in range(2):
        del store.records["a"][position]
    assert len(await loaded(store, BOTH)) == 1
    with pytest.raises(SignatureError, match=r"record 2 .* is signed by key"):
        await loaded(store, ring(NEW))


async def test_an_unsigned_message_in_a_signed_log_is_refused_before_a_byte_of_it_is_believed():
    records = sealed(chain(3))
    records[1] = b"DBM1" + bytes(4)  # an empty body: its checksum is right, and nothing in it can be parsed
    with pytest.raises(SignatureError, match="record 1 of log a in fake://topic is not signed"):
        await loaded(stored(records), ring(OLD))
    records[1] = encode_message(chain(3)[1])
    with pytest.raises(SignatureError, match="record 1 of log a in fake://topic is not signed"):
        await loaded(stored(records), ring(OLD))


async def test_a_record_at_another_position_or_in_another_log_is_refused():
    records = sealed(chain(3))
    with pytest.raises(MessageFormatError, match="stands at position 1"):
        await loaded(stored([records[0], records[1], records[1]]), ring(OLD))
    with pytest.raises(MessageFormatError, match="belongs to the log of 'a'"):
        await loaded(stored(records, writer="b"), ring(OLD))


async def test_a_record_of_another_topic_of_the_same_key_is_refused():
    here, there = sealed(chain(4)), sealed(chain(4), log_id=THERE)
    with pytest.raises(SignatureError, match=r"record 2 .* is signed, but for another log"):
        await loaded(stored([*here[:2], *there[2:]]), ring(OLD))


async def test_a_record_that_was_never_in_the_log_is_refused_where_another_stood():
    """Such as one that lost the race for its position, and that somebody kept."""
    here = sealed(chain(4))
    other = sealed([delta(1, 2, step=99), *chain(4)[2:]], before=here[0])
    with pytest.raises(SignatureError, match=r"record 2 .* behind another record than the one that stands before it"):
        await loaded(stored([here[0], other[0], here[2]]), ring(OLD))


async def test_a_log_may_begin_late_but_not_lie_about_it():
    records = sealed(chain(5))
    assert len(await loaded(stored(records[3:], at=3), ring(OLD))) == 2
    late_first = sealed([chain(5)[3]])
    with pytest.raises(SignatureError, match="not for this place"):
        await loaded(stored(late_first, at=3), ring(OLD))
    not_first = sealed([anchor(0, 1)], before=b"something")
    with pytest.raises(SignatureError, match="not for this place"):
        await loaded(stored(not_first), ring(OLD))


async def test_a_reader_that_fell_behind_retention_knows_its_log_again():
    here, there = sealed(chain(9)), sealed(chain(9), log_id=THERE)
    for records, refused in ((here, False), (there, True)):
        store = stored(here[:2])
        reader = TopicReader(FakeTransport(store), retry=Time().retry(), keys=ring(OLD))
        await reader.load()
        store.records["a"] = dict(enumerate(records[6:], 6))
        if refused:
            with pytest.raises(SignatureError, match="another log"):
                await reader.load()
        else:
            assert len(await reader.load()) == 3


async def test_a_follower_notices_that_the_end_it_had_seen_was_cut_off_and_written_anew():
    records = sealed(chain(5))
    other = sealed([*(delta(p, p + 1, step=99) for p in (3, 4)), delta(5, 6)], before=records[2])
    store = stored(records)
    transport = FakeTransport(store)
    reader = TopicReader(transport, retry=Time().retry(), keys=ring(OLD), discovery=0.001)
    async with aclosing(reader.follow()) as messages:
        assert len(await take(messages, 5)) == 5
        store.records["a"] = dict(enumerate([*records[:3], *other]))
        await transport.wake()
        with pytest.raises(SignatureError, match=r"record 5 .* behind another record"):
            await take(messages, 1)


async def test_a_follower_checks_what_comes_and_goes_on_where_it_stopped():
    records = sealed(chain(4))
    store = stored(records[:2])
    transport = FakeTransport(store)
    reader = TopicReader(transport, retry=Time().retry(), keys=ring(OLD), discovery=0.001)
    assert len(await reader.load()) == 2
    async with aclosing(reader.follow()) as messages:
        store.records["a"][2] = records[2]
        await transport.wake()
        assert [message.position for message in await take(messages, 1)] == [2]
    async with aclosing(reader.follow()) as messages:
        store.records["a"][3] = encode_message(chain(4)[3])
        await transport.wake()
        with pytest.raises(SignatureError, match=r"record 3 .* is not signed"):
            await take(messages, 1)
    store.records["a"][3] = records[3]
    assert [message.position for message in await reader.load()] == [3]


# readers that know what was seen before


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 1000])
async def test_the_end_of_a_log_is_found_with_few_reads(length):
    for begin in (0, 5, 999):
        records = [encode_message(message) for message in chain(length)[begin:length]]
        transport = FakeTransport(stored(records, at=begin))
        last = await read_last(transport, "a", retry=Time().retry())
        assert (last.message.position if last else None) == (length - 1 if records else None)
        assert transport.calls.count("read") <= 2 * length.bit_length() + 1


async def test_the_end_of_a_log_shows_whose_it_is():
    records = sealed(chain(5))
    last = await read_last(FakeTransport(stored(records)), "a", retry=Time().retry(), keys=BOTH)
    assert last.link == admit(Record(4, records[4]), topic="", writer="a", keys=BOTH, after=None).link
    for end in (encode_message(delta(5, 6)), *sealed([delta(5, 6)], SHARED, before=records[-1])):
        with pytest.raises(SignatureError):
            await read_last(FakeTransport(stored([*records, end])), "a", retry=Time().retry(), keys=BOTH)


async def seen_of(records: list[bytes]) -> dict[str, Link]:
    reader = TopicReader(FakeTransport(stored(records)), retry=Time().retry(), keys=ring(OLD))
    await reader.load()
    return dict(reader.seen)


def later(transport: FakeTransport, seen: dict[str, Link]) -> TopicReader:
    return TopicReader(transport, retry=Time().retry(), keys=ring(OLD), seen=seen, discovery=0.001)


@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True), st.builds(
    Link, st.integers(0, (1 << 63) - 1), st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16)
), max_size=4))  # fmt: skip
def test_what_was_seen_survives_its_text(links):
    assert parse_seen(seen_text(links)) == links


@pytest.mark.parametrize("text", ["a", "a@1", "a@1:00:11", "a@-1:" + "0" * 32 + ":" + "0" * 64, "x" * 9999])
def test_what_does_not_say_what_was_seen_is_refused(text):
    with pytest.raises(UsageError, match="does not say where a log stands"):
        parse_seen(text)


def test_what_was_seen_needs_keys():
    with pytest.raises(UsageError, match="give keys too"):
        TopicReader(FakeTransport(), seen={"a": Link(0, bytes(32), HERE)})


@pytest.mark.parametrize("length", [3, 4, 5])
async def test_a_log_goes_on_where_it_was_seen(length):
    records = sealed(chain(5))
    reader = later(FakeTransport(stored(records[:length])), await seen_of(records[:3]))
    assert len(await reader.load()) == length
    assert reader.seen["a"].position == length - 1


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_a_log_that_was_cut_off_since_is_refused(left):
    records = sealed(chain(3))
    reader = later(FakeTransport(stored(records[:left])), await seen_of(records))
    with pytest.raises(SignatureError, match=f"ends at position {left - 1}, but was seen up to 2"):
        await reader.load()


async def test_a_backend_that_lags_behind_what_was_seen_is_waited_for():
    records = sealed(chain(3))
    transport = FakeTransport(stored(records[:2]))

    async def appear() -> None:
        transport.store.records["a"][2] = records[2]

    transport.fail("logs", None, None, appear)
    assert len(await later(transport, await seen_of(records)).load()) == 3


async def test_a_backend_that_stays_away_is_not_taken_for_a_log_that_was_cut_off():
    transport = FakeTransport(stored(sealed(chain(3))))
    transport.fail("logs", *(TransientTransportError("busy", url="fake://topic") for _ in range(1000)))
    with pytest.raises(TransientTransportError, match="busy"):
        await later(transport, await seen_of(sealed(chain(3)))).load()


async def test_a_log_that_was_exchanged_since_is_refused():
    seen = await seen_of(sealed(chain(3)))
    with pytest.raises(SignatureError, match=r"record 0 .* for another log"):
        await later(FakeTransport(stored(sealed(chain(4), log_id=THERE))), seen).load()
    fork = [*sealed(chain(1)), *sealed([delta(p, p + 1, step=99) for p in (1, 2, 3)], before=sealed(chain(1))[0])]
    with pytest.raises(SignatureError, match=r"record 2 .* another one was seen in its place"):
        await later(FakeTransport(stored(fork)), seen).load()


async def test_retention_may_remove_what_was_seen():
    records = sealed(chain(6))
    seen = await seen_of(records[:3])
    for start in (2, 3, 5):
        assert len(await later(FakeTransport(stored(records[start:], at=start)), seen).load()) == 6 - start
    other = sealed([delta(3, 4), delta(4, 5)], before=b"something")
    with pytest.raises(SignatureError, match=r"record 3 .* behind another record"):
        await later(FakeTransport(stored(other, at=3)), seen).load()


async def test_a_follower_holds_what_comes_against_what_was_seen():
    records = sealed(chain(3))
    seen = await seen_of(records)
    transport = FakeTransport(stored(records[:1]))
    async with aclosing(later(transport, seen).follow()) as messages:
        assert len(await take(messages, 1)) == 1
        other = sealed([delta(p, p + 1, step=99) for p in (1, 2)], before=records[0])
        transport.store.records["a"] |= {1: other[0], 2: other[1]}
        await transport.wake()
        assert len(await take(messages, 1)) == 1
        with pytest.raises(SignatureError, match=r"record 2 .* another one was seen in its place"):
            await take(messages, 1)


FORK = sealed([chain(2)[1], *(delta(p, p + 1, step=99) for p in (2, 3))], before=sealed(chain(1))[0])
HISTORIES = [
    sealed(chain(4)),
    [*sealed(chain(1)), *FORK],
    sealed(chain(4), log_id=THERE),
]
"""Each is one that a holder of the key wrote; the first two are one until position 1."""
POOL = sorted({record for history in HISTORIES for record in history} | {encode_message(m) for m in chain(4)})


@given(st.lists(st.sampled_from(POOL), min_size=1, max_size=5), st.integers(0, 1))
def test_of_all_that_can_be_laid_one_behind_the_other_only_histories_are_read(records, at):
    """The oracle: a run of one history, from its beginning or from where retention left it."""
    expected = any(history[at : at + len(records)] == records for history in HISTORIES)
    try:
        admitted(records, ring(OLD), at=at)
    except (SignatureError, MessageFormatError):
        assert not expected
    else:
        assert expected


@given(st.integers(0, 3), st.integers(0, 3))
def test_swapping_two_records_is_refused(one, other):
    records = sealed(chain(4))
    records[one], records[other] = records[other], records[one]
    if one == other:
        assert len(admitted(records, ring(OLD))) == 4
    else:
        with pytest.raises((SignatureError, MessageFormatError)):
            admitted(records, ring(OLD))


@given(st.data())
def test_nothing_else_than_our_errors_comes_of_a_damaged_log(data):
    records = sealed(chain(3), data.draw(st.sampled_from([OLD, SHARED])))
    damaged = bytearray(records[place := data.draw(st.integers(0, 2))])
    for at in data.draw(st.sets(st.integers(0, len(damaged) * 8 - 1), min_size=1, max_size=4)):
        damaged[at // 8] ^= 1 << at % 8
    records[place] = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    with pytest.raises((SignatureError, MessageFormatError)):
        admitted(records, ring(OLD, SHARED))


# writers


@pytest.fixture
def store() -> Store:
    return Store()


async def fresh(store: Store, key: SigningKey = OLD, **options: Any) -> LogWriter:
    return await opened(store, key=key, **options)


def ids(messages: list[Message]) -> set[bytes]:
    return {seal.log_id for message in messages if (seal := seal_of(message))}


@pytest.mark.parametrize("key", [OLD, SHARED])
async def test_what_a_writer_signs_a_reader_with_its_key_reads(store, key):
    first = await fresh(store, key)
    written = [await publish(first), await publish(first, base=1)]
    second = await fresh(store, key)
    written.append(await publish(second, base=2))
    read = await loaded(store, ring(key))
    assert read == written
    assert len(ids(read)) == 1
    assert all(message.signature is not None for message in read)


async def test_every_new_log_has_an_id_of_its_own():
    found = set()
    for _ in range(5):
        store = Store()
        await publish(await fresh(store))
        found |= ids(await loaded(store, ring(OLD)))
    assert len(found) == 5


async def test_keys_are_exchanged_at_a_restart(store):
    await publish(await fresh(store, OLD))
    with pytest.raises(SignatureError, match=f"is signed by key {OLD.id.hex()}, and only {NEW.id.hex()}"):
        await fresh(store, NEW)
    await publish(await fresh(store, NEW, keys=ring(OLD)), base=1)
    await publish(await fresh(store, NEW, keys=ring(OLD)), base=2)
    read = await loaded(store, BOTH)
    assert [seal_of(message).key_id for message in read] == [OLD.id, NEW.id, NEW.id]
    assert len(ids(read)) == 1


async def test_a_log_that_is_not_signed_is_not_continued_with_a_key_nor_a_signed_one_without(store):
    await publish(await opened(store))
    with pytest.raises(SignatureError, match="is not signed"):
        await fresh(store)
    signed = Store()
    await publish(await fresh(signed))
    with pytest.raises(SignatureError, match="this publisher has no key"):
        await opened(signed)
    assert len(signed.records["a"]) == 1


def test_keys_without_a_key_to_sign_with_are_a_mistake(store):
    with pytest.raises(UsageError, match="give it a signing key"):
        LogWriter(FakeTransport(store), "a", keys=BOTH)


async def test_an_heir_that_was_overtaken_goes_on_behind_what_it_found(store):
    zombie = await fresh(store)
    await publish(zombie)
    heir = await fresh(store)
    await publish(zombie, base=1)
    with pytest.raises(OvertakenError):
        await publish(heir, base=1, mark=1)
    await publish(heir)
    with pytest.raises(FencedError):
        await publish(zombie, base=2)
    assert [message.epoch for message in await loaded(store, ring(OLD))] == [1, 1, 2]


async def test_of_two_that_begin_a_log_together_one_writes_it_under_one_id(store):
    one, other = await fresh(store), await fresh(store)
    await publish(one)
    with pytest.raises(FencedError):
        await publish(other, mark=1)
    await publish(one, base=1)
    assert len(ids(await loaded(store, ring(OLD)))) == 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_lost_answer_leaves_a_chain_that_holds(store, late):
    transport = FakeTransport(store)
    log = await fresh(store, transport=transport)
    transport.fail("append", AppendUnknownError("the answer was lost", url="fake://topic"), late=late)
    await publish(log)
    await publish(log, base=1)
    assert len(await loaded(store, ring(OLD))) == 2


async def test_a_commit_that_was_reported_as_failed_but_stands_is_a_link_of_the_chain(store):
    transport = FakeTransport(store)
    log = await fresh(store, transport=transport)
    await publish(log)
    transport.fail("append", RuntimeError("a crash behind the effect"), late=True)
    with pytest.raises(RuntimeError):
        await publish(log, base=1)
    with pytest.raises(OvertakenError):
        await publish(log, base=1, mark=1)
    await publish(log)
    assert [message.version for message in await loaded(store, ring(OLD))] == [1, 2, 3]


async def test_whoever_writes_without_the_key_stops_the_writer_with_it(store):
    log = await fresh(store)
    await publish(log)
    store.records["a"][1] = encode_message(delta(1, 2, epoch=9))
    with pytest.raises(SignatureError, match="record 1 of log a in fake://topic is not signed"):
        await publish(log, base=1)


async def test_a_log_whose_beginning_was_removed_is_continued_under_its_id(store):
    log = await fresh(store)
    for version in range(1, 5):
        await publish(log, version=version)
    for position in range(3):
        del store.records["a"][position]
    await publish(await fresh(store))
    read = await loaded(store, ring(OLD))
    assert ([message.position for message in read], len(ids(read))) == ([3, 4], 1)


async def test_a_new_id_is_drawn_from_where_it_is_said(store):
    log = await fresh(store, draw=lambda size: b"7" * size)
    await publish(log)
    assert ids(await loaded(store, ring(OLD))) == {b"7" * 16}
