"""Where shadows live: in memory, on devices, or in a file of a directory, mapped into memory."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deltabus.bus.errors import StorageFullError, UsageError
from deltabus.codecs.changes import Bits
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Allocate, in_memory, on_devices

__all__ = ["allocator"]

_RAM = "ram"
_BESIDE = "device"
_ALIGNMENT = 64
"""Segments begin at multiples of this many bytes, so that they are compared by whole words."""

_CHUNK = 8 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_RESERVING = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


def allocator(shadow: str | os.PathLike[str] | torch.device | None, *, of_model: bool = True) -> Allocate:
    """Return what makes the memory of a shadow.

    A directory gets one file for each shadow. It has no name, so that it vanishes with the last use of its arrays, also
    when the process is killed. All its space is taken beforehand: a disk that is full later would end the process with
    a signal in the middle of a write.

    Args:
        shadow: None or `"ram"` for memory; a `torch.device` for the memory of that; `"device"` for that of the devices
            where the state lies; otherwise a directory on a local disk, made if it is not there.
        of_model: Whether there is a state that a shadow can lie beside.

    Raises:
        UsageError: If the directory cannot be made, or not be written to, the device is not there, or there is no state
            to lie beside. What is returned raises `StorageFullError` if there is no room for a shadow, before anything
            was changed.
    """
    if shadow is None or shadow == _RAM:
        return in_memory
    if isinstance(shadow, torch.device):
        return _on(shadow)
    if shadow == _BESIDE:
        if not of_model:
            raise UsageError(
                f"shadow={_BESIDE!r} is for publishers; a subscriber has no weights to lie beside yet: name the "
                "device, such as torch.device('cuda')"
            )
        return on_devices
    directory = Path(shadow)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"shadow={os.fspath(shadow)!r} is no directory that can be written to ({error.strerror}); name another, or "
            "leave `shadow` out to use memory"
        ) from error

    def mapped(schema: Schema, devices: Sequence[torch.device] = ()) -> list[Bits]:
        return _mapped(directory, schema)

    return mapped


def _on(device: torch.device) -> Allocate:
    try:
        probe = torch.zeros(1, device=device)
        probe.item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # of which it is depends on how torch is built
        raise UsageError(f"shadow=torch.device({str(device)!r}) cannot be used here: {error}") from error
    # A device without a number is the calling thread's current one, which is another in other threads.
    return lambda schema, devices: on_devices(schema, [probe.device] * len(schema.segments))


def _mapped(directory: Path, schema: Schema) -> list[Bits]:
    offsets, size = [], 0
    for segment in schema.segments:
        offsets.append(size)
        size += -(-segment.size * segment.dtype.size // _ALIGNMENT) * _ALIGNMENT
    if not size:
        return in_memory(schema)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            _reserve(file.fileno(), size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise StorageFullError(
            f"no room for a shadow of {size} bytes in {directory} ({error.strerror}); nothing was captured: free "
            "space, name another directory as `shadow`, or leave it out to use memory"
        ) from error
    return [
        np.frombuffer(memory, segment.dtype.bits, segment.size, offset)
        for segment, offset in zip(schema.segments, offsets, strict=True)
    ]


def _reserve(file: int, size: int) -> None:
    """Give a file so many zero bytes, and let them lie on the disk."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in _NO_RESERVING:
                raise
        else:
            return
    zeros = bytes(_CHUNK)
    for start in range(0, size, _CHUNK):
        written, wanted = 0, min(_CHUNK, size - start)
        while written < wanted:
            written += os.pwrite(file, zeros[written:wanted], start + written)
