"""Schemas: what names them."""

import hashlib
import json

import pytest

from deltabus.bus.errors import MessageFormatError, SchemaMismatchError
from deltabus.codecs.schema import Schema, TensorSpec


def test_a_schema_is_named_by_the_bytes_that_it_was_read_from():
    schema = Schema.of([TensorSpec(name="a", dtype="F32", shape=(4,))])
    assert schema.checksum == hashlib.sha256(schema.encode()).digest()
    foreign = json.dumps(json.loads(schema.encode()), indent=1).encode()
    read = Schema.decode(foreign)
    assert read == schema
    assert read.checksum == hashlib.sha256(foreign).digest() != schema.checksum


@pytest.mark.parametrize(
    ("shape", "segment_elements", "words"),
    [
        ((1 << 61,), 1 << 22, "segments"),
        (((1 << 20) + 1,), 1, "segments"),
        ((1 << 62, 1 << 62), 1 << 22, "elements"),
        ((1 << 62,) * 65, 1 << 22, "dimensions"),
    ],
)
def test_a_schema_promises_no_more_than_can_be_handled(shape, segment_elements, words):
    tensor = {"name": "a", "dtype": "F32", "shape": shape, "aliases": []}
    text = json.dumps({"tensors": [tensor], "segment_elements": segment_elements, "format": 1})
    with pytest.raises(MessageFormatError, match=words):
        Schema.decode(text.encode())
    with pytest.raises(SchemaMismatchError, match=words):
        Schema.of([TensorSpec(name="a", dtype="F32", shape=shape)], segment_elements=segment_elements)


def test_segments_are_counted_for_each_dtype():
    tensors = [TensorSpec(name="a", dtype="F32", shape=(1 << 20,)), TensorSpec(name="b", dtype="I64", shape=(1,))]
    with pytest.raises(SchemaMismatchError, match="segments"):
        Schema.of(tensors, segment_elements=1)
    assert Schema.of(tensors[:1], segment_elements=1).total == 1 << 20


def test_names_that_are_no_text_are_refused():
    with pytest.raises(SchemaMismatchError, match="surrogates"):
        Schema.of([TensorSpec(name="a\ud800", dtype="F32", shape=(4,))])
