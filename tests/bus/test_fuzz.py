"""What parses bytes from outside: any input gives a value or one of our errors, in bounded memory and time."""

from __future__ import annotations

import tracemalloc
import zlib
from contextlib import aclosing, suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import ConflictError, MessageFormatError, RetentionGapError, SignatureError
from deltabus.bus.message import MAX_RECORD_BYTES, Message, decode_message, encode_message, unframe
from deltabus.bus.planner import plan
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.signing import KeyRing, Scheme, SigningKey, check_record

from .support import FakeTransport, Store, Time, chain
from .test_message import messages
from .test_reader import take

KEY = SigningKey(Scheme.ED25519, bytes(32))
FIELDS = Message.__struct_fields__
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40)
    | st.sampled_from(["a", "anchor", "delta", "../x", "a" * 64, bytes(32), 1, 0])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def framed(body: bytes) -> bytes:
    return b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body


def decoded(record: bytes) -> Message | None:
    try:
        return decode_message(record)
    except MessageFormatError:
        return None


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES)
def test_any_messagepack_is_a_message_or_an_error(value):
    message = decoded(framed(msgspec.msgpack.encode(value)))
    if message is not None:
        assert decode_message(encode_message(message)) == message


@given(messages(), st.sampled_from(FIELDS), VALUES)
def test_a_message_with_any_field_exchanged_is_a_message_or_an_error(message, field, value):
    fields = msgspec.msgpack.decode(unframe(encode_message(message)))
    found = decoded(framed(msgspec.msgpack.encode({**fields, field: value})))
    if found is not None:
        assert decode_message(encode_message(found)) == found


@given(messages(), st.data())
def test_a_message_with_any_bytes_exchanged_is_a_message_or_an_error(message, data):
    body = unframe(encode_message(message))
    start = data.draw(st.integers(0, len(body)))
    stop = data.draw(st.integers(start, min(start + 20, len(body))))
    found = decoded(framed(body[:start] + data.draw(st.binary(max_size=20)) + body[stop:]))
    if found is not None:
        encode_message(found)


HEAVY = {
    "an array of 4 G elements": b"\xdd\xff\xff\xff\xff",
    "a map of 4 G entries": b"\xdf\xff\xff\xff\xff",
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "a value of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "arrays of 65535 in arrays": b"\xdc\xff\xff" * 1000,
    "a million empty maps": b"\xdd\x00\x0f\x00\x00" + b"\x80" * (15 << 16),
}


@pytest.mark.parametrize("bomb", HEAVY.values(), ids=HEAVY)
@pytest.mark.parametrize("field", ["unknown", "base", "group", "blobs", "metadata", "signature", "writer"])
def test_what_promises_much_takes_little(field, bomb):
    body = b"\x81" + msgspec.msgpack.encode(field) + bomb
    record = framed(body)
    tracemalloc.start()
    try:
        with pytest.raises(MessageFormatError):
            decode_message(record)
        with pytest.raises(SignatureError):
            check_record(record, KeyRing([KEY.verify_key]))
        assert tracemalloc.get_traced_memory()[1] < 64 * MAX_RECORD_BYTES
    finally:
        tracemalloc.stop()


def test_a_record_that_is_too_large_is_not_parsed():
    record = framed(b"\x81\xa1x\xc6" + (MAX_RECORD_BYTES).to_bytes(4, "big") + bytes(MAX_RECORD_BYTES))
    with pytest.raises(MessageFormatError, match="is not a deltabus message"):
        decode_message(record)


RECORDS = st.lists(
    st.sampled_from([encode_message(message) for message in chain(4)])
    | messages().map(encode_message)
    | st.binary(max_size=60)
    | st.binary(max_size=60).map(framed),
    max_size=5,
)


@given(RECORDS, st.sampled_from([None, KeyRing([KEY.verify_key])]))
async def test_any_log_is_read_or_refused(records, keys):
    store = Store()
    store.records["a"] = dict(enumerate(records))
    reader = TopicReader(FakeTransport(store), retry=Time().retry(), keys=keys)
    try:
        loaded = await reader.load()
    except (MessageFormatError, SignatureError):
        loaded = []
    assert keys is None or not loaded
    sequencer = Sequencer(topic="fake://topic")
    for message in loaded:
        try:
            sequencer.feed(message)
        except ConflictError:
            break
    cut = sequencer.newest_cut()
    if cut is not None:
        with suppress(RetentionGapError):  # whether there is a way is up to the log
            plan(sequencer.messages, have=None, target=cut.state)


async def test_a_follower_of_rubbish_ends_with_a_clear_error():
    store = Store()
    store.records["a"] = {0: encode_message(chain(1)[0]), 1: framed(b"\xdd\xff\xff\xff\xff")}
    reader = TopicReader(FakeTransport(store), retry=Time().retry(), discovery=0.001)
    async with aclosing(reader.follow()) as following:
        assert await take(following, 1) == chain(1)
        with pytest.raises(MessageFormatError, match="record 1 of log a"):
            await take(following, 1)
