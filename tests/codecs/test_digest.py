import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.codecs.changes import changes_between
from deltabus.codecs.digest import digest_delta, digest_of
from deltabus.codecs.schema import Schema, TensorSpec

MASK = (1 << 64) - 1


def plain_term(seed, element, bits):
    """The formula in the module's docstring, in whole numbers."""
    k = (seed + element * 0x9E3779B97F4A7C15) & MASK
    x = k ^ bits
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 + k) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_digest(tensors):
    total = 0
    for (name, dtype, shape), values in tensors:
        text = "\0".join((name, dtype, ",".join(map(str, shape))))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        total += sum(plain_term(seed, i, bits) for i, bits in enumerate(values))
    return total & MASK


WIDTHS = {"F8_E5M2": 8, "BF16": 16, "F32": 32, "F64": 64, "BOOL": 8}


@st.composite
def models(draw):
    tensors = []
    for number in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
        size = int(np.prod(shape, dtype=np.int64))
        values = draw(st.lists(st.integers(0, (1 << WIDTHS[dtype]) - 1), min_size=size, max_size=size))
        tensors.append(((f"t{number}", dtype, shape), values))
    return tensors


def schema_of(tensors, segment_elements):
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for (name, dtype, shape), _ in tensors]
    return Schema.of(specs, segment_elements=segment_elements)


def segments_of(schema, tensors):
    values = [values for _, values in tensors]
    return [
        np.array([v for p in segment.pieces for v in values[p.tensor][p.start : p.stop]], segment.dtype.bits)
        for segment in schema.segments
    ]


@given(models(), st.integers(1, 9))
def test_compiled_equals_plain_however_it_is_cut(tensors, segment_elements):
    schema = schema_of(tensors, segment_elements)
    assert digest_of(schema, segments_of(schema, tensors).__getitem__) == plain_digest(tensors)


@given(models(), st.integers(1, 9), st.data())
def test_digest_of_the_sum_is_the_sum_of_digests(tensors, segment_elements, data):
    changed = [(key, [data.draw(st.sampled_from([value, 0, 1])) for value in values]) for key, values in tensors]
    schema = schema_of(tensors, segment_elements)
    old, new = segments_of(schema, tensors), segments_of(schema, changed)
    delta = digest_delta(changes_between(schema, old.__getitem__, new.__getitem__))
    assert 0 <= delta <= MASK
    assert (digest_of(schema, old.__getitem__) + delta) & MASK == digest_of(schema, new.__getitem__)


def test_pool_gives_the_same():
    tensors = [(("w", "BF16", (1000,)), list(range(1000)))]
    schema = schema_of(tensors, 64)
    read = segments_of(schema, tensors).__getitem__
    with ThreadPoolExecutor(3) as pool:
        assert digest_of(schema, read, pool=pool) == digest_of(schema, read) == plain_digest(tensors)


def test_known_values():
    # Written down once: a digest that changes makes every published topic unreadable.
    assert plain_digest([(("w", "F32", (2,)), [0x3F800000, 0x80000000])]) == 10035428665870027229
    assert digest_of(Schema.of([]), [].__getitem__) == 0


@pytest.mark.parametrize("dtype", ["BF16", "F64"])
def test_trading_places_shows(dtype):
    shape, size = (64,), 64
    values = list(range(1, size + 1))
    base = plain_digest([(("w", dtype, shape), values)])
    digests = {base}
    for i in range(size):
        for j in range(i):
            swapped = list(values)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            digests.add(plain_digest([(("w", dtype, shape), swapped)]))
    assert len(digests) == 1 + size * (size - 1) // 2


def test_patterns_that_differ_like_their_keys_show():
    # Without the second use of the key these two states would have one digest.
    first, second = 12345, 67890
    keys = [(i * 0x9E3779B97F4A7C15) & MASK for i in (0, 1)]
    trade = keys[0] ^ keys[1]
    before = plain_term(0, 0, first) + plain_term(0, 1, second)
    after = plain_term(0, 0, second ^ trade) + plain_term(0, 1, first ^ trade)
    assert before != after
