import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import decode_anchor, decode_delta, encode_anchor, encode_delta
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.schema import Schema

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("v1-*.safetensors"))


@pytest.fixture(scope="module")
def known():
    numbers = json.loads((GOLDEN / "v1.json").read_text())
    schema = Schema.decode(numbers["schema"].encode())
    kinds = [segment.dtype.bits for segment in schema.segments]
    state = [np.array(bits, kind) for bits, kind in zip(numbers["state"], kinds, strict=True)]
    changes = {
        each["segment"]: SegmentChanges(
            np.array(each["positions"], np.uint32),
            np.array(each["old"], kinds[each["segment"]]),
            np.array(each["new"], kinds[each["segment"]]),
        )
        for each in numbers["changes"]
    }
    return schema, state, Changes(schema, changes)


def test_there_is_a_file_for_each_encoding():
    assert sorted([*(f"v1-{name}.safetensors" for name in ENCODINGS), "v1-anchor.safetensors"]) == FILES


@pytest.mark.parametrize("name", ENCODINGS)
def test_deltas_of_before_are_still_read(known, name):
    schema, state, changes = known
    found = decode_delta([(GOLDEN / f"v1-{name}.safetensors").read_bytes()], schema, state.__getitem__)
    assert list(found.segments) == list(changes.segments)
    for index, expected in changes.segments.items():
        for field in ("positions", "old", "new"):
            here, there = getattr(found.segments[index], field), getattr(expected, field)
            assert here.dtype == there.dtype
            assert here.tolist() == there.tolist()


def test_anchors_of_before_are_still_read(known):
    schema, state, _ = known
    found = dict(decode_anchor([(GOLDEN / "v1-anchor.safetensors").read_bytes()], schema))
    assert {index: bits.tolist() for index, bits in found.items()} == {i: bits.tolist() for i, bits in enumerate(state)}


def test_what_is_written_now_has_the_same_names_and_metadata(known, tmp_path):
    schema, state, changes = known
    path = tmp_path / "now.safetensors"
    for file in FILES:
        name = file.removeprefix("v1-").removesuffix(".safetensors")
        parts = (
            encode_anchor(schema, state.__getitem__)
            if name == "anchor"
            else encode_delta(changes, base=state.__getitem__, encoding=name)
        )
        path.write_bytes(next(iter(parts)).data)
        with safe_open(path, framework="np") as now, safe_open(GOLDEN / file, framework="np") as before:
            assert list(now.keys()) == list(before.keys())
            # Compressed bytes may differ from one zstd to the next, and their checksums with them.
            volatile = {"segments", "checksum"}
            kept = [{k: v for k, v in each.metadata().items() if k not in volatile} for each in (now, before)]
            assert kept[0] == kept[1]


# The first segment of `v1-step.safetensors` by hand, from docs/format.md alone: an independent reader of `step`.
def read_plane(data, at, size):
    method, at = data[at], at + 1
    if method == 0:
        return list(data[at : at + size]), at + size
    if method == 2:
        return [data[at]] * size, at + 1
    assert method == 3, "the golden file's small planes are raw, constant or sparse"
    marks, at = read_plane(data, at, (size + 7) // 8)
    present = [marks[i // 8] >> i % 8 & 1 for i in range(size)]
    values, at = read_plane(data, at, sum(present))
    rest = iter(values)
    return [next(rest) if mark else 0 for mark in present], at


def test_format_md_suffices_to_read_a_step(known):
    schema, state, changes = known
    data = (GOLDEN / "v1-step.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, stop = header["segment.000000.step"]["data_offsets"]
    content = data[8 + length + start : 8 + length + stop]
    assert header["__metadata__"]["segments"][:8] == f"{zlib.crc32(b'segment.000000.step' + content):08x}"
    count, at = int.from_bytes(content[:4], "little"), 4
    parameters, at = read_plane(content, at, (count + 127) // 128)
    size, at = int.from_bytes(content[at : at + 4], "little"), at + 4
    bits = "".join(f"{byte:08b}"[::-1] for byte in content[at : at + size])
    at += size
    width = max((schema.segments[0].size - 1).bit_length(), 1)
    positions, position, place = [], -1, 0
    for number in range(count):
        zeros = 0
        while zeros < 12 and bits[place + zeros] == "0":
            zeros += 1
        low = parameters[number // 128] if zeros < 12 else width
        place += zeros + (zeros < 12)
        value = int(bits[place : place + low][::-1] or "0", 2)
        place += low
        position += 1 + (value + (zeros << low) if zeros < 12 else value)
        positions.append(position)
    signs, at = read_plane(content, at, (count + 7) // 8)
    lower, at = read_plane(content, at, count)
    upper, at = read_plane(content, at, count)
    assert at == len(content)

    def place_of(pattern):
        return pattern ^ 0x7FFF if pattern & 0x8000 else pattern

    new = []
    for number, position in enumerate(positions):
        magnitude = lower[number] + 256 * upper[number] + 1
        step = -magnitude if signs[number // 8] >> number % 8 & 1 else magnitude
        new.append(place_of((place_of(int(state[0][position])) + step) % 65536))
    expected = changes.segments[0]
    assert positions == expected.positions.tolist()
    assert new == expected.new.tolist()
