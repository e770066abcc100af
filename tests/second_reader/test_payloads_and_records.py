"""Single payloads and records: the second reader finds in them what deltabus does, and refuses what it refuses."""

from __future__ import annotations

import functools
import json
import random
import re
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deltabus.bus.errors import DeltabusError
from deltabus.bus.message import decode_message
from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import decode_delta, encode_anchor, encode_delta, open_part
from deltabus.codecs.schema import Schema as TheirSchema
from deltabus.codecs.schema import TensorSpec

from .message import body_of, message_of
from .payload import Bytes, read_changes, read_payload
from .published import flipped, of_every_dtype, snapshot
from .schema import ALL_64, RefusedError, Schema, term
from .seals import Key, Seal, open_seal

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
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


def test_the_examples_of_the_pages():
    payloads, protocol = ((DOCS / name).read_text(encoding="utf-8") for name in ("format.md", "protocol.md"))
    example = payloads[payloads.index("## 5. An example") :]
    old = [int(bits, 16) for bits in re.search(r"^ +old +(.*)$", example, re.MULTILINE)[1].split()]
    new = [0x3F80, 0x3F82, 0xBF81, 0x4000, 0x3F82, 0x8000]
    table = {"name": "w", "dtype": "BF16", "shape": [2, 3], "aliases": []}
    ours = Schema(json.dumps({"tensors": [table], "segment_elements": 1 << 22, "format": 1}).encode())
    theirs = TheirSchema.of([TensorSpec(name="w", dtype="BF16", shape=(2, 3))])
    positions = np.array([1, 2, 5], np.uint32)
    held, after = np.array(old, np.uint16), np.array(new, np.uint16)
    changes = Changes(theirs, {0: SegmentChanges(positions, held[positions], after[positions])})
    rows = dict(re.findall(r"^    ([a-z]+) +((?:[0-9A-F]{2} )+[0-9A-F]{2})$", example, re.MULTILINE))
    assert rows.keys() == {*ENCODINGS, "full"}
    for name, text in rows.items():
        data = bytes.fromhex(text)
        if name == "full":
            (part,) = encode_anchor(theirs, lambda _: held)
        else:
            (part,) = encode_delta(changes, base=lambda _: held, encoding=name)
            found = read_changes(Bytes(data), name, old, "BF16")
            assert [found.get(i, bits) for i, bits in enumerate(old)] == new
        assert part.data.endswith(data)
        kind = "anchor" if name == "full" else "delta"
        state, _ = read_payload([sealed(part.data, schema=ours.name)], kind, ours, {"BF16": old})
        assert state == {"BF16": old if name == "full" else new}
    numbers = protocol[protocol.index("Numbers to test with") :]
    seeds = re.findall(r"^\| [^|]+ \| `([0-9a-f]{16})` \|", numbers, re.MULTILINE)
    whole = ours.tensors[0]
    row = replace(whole, shape=(1, 3), start=(1, 0), whole=(2, 3))
    scalar = replace(whole, name="n", dtype="I64", shape=())
    assert [f"{tensor.seed():016x}" for tensor in (whole, row, scalar)] == seeds
    first = [term(whole.seed(), i, bits) for i, bits in enumerate(old)]
    told = [ours.digest({"BF16": old}), *first[:2], term(scalar.seed(), 0, 0x29)]
    assert [number for number in told if f"`{number:016x}`" not in numbers] == []
    secret, public = (re.search(rf"`({kind}:[^.`]+)`", protocol)[1] for kind in ("ed25519", "ed25519-public"))
    assert Key.parse(secret) == Key.parse(public)
    assert [f"`{key.id.hex()}`" in protocol for key in (Key.parse(secret), Key(2, bytes(range(32))))] == [True, True]


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


def damaged_schemas():
    """A schema with one value left out, or another in its place."""
    box = {"start": [1, 0], "whole": [4, 5]}
    first = {"name": "a", "dtype": "BF16", "shape": [3, 5], "aliases": ["c"], "slice": box}
    second = {"name": "b", "dtype": "I8", "shape": [], "aliases": []}
    schema = {"tensors": [first, second], "segment_elements": 7, "format": 1}
    values = [None, True, -1, 0, 1, 2, 1.5, 1 << 28, (1 << 28) + 1, 1 << 63, "", "a", "b", "c", "\ud800", "é", "F64"]
    values += ["F4", [], ["a"], ["c"], ["c", "c"], [0, 5], [4, 5], [3, 5, 0], [0] * 64, [1] * 65, [-1, 1], [1.0, 1], {}]
    values += [[1 << 32, 1 << 31], [1 << 32, 1 << 30], {**box, "start": [2, 0]}, {**box, "start": [1]}, [second, first]]
    yield from (json.dumps(schema).encode(), b"[]", b"", b"{}", b"\xff", b'{"tensors":[]}')
    for place in ([], ["tensors", 0], ["tensors", 1], ["tensors", 0, "slice"]):
        for name in [*functools.reduce(lambda found, key: found[key], place, schema), "more", "slice"]:
            for value in [*values, ...]:
                damaged = json.loads(json.dumps(schema))
                found = functools.reduce(lambda found, key: found[key], place, damaged)
                found[name] = value
                if value is ...:
                    del found[name]
                yield json.dumps(damaged).encode()


def test_both_readers_refuse_the_same_schemas():
    read = refused = 0
    for data in damaged_schemas():
        try:
            schema = Schema(data)
        except RefusedError:
            schema = None
        try:
            theirs = TheirSchema.decode(data)
        except DeltabusError:
            theirs = None
        assert (schema is None) == (theirs is None), data
        if schema is None:
            refused += 1
            continue
        read += 1
        assert [tensor.seed() for tensor in schema.tensors] == [tensor.seed for tensor in theirs.tensors]
        assert [(d, b - a) for d, a, b in schema.segments] == [(s.dtype.name, s.size) for s in theirs.segments]
    assert min(read, refused) > 50


def damaged_records():
    """Bodies with a bit flipped, a field left out, or another value in its place."""
    chosen = random.Random(5)
    for path in sorted(RECORDS.glob("*.record")):
        data = path.read_bytes()
        for _ in range(300):
            yield flipped(data, chosen.randrange(8, len(data)), chosen)[8:]
    fields = msgspec.msgpack.decode((RECORDS / "v1-unsigned.record").read_bytes()[8:])
    delta = {**fields, "kind": "delta", "version": 5, "base": {"trainer": 4, "a": 1}, "digest_before": 7, "blobs": []}
    ranks = {**fields, "writer": "trainer-1", "group": [], "cohort": {"generation": 3, "ranks": 2}}
    numbers = [
        -1,
        0,
        1,
        2,
        4,
        5,
        4096,
        4097,
        1 << 28,
        1 << 30,
        1 << 62,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        -(1 << 63),
    ]
    names = ["trainer", "trainer-1", "trainer-01", "-x", "a" * 63, "a" * 64, "é", "anchor", "delta", "a/b"]
    keys = ["a//b", "=a", "a/=b", ".a", "a/.b", "a" * 512, "a" * 513, "é", ""]
    lists = [[], ["trainer"], ["a"], ["trainer", "trainer"], ["b", "trainer", "a"], [{}], [1], {}]
    maps = [{"a": "b"}, {"a": 1}, {"trainer": 1}, {"trainer": 0}, {"a": 0}, {"-": 1}, {str(i): "" for i in range(257)}]
    maps += [{"generation": 1, "ranks": ranks} for ranks in (0, 1, 2, 4096, 4097)] + [{"generation": 0}, {"ranks": 2}]
    values = [None, True, 1.5, float("nan"), b"", bytes(32), bytes(33), *numbers, *names, *keys, *lists, *maps]
    for message in (fields, delta, ranks):
        for name in [*message, "cohort"]:
            yield msgspec.msgpack.encode({key: message[key] for key in message if key != name})
            inner = message.get(name)
            for value in values:
                yield msgspec.msgpack.encode({**message, name: value})
                if isinstance(inner, dict):
                    for key in inner:
                        yield msgspec.msgpack.encode({**message, name: {**inner, key: value}})
            if isinstance(inner, dict):
                for key in inner:
                    yield msgspec.msgpack.encode({**message, name: {k: inner[k] for k in inner if k != key}})


def test_both_readers_refuse_the_same_records():
    read = refused = 0
    names = ["epoch", "kind", "step", "version", "members", "generation", "digest_before", "digest_after", "metadata"]
    for body in damaged_records():
        writer = "trainer-1" if b"trainer-1" in body[:30] else "trainer"
        try:
            message = message_of(body, writer, 0)
        except RefusedError as error:
            message = None
            if "UTF-8" in str(error):  # deltabus does not look at the names of fields that it does not know
                continue
        try:
            theirs = decode_message(framed(body), writer=writer, position=0)
        except DeltabusError:
            theirs = None
        assert (message is None) == (theirs is None), (body, message, theirs)
        if message is None:
            refused += 1
            continue
        read += 1
        assert [getattr(message, name) for name in [*names, "base"]] == [getattr(theirs, n) for n in [*names, "base"]]
    assert min(read, refused) > 300


def framed(body: bytes) -> bytes:
    return b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body


def damaged_headers():
    """Parts with one value of the header left out, or another in its place; the checksum is made to fit."""
    data = (PAYLOADS / "v1-step.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    values = ["", "1", "01", "0", "delta", "anchor", "a" * 64, "A" * 8, "0" * 8, None, True, 0, 1, -1, 1 << 63, 1.5]
    values += [[], {}, [0], [1], [0, 1], [0, 0], [0, 1, 2], [-1, 1], ["0", "1"], "U8", "I8", "\ud800", "é"]
    for name in [
        *header,
        "more",
        "segment.000009.step",
        "segment.9.step",
        "segment.0000009.step",
        "segment.000009.Step",
    ]:
        inner = header.get(name, {})
        for key in [*inner, "more", ...] if isinstance(inner, dict) else [...]:
            for value in [*values, ...]:
                changed = json.loads(json.dumps(header))
                found, at = (changed, name) if key is ... else (changed.setdefault(name, {}), key)
                found[at] = value
                if value is ...:
                    del found[at]
                yield with_header(changed, data[8 + length :], fit=key != "checksum")
    yield with_header(dict(reversed(header.items())), data[8 + length :])
    yield with_header(header, data[8 + length :] + b"\0")
    yield with_header(header, data[8 + length : -1])
    yield data[: 8 + length // 2]
    yield data[:8].replace(b"\0", b"\xff") + data[8:]


def with_header(header: dict, segments: bytes, *, fit: bool = True) -> bytes:
    metadata = header.get("__metadata__")
    if fit and isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        texts = "".join(f"{key}\0{value}\0" for key, value in sorted(metadata.items()) if key != "checksum")
        metadata["checksum"] = f"{zlib.crc32(texts.encode('utf-8', 'surrogatepass')):08x}"
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + segments


def test_both_readers_refuse_the_same_headers():
    schema, old, _ = golden_states()
    read = refused = 0
    for data in damaged_headers():
        try:
            state, _ = read_payload([data], "delta", schema, old)
        except RefusedError:
            state = None
        try:
            part = open_part(data)
            theirs = part.kind == "delta" and part.schema_checksum.hex() == schema.name and part.number == 0
        except DeltabusError:
            theirs = False
        assert (state is not None) == theirs, data[: data.index(b"}}") + 2]
        read += theirs
        refused += not theirs
    assert read > 10 and refused > 300


def sealed(data: bytes, **more: str) -> bytes:
    """A part with the checksums that its header needs."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"] | more
    header["__metadata__"] = metadata
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
