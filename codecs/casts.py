"""In which dtype each tensor is published, and what a user's functions make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from deltabus.bus.errors import SchemaMismatchError, UnsupportedTensorError, UsageError

from .slices import TensorSlice

__all__ = ["Dtypes", "Transform", "dtype_chooser", "matching", "transformed"]

Dtypes = torch.dtype | Mapping[str, torch.dtype | None] | Callable[[str], torch.dtype | None]
"""One dtype for all; or by shell pattern of canonical names, of which the first that matches counts; or a function of
the name. None is a tensor's own."""

Transform = Mapping[str, Callable[[str, Tensor], Tensor | Mapping[str, Tensor]]]
"""By shell pattern of canonical names, of which the first that matches counts: a function that takes a tensor's name
and the tensor, and returns the tensor to publish in its place, or several by their names."""

_Part = Tensor | TensorSlice


def matching(patterns: Sequence[str], name: str) -> str | None:
    """Return the first shell pattern that a name matches, if there is one."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def dtype_chooser(dtype: Dtypes | None) -> Callable[[str], torch.dtype | None]:
    """Return a function that tells in which dtype a tensor of a name is published; None is its own.

    >>> choose = dtype_chooser({"*norm*": None, "*": torch.bfloat16})
    >>> choose("layers.0.norm.weight"), choose("layers.0.mlp.weight")
    (None, torch.bfloat16)

    Raises:
        UsageError: If a dtype is not a floating one; of a function, once it returns one.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        only = _floating(dtype)
        return lambda name: only
    if callable(dtype):
        return lambda name: _floating(dtype(name))
    by_pattern = {pattern: _floating(found) for pattern, found in dtype.items()}
    patterns = tuple(by_pattern)

    def choose(name: str) -> torch.dtype | None:
        pattern = matching(patterns, name)
        return None if pattern is None else by_pattern[pattern]

    return choose


def _floating(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"weights can be published in a floating dtype such as torch.bfloat16, not in {dtype}")
    return dtype


def transformed(parts: Mapping[str, _Part], transform: Transform | None) -> tuple[dict[str, _Part], frozenset[str]]:
    """Return the parts with what functions made of those that match, and the names of what they made.

    Tied tensors stay tied where the function returns a single tensor: it is called once for them.

    Raises:
        UsageError: If a function returns something else than a tensor, or tensors by name.
        SchemaMismatchError: If a name that a function gives is taken.
        UnsupportedTensorError: If a function makes of a slice anything but one tensor of its shape.
    """
    if not transform:
        return dict(parts), frozenset()
    patterns = tuple(transform)
    kept: dict[str, _Part] = {}
    made: dict[str, _Part] = {}
    known: dict[tuple[object, ...], Tensor] = {}
    for name, part in parts.items():
        pattern = matching(patterns, name)
        if pattern is None:
            kept[name] = part
            continue
        tensor = (part.tensor if isinstance(part, TensorSlice) else part).detach()
        key = (pattern, tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in known:
            found: Tensor | Mapping[str, Tensor] = known[key]
        else:
            with torch.no_grad():
                found = transform[pattern](name, tensor)
        if isinstance(found, Tensor):
            known[key] = found
            found = {name: found}
        for new, result in _checked(name, part, found).items():
            if new in made or (new != name and new in parts):
                text = (
                    f"the function for {pattern!r} made {new!r} of {name!r}, and there is another tensor of that name"
                )
                raise SchemaMismatchError(text, tensor=new)
            made[new] = result
    return {**kept, **made}, frozenset(made)


def _checked(name: str, part: _Part, found: Mapping[str, Tensor]) -> Mapping[str, _Part]:
    if not isinstance(found, Mapping) or not all(
        isinstance(new, str) and isinstance(result, Tensor) for new, result in found.items()
    ):
        raise UsageError(f"the transform of {name!r} returned no tensor, nor tensors by name, but {found!r}")
    if not isinstance(part, TensorSlice):
        return found
    shape = part.tensor.shape
    if len(found) != 1 or any(result.shape != shape for result in found.values()):
        text = f"{name!r} is a slice; of slices a transform makes one tensor of the same shape, {tuple(shape)}"
        raise UnsupportedTensorError(text, tensor=name)
    return {new: TensorSlice(result, part.start, part.whole) for new, result in found.items()}
