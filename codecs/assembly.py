"""Assembly: whole tensors from what several writers hold of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deltabus.bus.errors import SchemaMismatchError

from . import dtypes
from .apply import Target, load_all
from .held import Held
from .schema import Schema

__all__ = ["assemble", "whole_tensors"]


def whole_tensors(schemas: Sequence[Schema]) -> dict[str, Tensor]:
    """Return tensors for what parts make together, by name, all zero; aliases are the same tensors.

    Args:
        schemas: Of each writer.

    Raises:
        SchemaMismatchError: If parts of one tensor differ in its shape or dtype, or leave some of its elements out.
    """
    tensors: dict[str, Tensor] = {}
    for schema in schemas:
        for spec in schema.tensors:
            dtype = dtypes.by_name(spec.dtype).torch
            whole = tensors.setdefault(spec.name, torch.zeros(spec.whole, dtype=dtype))
            if (tuple(whole.shape), whole.dtype) != (spec.whole, dtype):
                raise SchemaMismatchError(
                    f"one writer says that {spec.name!r} is {tuple(whole.shape)} of {whole.dtype}, another "
                    f"{spec.whole} of {dtype}; the group must be restarted with one model",
                    tensor=spec.name,
                )
    _check_whole(schemas, tensors)
    for schema in schemas:
        for spec in schema.tensors:
            tensors.update((alias, tensors[spec.name]) for alias in spec.aliases)
    return tensors


def assemble(parts: Sequence[tuple[Schema, Callable[[int], Held]]]) -> dict[str, Tensor]:
    """Return the tensors that parts make together, by name; aliases are the same tensors.

    Args:
        parts: Of each writer its schema, and the bits of its segments; of elements that several have, the last counts.

    Raises:
        SchemaMismatchError: If parts of one tensor differ in its shape or dtype, or leave some of its elements out.
    """
    schemas = [schema for schema, _ in parts]
    tensors = whole_tensors(schemas)
    targets = Target.bind_all(tensors, schemas)
    load_all([(target, read) for target, (_, read) in zip(targets, parts, strict=True)])
    return tensors


def _check_whole(schemas: Sequence[Schema], tensors: dict[str, Tensor]) -> None:
    """Check that every element of every tensor is in some part."""
    boxes: dict[str, list[tuple[slice, ...]]] = {name: [] for name in tensors}
    for schema in schemas:
        for spec in schema.tensors:
            ends = zip(spec.start, spec.shape, strict=True)
            boxes[spec.name].append(tuple(slice(start, start + size) for start, size in ends))
    for name, found in boxes.items():
        whole = tensors[name]
        if any(all(b.stop - b.start == n for b, n in zip(box, whole.shape, strict=True)) for box in found):
            continue
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for box in found:
            covered[box] = True
        missing = int(whole.numel() - covered.sum())
        if missing:
            raise SchemaMismatchError(
                f"no writer has {missing} of the {whole.numel()} elements of {name!r}; a rank is missing in the group, "
                "or publishes too little",
                tensor=name,
            )
