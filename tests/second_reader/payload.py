"""Payloads of deltas and anchors, read as docs/format.md says.

A state is a map from dtype to the bits of all elements of that dtype, in the schema's order, as unsigned numbers.
"""

import re
import zlib

import zstandard

from .schema import ALL_64, DTYPES, RefusedError, Schema, parse_json, require, whole_number

SEGMENT_NAME = re.compile(r"segment\.(\d{6,7})\.([a-z]+)", re.ASCII)
HEXADECIMAL = re.compile(r"([0-9a-f]{8})*", re.ASCII)


class Bytes:
    """Takes one item after the other from the bytes of a segment."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        require(self.at + count <= len(self.data), "a segment ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def plane(self, count: int, *, sparse: bool = True) -> bytes:
        if count == 0:
            return b""
        kind = self.take(1)[0]
        if kind == 0:
            return self.take(count)
        if kind == 1:
            return self._zstd(self.take(self.number()), count)
        if kind == 2:
            return self.take(1) * count
        require(kind == 3 and sparse, f"a plane of the kind {kind}")
        marked = bits_of(self.plane((count + 7) // 8, sparse=False), count)
        written = iter(self.plane(sum(marked), sparse=False))
        return bytes(next(written) if mark else 0 for mark in marked)

    @staticmethod
    def _zstd(frame: bytes, count: int) -> bytes:
        try:
            header = zstandard.get_frame_parameters(frame)
            require(header.content_size == count, "a zstd frame of another size")
            require(header.window_size <= max(count, 8 << 20) and header.dict_id == 0, "a zstd frame needs too much")
            data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RefusedError(f"no zstd frame: {error}") from error
        require(len(data) == count, "a zstd frame of another size")
        return data

    def planes(self, count: int, width: int) -> list[int]:
        planes = [self.plane(count) for _ in range(width // 8)]
        return [int.from_bytes(column, "little") for column in zip(*planes, strict=True)]

    def positions(self, count: int, size: int) -> list[int]:
        width = max(1, (size - 1).bit_length())
        parameters = self.plane((count + 127) // 128)
        require(all(k < width for k in parameters), "a parameter is too large")
        codes = RawBits(self.take(self.number()))
        positions, last = [], -1
        for index in range(count):
            k, zeros = parameters[index // 128], 0
            while zeros < 12 and not codes.number(1):
                zeros += 1
            last += 1 + (codes.number(width) if zeros == 12 else (zeros << k) + codes.number(k))
            require(last < size, "a position beyond its segment")
            positions.append(last)
        codes.end()
        return positions

    def end(self) -> None:
        require(self.at == len(self.data), "something follows the last item of a segment")


def bits_of(data: bytes, count: int) -> list[int]:
    bits = [(byte >> i) & 1 for byte in data for i in range(8)]
    require(not any(bits[count:]), "padding is not zero")
    return bits[:count]


class RawBits:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, bits: int) -> int:
        end = self.at + bits
        require(end <= 8 * len(self.data), "bits end early")
        value = int.from_bytes(self.data[self.at // 8 : (end + 7) // 8], "little") >> (self.at % 8)
        self.at = end
        return value & ((1 << bits) - 1)

    def end(self) -> None:
        require(8 * len(self.data) - self.at < 8, "bytes were not used")
        require(self.number(8 * len(self.data) - self.at) == 0, "padding is not zero")


class Contexts:
    def __init__(self, count: int) -> None:
        self.chances, self.uses = [1 << 15] * count, [0] * count


class Code:
    """The arithmetic code of `conditional`."""

    def __init__(self, data: bytes) -> None:
        require(data[-1:] != b"\0", "a code ends with a zero byte")
        self.data, self.used, self.span = data, 0, ALL_64
        self.offset = self._next(8)

    def _next(self, count: int) -> int:
        self.used += count
        return int.from_bytes(self.data[self.used - count : self.used].ljust(count, b"\0"), "big")

    def bit(self, contexts: Contexts, i: int) -> int:
        chance, n = contexts.chances[i], contexts.uses[i]
        bound, rate = (self.span >> 16) * chance, (1 << 17) // (2 * n + 3)
        bit = self.offset < bound
        if bit:
            self.span, chance = bound, chance + (((1 << 16) - chance) * rate >> 16)
        else:
            self.span, self.offset, chance = self.span - bound, self.offset - bound, chance - (chance * rate >> 16)
        contexts.chances[i], contexts.uses[i] = chance, min(n + 1, 127)
        if self.span < 1 << 32:
            self.span, self.offset = self.span << 32, (self.offset << 32) + self._next(4)
        return bit

    def unary(self, contexts: Contexts) -> int:
        for i in range(64):
            if self.bit(contexts, i):
                return i
        raise RefusedError("a unary number is too large")

    def end(self) -> None:
        require(len(self.data) <= self.used, "a code is longer than what was read of it")


class Series:
    """Adaptive numbers."""

    def __init__(self, code: Code, raw: RawBits, parameter: int) -> None:
        require(parameter <= 43, "a first parameter is too large")
        self.code, self.raw, self.k, self.total, self.count = code, raw, parameter, 1 << parameter, 1
        self.contexts = Contexts(16)

    def number(self) -> int:
        q = 0
        while q < 16 and not (self.code.bit(self.contexts, q) if self.k == 0 else self.raw.number(1)):
            q += 1
        number = (q << self.k) + self.raw.number(self.k) if q < 16 else self.raw.number(self.raw.number(6))
        self.total, self.count = self.total + min(number, 1 << 43), self.count + 1
        if self.count == 32:
            self.total, self.count = self.total // 2, self.count // 2
        self.k = max((self.total // self.count).bit_length() - 1, 0)
        return number


def place_of(bits: int, dtype: str) -> int:
    """The place of bits in the order of their dtype, and the bits at a place."""
    width, exponent, _ = DTYPES[dtype]
    top = 1 << (width - 1)
    return bits ^ (top - 1) if exponent and bits & top else bits


def stepped(old: int, step: int, dtype: str) -> int:
    return place_of((place_of(old, dtype) + step) % (1 << DTYPES[dtype][0]), dtype)


def rotated_back(bits: list[int], dtype: str) -> list[int]:
    width, exponent, _ = DTYPES[dtype]
    return [(b >> 1) | ((b & 1) << (width - 1)) for b in bits] if exponent else bits


def read_conditional(data: Bytes, old: list[int], dtype: str) -> dict[int, int]:
    width, exponent, below = DTYPES[dtype]
    classes: list[list[int]] = [[] for _ in range(1 << min(exponent, 8))]
    for position, bits in enumerate(old):
        classes[(bits >> below) % len(classes) if exponent else 0].append(position)
    code = Code(data.take(data.number()))
    raw = RawBits(data.data[data.at :])  # signs lie behind them; how many bytes shows once the changes are counted
    behind, counts = (Contexts(64), Contexts(64)), [0]
    for _ in classes:
        bits = code.unary(behind[counts[-1] > 0])
        counts.append((1 << (bits - 1)) + raw.number(bits - 1) if bits else 0)
    count = sum(counts)
    require(1 <= count <= len(old), "a count of changes that cannot be")
    signs = (count + 7) // 8
    require(len(raw.data) >= signs, "a segment ends early")
    raw.data = raw.data[:-signs]
    magnitudes, of_gaps, of_magnitudes = {}, Contexts(64), Contexts(64)
    for members, changes in zip(classes, counts[1:], strict=True):
        if changes:
            first = code.unary(of_gaps)
            gaps, sizes = Series(code, raw, first), Series(code, raw, code.unary(of_magnitudes))
        last = -1
        for _ in range(changes):
            last += 1 + gaps.number()
            require(last < len(members), "a change finds no place")
            magnitudes[members[last]] = sizes.number() + 1
            require(magnitudes[members[last]] <= 1 << (width - 1), "a step is too large")
    code.end()
    raw.end()
    data.take(len(raw.data))
    negative = bits_of(data.take(signs), count)
    return apply_magnitudes(sorted(magnitudes.items()), negative, old, dtype)


def apply_magnitudes(magnitudes, negative: list[int], old: list[int], dtype: str) -> dict[int, int]:
    steps = zip(magnitudes, negative, strict=True)
    return {position: stepped(old[position], -m if sign else m, dtype) for (position, m), sign in steps}


def read_changes(data: Bytes, encoding: str, old: list[int], dtype: str) -> dict[int, int]:
    """New bits by position in the segment."""
    width = DTYPES[dtype][0]
    if encoding == "conditional":
        return read_conditional(data, old, dtype)
    if encoding == "dense":
        numbers = enumerate(data.planes(len(old), width))
        changes = {i: stepped(old[i], -(z + 1) // 2 if z & 1 else z // 2, dtype) for i, z in numbers if z}
        require(changes, "a segment without changes")
        return changes
    require(encoding in ("overwrite", "step"), f"the encoding {encoding}")
    count = data.number()
    require(1 <= count <= len(old), "a count of changes that cannot be")
    positions = data.positions(count, len(old))
    if encoding == "overwrite":
        return dict(zip(positions, rotated_back(data.planes(count, width), dtype), strict=True))
    negative = bits_of(data.plane((count + 7) // 8), count)
    magnitudes = [(p, m + 1) for p, m in zip(positions, data.planes(count, width), strict=True)]
    return apply_magnitudes(magnitudes, negative, old, dtype)


def read_part(data: bytes, kind: str, schema: Schema, part: int) -> list[tuple[int, str, bytes]]:
    """The segments of a part: number, encoding, bytes."""
    length = int.from_bytes(data[:8], "little")
    require(len(data) >= 8 and length <= min(2 << 20, len(data) - 8), "no header")
    header = parse_json(data[8 : 8 + length])
    metadata = header.pop("__metadata__", None)
    require(isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()), "no metadata")
    said = {key: metadata.get(key) for key in ("format", "version", "kind", "schema", "part")}
    wanted = {"format": "deltabus", "version": "1", "kind": kind, "schema": schema.name, "part": str(part)}
    require(said == wanted, f"metadata {said} where {wanted} is due")
    checksum = metadata.pop("checksum", None)
    texts = "".join(f"{key}\0{value}\0" for key, value in sorted(metadata.items()))
    require(checksum == f"{zlib.crc32(texts.encode()):08x}", "the header's checksum is wrong")
    require(len(header) <= 8192, "too many segments in a part")
    checksums = metadata.get("segments", "")
    require(HEXADECIMAL.fullmatch(checksums) and len(checksums) == 8 * len(header), "no checksums of segments")
    found, end = [], 0
    ranges = [entry.get("data_offsets") if isinstance(entry, dict) else None for entry in header.values()]
    require(all(isinstance(r, list) and len(r) == 2 and all(map(whole_number, r)) for r in ranges), "no ranges")
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        match = SEGMENT_NAME.fullmatch(name)
        require(match and match[1] == f"{int(match[1]):06d}", f"a segment is called {name!r}")
        offsets = entry["data_offsets"]
        require(offsets[0] == end < offsets[1], "segments do not follow each other")
        end = offsets[1]
        size = end - offsets[0]
        require(entry == {"dtype": "U8", "shape": [size], "data_offsets": offsets}, "an odd segment")
        require(8 + length + end <= len(data), "a segment ends behind its file")
        bits = data[8 + length + offsets[0] : 8 + length + end]
        due = checksums[8 * len(found) : 8 * len(found) + 8]
        require(f"{zlib.crc32(name.encode() + bits):08x}" == due, f"{name} is damaged")
        found.append((int(match[1]), match[2], bits))
    require(8 + length + end == len(data), "something follows the last segment")
    return found


def read_payload(parts, kind: str, schema: Schema, old: dict[str, list[int]] | None):
    """The state that a payload leads to, and by how much it changes the digest (all of it for an anchor)."""
    found = [segment for part, data in enumerate(parts) for segment in read_part(data, kind, schema, part)]
    numbers = [number for number, _, _ in found]
    require(numbers == sorted(set(numbers)), "segments do not rise")
    require(not numbers or numbers[-1] < len(schema.segments), "a segment that the schema does not have")
    require(kind == "delta" or len(numbers) == len(schema.segments), "an anchor without all segments")
    state = {dtype: list(old[dtype]) if kind == "delta" else [] for dtype in schema.dtypes}
    change = 0
    for number, encoding, data in found:
        dtype, begin, end = schema.segments[number]
        reader = Bytes(data)
        if kind == "anchor":
            require(encoding == "full", f"the encoding {encoding} in an anchor")
            state[dtype] += rotated_back(reader.planes(end - begin, DTYPES[dtype][0]), dtype)
        else:
            line = state[dtype]
            for position, bits in read_changes(reader, encoding, line[begin:end], dtype).items():
                before = line[begin + position]
                require(bits != before, "an element that a delta lists does not change")
                change += schema.term(dtype, begin + position, bits) - schema.term(dtype, begin + position, before)
                line[begin + position] = bits
        reader.end()
    return state, (change if kind == "delta" else schema.digest(state)) & ALL_64
