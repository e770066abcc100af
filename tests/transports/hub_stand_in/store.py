"""The content-addressed store: xorbs and shards as files, so that it survives the death of its process."""

from __future__ import annotations

import bisect
import os
import secrets
from pathlib import Path

from .formats import ProtocolError, Term, decode_chunks, parse_shard, scan_xorb

__all__ = ["FullError", "Store"]

_EMPTY = "0" * 64


class FullError(Exception):
    """The store may hold no more bytes."""


class Store:
    """Xorbs and files by their hashes.

    Args:
        root: The directory to keep them in.
        quota: Bytes that all xorbs together may take.
    """

    def __init__(self, root: Path, *, quota: int | None = None) -> None:
        self.xorbs = root / "xorbs"
        self._shards = root / "shards"
        self._tables: dict[str, tuple[list[int], list[int]]] = {}
        self._files: dict[str, list[Term]] = {_EMPTY: []}
        self.quota = quota
        for folder in (self.xorbs, self._shards):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(".*"):
                path.unlink()  # half a file, from a process that was killed
        for path in self._shards.iterdir():
            self._files.update(parse_shard(path.read_bytes()))
        self.stored = sum(path.stat().st_size for path in self.xorbs.iterdir())

    def __contains__(self, file: str) -> bool:
        return file in self._files

    def put_xorb(self, xorb: str, data: bytes) -> bool:
        """Store a xorb, and return whether it is new."""
        path = self.xorbs / xorb
        if path.exists():
            return False
        table = scan_xorb(data)
        if self.quota is not None and self.stored + len(data) > self.quota:
            raise FullError
        _write(path, data)
        self._tables[xorb] = table
        self.stored += len(data)
        return True

    def put_shard(self, data: bytes) -> None:
        """Make the files of a shard known."""
        files = parse_shard(data)
        for terms in files.values():
            for term in terms:
                if not (self.xorbs / term.xorb).exists():
                    raise ProtocolError(f"the shard names xorb {term.xorb}, which is not here")
                content = self.table(term.xorb)[1]
                if term.end >= len(content) or content[term.end] - content[term.start] != term.length:
                    raise ProtocolError("a term is not as long as its chunks")
        _write(self._shards / secrets.token_hex(16), data)
        self._files.update(files)

    def table(self, xorb: str) -> tuple[list[int], list[int]]:
        """Return where each chunk of a xorb begins, in the xorb and in its content."""
        if xorb not in self._tables:
            self._tables[xorb] = scan_xorb((self.xorbs / xorb).read_bytes())
        return self._tables[xorb]

    def size(self, file: str) -> int:
        """Return the bytes of a file."""
        return sum(term.length for term in self._files[file])

    def cover(self, file: str, start: int, end: int) -> tuple[int, list[Term]]:
        """Return the terms, cut to whole chunks, that cover a range, and where in the first of them it begins."""
        skip, found, at = 0, [], 0
        for term in self._files[file]:
            low, high = max(start, at), min(end, at + term.length)
            if low < high:
                content = self.table(term.xorb)[1]
                base = content[term.start] - at
                first = bisect.bisect_right(content, low + base) - 1
                last = bisect.bisect_left(content, high + base)
                if not found:
                    skip = low + base - content[first]
                found.append(Term(term.xorb, first, last, content[last] - content[first]))
            at += term.length
        return skip, found

    def read(self, file: str, start: int, end: int) -> bytes:
        """Return a range of a file."""
        skip, terms = self.cover(file, start, end)
        parts = []
        for term in terms:
            places = self.table(term.xorb)[0]
            with (self.xorbs / term.xorb).open("rb") as stream:
                stream.seek(places[term.start])
                parts.append(decode_chunks(stream.read(places[term.end] - places[term.start])))
        return b"".join(parts)[skip : skip + end - start]


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(data)
    os.replace(temporary, path)  # noqa: PTH105
