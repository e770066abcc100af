"""`nats://`: the parts that need no server: what names parts, where things are, and working on several at a time."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import TransportError, UsageError
from deltabus.transports import open_transport
from deltabus.transports.names import check_key
from deltabus.transports.nats.chunks import MANIFEST, Manifest, read_manifest, run_windowed
from deltabus.transports.nats.jetstream import Stored
from deltabus.transports.nats.streams import make_attempt


def stored(data, headers=None):
    return Stored(1, "deltabus.run.blob.key.head", {MANIFEST: "1"} if headers is None else headers, data, "")


@given(st.lists(st.integers(1, 1 << 40), unique=True, max_size=50), st.integers(1 << 10, 1 << 20), st.data())
def test_a_manifest_names_parts_in_their_order(sequences, chunk, data):
    """Numbers of a stream may come in any order: parts are stored at the same time, and some of them twice."""
    last = data.draw(st.integers(1, chunk)) if sequences else 0
    size = max(len(sequences) - 1, 0) * chunk + last
    manifest = Manifest.of(size, chunk, "attempt", sequences)
    assert manifest.sequences() == sequences
    assert read_manifest(stored(msgspec.msgpack.encode(manifest)), url="") == manifest


def test_parts_that_follow_each_other_take_no_room():
    manifest = Manifest.of(2000 * 1024, 1024, "attempt", range(7, 2007))
    assert manifest.runs == ((7, 2000),)
    assert len(msgspec.msgpack.encode(manifest)) < 30


@given(st.binary(max_size=60))
def test_any_bytes_are_a_manifest_or_a_clear_error(data):
    try:
        manifest = read_manifest(stored(data), url="nats://host/run")
    except TransportError as error:
        assert "nats://host/run" in str(error)
    else:
        assert len(manifest.sequences()) <= 1 << 20


_NUMBERS = st.integers(-1, 1 << 62) | st.sampled_from([0, 1, 1 << 10, 1 << 20, 1 << 30])


@given(_NUMBERS, _NUMBERS, st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=4))
def test_no_manifest_asks_for_more_memory_than_a_blob_may_have(size, chunk, runs):
    payload = msgspec.msgpack.encode([size, chunk, "a", runs])
    try:
        manifest = read_manifest(stored(payload), url="")
    except TransportError:
        return
    assert 0 <= manifest.size <= 1 << 30
    assert len(manifest.sequences()) == -(-manifest.size // manifest.chunk) <= 1 << 20


def test_a_message_without_the_header_is_the_bytes_themselves():
    assert read_manifest(stored(b"\x90", {}), url="") is None
    with pytest.raises(TransportError, match="update deltabus"):
        read_manifest(stored(msgspec.msgpack.encode(Manifest.of(0, 1024, "a", [])), {MANIFEST: "2"}), url="")


_WORDS = st.text("ab._=-%", min_size=1, max_size=4)
_KEYS = st.lists(_WORDS, min_size=1, max_size=3).map("/".join)


@given(st.sets(_KEYS, max_size=8))
def test_each_key_has_a_subject_of_its_own(keys):
    streams = open_transport("nats://host/run")._streams
    good = []
    for key in keys:
        try:
            good.append(check_key(key))
        except UsageError:
            continue
    subjects = {streams.blob_subject(key) for key in good}
    assert len(subjects) == len(good)
    assert all(subject.count(".") == 4 and not set(subject) & set("*> ") for subject in subjects)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200), st.booleans()), max_size=12))
def test_only_what_is_old_and_was_never_finished_is_abandoned(begun):
    streams = open_transport("nats://host/run")._streams
    subjects, expected = {}, []
    finished = {key for key, _, done in begun if done}
    for key, at, _ in begun:
        parts = streams.blob_parts_subject(key, make_attempt(200 - at))  # the writer's clock is no help
        subjects[parts] = at
        if at < 100 and key not in finished:
            expected.append(parts)
    subjects |= {streams.blob_subject(key): 0 for key in finished} | {streams.blob_parts_subject("a", "strange"): 0}
    assert sorted(streams.abandoned_parts(subjects, 100)) == sorted(expected)


async def test_several_are_worked_on_at_a_time_and_no_more():
    running, most = 0, 0

    async def work(number):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number * number

    assert await run_windowed(100, work, width=7) == [number * number for number in range(100)]
    assert most == 7
    assert await run_windowed(0, work) == []
    assert await run_windowed(1, work) == [0]


async def test_after_a_failure_none_is_begun_and_none_is_under_way():
    begun, ended = [], []

    async def work(number):
        begun.append(number)
        for _ in range(number % 3 + 1):
            await asyncio.sleep(0)
        ended.append(number)
        if number == 5:
            raise UsageError("five")

    with pytest.raises(UsageError, match="five"):
        await run_windowed(100, work, width=4)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 12
