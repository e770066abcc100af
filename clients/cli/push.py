"""`deltabus push`: existing checkpoints as the versions of a topic."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltabus.bus.errors import RetentionGapError, UsageError
from deltabus.bus.message import Message, check_writer_name
from deltabus.bus.signing import KeyRing
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.digest import digest_of
from deltabus.codecs.state import collect
from deltabus.keys import Key, signing_key, verify_keys
from deltabus.publisher import Publisher
from deltabus.sender import newest_state
from deltabus.workers import usable_cores

from .log import row_of, totals_of
from .output import Meter, Silent
from .topic import read_topic

__all__ = ["Checkpoint", "Pushed", "find_steps", "push_checkpoints"]

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to publish.

    Attributes:
        path: A safetensors file, or a directory of them.
        step: The training step that it belongs to.
    """

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was published.

    Attributes:
        url: The topic.
        held: Checkpoints that were left out, because the topic's newest version is the last of them.
        messages: What was added to the log, in order, anchors beside deltas included.
    """

    url: str
    held: tuple[Checkpoint, ...]
    messages: tuple[Message, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON, messages as `deltabus log` gives them."""
        now = time.time()
        return {
            "url": self.url,
            "held": [{"path": checkpoint.path, "step": checkpoint.step} for checkpoint in self.held],
            "messages": [row_of(message, now=now) for message in self.messages],
            "totals": totals_of(self.messages),
        }


def find_steps(paths: Sequence[Path], first: int | None = None) -> list[Checkpoint]:
    """Return checkpoints with their steps, in the order of steps.

    A step is the last number in the name of the directory, or of the file unless it is called `model`.

    >>> [checkpoint.step for checkpoint in find_steps([Path("run/checkpoint-1500"), Path("run/checkpoint-500")])]
    [500, 1500]
    >>> find_steps([Path("run/step_7/model.safetensors")])[0].step
    7

    Args:
        paths: The checkpoints.
        first: The step of the first one; the others count on from it. None takes steps from the names.

    Raises:
        UsageError: If a name has no number, or two have the same.
    """
    if first is not None:
        return [Checkpoint(path, first + number) for number, path in enumerate(paths)]
    checkpoints = sorted((Checkpoint(path, _step_in(path)) for path in paths), key=lambda checkpoint: checkpoint.step)
    for one, other in itertools.pairwise(checkpoints):
        if one.step == other.step:
            raise UsageError(f"{one.path} and {other.path} are both of step {one.step}; leave one out, or give --step")
    return checkpoints


def _step_in(path: Path) -> int:
    name = path.name.removesuffix(".safetensors")
    if name != path.name and re.fullmatch(r"model([-_.].*)?", name):
        name = path.absolute().parent.name
    numbers = re.findall(r"[0-9]+", name)
    if not numbers:
        raise UsageError(f"the name of {path} has no step, as checkpoint-1500 has; give --step")
    return int(numbers[-1])


def push_checkpoints(
    url: str,
    checkpoints: Sequence[Checkpoint],
    *,
    writer: str = "trainer",
    dtype: str | None = None,
    anchor: str = "adaptive",
    key: Key | None = None,
    keys: Sequence[Key] | None = None,
    meter: Meter | None = None,
) -> Pushed:
    """Publish checkpoints, each as a version, in the order given.

    When one of them is what the topic's newest version holds, it and those before it are left out, and the chain of
    deltas goes on from there. Otherwise the first one is published whole.

    Args:
        url: The topic.
        checkpoints: At least one.
        writer: The name of the log.
        dtype: The dtype in which floating-point tensors are published, such as `bf16`; None is each tensor's own.
        anchor: When to publish the whole state besides, as `Publisher` takes it.
        key: Signs every message, as `Publisher` takes it.
        keys: Whose messages are accepted besides, as `Publisher` takes them.
        meter: Is told how far it is.

    Raises:
        UsageError: If an argument or the URL is wrong, or a checkpoint is not there.
        CorruptPayloadError: If a checkpoint cannot be read.
        SchemaMismatchError: If a checkpoint has a tensor twice.
        UnsupportedTensorError: If a tensor cannot be published.
        MessageFormatError: If what lies under the URL is not a topic.
        SignatureError: If there is a key, and the topic has messages that no accepted key signed; or none, and they
            are.
        PublishError: If a checkpoint could not be stored.
        FencedError: If another process took this writer's log over.
        WaitTimeoutError: If the backend is too slow.
        TransportError: If the topic cannot be reached.
    """
    meter = meter or Silent()
    check_writer_name(writer)
    kind = _dtype_of(dtype)
    sizes = [_size_of(checkpoint, kind) for checkpoint in checkpoints]
    signs, accepted = signing_key(key), verify_keys(keys)
    if signs is not None:
        accepted = KeyRing([signs.verify_key]) if accepted is None else accepted.joined(signs.verify_key)
    before = _log_of(url, writer, accepted)
    newest = newest_state(before)
    match = None if newest is None else _find_version(checkpoints, newest, kind)
    begin = 0 if match is None else match + 1
    with Publisher(
        url,
        writer=writer,
        have=None if match is None else checkpoints[match].path,
        dtype=kind,
        anchor=anchor,
        on_busy="wait",
        key=signs,
        keys=keys,
    ) as publisher:
        shown = publisher.url
        meter.begin("publishing", sum(sizes[begin:]))
        for checkpoint, size in zip(checkpoints[begin:], sizes[begin:], strict=True):
            publisher.publish(checkpoint.step, load_checkpoint(checkpoint.path)).result()
            meter.advance(size)
    after = _log_of(url, writer, accepted)
    return Pushed(shown, tuple(checkpoints[:begin]), tuple(after[len(before) :]))


def _dtype_of(name: str | None) -> torch.dtype | None:
    if name is not None and name not in _DTYPES:
        raise UsageError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return None if name is None else _DTYPES[name]


def _size_of(checkpoint: Checkpoint, dtype: torch.dtype | None) -> int:
    """Return how many bytes a checkpoint has, once it is clear that it can be published."""
    return collect(load_checkpoint(checkpoint.path), dtype=dtype).schema.nbytes


def _log_of(url: str, writer: str, keys: KeyRing | None) -> list[Message]:
    try:
        return [message for message in read_topic(url, keys=keys).messages if message.writer == writer]
    except RetentionGapError:
        return []


def _find_version(checkpoints: Sequence[Checkpoint], newest: Message, dtype: torch.dtype | None) -> int | None:
    """Return which checkpoint has the bits of a version; those of its step are looked at first, then later ones."""
    order = sorted(range(len(checkpoints)), key=lambda i: (checkpoints[i].step != newest.step, -i))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for index in order:
            state = collect(load_checkpoint(checkpoints[index].path), dtype=dtype)
            if state.schema.checksum != newest.schema.checksum:
                continue
            if digest_of(state.schema, state.read, pool) == newest.digest_after:
                return index
    return None
