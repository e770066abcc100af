import json
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from deltabus.bus.errors import CodecError, CorruptPayloadError, SchemaMismatchError, UsageError
from deltabus.codecs.ahead import in_order
from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import (
    decode_anchor,
    decode_delta,
    encode_anchor,
    encode_delta,
    open_part,
    part_bytes_of,
)
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.header import MAX_HEADER_BYTES, MAX_SEGMENTS
from deltabus.codecs.schema import Schema, TensorSpec

SHAPES = [("a", "BF16", (40, 30)), ("b", "F32", (500,)), ("c", "I64", ()), ("d", "BF16", (7, 0)), ("e", "BOOL", (33,))]
SCHEMA = Schema.of([TensorSpec(name=n, dtype=d, shape=s) for n, d, s in SHAPES], segment_elements=256)
EMPTY = Schema.of([])


def state(seed, schema=SCHEMA):
    rng = np.random.default_rng(seed)
    high = {1: 1 << 7, 2: 1 << 15, 4: 1 << 31, 8: 1 << 63}
    return [rng.integers(0, high[s.dtype.size], s.size, dtype=np.uint64).astype(s.dtype.bits) for s in schema.segments]


def changes_between(old, new, schema=SCHEMA):
    found = {}
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        positions = np.flatnonzero(before != after).astype(np.uint32)
        if positions.size:
            found[index] = SegmentChanges(positions, before[positions], after[positions])
    return Changes(schema, found)


def some_changes(seed, density=0.1):
    """A state, and one that differs from it by a few steps here and there."""
    old = state(seed)
    rng = np.random.default_rng(seed + 1)
    moves = [(rng.random(bits.size) < density) * rng.integers(1, 4, bits.size) for bits in old]
    return old, changes_between(old, [bits + move.astype(bits.dtype) for bits, move in zip(old, moves, strict=True)])


def same(a, b):
    return (
        a.schema == b.schema
        and list(a.segments) == list(b.segments)
        and all(
            np.array_equal(getattr(a.segments[i], field), getattr(b.segments[i], field))
            for i in a.segments
            for field in ("positions", "old", "new")
        )
    )


def data_of(parts):
    return [part.data for part in parts]


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(params=["without a pool", "with a pool"])
def maybe_pool(request, pool):
    return pool if request.param == "with a pool" else None


def test_parts_are_small_beside_the_state_and_not_too_many():
    assert part_bytes_of(0) == part_bytes_of(1 << 30) == 8 << 20
    assert part_bytes_of(2 << 30) == 16 << 20
    assert part_bytes_of(4 << 30) == part_bytes_of(128 << 30) == 32 << 20
    assert (1 << 50) / part_bytes_of(1 << 50) == 4096


@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
@pytest.mark.parametrize("part_bytes", [1, 300, None])
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
def test_round_trip_of_deltas(encoding, part_bytes, density, maybe_pool):
    old, changes = some_changes(1, density)
    parts = list(encode_delta(changes, base=old.__getitem__, encoding=encoding, part_bytes=part_bytes, pool=maybe_pool))
    assert len(parts) == {1: len(changes.segments), None: 1}.get(part_bytes, len(parts))
    assert same(decode_delta(data_of(parts), SCHEMA, old.__getitem__, pool=maybe_pool), changes)
    assert encoding is None or {name for part in parts for name in part.encodings} == {encoding}


@pytest.mark.parametrize("part_bytes", [1, 3000, None])
def test_round_trip_of_anchors(part_bytes, maybe_pool):
    bits = state(3)
    parts = list(encode_anchor(SCHEMA, bits.__getitem__, part_bytes=part_bytes, pool=maybe_pool))
    found = list(decode_anchor(data_of(parts), SCHEMA, pool=maybe_pool))
    assert [index for index, _ in found] == list(range(len(bits)))
    assert all(np.array_equal(bits[index], there) and bits[index].dtype == there.dtype for index, there in found)


def test_no_changes_have_no_parts():
    assert list(encode_delta(Changes(SCHEMA, {}))) == []
    assert decode_delta([], SCHEMA, state(1).__getitem__).segments == {}


def test_a_schema_without_elements_has_an_anchor_of_one_empty_part():
    parts = list(encode_anchor(EMPTY, state(1).__getitem__))
    assert [open_part(part.data).segments for part in parts] == [()]
    assert list(decode_anchor(data_of(parts), EMPTY)) == []
    assert load(parts[0].data) == {}


def test_a_part_is_a_safetensors_file(tmp_path):
    _, changes = some_changes(1)
    for number, part in enumerate(encode_delta(changes, part_bytes=300)):
        path = tmp_path / "part.safetensors"
        path.write_bytes(part.data)
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
            assert (metadata["format"], metadata["version"], metadata["kind"]) == ("deltabus", "1", "delta")
            assert (metadata["schema"], metadata["part"]) == (SCHEMA.checksum.hex(), str(number))
            contents = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
        reader = open_part(part.data)
        assert {
            f"segment.{s.index:06d}.{s.encoding}": part.data[s.start : s.start + s.size] for s in reader.segments
        } == contents
        crcs = [zlib.crc32(name.encode() + content) for name, content in sorted(contents.items())]
        assert metadata["segments"] == "".join(f"{crc:08x}" for crc in crcs)


def test_a_part_says_what_it_holds():
    _, changes = some_changes(1)
    (part,) = encode_delta(changes, encoding="step")
    reader = open_part(part.data, expect_schema=SCHEMA.checksum)
    assert (reader.kind, reader.number, reader.schema_checksum) == ("delta", 0, SCHEMA.checksum)
    assert [s.index for s in reader.segments] == sorted(changes.segments)
    assert part.encodings == {"step": sum(s.size for s in reader.segments)}
    assert sum(s.size for s in reader.segments) + reader.segments[0].start == len(part.data)
    reader.verify()


def test_overhead_is_tens_of_bytes_a_segment():
    _, changes = some_changes(1, 1.0)
    (part,) = encode_delta(changes)
    assert len(part.data) - sum(part.encodings.values()) < 300 + 110 * len(changes.segments)


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_every_truncation_is_refused(kind):
    old, changes = some_changes(1, 0.02)
    parts = encode_delta(changes) if kind == "delta" else encode_anchor(SCHEMA, old.__getitem__)
    (data,) = data_of(parts)
    for length in range(len(data)):
        with pytest.raises(CorruptPayloadError):
            open_part(data[:length])
    with pytest.raises(CorruptPayloadError):
        open_part(data + b"\0")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_flipped_byte_is_refused_or_changes_nothing(encoding):
    old, changes = some_changes(1, 0.02)
    (data,) = data_of(encode_delta(changes, base=old.__getitem__, encoding=encoding))
    refused = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            found = decode_delta([bytes(damaged)], SCHEMA, old.__getitem__)
        except CodecError:
            refused += 1
        else:
            assert same(found, changes)
    # Only padding may be anything that JSON takes for a space.
    assert refused >= len(data) - 8


@given(st.data())
def test_bits_flipped_anywhere_in_an_anchor_are_refused_or_change_nothing(data):
    bits = state(3)
    parts = data_of(encode_anchor(SCHEMA, bits.__getitem__, part_bytes=3000))
    which = data.draw(st.integers(0, len(parts) - 1))
    damaged = bytearray(parts[which])
    for at in data.draw(st.sets(st.integers(0, len(damaged) * 8 - 1), min_size=1, max_size=4)):
        damaged[at // 8] ^= 1 << at % 8
    parts[which] = bytes(damaged)
    try:
        found = list(decode_anchor(parts, SCHEMA))
    except CodecError:
        return
    assert all(np.array_equal(bits[index], there) for index, there in found)


@given(st.binary(max_size=400))
def test_noise_is_refused(noise):
    for data in (noise, len(noise).to_bytes(8, "little") + noise):
        with pytest.raises(CorruptPayloadError):
            open_part(data)


def rebuilt(part, *, tensors=None, rename=None, metadata=None, text=None, resign=True):
    """The part with something in its header changed and its checksums made right again, as an attacker could."""
    length = int.from_bytes(part[:8], "little")
    header, body = json.loads(part[8 : 8 + length]), part[8 + length :]
    header["__metadata__"] |= metadata or {}
    header |= tensors or {}
    header = {(rename or {}).get(name, name): value for name, value in header.items()}
    known = header["__metadata__"]
    if resign:
        spans = sorted((v["data_offsets"], name) for name, v in header.items() if name != "__metadata__")
        crcs = [zlib.crc32(name.encode() + body[start:stop]) for (start, stop), name in spans]
        known["segments"] = "".join(f"{crc:08x}" for crc in crcs)
        del known["checksum"]
        covered = "".join(f"{key}\0{known[key]}\0" for key in sorted(known))
        known["checksum"] = f"{zlib.crc32(covered.encode()):08x}"
    encoded = (text or json.dumps)(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + body


@pytest.fixture(scope="module")
def delta():
    old, changes = some_changes(1, 0.02)
    (data,) = data_of(encode_delta(changes, encoding="step"))
    return old, changes, data


def test_rebuilding_a_part_keeps_it_readable(delta):
    old, changes, data = delta
    for part in (rebuilt(data), rebuilt(data, metadata={"note": "unknown metadata is ignored", "zeta": ""})):
        assert same(decode_delta([part], SCHEMA, old.__getitem__), changes)
    assert save(load(data), {"format": "deltabus"}) != data


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"format": "pt"}, "not a deltabus payload"),
        ({"version": "2"}, "version '2'.*upgrade"),
        ({"kind": "skip"}, "cannot be read"),
        ({"schema": "00"}, "cannot be read"),
        ({"part": "-1"}, "cannot be read"),
        ({"part": "01"}, "cannot be read"),
        ({"part": "1"}, "part 1 stands where part 0"),
        ({"kind": "anchor"}, "'anchor' where 'delta'"),
        ({"note": 5}, "cannot be read"),
        ({"note": "\ud800"}, "cannot be read"),
    ],
)
def test_metadata_that_is_wrong_is_refused(delta, metadata, what):
    old, _, data = delta
    with pytest.raises(CorruptPayloadError, match=what):
        decode_delta([rebuilt(data, metadata=metadata, resign="note" not in metadata)], SCHEMA, old.__getitem__)


FIRST = "segment.000000.step"


@pytest.mark.parametrize(
    "name",
    [
        "weight",
        "segment.0.step",
        "segment.0000000.step",
        "segment.-00001.step",
        "segment.00000\u0663.step",  # a digit, but not one of ours
        "segment.000000.Step",
        "segment.000000.",
        "segment.000001.step ",
        "segment.000900.step",
        "segment.000001.step",
    ],
)
def test_names_that_are_no_segment_or_out_of_order_are_refused(delta, name):
    old, _, data = delta
    with pytest.raises(CorruptPayloadError):
        decode_delta([rebuilt(data, rename={FIRST: name})], SCHEMA, old.__getitem__)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]},
        {"dtype": "U8", "shape": [10], "data_offsets": [0, 9]},
        {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "U8", "shape": [-1], "data_offsets": [1, 0]},
        {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1 << 70], "data_offsets": [0, 1 << 70]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "more": 1},
        {"dtype": "U8", "shape": [1]},
        [],
    ],
)
def test_tensors_that_are_described_wrong_are_refused(delta, tensor):
    _, _, data = delta
    with pytest.raises(CorruptPayloadError):
        open_part(rebuilt(data, tensors={FIRST: tensor}, resign=False))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"__metadata__": null}',
        '{"__metadata__": {}}',
        '{"__metadata__": {"format": "deltabus"}}',
        '{"__metadata__": {"format": "deltabus", "version": "1", "kind": "delta"}}',
        '{"__metadata__": {"format": "deltabus", "format": "deltabus", "version": "1"}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
def test_headers_that_are_no_header_are_refused(text):
    header = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(CorruptPayloadError):
        open_part(len(header).to_bytes(8, "little") + header)


def test_a_missing_checksum_is_refused(delta):
    _, _, data = delta
    known = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    known["segments"] = known["segments"][8:]
    del known["checksum"]
    covered = "".join(f"{key}\0{known[key]}\0" for key in sorted(known))
    known["checksum"] = f"{zlib.crc32(covered.encode()):08x}"
    with pytest.raises(CorruptPayloadError, match="checksums for"):
        open_part(rebuilt(data, metadata=known, resign=False))


def test_a_name_that_occurs_twice_is_refused(delta):
    _, _, data = delta

    def twice(header):
        return json.dumps(header)[:-1] + f', "{FIRST}": {json.dumps(header[FIRST])}}}'

    with pytest.raises(CorruptPayloadError, match="twice"):
        open_part(rebuilt(data, text=twice))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_takes_no_memory(length):
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayloadError, match="claims"):
            open_part(length.to_bytes(8, "little") + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_more_segments_than_a_part_may_hold_are_refused(delta):
    _, _, data = delta
    tensors = {
        f"segment.{i:06d}.step": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(MAX_SEGMENTS + 1)
    }
    with pytest.raises(CorruptPayloadError):
        open_part(rebuilt(data, tensors=tensors))


def test_many_small_segments_are_spread_over_parts():
    schema = Schema.of([TensorSpec(name="w", dtype="U8", shape=(MAX_SEGMENTS + 5,))], segment_elements=1)
    parts = data_of(encode_anchor(schema, lambda index: np.array([index % 251], np.uint8)))
    assert len(parts) == 2
    assert [int(bits[0]) for _, bits in decode_anchor(parts, schema)] == [i % 251 for i in range(MAX_SEGMENTS + 5)]


def test_damage_to_a_segment_is_found_by_verify(delta):
    _, _, data = delta
    damaged = bytearray(data)
    damaged[-1] ^= 1
    with pytest.raises(CorruptPayloadError, match=r"segment .* checksum"):
        open_part(bytes(damaged)).verify()


def test_another_schema_is_a_mismatch(delta):
    old, _, data = delta
    with pytest.raises(SchemaMismatchError, match="belongs to schema"):
        open_part(data, expect_schema=EMPTY.checksum)
    with pytest.raises(SchemaMismatchError, match="belongs to schema"):
        decode_delta([data], EMPTY, old.__getitem__)


def test_parts_out_of_order_twice_or_missing_are_refused():
    bits = state(3)
    parts = data_of(encode_anchor(SCHEMA, bits.__getitem__, part_bytes=1000))
    assert len(parts) > 2
    for wrong in ([parts[1], parts[0]], [parts[0], parts[0]], parts[1:]):
        with pytest.raises(CorruptPayloadError, match="in order"):
            list(decode_anchor(wrong, SCHEMA))
    with pytest.raises(CorruptPayloadError, match=r"holds .* segments"):
        list(decode_anchor(parts[:-1], SCHEMA))
    again = rebuilt(parts[0], metadata={"part": "1"})
    with pytest.raises(CorruptPayloadError, match="ends with segment"):
        list(decode_anchor([parts[0], again], SCHEMA))


def test_a_segment_that_two_parts_of_a_delta_hold_is_refused(delta):
    old, _, data = delta
    with pytest.raises(CorruptPayloadError, match="ends with segment"):
        decode_delta([data, rebuilt(data, metadata={"part": "1"})], SCHEMA, old.__getitem__)


def test_deltas_and_anchors_are_not_mistaken_for_each_other(delta):
    _, _, data = delta
    with pytest.raises(CorruptPayloadError, match="'delta' where 'anchor'"):
        list(decode_anchor([data], SCHEMA))
    with pytest.raises(CorruptPayloadError, match="not one of full"):
        list(decode_anchor([rebuilt(data, metadata={"kind": "anchor"})], SCHEMA))


def test_wrong_use_is_refused_at_once():
    _, changes = some_changes(1)
    with pytest.raises(UsageError, match="'zip' is not one of conditional"):
        encode_delta(changes, encoding="zip")
    with pytest.raises(UsageError, match="part_bytes"):
        encode_delta(changes, part_bytes=0)
    with pytest.raises(UsageError, match="part_bytes"):
        encode_anchor(SCHEMA, state(1).__getitem__, part_bytes=-1)
    with pytest.raises(UsageError, match="schema of 0 segments"):
        encode_delta(Changes(EMPTY, changes.segments))


def test_memoryviews_and_bytearrays_are_read_too(delta):
    old, changes, data = delta
    for buffer in (bytearray(data), memoryview(data)):
        assert same(decode_delta([buffer], SCHEMA, old.__getitem__), changes)


def test_work_ahead_is_bounded_and_in_order(pool):
    begun = []

    def work(item):
        begun.append(item)
        return item

    results = in_order(work, range(100), pool=pool, ahead=5)
    for taken in range(20):
        assert next(results) == taken
        assert max(begun) <= taken + 5
    results.close()
    assert len(begun) <= 25


def test_a_failure_in_the_pool_reaches_the_caller_and_ends_the_work(pool):
    def work(item):
        if item == 3:
            raise KeyError(item)
        return item

    results = in_order(work, range(100), pool=pool, ahead=5)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)
    assert list(results) == []


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from([1, 200, 1000, None]))
def test_round_trip_of_any_changes(seed, density, part_bytes):
    old, changes = some_changes(seed, density)
    parts = data_of(encode_delta(changes, base=old.__getitem__, part_bytes=part_bytes))
    assert same(decode_delta(parts, SCHEMA, old.__getitem__), changes)
