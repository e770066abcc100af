"""Write the golden files of the payload's format that are not there: once for each version of it and each encoding.

    python tests/codecs/golden/make.py

`v1.json` holds, in plain numbers, the schema, a state and the changes that lead from it; the safetensors files hold the
same changes in each encoding, and the state as an anchor. Another implementation of the format can be tested with them.
"""

import json
from pathlib import Path

import numpy as np

from deltabus.codecs.changes import Changes, SegmentChanges
from deltabus.codecs.container import encode_anchor, encode_delta
from deltabus.codecs.encodings import ENCODINGS
from deltabus.codecs.schema import Schema, TensorSpec

HERE = Path(__file__).parent


def scenario() -> tuple[Schema, list[np.ndarray], Changes]:
    """A state of six dtypes, the first segment trained as bf16 is, the others with patterns that are easily lost."""
    rng = np.random.default_rng(2026)
    schema = Schema.of(
        [
            TensorSpec(name="a.weight", dtype="BF16", shape=(40, 30), aliases=("head.weight",)),
            TensorSpec(name="b.scale", dtype="F32", shape=(12,)),
            TensorSpec(name="c.step", dtype="I64", shape=()),
            TensorSpec(name="d.mask", dtype="BOOL", shape=(9,)),
            TensorSpec(name="e.packed", dtype="F8_E4M3", shape=(16,)),
            TensorSpec(name="f.buffer", dtype="F16", shape=(3, 0)),
            TensorSpec(name="g.double", dtype="F64", shape=(5,)),
        ],
        segment_elements=1000,
    )
    weights = (rng.standard_normal(1200) * 0.02).astype(np.float32).view(np.uint32) >> np.uint32(16)
    old = [weights[:1000].astype(np.uint16), weights[1000:].astype(np.uint16)]
    old.append(np.array([0, 1 << 31, 1, 0x7FC00001, 0x7F800000, 0xFF800000, 5, 6, 7, 8, 9, 0x3F800000], np.uint32))
    old.append(np.array([41], np.uint64))
    old.append(np.array([0, 1, 0, 1, 1, 0, 0, 0, 1], np.uint8))
    old.append(np.arange(16, dtype=np.uint8) * np.uint8(17))
    old.append(np.array([0, 1 << 63, 0x7FF0 << 48, (0x7FF0 << 48) + 1, 0x3FF0 << 48], np.uint64))
    moves = {
        0: {int(at): int(rng.choice([-2, -1, -1, 1, 1, 3])) for at in np.flatnonzero(rng.random(1000) < 0.05)},
        2: {0: 1 << 31, 3: -1, 11: 1},
        3: {0: 1},
        4: {0: 1, 8: -1},
        5: dict.fromkeys(range(16), 128),
        6: {1: (1 << 63) - 1, 2: 2, 4: 0x0010 << 48},
    }
    changes = {}
    for index, moved in moves.items():
        positions = np.array(sorted(moved), np.uint32)
        before = old[index][positions]
        width = 8 * before.dtype.itemsize
        after = [(int(b) + moved[int(at)]) % 2**width for at, b in zip(positions, before, strict=True)]
        changes[index] = SegmentChanges(positions, before, np.array(after, before.dtype))
    return schema, old, Changes(schema, changes)


def main() -> None:
    """Write the files beside this one."""
    schema, old, changes = scenario()
    numbers = {
        "schema": schema.encode().decode(),
        "state": [bits.tolist() for bits in old],
        "changes": [
            {"segment": index, "positions": c.positions.tolist(), "old": c.old.tolist(), "new": c.new.tolist()}
            for index, c in changes.segments.items()
        ],
    }
    parts = {name: encode_delta(changes, base=old.__getitem__, encoding=name) for name in ENCODINGS}
    files = {f"v1-{name}.safetensors": part for name, (part,) in parts.items()}
    (files["v1-anchor.safetensors"],) = encode_anchor(schema, old.__getitem__)
    contents = {name: part.data for name, part in files.items()}
    contents["v1.json"] = json.dumps(numbers, separators=(",", ":")).encode() + b"\n"
    for name, data in contents.items():
        # What was written once stays as it is: readers of every later version are held to it.
        if not (HERE / name).exists():
            (HERE / name).write_bytes(data)


if __name__ == "__main__":
    main()
