import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import CorruptPayloadError, SchemaMismatchError, UsageError
from deltabus.codecs import dtypes
from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import encode_delta
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.schema import Schema, TensorSpec

CONDITIONAL = ENCODINGS["conditional"]
EXPONENTS = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F64": (52, 11), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}
NAMES = [*EXPONENTS, "BOOL", "I8", "I32", "U64"]


def segment_of(name, *sizes):
    tensors = [TensorSpec(name=f"w{i}", dtype=name, shape=(size,)) for i, size in enumerate(sizes)]
    return Schema.of(tensors, segment_elements=1 << 28).segments[0]


def changes_between(old, new):
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return SegmentChanges(positions, old[positions], new[positions])


def same(a, b):
    return all(np.array_equal(getattr(a, field), getattr(b, field)) for field in ("positions", "old", "new"))


def weights(name, size, seed):
    """Numbers as weights are, in the type, and all of them a little larger and smaller."""
    rng = np.random.default_rng(seed)
    dtype = dtypes.by_name(name)
    return rng, (rng.standard_normal(size) * 0.02).astype(np.float32), dtype.bits


class Reader:
    """A reader of `conditional` written from docs/format.md alone, in plain Python."""

    def __init__(self, code, raw):
        self.code, self.bits = code, "".join(f"{byte:08b}"[::-1] for byte in raw)
        self.at, self.next = 0, 8
        self.span, self.offset = 2**64 - 1, int.from_bytes(code[:8].ljust(8, b"\0"), "big")

    def raw(self, count):
        value = int(self.bits[self.at : self.at + count][::-1] or "0", 2)
        self.at += count
        return value

    def adaptive(self, context):
        bound = (self.span >> 16) * context[0]
        rate = 2**17 // (2 * context[1] + 3)
        bit = self.offset < bound
        if bit:
            self.span = bound
            context[0] += ((2**16 - context[0]) * rate) >> 16
        else:
            self.offset -= bound
            self.span -= bound
            context[0] -= (context[0] * rate) >> 16
        context[1] = min(context[1] + 1, 127)
        if self.span < 2**32:
            self.span *= 2**32
            self.offset = self.offset * 2**32 + int.from_bytes(
                self.code[self.next : self.next + 4].ljust(4, b"\0"), "big"
            )
            self.next += 4
        return bit

    def unary(self, contexts):
        value = 0
        while not self.adaptive(contexts[value]):
            value += 1
        return value


def contexts(count):
    return [[2**15, 0] for _ in range(count)]


class Series:
    def __init__(self, k):
        self.contexts, self.total, self.count, self.k = contexts(16), 2**k, 1, k

    def read(self, reader):
        zeros = 0
        while zeros < 16 and not (reader.raw(1) if self.k else reader.adaptive(self.contexts[zeros])):
            zeros += 1
        value = zeros * 2**self.k + reader.raw(self.k) if zeros < 16 else reader.raw(reader.raw(6))
        self.total += min(value, 2**43)
        self.count += 1
        if self.count == 32:
            self.total //= 2
            self.count //= 2
        self.k = max((k for k in range(64) if self.count * 2**k <= self.total), default=0)
        return value


def read_plainly(name, data, base):
    width = 8 * dtypes.by_name(name).size
    mantissa, exponent = EXPONENTS.get(name, (0, 0))
    kept = min(exponent, 8)

    def class_of(bits):
        return bits >> (mantissa + exponent - kept) & (2**kept - 1)

    length = int.from_bytes(data[:4], "little")
    reader = Reader(data[4 : 4 + length], data[4 + length :])
    behind, counts = (contexts(64), contexts(64)), []
    for number in range(2**kept):
        bits = reader.unary(behind[number > 0 and counts[-1] > 0])
        counts.append((1 << bits - 1) + reader.raw(bits - 1) if bits else 0)
    parameters, found = (contexts(64), contexts(64)), []
    members = {number: [at for at, bits in enumerate(base) if class_of(bits) == number] for number in range(2**kept)}
    for number, count in enumerate(counts):
        if count:
            gaps, magnitudes = (Series(reader.unary(each)) for each in parameters)
            rank = -1
            for _ in range(count):
                rank += 1 + gaps.read(reader)
                found.append((members[number][rank], magnitudes.read(reader) + 1))
    signs = data[4 + length + (reader.at + 7) // 8 :]
    assert len(signs) == (len(found) + 7) // 8
    top = 2 ** (width - 1)

    def place(bits):
        return bits ^ (top - 1) if mantissa and bits & top else bits

    result = []
    for i, (at, magnitude) in enumerate(sorted(found)):
        step = -magnitude if signs[i // 8] >> i % 8 & 1 else magnitude
        result.append((at, place((place(base[at]) + step) % 2**width)))
    return result


def listed(changes):
    return list(zip(changes.positions.tolist(), changes.new.tolist(), strict=True))


def some_case(name, size, density, seed, far=4):
    """A state of mostly small numbers, and some of its elements a few steps away, or any."""
    dtype = dtypes.by_name(name)
    rng = np.random.default_rng(seed)
    limit = (1 << 8 * dtype.size) - 1
    base = rng.integers(0, limit, size, dtype=np.uint64, endpoint=True)
    if rng.random() < 0.5:
        base = np.minimum(base, rng.integers(1, limit, dtype=np.uint64))
    base = base.astype(dtype.bits)
    moves = rng.integers(1, far, size).astype(dtype.bits) if far else base[::-1]
    new = np.where(rng.random(size) < density, base + moves if rng.random() < 0.5 else base - moves, base)
    new[rng.integers(size)] ^= dtype.bits.type(1)
    return segment_of(name, size), base, changes_between(base, new)


@given(st.sampled_from(NAMES), st.integers(1, 400), st.floats(0, 1), st.integers(0, 2**32), st.sampled_from([4, 0]))
def test_format_md_suffices_to_read_it(name, size, density, seed, far):
    segment, base, changes = some_case(name, size, density, seed, far)
    if changes.positions.size:
        assert read_plainly(name, CONDITIONAL.encode(segment, changes, base), base.tolist()) == listed(changes)


def test_format_md_suffices_to_read_the_golden_file():
    golden = Path(__file__).parent / "golden"
    numbers = json.loads((golden / "v1.json").read_text())
    schema = Schema.decode(numbers["schema"].encode())
    data = (golden / "v1-conditional.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for each in numbers["changes"]:
        index = each["segment"]
        start, stop = header[f"segment.{index:06d}.conditional"]["data_offsets"]
        content = data[8 + length + start : 8 + length + stop]
        name = schema.segments[index].dtype.name
        found = read_plainly(name, content, numbers["state"][index])
        assert found == list(zip(each["positions"], each["new"], strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0, 0.001, 0.02, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("far", [4, 0])
def test_round_trip_at_every_density(name, density, far):
    segment, base, changes = some_case(name, 50_000, density, 7, far)
    assert same(CONDITIONAL.decode(segment, CONDITIONAL.encode(segment, changes, base), base), changes)


@given(st.integers(0, 2**32), st.integers(1, 63), st.integers(1, 2000))
def test_numbers_of_any_size_are_kept(seed, bits, size):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 1 << 64, size, dtype=np.uint64)
    moves = rng.integers(1, 1 << bits, size, dtype=np.uint64) >> rng.integers(0, bits, size).astype(np.uint64)
    changes = changes_between(base, np.where(rng.random(size) < rng.random(), base + moves, base))
    segment = segment_of("U64", size)
    if changes.positions.size:
        assert same(CONDITIONAL.decode(segment, CONDITIONAL.encode(segment, changes, base), base), changes)


def trained(noise, *scales, size=1 << 18):
    """Two bf16 states of tensors of such scales, as a step of training makes them."""
    rng = np.random.default_rng(5)
    scale = np.repeat(np.array(scales, np.float32), size // len(scales))
    master = rng.standard_normal(scale.size).astype(np.float32) * scale
    moved = master + rng.standard_normal(scale.size).astype(np.float32) * np.float32(noise)
    old, new = ((m.view(np.uint32) + np.uint32(0x8000) >> np.uint32(16)).astype(np.uint16) for m in (master, moved))
    return segment_of("BF16", *[size // len(scales)] * len(scales)), old, changes_between(old, new)


def bound(base, changes):
    """The bits that positions and steps take where only their class is known (Shannon 1948)."""
    bits = 0.0
    classes, changed = base >> 7 & 255, changes.old >> 7 & 255
    steps = changes.new.astype(np.int64) - changes.old.astype(np.int64)
    for number in np.unique(changed):
        counts = [[(changed == number).sum(), (classes == number).sum() - (changed == number).sum()]]
        counts.append(np.unique(steps[changed == number], return_counts=True)[1])
        for each in counts:
            some = np.array([n for n in each if n])
            bits += float((some * np.log2(some.sum() / some)).sum())
    return bits


@pytest.mark.parametrize("noise", [3e-7, 3e-6, 3e-5, 3e-4])
def test_training_steps_come_near_the_bound(noise):
    segment, base, changes = trained(noise, 0.02)
    assert len(CONDITIONAL.encode(segment, changes, base)) * 8 < 1.06 * bound(base, changes) + 500


@pytest.mark.parametrize("noise", [1e-8, 3e-7, 3e-6, 3e-5, 3e-4])
@pytest.mark.parametrize("scales", [(0.02,), (0.02, 0.5), (0.001, 1.0, 0.02, 0.1)])
def test_estimates_come_near(noise, scales):
    segment, base, changes = trained(noise, *scales)
    size = len(CONDITIONAL.encode(segment, changes, base))
    assert 0.9 * size - 30 < CONDITIONAL.estimate(segment, changes, base) < 1.1 * size + 30


@pytest.mark.parametrize("layout", [lambda bits: np.repeat(bits, 2)[::2], lambda bits: bits[::-1].copy()[::-1]])
def test_a_base_may_lie_in_memory_in_any_way(layout):
    segment, base, changes = trained(3e-6, 0.02)
    data = CONDITIONAL.encode(segment, changes, base)
    assert CONDITIONAL.encode(segment, changes, layout(base)) == data
    assert same(CONDITIONAL.decode(segment, data, layout(base)), changes)
    assert CONDITIONAL.estimate(segment, changes, layout(base)) == CONDITIONAL.estimate(segment, changes, base)


FOR_ANY_PROCESSOR = """
import sys
import numpy as np
from deltabus.codecs.changes import SegmentChanges
from deltabus.codecs.dtypes import by_name
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.kernels.words import CAN_DEPOSIT
from deltabus.codecs.schema import Piece, Segment

assert not CAN_DEPOSIT
random = np.random.default_rng(1)
base = (random.standard_normal(9000).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
positions = np.arange(0, 9000, 7, dtype=np.uint32)
changes = SegmentChanges(positions, base[positions], base[positions] ^ np.uint16(1))
segment = Segment(0, by_name("BF16"), 9000, (Piece(0, 0, 9000, 0),))
data = ENCODINGS["conditional"].encode(segment, changes, base)
found = ENCODINGS["conditional"].decode(segment, data, base)
assert found.positions.tolist() == positions.tolist() and found.new.tolist() == changes.new.tolist()
sys.stdout.write(data.hex())
"""


def test_loops_may_be_compiled_for_another_processor(tmp_path):
    """Which is how machines that are not alike share numba's cache."""
    random = np.random.default_rng(1)
    base = (random.standard_normal(9000).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    positions = np.arange(0, 9000, 7, dtype=np.uint32)
    changes = SegmentChanges(positions, base[positions], base[positions] ^ np.uint16(1))
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FOR_ANY_PROCESSOR]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert bytes.fromhex(done.stdout) == CONDITIONAL.encode(segment_of("BF16", 9000), changes, base)


def test_many_small_tensors_cost_no_more_than_one_large():
    _, base, changes = trained(3e-7, 0.02)
    one, many = segment_of("BF16", base.size), segment_of("BF16", *[256] * 1024)
    assert CONDITIONAL.encode(one, changes, base) == CONDITIONAL.encode(many, changes, base)


def test_a_single_change_takes_a_few_bytes():
    segment, base, changes = trained(3e-7, 0.02)
    first = SegmentChanges(*(each[:1] for each in (changes.positions, changes.old, changes.new)))
    assert len(CONDITIONAL.encode(segment, first, base)) <= 24


def test_a_state_is_needed_and_must_be_the_one_that_changes_start_from():
    segment, base, changes = trained(3e-7, 0.02)
    with pytest.raises(UsageError, match="pass `base`"):
        CONDITIONAL.encode(segment, changes)
    with pytest.raises(UsageError, match="pass `base`"):
        CONDITIONAL.estimate(segment, changes)
    after = base.copy()
    after[changes.positions] = changes.new
    with pytest.raises(UsageError, match="as they were before"):
        CONDITIONAL.encode(segment, changes, after)
    with pytest.raises(SchemaMismatchError):
        CONDITIONAL.encode(segment, changes, base[1:])


def test_deltas_without_a_base_use_other_encodings():
    schema = Schema.of([TensorSpec(name="w", dtype="BF16", shape=(1 << 18,))])
    _, base, changes = trained(3e-7, 0.02)
    delta = Changes(schema, {0: changes})
    (part,) = encode_delta(delta)
    assert list(part.encodings) == ["step"]
    (part,) = encode_delta(delta, base=lambda _: base)
    assert list(part.encodings) == ["conditional"]
    with pytest.raises(UsageError, match="'conditional' needs the state before"):
        encode_delta(delta, encoding="conditional")


def test_the_base_is_read_only_where_it_is_needed():
    schema = Schema.of([TensorSpec(name="w", dtype="BF16", shape=(1 << 18,))])
    _, base, changes = trained(3e-7, 0.02)
    read = []
    list(encode_delta(Changes(schema, {0: changes}), base=lambda index: read.append(index) or base, encoding="step"))
    assert read == []


def test_another_state_is_refused_or_gives_changes_of_that_state():
    segment, base, changes = trained(3e-7, 0.02)
    data = CONDITIONAL.encode(segment, changes, base)
    with pytest.raises(CorruptPayloadError, match="no place in the state read"):
        CONDITIONAL.decode(segment, data, np.zeros_like(base))


def test_wrong_lengths_and_padding_are_refused():
    segment, base, changes = trained(3e-7, 0.02)
    data = CONDITIONAL.encode(segment, changes, base)
    length = int.from_bytes(data[:4], "little")
    code, tail = data[4 : 4 + length], data[4 + length :]

    def joined(code, tail):
        return len(code).to_bytes(4, "little") + code + tail

    assert joined(code, tail) == data
    for wrong, what in (
        (joined(code + b"\0", tail), "code behind"),
        (joined(code + b"\1" * 64, tail), "code behind"),
        (joined(code, tail + b"\0"), "belong"),
        (joined(code, tail[:-1]), "belong"),
        (joined(code, b""), "claims"),
        (b"\xff\xff\xff\xff" + data[4:], "truncated"),
    ):
        with pytest.raises(CorruptPayloadError, match=what):
            CONDITIONAL.decode(segment, wrong, base)


@given(st.binary(max_size=60), st.binary(max_size=200), st.integers(1, 300), st.sampled_from(NAMES))
def test_noise_is_refused_or_gives_changes_in_range(code, tail, size, name):
    segment = segment_of(name, size)
    base = np.arange(size).astype(segment.dtype.bits)
    try:
        found = CONDITIONAL.decode(segment, len(code).to_bytes(4, "little") + code + tail, base)
    except CorruptPayloadError:
        return
    assert 0 < found.positions.size <= min(size, 8 * len(tail))
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()
    assert found.positions[-1] < size
    assert (found.old != found.new).all()
