from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import MessageFormatError, UsageError
from deltabus.bus.message import (
    MAX_BLOB_BYTES,
    MAX_RECORD_BYTES,
    Blob,
    Cohort,
    Kind,
    Message,
    Stats,
    check_writer_name,
    decode_message,
    encode_message,
)

from .support import anchor, delta, payload

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True)
COUNTS = st.integers(0, (1 << 63) - 1)
DIGESTS = st.integers(0, (1 << 64) - 1)
BLOBS = st.builds(
    Blob,
    key=st.from_regex(r"[a-z0-9_-][a-z0-9._=-]{0,9}(/[a-z0-9_-][a-z0-9._=-]{0,9}){0,2}", fullmatch=True),
    size=st.integers(0, MAX_BLOB_BYTES),
    checksum=st.binary(min_size=32, max_size=32),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def messages(draw) -> Message:
    writer = draw(NAMES)
    kind = draw(st.sampled_from(Kind))
    version = draw(st.integers(2, (1 << 63) - 1))
    others = draw(st.lists(NAMES.filter(lambda name: name != writer), unique=True, max_size=3))
    is_delta = kind is Kind.DELTA
    base = {**{w: draw(COUNTS) for w in others}, writer: draw(st.integers(1, version - 1))} if is_delta else {}
    return Message(
        writer=writer,
        position=draw(COUNTS),
        epoch=draw(st.integers(1, (1 << 63) - 1)),
        kind=kind,
        step=draw(st.integers(-(1 << 63) + 1, (1 << 63) - 1)),
        base=base,
        version=version,
        group=(*others, writer),
        schema=draw(BLOBS),
        digest_before=draw(DIGESTS) if is_delta else None,
        digest_after=draw(DIGESTS),
        blobs=tuple(draw(st.lists(BLOBS, min_size=0 if is_delta else 1, max_size=3))),
        stats=Stats(
            changed=draw(COUNTS), total=draw(COUNTS), encodings=draw(st.dictionaries(TEXT, COUNTS, max_size=3))
        ),
        created=draw(st.floats(allow_nan=False, allow_infinity=False)),
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        signature=draw(st.none() | st.binary(max_size=64)),
    )


def record_of(fields: object) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body


def fields_of(message: Message) -> dict[str, object]:
    return msgspec.msgpack.decode(encode_message(message)[8:])


@given(messages())
def test_a_message_survives_its_bytes(message):
    record = encode_message(message)
    assert decode_message(record, writer=message.writer, position=message.position) == message
    assert encode_message(decode_message(record)) == record


@given(messages(), st.data())
def test_damage_is_found(message, data):
    record = bytearray(encode_message(message))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageFormatError):
        decode_message(bytes(record))


@given(messages(), st.data())
def test_truncation_is_found(message, data):
    record = encode_message(message)
    with pytest.raises(MessageFormatError):
        decode_message(record[: data.draw(st.integers(0, len(record) - 1))])


@given(st.binary(max_size=200))
def test_any_bytes_give_a_clear_error(data):
    for record in (data, b"DBM1" + zlib.crc32(data).to_bytes(4, "little") + data):
        with pytest.raises(MessageFormatError):
            decode_message(record, topic="fake://topic")


def test_unknown_fields_are_ignored():
    message = delta(1, 2)
    assert decode_message(record_of({**fields_of(message), "colour": {"of": ["the", 1]}})) == message


def test_deep_nesting_is_an_error_not_a_crash():
    body = b"\x81\xa1x" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(MessageFormatError, match="cannot be read"):
        decode_message(b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body)


def test_another_protocol_is_named_even_when_its_fields_differ():
    with pytest.raises(MessageFormatError, match="speaks protocol 2, this reader 1; upgrade"):
        decode_message(record_of({"protocol": 2, "kind": 7}))


def test_a_misplaced_record_is_refused():
    record = encode_message(anchor(3, 1))
    with pytest.raises(MessageFormatError, match="belongs to the log of 'a'") as caught:
        decode_message(record, topic="fake://topic", writer="b", position=3)
    assert (caught.value.topic, caught.value.writer) == ("fake://topic", "b")
    with pytest.raises(MessageFormatError, match="stands at position 3"):
        decode_message(record, writer="a", position=4)


@pytest.mark.parametrize(
    "changed",
    [
        {"position": -1},
        {"epoch": 0},
        {"version": 0},
        {"version": 1 << 63},
        {"kind": "merge"},
        {"writer": "../a"},
        {"group": []},
        {"group": ["b"]},
        {"group": ["a", "a"]},
        {"digest_after": -1},
        {"digest_before": None},
        {"base": {}},
        {"base": {"a": 2}},
        {"base": {"a": 0}},
        {"base": {"a": 1, "b": -1}},
        {"blobs": [{"key": "../../etc/passwd", "size": 1, "checksum": bytes(32)}]},
        {"blobs": [{"key": "a/.hidden", "size": 1, "checksum": bytes(32)}]},
        {"blobs": [{"key": "a", "size": MAX_BLOB_BYTES + 1, "checksum": bytes(32)}]},
        {"blobs": [{"key": "a", "size": 1, "checksum": bytes(31)}]},
        {"created": float("nan")},
        {"created": float("inf")},
    ],
)
def test_fields_out_of_range_are_refused(changed):
    with pytest.raises(MessageFormatError, match="cannot be read"):
        decode_message(record_of({**fields_of(delta(1, 2)), **changed}))


@pytest.mark.parametrize("changed", [{"base": {"a": 1}}, {"digest_before": 1}, {"blobs": []}])
def test_an_anchor_stands_alone(changed):
    with pytest.raises(MessageFormatError, match="an anchor has no"):
        decode_message(record_of({**fields_of(anchor(0, 1)), **changed}))


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 1 << 63},
        {"step": 1 << 65},
        {"version": 1 << 70},
        {"metadata": {"a": 1}},
        {"metadata": {"a": "\ud800"}},
        {"metadata": {"a": "x" * MAX_RECORD_BYTES}},
        {"blobs": payload(MAX_BLOB_BYTES + 1)},
        {"writer": "a/b", "group": ("a/b",)},
    ],
)
def test_what_cannot_be_read_is_not_written(fields):
    with pytest.raises(UsageError):
        encode_message(msgspec.structs.replace(anchor(0, 1), **fields))


def test_figures():
    message = delta(1, 3, blobs=payload(3) + payload(4))
    assert message.nbytes == 7
    assert message.state == {"a": 3}
    assert Stats(changed=1, total=4).density == 0.25
    assert Stats(changed=0, total=0).density == 0


def test_what_the_base_says_of_others_is_what_a_message_needs():
    message = msgspec.structs.replace(delta(1, 3), base={"a": 2, "b": 7})
    assert (message.state, message.needs) == ({"a": 3}, {"b": 7})
    first = msgspec.structs.replace(anchor(0, 1), base={"b": 7})
    assert (first.state, first.needs) == ({"a": 1}, {"b": 7})
    assert decode_message(encode_message(first)) == first


@pytest.mark.parametrize(
    ("writer", "fields"),
    [
        ("rank-4", {"cohort": Cohort(generation=1, ranks=4)}),
        ("rank-01", {"cohort": Cohort(generation=1, ranks=4)}),
        ("rank", {"cohort": Cohort(generation=1, ranks=4)}),
        ("rank-1", {"cohort": Cohort(generation=1, ranks=4), "group": ("rank-1",)}),
        ("rank-1", {"cohort": Cohort(generation=1)}),
        ("rank-1", {}),
    ],
)
def test_a_group_of_ranks_that_the_writer_is_none_of_is_refused(writer, fields):
    with pytest.raises(ValueError, match=r"rank|group"):
        anchor(0, 1, writer=writer, **{"group": (), **fields})


@pytest.mark.parametrize("name", ["a", "rank-0", "A_1", "0" * 63])
def test_good_writer_names(name):
    assert check_writer_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "_a", "a/b", "a.b", "..", "a\n", "ä", "0" * 64])
def test_bad_writer_names(name):
    with pytest.raises(UsageError, match="writer"):
        check_writer_name(name)
