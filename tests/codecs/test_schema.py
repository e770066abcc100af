"""Schemas: what names them."""

import hashlib
import json

from deltabus.codecs.schema import Schema, TensorSpec


def test_a_schema_is_named_by_the_bytes_that_it_was_read_from():
    schema = Schema.of([TensorSpec(name="a", dtype="F32", shape=(4,))])
    assert schema.checksum == hashlib.sha256(schema.encode()).digest()
    foreign = json.dumps(json.loads(schema.encode()), indent=1).encode()
    read = Schema.decode(foreign)
    assert read == schema
    assert read.checksum == hashlib.sha256(foreign).digest() != schema.checksum
