"""Schemas and digests, read as docs/protocol.md says in sections 3 and 4."""

import hashlib
import json
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

# dtype: width in bits, bits of the exponent (0: not a float), bits below those that make the class
DTYPES = {
    "BF16": (16, 8, 7),
    "F16": (16, 5, 10),
    "F32": (32, 8, 23),
    "F64": (64, 8, 55),  # of its 11 bits of exponent the upper 8
    "F8_E4M3": (8, 4, 3),
    "F8_E5M2": (8, 5, 2),
    **dict.fromkeys(("F8_E8M0", "BOOL", "U8", "I8"), (8, 0, 0)),
    **dict.fromkeys(("U16", "I16"), (16, 0, 0)),
    **dict.fromkeys(("U32", "I32"), (32, 0, 0)),
    **dict.fromkeys(("U64", "I64", "C64"), (64, 0, 0)),
}
ALL_64 = (1 << 64) - 1


class RefusedError(ValueError):
    """What was read breaks a rule of the two pages."""


def require(holds, why):
    if not holds:
        raise RefusedError(why)


def parse_json(data: bytes) -> dict:
    def once(pairs):
        require(len({name for name, _ in pairs}) == len(pairs), "a name occurs twice in an object")
        return dict(pairs)

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # an escape may stand for half a pair of surrogates
    except (UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise RefusedError(f"no JSON: {error}") from error
    require(isinstance(value, dict), "no JSON object")
    return value


def whole_number(value, least=0, most=(1 << 63) - 1):
    return type(value) is int and least <= value <= most


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    start: tuple[int, ...] | None  # of a slice
    whole: tuple[int, ...] | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def seed(self) -> int:
        parts = [self.name, self.dtype, *(",".join(map(str, numbers)) for numbers in self.boxes())]
        return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "little")

    def places(self) -> list[int]:
        """The place of each element in the whole tensor, row-major."""
        whole, start = (self.shape, (0,) * len(self.shape)) if self.start is None else (self.whole, self.start)
        places = [0]
        for begin, length, of in zip(start, self.shape, whole, strict=True):
            places = [place * of + begin + i for place in places for i in range(length)]
        return places

    def boxes(self):
        return (self.shape,) if self.start is None else (self.shape, self.start, self.whole)


class Schema:
    def __init__(self, data: bytes) -> None:
        self.name = hashlib.sha256(data).hexdigest()
        value = parse_json(data)
        require(whole_number(value.get("format", 1), 1, 1), "an unknown format of schemas")
        size = value.get("segment_elements", 1 << 22)
        require(whole_number(size, 1, 1 << 28), "segment_elements is no count")
        require(isinstance(value.get("tensors"), list), "a schema without tensors")
        self.tensors = [self._tensor(entry) for entry in value["tensors"]]
        names = [tensor.name for tensor in self.tensors]
        require(names == sorted(names), "tensors are not sorted")
        every = names + [alias for tensor in self.tensors for alias in tensor.aliases]
        require(len(set(every)) == len(every), "a name occurs twice")
        self.dtypes = list(dict.fromkeys(tensor.dtype for tensor in self.tensors))
        self.lines = {dtype: [t for t in self.tensors if t.dtype == dtype and t.size] for dtype in self.dtypes}
        self.begins = {dtype: [0, *accumulate(t.size for t in line)] for dtype, line in self.lines.items()}
        sizes = [begins[-1] for begins in self.begins.values()]
        require(sum(sizes) < 1 << 63 and sum(-(-n // size) for n in sizes) <= 1 << 20, "too many segments")
        self.segments = [
            (dtype, begin, min(begin + size, self.begins[dtype][-1]))
            for dtype in self.dtypes
            for begin in range(0, self.begins[dtype][-1], size)
        ]

    @staticmethod
    def _tensor(entry) -> Tensor:
        require(isinstance(entry, dict), "a tensor is no object")
        box = entry.get("slice")
        require("slice" not in entry or isinstance(box, dict), "no slice")
        lists = [entry.get("shape"), *([] if box is None else [box.get("start"), box.get("whole")])]
        require(all(isinstance(n, list) and len(n) <= 64 and all(map(whole_number, n)) for n in lists), "no shape")
        aliases = entry.get("aliases", [])
        require(isinstance(aliases, list), "no aliases")
        require(all(isinstance(name, str) for name in [entry.get("name"), *aliases]), "no name")
        require(isinstance(entry.get("dtype"), str) and entry["dtype"] in DTYPES, "no dtype")
        shape, start, whole = (tuple(n) for n in (lists if len(lists) == 3 else (lists[0], (), ())))
        if box is not None:
            require(len(start) == len(whole) == len(shape), "a slice of other dimensions")
            require(math.prod(whole) < 1 << 63, "too many elements")
            require(all(s + n <= w for s, n, w in zip(start, shape, whole, strict=True)), "a slice beyond its tensor")
            return Tensor(entry["name"], entry["dtype"], shape, tuple(aliases), start, whole)
        return Tensor(entry["name"], entry["dtype"], shape, tuple(aliases), None, None)

    def term(self, dtype: str, place: int, bits: int) -> int:
        """What the element at a place of a dtype's line adds to the digest."""
        which = bisect_right(self.begins[dtype], place) - 1
        return term(self.lines[dtype][which].seed(), place - self.begins[dtype][which], bits)

    def digest(self, state: dict[str, list[int]]) -> int:
        terms = 0
        for dtype, line in self.lines.items():
            for tensor, begin in zip(line, self.begins[dtype], strict=False):
                seed = tensor.seed()
                terms += sum(term(seed, i, b) for i, b in enumerate(state[dtype][begin : begin + tensor.size]))
        return terms & ALL_64


def term(seed: int, position: int, bits: int) -> int:
    k = (seed + position * 0x9E3779B97F4A7C15) & ALL_64
    x = k ^ bits
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 + k) & ALL_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ALL_64
    return x ^ (x >> 31)
