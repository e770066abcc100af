"""Publishing from every rank of a `torch.distributed` job: one group, one generation, and no tensor twice."""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from msgspec import UNSET

from deltabus.bus.errors import DeltabusError, SchemaMismatchError, UsageError
from deltabus.bus.group import Group
from deltabus.bus.logs import read_last
from deltabus.bus.message import MAX_RANKS, check_writer_name, rank_writer
from deltabus.bus.retry import Retry
from deltabus.bus.signing import KeyRing, accepted
from deltabus.bus.transport import Transport
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.state import State
from deltabus.transports import open_transport

from .bridge import LoopThread
from .keys import Key, signing_key, verify_keys

__all__ = ["Division", "agree_on_group"]

_HASHED = 1 << 62
"""Hashes are compared as numbers of 62 bits, which every backend of `torch.distributed` can reduce."""


def agree_on_group(
    url: str | os.PathLike[str],
    *,
    stem: str = "trainer",
    key: Key | None = None,
    keys: Key | Sequence[Key] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 300.0,
) -> tuple[str, Group]:
    """Return the name of this rank's writer, and the group of all ranks with a generation that none of them has used.

    All ranks must call it together. Of each log the newest message is read.

    Args:
        url: The topic.
        stem: What the names of the writers begin with.
        key: What this rank signs with, as `Publisher` takes it: then messages must be signed to be believed.
        keys: Whose messages are believed besides.
        process_group: The ranks; None is all.
        timeout: Limit in seconds for reading the logs.

    Raises:
        UsageError: If `torch.distributed` is not initialised, an argument is wrong, or there are too many ranks.
        TransportError: If a log cannot be read.
        SignatureError: If there is a key, and the newest message of a log shows no accepted one.
        WaitTimeoutError: If that takes longer than `timeout`.
        MessageFormatError: If what lies under the URL is not a topic.
        DeltabusError: If another rank could not read its log; its own error says why.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("torch.distributed is not initialised; call init_process_group first, or name the group")
    rank, count = dist.get_rank(process_group), dist.get_world_size(process_group)
    if count > MAX_RANKS:
        raise UsageError(f"{count} ranks are too many; a group has at most {MAX_RANKS}")
    failure: Exception | None = None
    used = 0
    try:
        check_writer_name(stem)
        loop = LoopThread(f"deltabus rank {rank} of {url}")
        try:
            ring = accepted(signing_key(key), verify_keys(keys))
            reading = _newest_generation(url, stem, rank, count, ring)
            used = loop.run(reading, timeout=timeout, what=f"reading the logs of {url}")
        finally:
            loop.stop()
    except Exception as error:  # told to the other ranks first, which would wait for ever otherwise
        failure = error
    found = _gathered([used, failure is not None], process_group)
    if failure is not None:
        raise failure
    failed = [other for other, (_, broken) in enumerate(found) if broken]
    if failed:
        raise DeltabusError(f"rank {failed[0]} could not open {url}, so that the group cannot publish; see its error")
    generation = max(number for number, _ in found) + 1
    return rank_writer(stem, rank), Group.of_ranks(stem, count, generation=generation)


async def _newest_generation(
    url: str | os.PathLike[str], stem: str, rank: int, count: int, keys: KeyRing | None
) -> int:
    """Return the greatest generation in the logs that fall to a rank: its own, and a share of those that left."""
    newest = 0
    async with open_transport(url) as transport:
        for log in await _logs(transport):
            base, _, number = log.rpartition("-")
            if base == stem and number.isdecimal() and int(number) % count == rank:
                last = await read_last(transport, log, retry=Retry(), keys=keys)
                # Generations never fall along a log.
                newest = max(newest, last.message.generation if last is not None else 0)
    return newest


async def _logs(transport: Transport) -> list[str]:
    return await Retry().call(f"listing the logs of {transport.url}", transport.logs)


def _gathered(numbers: list[int], process_group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return the numbers that each rank brought."""
    device = torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(found, own, group=process_group)
    return [each.tolist() for each in found]


@dataclass
class Division:
    """Leaves a rank its share of the tensors that all ranks hold alike.

    Slices are the rank's own, and stay. Of whole tensors all ranks that have the same names, dtypes and shapes are
    taken for replicas, as data parallel ones are, and each publishes a share; where ranks differ in them, as those of a
    pipeline do, each publishes all of its own. That is found out together, at the first state: all ranks must publish
    it together.

    Args:
        process_group: The ranks; None is all.
    """

    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self._whole: tuple[TensorSpec, ...] | None = None
        self._share: frozenset[str] = frozenset()

    def of(self, state: State) -> State:
        """Return the part of a state that this rank publishes.

        Raises:
            SchemaMismatchError: If its tensors are others than at first.
        """
        whole = tuple(spec for spec in state.schema.tensors if spec.slice is UNSET)
        if self._whole is None:
            self._whole, self._share = whole, self._agree(whole)
        elif whole != self._whole:
            # Not to be agreed on anew: where only one rank's changed, it would wait for the others for ever.
            raise SchemaMismatchError("the tensors that this rank publishes changed; restart the group to publish them")
        kept = [
            (spec, tensor)
            for spec, tensor in zip(state.schema.tensors, state.tensors, strict=True)
            if spec.slice is not UNSET or spec.name in self._share
        ]
        if len(kept) == len(state.tensors):
            return state
        schema = Schema.of((spec for spec, _ in kept), segment_elements=state.schema.segment_elements)
        return State(schema, tuple(tensor for _, tensor in kept))

    def _agree(self, whole: tuple[TensorSpec, ...]) -> frozenset[str]:
        rank, count = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        named = Schema.of(whole).checksum
        mark = int.from_bytes(hashlib.sha256(named).digest()[:8], "little") % _HASHED
        if len({found for (found,) in _gathered([mark], self.process_group)}) > 1:
            return frozenset(spec.name for spec in whole)
        # The largest first, each to whom has least so far: nearly even, and the same on all ranks.
        loads = [(0, owner) for owner in range(count)]
        share = set()
        for spec in sorted(whole, key=lambda spec: (-spec.size, spec.name)):
            load, owner = loads[0]
            heapq.heapreplace(loads, (load + max(spec.size, 1), owner))
            if owner == rank:
                share.add(spec.name)
        return frozenset(share)
