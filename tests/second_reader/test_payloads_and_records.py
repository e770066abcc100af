"""Single payloads and records: the second reader finds in them what deltabus does, and refuses what it refuses."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from deltabus.bus.errors import DeltabusError
from deltabus.bus.message import decode_message
from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import decode_delta, encode_anchor, encode_delta
from deltabus.codecs.schema import Schema as TheirSchema
from deltabus.codecs.schema import TensorSpec

from .message import body_of, message_of
from .payload import read_payload
from .published import flipped, of_every_dtype, snapshot
from .schema import ALL_64, RefusedError, Schema
from .seals import Key, Seal, open_seal

TESTS = Path(__file__).parents[1]
PAYLOADS, RECORDS = TESTS / "codecs" / "golden", TESTS / "bus" / "golden"
ENCODINGS = ["conditional", "overwrite", "step", "dense"]


def golden_states():
    numbers = json.loads((PAYLOADS / "v1.json").read_text(encoding="utf-8"))
    schema = Schema(numbers["schema"].encode())
    old: dict[str, list[int]] = {dtype: [] for dtype in schema.dtypes}
    for (dtype, _, _), bits in zip(schema.segments, numbers["state"], strict=True):
        old[dtype] += bits
    new = {dtype: list(line) for dtype, line in old.items()}
    for change in numbers["changes"]:
        dtype, begin, _ = schema.segments[change["segment"]]
        for position, bits in zip(change["positions"], change["new"], strict=True):
            new[dtype][begin + position] = bits
    return schema, old, new


@pytest.mark.parametrize("name", ["anchor", *ENCODINGS])
def test_golden_payloads(name):
    schema, old, new = golden_states()
    data = (PAYLOADS / f"v1-{name}.safetensors").read_bytes()
    if name == "anchor":
        assert read_payload([data], "anchor", schema, None) == (old, schema.digest(old))
        return
    state, change = read_payload([data], "delta", schema, old)
    assert state == new
    assert (schema.digest(old) + change) & ALL_64 == schema.digest(new)


@pytest.mark.parametrize("name", ["unsigned", "ed25519", "hmac-sha256"])
def test_golden_records(name):
    record = (RECORDS / f"v1-{name}.record").read_bytes()
    body = body_of(record)
    message = message_of(body, "trainer", 0)
    assert (message.kind, message.step, message.version, message.digest_after) == ("anchor", 7, 1, 0xFEDCBA9876543210)
    assert (message.members, message.generation, message.metadata) == ({"trainer"}, 0, {"run": "golden"})
    assert [(blob.size, blob.checksum) for blob in message.blobs] == [(1000, b"\xcd" * 32)]
    keys = [Key.parse(f"{kind}:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8") for kind in ("ed25519", "hmac-sha256")]
    if name == "unsigned":
        with pytest.raises(RefusedError, match="not signed"):
            open_seal(body, keys)
        return
    assert open_seal(body, keys) == Seal(bytes(range(100, 116)), bytes(32))
    for at in range(0, len(body), 23):
        with pytest.raises(RefusedError):
            open_seal(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], keys)


def lines_of(schema: Schema, found: dict) -> dict[str, list[int]]:
    lines = {dtype: [] for dtype in schema.dtypes}
    for tensor in schema.tensors:
        lines[tensor.dtype] += found[tensor.name][2]
    return lines


@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
def test_many_segments_and_parts(encoding):
    weights = of_every_dtype()
    del weights["tied"]
    states = [snapshot(weights)]
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape, _) in states[0].items()]
    theirs = TheirSchema.of(specs, segment_elements=37)
    schema = Schema(theirs.encode())
    weights.move(0.3)
    states.append(snapshot(weights))
    old, new = (lines_of(schema, state) for state in states)
    held = [np.array(old[d][a:b], s.dtype.bits) for (d, a, b), s in zip(schema.segments, theirs.segments, strict=True)]
    changes = {}
    for index, (dtype, begin, end) in enumerate(schema.segments):
        after = np.array(new[dtype][begin:end], held[index].dtype)
        positions = np.flatnonzero(held[index] != after).astype(np.uint32)
        if len(positions):
            changes[index] = SegmentChanges(positions, held[index][positions], after[positions])
    anchor = [part.data for part in encode_anchor(theirs, held.__getitem__, part_bytes=300)]
    delta = encode_delta(Changes(theirs, changes), base=held.__getitem__, encoding=encoding, part_bytes=300)
    parts = [part.data for part in delta]
    assert len(anchor) > 9 and len(parts) > 3
    assert read_payload(anchor, "anchor", schema, None) == (old, schema.digest(old))
    state, change = read_payload(parts, "delta", schema, old)
    assert state == new
    assert (schema.digest(old) + change) & ALL_64 == schema.digest(new)
    for wrong in (parts[1:], parts[:1] + parts[2:], [parts[1], parts[0], *parts[2:]]):
        with pytest.raises(RefusedError):
            read_payload(wrong, "delta", schema, old)
    with pytest.raises(RefusedError, match="without all segments"):
        read_payload(anchor[:-1], "anchor", schema, None)


def test_both_readers_refuse_the_same_payloads():
    """Of damaged payloads whose checksums were made to fit, each is refused by both, or read as the same."""
    schema, old, new = golden_states()
    numbers = json.loads((PAYLOADS / "v1.json").read_text(encoding="utf-8"))
    ours = TheirSchema.decode(numbers["schema"].encode())
    held = [np.array(bits, segment.dtype.bits) for bits, segment in zip(numbers["state"], ours.segments, strict=True)]
    chosen, read = random.Random(4), 0
    for name in ENCODINGS:
        data = (PAYLOADS / f"v1-{name}.safetensors").read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for _ in range(100):
            forged = sealed(flipped(data, chosen.randrange(begin, len(data)), chosen))
            try:
                state, _ = read_payload([forged], "delta", schema, old)
            except RefusedError:
                state = None
            try:
                changes = decode_delta([forged], ours, held.__getitem__)
            except DeltabusError:
                assert state is None
                continue
            expected = {dtype: list(line) for dtype, line in old.items()}
            for index, changed in changes.segments.items():
                dtype, start, _ = schema.segments[index]
                for position, bits in zip(changed.positions.tolist(), changed.new.tolist(), strict=True):
                    expected[dtype][start + position] = bits
            assert state == expected
            read += state != new
    assert read  # some damage makes other changes, which the digest then shows


def test_both_readers_refuse_the_same_records():
    chosen, read, refused = random.Random(5), 0, 0
    for path in sorted(RECORDS.glob("*.record")):
        data = path.read_bytes()
        for _ in range(400):
            body = flipped(data, chosen.randrange(8, len(data)), chosen)[8:]
            try:
                message = message_of(body, "trainer", 0)
            except RefusedError as error:
                message = None
                if "UTF-8" in str(error):  # deltabus does not look at the names of fields that it does not know
                    continue
            try:
                theirs = decode_message(framed(body), writer="trainer", position=0)
            except DeltabusError:
                theirs = None
            assert (message is None) == (theirs is None), (path.name, body, message, theirs)
            if message is None:
                refused += 1
                continue
            read += 1
            names = ("epoch", "kind", "step", "base", "version", "members", "digest_before", "digest_after", "metadata")
            assert [getattr(message, name) for name in names] == [getattr(theirs, name) for name in names]
    assert read and refused


def framed(body: bytes) -> bytes:
    return b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body


def sealed(data: bytes) -> bytes:
    """A part with the checksums that its header needs."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata["segments"] = "".join(
        f"{zlib.crc32(name.encode() + data[8 + length + begin : 8 + length + end]):08x}"
        for name, (begin, end) in sorted(
            ((n, e["data_offsets"]) for n, e in header.items() if n != "__metadata__"), key=lambda item: item[1]
        )
    )
    texts = "".join(f"{key}\0{value}\0" for key, value in sorted(metadata.items()) if key != "checksum")
    metadata["checksum"] = f"{zlib.crc32(texts.encode()):08x}"
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    return data[:8] + text + data[8 + length :]
