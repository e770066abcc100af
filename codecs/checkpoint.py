"""Checkpoints on disk, in the way of Hugging Face: safetensors files, and an index where there are several.

A tensor that a model holds under several names is stored once, under the name that transformers gives it: engines read
the head of a tied model from its embedding, and pass a head in the file over. The file's metadata has an entry from
each other name to the stored one, as `safetensors.torch.save_model` writes it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltabus.bus.errors import CorruptPayloadError, SchemaMismatchError, UsageError

from . import dtypes
from .changes import Bits
from .schema import Schema, Segment, TensorSpec

__all__ = ["INDEX_NAME", "SHARD_BYTES", "Earlier", "load_checkpoint", "save_checkpoint"]

INDEX_NAME = "model.safetensors.index.json"
"""The file that says which shard holds which tensor."""

SHARD_BYTES = 5 * 10**9
"""The size from which on a checkpoint is split, in bytes; a larger tensor has a shard of its own."""

_PathLike = str | os.PathLike[str]


def load_checkpoint(source: _PathLike | Iterable[_PathLike]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, tied ones under all their names.

    They are mapped into memory, not read; writing to them does not change the files.

    Args:
        source: A safetensors file, several, or a directory with `model.safetensors.index.json` or with
            safetensors files.

    Raises:
        UsageError: If there is no such file, or no safetensors file in the directory.
        CorruptPayloadError: If a file is truncated or no safetensors file, or the index names what is not there.
        SchemaMismatchError: If a tensor is in two of the files.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for path in _files(source):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                twice = sorted(tensors.keys() & names)
                if twice:
                    text = f"tensor {twice[0]!r} is in {path} and in a file before it; name each file once"
                    raise SchemaMismatchError(text, tensor=twice[0])
                tensors.update((name, file.get_tensor(name)) for name in names)
                aliases.update(file.metadata() or {})
        except FileNotFoundError as error:
            raise UsageError(f"there is no file {path}") from error
        except SafetensorError as error:
            raise CorruptPayloadError(f"{path} is truncated or no safetensors file: {error}") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be opened: {error}") from error
    tied = {alias: tensors[name] for alias, name in aliases.items() if name in tensors and alias not in tensors}
    return tensors | tied


def _files(source: _PathLike | Iterable[_PathLike]) -> list[Path]:
    if not isinstance(source, str | os.PathLike):
        return [Path(path) for path in source]
    path = Path(source)
    if not path.is_dir():
        return [path]
    index = path / INDEX_NAME
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"directory {path} holds no safetensors file")
        return files
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if any(Path(shard).name != shard for shard in shards):
            raise CorruptPayloadError(f"{index} names a file outside of its directory")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPayloadError(f"{index} is no index of a checkpoint: {error!r}") from error
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise CorruptPayloadError(f"{index} names {missing[0]}, which is not there ({len(missing)} missing)")
    return [path / shard for shard in shards]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A checkpoint whose files are never written to again, and may be linked.

    Attributes:
        directory: Where it lies.
        changed: The tensors whose bits differ from it now, by all of their names.
    """

    directory: Path
    changed: Collection[str]


@dataclass(slots=True)
class _Shard:
    """One file to be: its header, and how many bytes of tensors it will hold."""

    header: dict[str, Any] = field(default_factory=lambda: {"__metadata__": {"format": "pt"}})
    nbytes: int = 0

    def add(self, spec: TensorSpec) -> None:
        stop = self.nbytes + _nbytes(spec)
        stored, *others = _names(spec)
        self.header[stored] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (self.nbytes, stop)}
        self.header["__metadata__"].update(dict.fromkeys(others, stored))
        self.nbytes = stop

    def head(self) -> bytes:
        """Return what stands before the tensors: the header's length, and the header, padded to 8 bytes."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def link(self, path: Path, source: Path, changed: Collection[str]) -> bool:
        """Make a path a link to an earlier file that holds the same, if it does; return whether it does."""
        head = self.head()
        if not self.header.keys().isdisjoint(changed):
            return False
        try:
            with source.open("rb") as file:
                same = file.read(len(head)) == head and source.stat().st_size == len(head) + self.nbytes
            if same:
                path.hardlink_to(source)
        except OSError:
            return False  # it is gone, or the file system has no links
        return same


def _names(spec: TensorSpec) -> list[str]:
    """Return all names of a tensor, first the one under which it is stored."""

    def preference(name: str) -> tuple[int, str]:
        parts = name.split(".")
        if "shared" in parts:
            return 0, name
        embeds = any(part == "wte" or ("embed" in part and not part.endswith("_out")) for part in parts)
        return 1 if embeds else 2, name

    return sorted((spec.name, *spec.aliases), key=preference)


def _nbytes(spec: TensorSpec) -> int:
    return spec.size * dtypes.by_name(spec.dtype).size


def save_checkpoint(
    directory: _PathLike,
    schema: Schema,
    read: Callable[[int], Bits],
    *,
    stem: str = "model",
    shard_bytes: int = SHARD_BYTES,
    earlier: Earlier | None = None,
) -> list[Path]:
    """Write a state as a checkpoint, and return its files, the index included.

    Takes the memory of one segment. Files are written under hidden names, made durable, and renamed when all are there,
    the index last.

    Args:
        directory: Where; made if it is not there.
        schema: The state's schema.
        read: Returns the bits of a segment.
        stem: What the names of files begin with.
        shard_bytes: The size from which on the checkpoint is split.
        earlier: A checkpoint with the same names of files. Those of which nothing changed are linked, not written.

    Raises:
        UsageError: If the directory holds a checkpoint already, `shard_bytes` is not positive, or a tensor is called
            `__metadata__`.
        OSError: If it cannot be written; what was begun is removed.
    """
    if shard_bytes < 1:
        raise UsageError(f"a shard of {shard_bytes} bytes holds nothing; the usual size is {SHARD_BYTES}")
    if any(_names(spec)[0] == "__metadata__" for spec in schema.tensors):
        raise UsageError("a safetensors file cannot hold a tensor called `__metadata__`; rename it")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    taken = sorted(
        path.name for path in directory.iterdir() if path.suffix == ".safetensors" or path.name == INDEX_NAME
    )
    if taken:
        raise UsageError(f"{directory} holds a checkpoint already ({taken[0]}); give an empty directory")
    # Tensors lie in the order in which segments bring them, so that each segment is read once. Wide types come first,
    # so that each tensor begins at a multiple of its type's size, as readers that map files expect.
    kinds = sorted(dict.fromkeys(spec.dtype for spec in schema.tensors), key=lambda name: -dtypes.by_name(name).size)
    segments = sorted(schema.segments, key=lambda segment: kinds.index(segment.dtype.name))
    shards, shard_of = _shards(sorted(schema.tensors, key=lambda spec: kinds.index(spec.dtype)), shard_bytes)
    count = len(shards)
    names = (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    index_name = f"{stem}.safetensors.index.json"
    hidden = [directory / f".{name}.{os.getpid()}.part" for name in (*names, index_name)]
    try:
        with contextlib.ExitStack() as stack:
            files: dict[int, BinaryIO] = {}
            for i, (path, shard) in enumerate(zip(hidden, shards, strict=False)):
                if earlier is None or not shard.link(path, earlier.directory / names[i], earlier.changed):
                    files[i] = stack.enter_context(path.open("wb"))
                    files[i].write(shard.head())
            for segment in segments:
                places = [shard_of[schema.tensors[piece.tensor].name] for piece in segment.pieces]
                _write_segment(segment, read, [files.get(place) for place in places])
            if count > 1:
                stored = {_names(spec)[0]: names[shard_of[spec.name]] for spec in schema.tensors}
                index = {"metadata": {"total_size": schema.nbytes}, "weight_map": dict(sorted(stored.items()))}
                files[count] = stack.enter_context(hidden[count].open("wb"))
                files[count].write(json.dumps(index, indent=2).encode())
                names.append(index_name)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for path, name in zip(hidden, names, strict=False):
            path.rename(directory / name)
    finally:
        for path in hidden:
            path.unlink(missing_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return [directory / name for name in names]


def _write_segment(segment: Segment, read: Callable[[int], Bits], files: Sequence[BinaryIO | None]) -> None:
    """Write each piece of a segment into its file; those without one are there already."""
    if not any(files):
        return
    bits = read(segment.index)
    for piece, file in zip(segment.pieces, files, strict=True):
        if file is not None:
            run = np.ascontiguousarray(bits[piece.offset : piece.offset + piece.stop - piece.start])
            file.write(run.view(np.uint8).data)


def _shards(specs: list[TensorSpec], shard_bytes: int) -> tuple[list[_Shard], dict[str, int]]:
    shards, shard_of = [_Shard()], {}
    for spec in specs:
        if shards[-1].nbytes and shards[-1].nbytes + _nbytes(spec) > shard_bytes:
            shards.append(_Shard())
        shards[-1].add(spec)
        shard_of[spec.name] = len(shards) - 1
    return shards, shard_of
