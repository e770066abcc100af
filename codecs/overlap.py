"""Whether elements of strided tensors share memory, decided from their layouts alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["overlapping", "overlaps_itself"]

_Dim = tuple[int, int]
"""A dimension's stride and size."""


def _dims(tensor: Tensor) -> list[_Dim]:
    """Return the dimensions that elements spread over, the widest stride first."""
    return sorted(((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1))[
        ::-1
    ]


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor share memory; layouts that are nested in no order count as doing so.

    >>> import torch
    >>> overlaps_itself(torch.zeros(3, 4).t()), overlaps_itself(torch.zeros(1).expand(4))
    (False, True)
    """
    reach = 0
    for stride, size in reversed(_dims(tensor)):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def overlapping(tensors: Sequence[Tensor], names: Sequence[str] | None = None) -> tuple[int, int] | None:
    """Return the indices of two tensors that share memory, or None; none of them may overlap itself.

    Two tensors with different strides whose memory is interleaved count as sharing it.

    Args:
        tensors: The tensors.
        names: What each is called; those of one name may share memory. None looks at all.

    >>> import torch
    >>> both = torch.zeros(4, 6)
    >>> overlapping([both[:, :3], both[:, 3:]])
    >>> overlapping([both[:, :3], both[:, 2:]])
    (0, 1)
    >>> overlapping([both, both[:, 1:], both[:, :1]], ["whole", "whole", "column"])
    (0, 2)
    """
    extents = []
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            start = tensor.data_ptr()
            reach = sum(stride * (size - 1) for stride, size in _dims(tensor)) + 1
            extents.append((str(tensor.device), start, start + reach * tensor.element_size(), index))
    extents.sort()
    for place, (device, start, stop, index) in enumerate(extents):
        for behind in range(place + 1, len(extents)):
            other_device, other_start, _, other = extents[behind]
            if other_device != device or other_start >= stop:
                break
            if names is not None and names[index] == names[other]:
                continue
            if _meet(tensors[index], tensors[other], other_start - start):
                return min(index, other), max(index, other)
    return None


def _meet(first: Tensor, second: Tensor, distance: int) -> bool:
    """Return whether an element of each lies in the same place; `distance` is from first to second, in bytes."""
    ours, theirs = dict(_dims(first)), dict(_dims(second))
    width = first.element_size()
    if width != second.element_size() or distance % width:
        return True
    if not (ours.keys() <= theirs.keys() or theirs.keys() <= ours.keys()):
        return True
    strides = sorted({*ours, *theirs}, reverse=True)
    # With i and j the indices in each, a common place means sum(stride * (i - j)) == distance.
    bounds = [(stride, 1 - theirs.get(stride, 1), ours.get(stride, 1) - 1) for stride in strides]
    return _solvable(bounds, distance // width)


def _solvable(bounds: Sequence[tuple[int, int, int]], target: int) -> bool:
    """Return whether sum(stride * d) == target for some d within each (stride, low, high)."""
    if not bounds:
        return target == 0
    (stride, low, high), rest = bounds[0], bounds[1:]
    least = sum(stride * low for stride, low, _ in rest)
    most = sum(stride * high for stride, _, high in rest)
    # The rest can only make up a remainder between `least` and `most`, which leaves few candidates.
    first, last = max(low, -((most - target) // stride)), min(high, (target - least) // stride)
    return any(_solvable(rest, target - stride * d) for d in range(first, last + 1))
