"""Payloads and schemas whose checksums are right but whose contents are not: a value or one of our errors, bounded."""

import json
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import CodecError, MessageFormatError
from deltabus.codecs.container import decode_anchor, decode_delta, encode_anchor, encode_delta, open_part
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.schema import Schema

from .test_container import SCHEMA, rebuilt, some_changes, state

OLD, CHANGES = some_changes(1, 0.05)
DELTAS = {name: next(iter(encode_delta(CHANGES, base=OLD.__getitem__, encoding=name))).data for name in ENCODINGS}
ANCHOR = next(iter(encode_anchor(SCHEMA, state(1).__getitem__))).data
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TENSOR = {"name": "a", "dtype": "F32", "shape": [4], "aliases": ["b"]}
GOOD = {"tensors": [TENSOR], "segment_elements": 256, "format": 1}


def damaged(data, part):
    """A part with bytes of its segments exchanged, and its checksums made right again, as an attacker could."""
    start = 8 + int.from_bytes(part[:8], "little")
    body = bytearray(part)
    for at in data.draw(st.sets(st.integers(start, len(part) - 1), min_size=1, max_size=6)):
        body[at] = data.draw(st.integers(0, 255))
    return rebuilt(bytes(body))


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(st.data())
def test_a_delta_with_any_contents_gives_changes_in_range_or_an_error(encoding, data):
    part = damaged(data, DELTAS[encoding])
    open_part(part).verify()
    try:
        found = decode_delta([part], SCHEMA, OLD.__getitem__)
    except CodecError:
        return
    for index, change in found.segments.items():
        size = SCHEMA.segments[index].size
        assert change.positions.size == change.new.size == change.old.size <= size
        assert (np.diff(change.positions.astype(np.int64)) > 0).all()
        assert int(change.positions[-1]) < size


@given(st.data())
def test_an_anchor_with_any_contents_gives_whole_segments_or_an_error(data):
    part = damaged(data, ANCHOR)
    open_part(part).verify()
    try:
        found = dict(decode_anchor([part], SCHEMA))
    except CodecError:
        return
    assert {index: bits.size for index, bits in found.items()} == {s.index: s.size for s in SCHEMA.segments}


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(st.data())
def test_contents_of_any_kind_take_bounded_memory(encoding, data):
    part = damaged(data, DELTAS[encoding])
    tracemalloc.start()
    try:
        decode_delta([part], SCHEMA, OLD.__getitem__)
    except CodecError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


def schema_of(data):
    try:
        return Schema.decode(data)
    except MessageFormatError:
        return None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_schema_or_an_error(data):
    schema_of(data)


@given(st.dictionaries(st.sampled_from(list(GOOD)), JSON) | JSON)
def test_any_json_is_a_schema_or_an_error(value):
    schema = schema_of(json.dumps(value).encode("utf-8", "surrogatepass"))
    assert schema is None or Schema.decode(schema.encode()) == schema


@given(st.sampled_from(list(GOOD)), st.sampled_from(list(TENSOR)), JSON)
def test_a_schema_with_any_field_exchanged_is_a_schema_or_an_error(field, of_tensor, value):
    for changed in ({**GOOD, field: value}, {**GOOD, "tensors": [{**TENSOR, of_tensor: value}]}):
        schema = schema_of(json.dumps(changed).encode("utf-8", "surrogatepass"))
        if schema is not None:
            assert Schema.decode(schema.encode()) == schema
            assert sum(segment.size for segment in schema.segments) == schema.total


@given(st.data())
def test_a_schema_with_any_bytes_exchanged_is_a_schema_or_an_error(data):
    text = bytearray(msgspec.json.encode(GOOD))
    for at in data.draw(st.sets(st.integers(0, len(text) - 1), min_size=1, max_size=4)):
        text[at] = data.draw(st.integers(0, 255))
    schema_of(bytes(text))


def test_deep_nesting_is_an_error_not_a_crash():
    for text in (b"[" * 500_000, b'{"tensors":' * 100_000, b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"):
        with pytest.raises(MessageFormatError, match="cannot be read"):
            Schema.decode(text)


def test_a_schema_of_endless_dimensions_takes_little():
    shape = [(1 << 63) - 1] * 20_000
    tracemalloc.start()
    try:
        with pytest.raises(MessageFormatError, match="dimensions"):
            Schema.decode(json.dumps({**GOOD, "tensors": [{**TENSOR, "shape": shape}]}).encode())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
