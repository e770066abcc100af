"""Apply: writing changes and whole states into the tensors of a live model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError

from . import dtypes
from .ahead import in_order
from .changes import Bits, Changes, SegmentChanges, check_same_schema, diverged, parts_of, validate
from .digest import digest_delta as delta_of
from .digest import digest_of
from .dtypes import DType
from .overlap import overlapping, overlaps_itself
from .schema import Piece, Schema, Segment, TensorSpec
from .state import Source, State, as_integers, bits_of, check_supported, memory_key, named_tensors, settle

__all__ = ["Staged", "Target"]

_AHEAD = 8


class Target:
    """The tensors of a model that a topic's states are written into, in place.

    It holds the tensors themselves: bind again when a module got other ones. One thread at a time uses it, and nothing
    else writes to the tensors meanwhile. Work on an accelerator runs in the current stream of the calling thread.

    Attributes:
        schema: The topic's schema.
    """

    def __init__(self, schema: Schema, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Use `Target.bind`, which checks what this takes for granted."""
        self.schema = schema
        self._tensors = tensors
        self._state = State(schema, tuple(copies[0] for copies in tensors))
        self._torn = ""

    @classmethod
    def bind(cls, source: Source, schema: Schema) -> Target:
        """Return the target for the tensors of a module, or of a mapping from name to tensor.

        Each tensor of the schema must be there under its name or an alias, without the parts that wrappers add, with
        its shape and dtype. Where several of these names are tensors of their own, all of them are written. Other
        tensors are left alone.

        Raises:
            SchemaMismatchError: If tensors are missing or have another shape or dtype, share memory with each other, or
                have elements that share memory.
            UnsupportedTensorError: If a tensor is of a kind that cannot be written, or a value is no tensor.
            UsageError: If the source is neither a module nor a mapping of names.
        """
        found = named_tensors(source)
        bound: list[list[Tensor]] = []
        missing, misfits = [], []
        for spec in schema.tensors:
            copies: dict[tuple[object, ...], Tensor] = {}
            for name in (spec.name, *spec.aliases):
                if name in found:
                    check_supported(name, found[name])
                    misfits += _misfit(name, found[name], spec)
                    copies.setdefault(memory_key(found[name]), found[name])
            if not copies:
                missing.append(f"{spec.name!r}")
            bound.append(list(copies.values()))
        problems = [
            f"{len(items)} {what}: {', '.join(items[:3])}{', ...' if len(items) > 3 else ''}"
            for what, items in (("missing", missing), ("of another shape, dtype or layout", misfits))
            if items
        ]
        if problems:
            total = len(schema.tensors)
            raise SchemaMismatchError(f"the model does not fit the topic's {total} tensors: {'; '.join(problems)}")
        flat = [(spec.name, tensor) for spec, copies in zip(schema.tensors, bound, strict=True) for tensor in copies]
        shared = overlapping([tensor for _, tensor in flat])
        if shared is not None:
            first, second = (flat[i][0] for i in shared)
            raise SchemaMismatchError(
                f"{first!r} and {second!r} share memory in the model, but are two tensors in the topic; untie them",
                tensor=first,
            )
        return cls(schema, bound)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are written to, in the schema's order; by their identity the model can be recognised."""
        return tuple(tensor for copies in self._tensors for tensor in copies)

    def read(self, index: int) -> Bits:
        """Return the bits of a segment that the model holds; maybe its own memory, not to be written to."""
        return self._state.read(index)

    def digest(self, pool: Executor | None = None) -> int:
        """Return the digest of the bits that the model holds.

        Raises:
            DivergedError: If a tensor that the model holds several times is not the same everywhere.
        """
        settle(self.tensors)
        for segment in self.schema.segments:
            for piece in segment.pieces:
                self._check_copies(piece, segment.dtype)
        return digest_of(self.schema, self.read, pool=pool)

    def stage(self, changes: Changes, *, digest_delta: int | None = None) -> Staged:
        """Move changes to where the tensors are, so that what is left to do is the short write.

        Args:
            changes: What to write.
            digest_delta: What the changes must add to the digest, modulo 2^64, if that is known.

        Raises:
            SchemaMismatchError: If they are of another schema.
            CorruptPayloadError: If they are not well formed, or add something else to the digest.
        """
        check_same_schema(self.schema, changes.schema)
        validate(changes)
        if digest_delta is not None and delta_of(changes) != digest_delta % (1 << 64):
            raise CorruptPayloadError(
                "the changes do not lead to the digest that their message names; fetch them again"
            )
        patches: list[_Patch] = []
        for index, change in changes.segments.items():
            segment = self.schema.segments[index]
            for piece, part in parts_of(segment, change):
                for tensor in self._tensors[piece.tensor]:
                    patches.append(_patch(tensor, segment, piece, change, part))
        return Staged(self, patches)

    def apply(self, changes: Changes, *, digest_delta: int | None = None) -> None:
        """Write changes, all or nothing: `stage`, then `Staged.write`.

        Raises:
            SchemaMismatchError: If they are of another schema.
            CorruptPayloadError: If they are not well formed, or add something else to the digest than `digest_delta`.
            DivergedError: If a touched element does not hold the bits that its change starts from.
        """
        self.stage(changes, digest_delta=digest_delta).write()

    def load(self, read: Callable[[int], Bits], *, pool: Executor | None = None) -> None:
        """Write a whole state, given by a function from segment index to that segment's bits.

        The old bits are not kept, since that would take a copy of the model. So when this fails or is interrupted after
        the first segment was written, the model holds a mixture; the error that comes out is a `DivergedError` then,
        and the target refuses changes until a `load` succeeds. Read from memory that is known to be whole, such as a
        shadow.

        Raises:
            CorruptPayloadError: If the first segment that arrives has a wrong size or type; nothing was changed.
            DivergedError: If it failed midway; the reason is chained.
            BaseException: What `read` raised for the first segment; nothing was changed.
        """

        def loaded(segment: Segment) -> None:
            bits = read(segment.index)
            if bits.dtype != segment.dtype.bits or bits.shape != (segment.size,):
                expected = f"{segment.size} elements of {segment.dtype.bits}"
                raise CorruptPayloadError(f"segment {segment.index} has {expected}, not {bits.shape} of {bits.dtype}")
            values = _values(bits)
            self._torn = self._torn or "loading a state stopped midway"
            for piece in segment.pieces:
                for tensor in self._tensors[piece.tensor]:
                    _overwrite(tensor, piece, values[piece.offset : piece.offset + piece.stop - piece.start])

        before, self._torn = self._torn, ""
        try:
            for _ in in_order(loaded, self.schema.segments, pool=pool, ahead=_AHEAD):
                pass
        except BaseException as error:
            if not self._torn:
                self._torn = before
                raise
            raise self._mixture() from error
        self._torn = ""

    def _mixture(self) -> DivergedError:
        return DivergedError(f"the model holds a mixture of two states, because {self._torn}; load an anchor into it")

    def _check_copies(self, piece: Piece, dtype: DType) -> None:
        first, *others = self._tensors[piece.tensor]
        for other in others:
            one, two = (bits_of(tensor, dtype, piece.start, piece.stop) for tensor in (first, other))
            if not np.array_equal(one, two):
                name = self.schema.tensors[piece.tensor].name
                text = f"the model holds tensor {name!r} several times, with different bits; load an anchor into it"
                raise DivergedError(text, tensor=name)


@dataclass(frozen=True, slots=True)
class _Patch:
    """Changes of one tensor in one segment, on the tensor's device."""

    segment: int
    positions: np.ndarray[tuple[int], np.dtype[np.uint32]]
    tensor: Tensor
    places: Tensor
    old: Tensor
    new: Tensor

    def held(self) -> Tensor:
        """Return what the touched elements hold now."""
        # `take` goes through any layout, but is three times slower on a flat tensor.
        return self.tensor.index_select(0, self.places) if self.tensor.dim() == 1 else self.tensor.take(self.places)


class Staged:
    """Changes that lie ready beside the tensors that they go into."""

    def __init__(self, target: Target, patches: list[_Patch]) -> None:
        self._target = target
        self._patches = patches

    def write(self) -> None:
        """Check that every touched element holds its old bits, then write the new ones: all or nothing.

        When writing fails or is interrupted, the old bits are written back before the error goes on. A second call
        raises, since the elements then hold the new bits.

        Raises:
            DivergedError: If an element holds other bits; nothing was changed. Or if the model holds a mixture, because
                a `load` failed midway, or old bits could not be written back.
        """
        if self._target._torn:
            raise self._target._mixture()
        # Inference mode, because tensors that were made in it can be written to in no other.
        self.check()
        with torch.inference_mode():
            try:
                for patch in self._patches:
                    patch.tensor.put_(patch.places, patch.new)
                self._finish()
            except BaseException:
                self._restore()
                raise

    @torch.inference_mode()
    def check(self) -> None:
        """Check that every touched element holds its old bits, and write nothing.

        Raises:
            DivergedError: If an element holds other bits; the error names the tensor.
        """
        by_device: dict[torch.device, list[_Patch]] = {}
        for patch in self._patches:
            by_device.setdefault(patch.tensor.device, []).append(patch)
        for patches in by_device.values():
            wrong = torch.stack([(patch.held() != patch.old).any() for patch in patches])
            # One wait for all answers, and not one for each.
            for patch in (patch for patch, failed in zip(patches, wrong.tolist(), strict=True) if failed):
                held = patch.held().cpu()
                first = int((held != patch.old.cpu()).nonzero()[0])
                mask = (1 << 8 * held.element_size()) - 1
                raise diverged(
                    self._target.schema,
                    patch.segment,
                    int(patch.positions[first]),
                    held=int(held[first]) & mask,
                    expected=int(patch.old[first]) & mask,
                )

    def _finish(self) -> None:
        """Wait until what was queued is done: a copy to the host comes after it."""
        for patch in {patch.tensor.device: patch for patch in self._patches}.values():
            patch.new[:1].cpu()

    def _restore(self) -> None:
        try:
            for patch in self._patches:
                patch.tensor.put_(patch.places, patch.old)
            self._finish()
        except BaseException as error:
            self._target._torn = f"writing changes failed and taking them back failed too ({error!r})"
            raise self._target._mixture() from error


def _misfit(name: str, tensor: Tensor, spec: TensorSpec) -> list[str]:
    dtype = dtypes.of_torch(tensor.dtype, name).name
    if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
        return [f"{name!r} is {dtype} {tuple(tensor.shape)}, the topic has {spec.dtype} {spec.shape}"]
    if overlaps_itself(tensor):
        return [f"{name!r} has elements that share memory (expanded); use `contiguous()`"]
    return []


def _patch(tensor: Tensor, segment: Segment, piece: Piece, change: SegmentChanges, part: slice) -> _Patch:
    positions = change.positions[part]
    places = torch.from_numpy(positions.astype(np.int64) + (piece.start - piece.offset))
    old, new = _values(change.old[part]), _values(change.new[part])
    # The view is made outside of inference mode, so that writing to it tells autograd that the tensor has changed.
    device, memory = tensor.device, as_integers(tensor)
    memory = memory.view(-1) if memory.is_contiguous() else memory
    return _Patch(segment.index, positions, memory, places.to(device), old.to(device), new.to(device))


def _values(bits: Bits) -> Tensor:
    """Return bits as a tensor of the integers that `as_integers` gives; torch shares writable memory only."""
    writable = np.require(bits, requirements=["C", "W"])
    return torch.from_numpy(writable.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else writable)


def _overwrite(tensor: Tensor, piece: Piece, values: Tensor) -> None:
    # The view is made outside of inference mode, so that writing to it tells autograd that the tensor has changed.
    memory = as_integers(tensor)
    if memory.is_contiguous():
        run = memory.view(-1)[piece.start : piece.stop]
        with torch.inference_mode():
            run.copy_(values)
    else:
        places = torch.arange(piece.start, piece.stop, device=tensor.device)
        with torch.inference_mode():
            memory.put_(places, values.to(tensor.device))
