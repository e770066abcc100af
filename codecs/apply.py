"""Apply: writing changes and whole states into the tensors of a live model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltabus.bus.errors import CorruptPayloadError, DivergedError, SchemaMismatchError

from . import dtypes
from .ahead import in_order
from .changes import Bits, Changes, Differing, SegmentChanges, check_same_schema, diverged, parts_of, validate
from .digest import digest_delta as delta_of
from .digest import digest_of
from .dtypes import DType
from .held import Held, differing, fits, to_host
from .on_device import as_tensor
from .overlap import overlapping, overlaps_itself
from .patches import Patch, first_mismatch, memory_of, patch_of, places_in, write_all
from .schema import Piece, Schema, Segment, TensorSpec
from .slices import Place, TensorSlice, Window, place_of
from .state import Parts, State, bits_of, check_supported, memory_key, named_parts, run_of, settle

__all__ = ["Difference", "Staged", "Target", "load_all"]

_AHEAD = 8
_PATIENCE = 10
"""How often old bits are written back anew when an interrupt comes between."""


class Difference(NamedTuple):
    """Where a tensor of a model differs from a state.

    Attributes:
        segment: The segment compared.
        piece: The run of the tensor's elements in it.
        place: Where in the model: a tensor, the view of a slice, or a window.
        change: What leads from the model's bits to the state's.
    """

    segment: Segment
    piece: Piece
    place: Place
    change: SegmentChanges


class Target:
    """The tensors of a model that a topic's states are written into, in place.

    It holds the tensors themselves: bind again when a module got other ones. One thread at a time uses it, and nothing
    else writes to the tensors meanwhile. Work on an accelerator runs in the current stream of the calling thread.

    Attributes:
        schema: The topic's schema.
        complete: Whether the model has every element of every entry; one that is sharded otherwise than the topic has
            only some of them, and takes those.
    """

    def __init__(self, schema: Schema, tensors: Sequence[Sequence[Tensor | TensorSlice]]) -> None:
        """Use `Target.bind`, which checks what this takes for granted."""
        self.schema = schema
        self._owners = [[_tensor_of(part) for part in copies] for copies in tensors]
        self._places: list[list[Place]] = [
            [place for part in copies if (place := place_of(part, spec)) is not None]
            for spec, copies in zip(schema.tensors, tensors, strict=True)
        ]
        first = [next((place for place in places if isinstance(place, Tensor)), None) for places in self._places]
        self._state = State(schema, tuple(tensor for tensor in first if tensor is not None))
        self.complete = len(self._state.tensors) == len(schema.tensors)
        self._torn = ""

    @classmethod
    def bind(cls, source: Parts, schema: Schema) -> Target:
        """Return the target for the tensors of a module, or of a mapping from name to tensor.

        Each tensor of the schema must be there under its name or an alias, without the parts that wrappers add, with
        its shape and dtype; where the schema has a slice, the whole tensor. Where several of these names are tensors of
        their own, all of them are written. Other tensors are left alone. Of distributed tensors, and of slices, what
        they have is written.

        Raises:
            SchemaMismatchError: If tensors are missing or have another shape or dtype, share memory with each other, or
                have elements that share memory.
            UnsupportedTensorError: If a tensor is of a kind that cannot be written, or a value is no tensor.
            UsageError: If the source is neither a module nor a mapping of names.
        """
        return cls.bind_all(source, [schema])[0]

    @classmethod
    def bind_all(cls, source: Parts, schemas: Sequence[Schema]) -> list[Target]:
        """Return the targets for the schemas of several writers, which may own slices of one tensor.

        Raises:
            As `bind` does.
        """
        found = named_parts(source, every_replica=True)
        targets = [cls._bound(found, schema) for schema in schemas]
        # Each of the model's tensors once, and not once for each writer that has a slice of it.
        owners = {
            (spec.name, id(owner)): owner
            for target in targets
            for spec, owned in zip(target.schema.tensors, target._owners, strict=True)
            for owner in owned
        }
        names = [name for name, _ in owners]
        # Of several writers, one that comes later may overwrite another's elements, but only of the same tensor.
        shared = overlapping(list(owners.values()), names)
        if shared is not None:
            first, second = (names[i] for i in shared)
            raise SchemaMismatchError(
                f"{first!r} and {second!r} share memory in the model, but are two tensors in the topic; untie them",
                tensor=first,
            )
        return targets

    @classmethod
    def _bound(cls, found: Mapping[str, Tensor | TensorSlice], schema: Schema) -> Target:
        bound: list[list[Tensor | TensorSlice]] = []
        missing, misfits = [], []
        for spec in schema.tensors:
            copies: dict[tuple[object, ...], Tensor | TensorSlice] = {}
            for name in (spec.name, *spec.aliases):
                if name in found:
                    tensor = _tensor_of(found[name])
                    check_supported(name, tensor)
                    misfits += _misfit(name, found[name], spec)
                    copies.setdefault(memory_key(tensor), found[name])
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
        return cls(schema, bound)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The model's tensors that are written to, in the schema's order; by their identity it can be recognised."""
        return tuple(tensor for copies in self._owners for tensor in copies)

    @property
    def copies(self) -> Sequence[Sequence[Tensor]]:
        """For each entry of the schema, the model's tensors: more than one where the model has copies."""
        return self._owners

    @property
    def parts(self) -> list[Tensor]:
        """What is written of each of the tensors: all of it, or a view of a slice."""
        return [_memory(place) for places in self._places for place in places]

    def read(self, index: int) -> Held:
        """Return the bits of a segment that the model holds, where they lie.

        Maybe the model's own memory, not to be written to.
        """
        device = self._state.device(index)
        return self._state.read(index) if device.type == "cpu" else self._state.read_on(device, index)

    def digest(self, pool: Executor | None = None) -> int:
        """Return the digest of the bits that the model holds; only when it is complete.

        Raises:
            DivergedError: If a tensor that the model holds several times is not the same everywhere.
        """
        settle(self.tensors)
        for segment in self.schema.segments:
            for piece in segment.pieces:
                self._check_copies(piece, segment.dtype)
        return digest_of(self.schema, self.read, pool=pool)

    def differences(self, read: Callable[[int], Held]) -> Iterator[Difference]:
        """Compare the model with a state, and yield what leads to it: of each tensor, and each copy, run by run.

        Args:
            read: Returns the state's bits of a segment.

        Raises:
            BaseException: What `read` raises.
        """
        settle(self.tensors)
        for segment in self.schema.segments:
            bits = read(segment.index)
            for piece in segment.pieces:
                wanted = bits[piece.offset : piece.offset + piece.stop - piece.start]
                for place in self._places[piece.tensor]:
                    found = _differing(place, segment.dtype, piece, wanted)
                    if found.positions.size:
                        positions = found.positions + np.uint32(piece.offset)
                        yield Difference(segment, piece, place, SegmentChanges(positions, found.old, found.new))

    def stage(self, changes: Changes, *, digest_delta: int | None = None, valid: bool = False) -> Staged:
        """Move changes to where the tensors are, so that what is left to do is the short write.

        Args:
            changes: What to write.
            digest_delta: What the changes must add to the digest, modulo 2^64, if that is known.
            valid: Whether they are known to be well formed, because a shadow has taken them.

        Raises:
            SchemaMismatchError: If they are of another schema.
            CorruptPayloadError: If they are not well formed, or add something else to the digest.
        """
        check_same_schema(self.schema, changes.schema)
        if not valid:
            validate(changes)
        if digest_delta is not None and delta_of(changes) != digest_delta % (1 << 64):
            raise CorruptPayloadError(
                "the changes do not lead to the digest that their message names; fetch them again"
            )
        patches: list[Patch] = []
        for index, change in changes.segments.items():
            segment = self.schema.segments[index]
            for piece, part in parts_of(segment, change):
                for place in self._places[piece.tensor]:
                    patches.append(patch_of(place, segment, piece, change, part))
        return Staged([(self, patches)])

    def apply(self, changes: Changes, *, digest_delta: int | None = None) -> None:
        """Write changes, all or nothing: `stage`, then `Staged.write`.

        Raises:
            SchemaMismatchError: If they are of another schema.
            CorruptPayloadError: If they are not well formed, or add something else to the digest than `digest_delta`.
            DivergedError: If a touched element does not hold the bits that its change starts from.
        """
        self.stage(changes, digest_delta=digest_delta).write()

    def load(self, read: Callable[[int], Held], *, pool: Executor | None = None) -> None:
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
            if not fits(segment, bits):
                expected, found = f"{segment.size} elements of {segment.dtype.bits}", f"{tuple(bits.shape)}"
                raise CorruptPayloadError(f"segment {segment.index} has {expected}, not {found} of {bits.dtype}")
            values = bits if isinstance(bits, Tensor) else as_tensor(bits, torch.device("cpu"))
            self._torn = self._torn or "loading a state stopped midway"
            for piece in segment.pieces:
                for place in self._places[piece.tensor]:
                    _overwrite(place, piece, values[piece.offset : piece.offset + piece.stop - piece.start])

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
        first, *others = [place for place in self._places[piece.tensor] if isinstance(place, Tensor)]
        for other in others:
            one, two = (bits_of(tensor, dtype, piece.start, piece.stop) for tensor in (first, other))
            if not np.array_equal(one, two):
                name = self.schema.tensors[piece.tensor].name
                text = f"the model holds tensor {name!r} several times, with different bits; load an anchor into it"
                raise DivergedError(text, tensor=name)


class Staged:
    """Changes that lie ready beside the tensors that they go into.

    Attributes:
        written: Whether the model holds the new bits, all of them, because `write` put them there.
    """

    def __init__(self, parts: Sequence[tuple[Target, Sequence[Patch]]]) -> None:
        """Use `Target.stage`, `joined` and `stage_differences`."""
        self._parts = parts
        self.written = False

    @classmethod
    def joined(cls, staged: Iterable[Staged]) -> Staged:
        """Return one that writes what these do, all of it or nothing."""
        return cls([part for each in staged for part in each._parts])

    def write(self, *, checked: bool = False) -> None:
        """Check that every touched element holds its old bits, then write the new ones: all or nothing.

        When writing fails or is interrupted, the old bits are written back before the error goes on. A second call
        raises, since the elements then hold the new bits.

        Args:
            checked: Whether `check` was called just before, and need not be again.

        Raises:
            DivergedError: If an element holds other bits; nothing was changed. Or if the model holds a mixture, because
                a `load` failed midway, or old bits could not be written back.
        """
        for target, _ in self._parts:
            if target._torn:
                raise target._mixture()
        if not checked:
            self.check()
        try:
            write_all(self._patches)
            # Within, so that an interrupt finds either this or the old bits, wherever it strikes.
            self.written = True
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Write the old bits back, whichever elements hold the new ones.

        An interrupt does not end it: it is begun again, and the interrupt goes on afterwards.

        Raises:
            DivergedError: If that failed: the model holds a mixture; the reason is chained.
            BaseException: What interrupted it.
        """
        self.written = False
        interrupt: BaseException | None = None
        for _ in range(_PATIENCE):
            try:
                write_all(self._patches, back=True)
            except Exception as error:
                raise self._mixed(error) from error
            except BaseException as error:
                interrupt = error
            else:
                break
        else:
            assert interrupt is not None
            raise self._mixed(interrupt) from interrupt
        if interrupt is not None:
            raise interrupt

    def check(self) -> None:
        """Check that every touched element holds its old bits, and write nothing.

        Raises:
            DivergedError: If an element holds other bits; the error names the tensor.
        """
        for target, patches in self._parts:
            wrong = first_mismatch(patches)
            if wrong is not None:
                raise diverged(target.schema, wrong.segment, wrong.position, held=wrong.held, expected=wrong.expected)

    @property
    def _patches(self) -> list[Patch]:
        return [patch for _, patches in self._parts for patch in patches]

    def _mixed(self, error: BaseException) -> DivergedError:
        for target, _ in self._parts:
            target._torn = f"writing changes failed and taking them back failed too ({error!r})"
        return self._parts[0][0]._mixture()


def load_all(states: Sequence[tuple[Target, Callable[[int], Held]]], *, pool: Executor | None = None) -> None:
    """Write the whole states of several targets of one model, in order; as `Target.load` does each.

    Raises:
        CorruptPayloadError: If the first segment that arrives has a wrong size or type; nothing was changed.
        DivergedError: If it failed midway; the reason is chained, and all of these targets refuse changes until each
            was loaded.
        BaseException: What reading the first segment raised; nothing was changed.
    """
    for place, (target, read) in enumerate(states):
        try:
            target.load(read, pool=pool)
        except BaseException as error:
            if place == 0 and not target._torn:
                raise
            for other, _ in states:
                other._torn = other._torn or "loading a state stopped midway"
            raise target._mixture() from error


def _tensor_of(part: Tensor | TensorSlice) -> Tensor:
    return part.tensor if isinstance(part, TensorSlice) else part


def _memory(place: Place) -> Tensor:
    return place.view if isinstance(place, Window) else place


def _misfit(name: str, part: Tensor | TensorSlice, spec: TensorSpec) -> list[str]:
    tensor = _tensor_of(part)
    dtype = dtypes.of_torch(tensor.dtype, name).name
    whole = part.whole if isinstance(part, TensorSlice) else tuple(part.shape)
    if whole != spec.whole or dtype != spec.dtype:
        return [f"{name!r} is {dtype} {whole}, the topic has {spec.dtype} {spec.whole}"]
    if overlaps_itself(tensor):
        return [f"{name!r} has elements that share memory (expanded); use `contiguous()`"]
    return []


def _differing(place: Place, dtype: DType, piece: Piece, wanted: Held) -> Differing:
    """Return where a place differs from the bits of a piece, by position in the piece."""
    if not isinstance(place, Window):
        run = bits_of if place.device.type == "cpu" else run_of
        return differing(run(place, dtype, piece.start, piece.stop), wanted)
    inside, numbers = place.locate(np.arange(piece.start, piece.stop, dtype=np.int64))
    held: Bits = memory_of(place.view).index_select(0, places_in(place.view, numbers)).cpu().numpy().view(dtype.bits)
    found = differing(held, to_host(wanted)[inside])
    return found._replace(positions=np.flatnonzero(inside)[found.positions].astype(np.uint32))


def _overwrite(place: Place, piece: Piece, values: Tensor) -> None:
    tensor = _memory(place)
    memory = memory_of(tensor)
    with torch.inference_mode():
        if isinstance(place, Window):
            inside, numbers = place.locate(np.arange(piece.start, piece.stop, dtype=np.int64))
            chosen = values[torch.from_numpy(inside).to(values.device)]
            memory.index_copy_(0, places_in(tensor, numbers), chosen.to(tensor.device))
        elif tensor.is_contiguous():
            memory[piece.start : piece.stop].copy_(values)
        else:
            elements = torch.arange(piece.start, piece.stop, device=tensor.device)
            memory.index_copy_(0, places_in(tensor, elements), values.to(tensor.device))
    settle((memory, values))  # the values may be given back now, and be another stream's
