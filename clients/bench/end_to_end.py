"""From `publish` at a trainer to applied at an engine, over a backend, against saved and loaded checkpoints."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .backend import Plain, directory_of, plain_speed
from .page_cache import can_drop_pages
from .peer import Answer, Setup
from .peers import Peer, in_this_process, start_peer
from .source import Source, schema_of

__all__ = ["CACHE", "DISK", "Checkpoint", "EndToEnd", "count_stages", "run"]

DISK, CACHE = "on the disk", "in the page cache"
"""Where a checkpoint lies: made durable and read from the disk, or written to memory and read from there."""

_MOST_DURABLE = 3
"""Durable checkpoints, at most: a disk takes much longer than memory."""

_DURABLE_SECONDS = 60.0
"""After so long no further one is begun."""

_CACHED, _DURABLE = ("save", "load", "copy"), ("save", "flush", "load", "copy")
"""Stages of a checkpoint."""

_NOT_DROPPED, _NOT_FETCHED = "this system cannot drop its pages", "nothing shows that it was read there"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How the whole state comes over in a checkpoint; medians, in seconds.

    Attributes:
        whole: From the call of `save_file` until the engine holds the state.
        stages: Of that way: `save`, `flush` where it is made durable, `load`, `copy`.
        applied: What stands against it: from `publish` to applied, and where the checkpoint is read from the disk,
            reading a step's files from there besides.
    """

    whole: float
    stages: dict[str, float]
    applied: float

    @property
    def loading(self) -> float:
        """From a checkpoint to a model that holds it: `load` and `copy`."""
        return self.stages["load"] + self.stages["copy"]


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Medians of one run, in seconds and bytes.

    Attributes:
        total: Elements of the model.
        model: Bytes of the model.
        changed: Elements of a step.
        nbytes: Bytes of a step.
        anchor: Bytes of the anchor.
        memcpy: A copy of the tensors by one thread, in the trainer.
        shared_memcpy: The same by as many threads as a publisher has.
        applied: From the call of `publish` until the engine holds the step.
        stages: Of that way, one after the other: `blocked` (inside `publish`), `encode`, `upload` (what comes after
            encoding), `download`, `decode`, `apply`, and `between` (the record, and until it is noticed).
        newcomer: From the first `publish` until an engine that waited and held nothing has the whole state.
        anchor_up: From the call of the first `publish` until the anchor is durable.
        anchor_down: From opening a subscriber until an engine that held nothing has the whole state.
        plain: What the backend does with plain bytes; None where it was not measured.
        cached: A checkpoint that goes through the page cache and is not made durable; None where it was not measured.
        durable: One that is made durable, and read from the disk; None where it was not measured, or left out.
        left_out: Why the durable one was left out; empty where it was not.
        reread: How long a step's files take to be read from the disk; None where no durable checkpoint was measured.
        memory: The most memory held beside the model, while the anchor and while steps went by, for either side; empty
            where it is not known, as when both sides share a process.
        exact: Whether the engine held the trainer's bits after each step, and after each checkpoint.
    """

    total: int
    model: int
    changed: int
    nbytes: int
    anchor: int
    memcpy: float
    shared_memcpy: float
    applied: float
    stages: dict[str, float]
    newcomer: float
    anchor_up: float
    anchor_down: float
    exact: bool
    plain: Plain | None = None
    cached: Checkpoint | None = None
    durable: Checkpoint | None = None
    left_out: str = ""
    reread: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """Those that were measured, by where they lie: `DISK`, `CACHE`."""
        both = {DISK: self.durable, CACHE: self.cached}
        return {place: checkpoint for place, checkpoint in both.items() if checkpoint is not None}


def count_stages(steps: int, *, checkpoints: bool, plain: bool) -> int:
    """Return how often `run` tells its progress at most."""
    return 3 + steps + checkpoints * (steps + min(steps, _MOST_DURABLE)) + plain


def run(
    source: Source,
    url: str,
    *,
    steps: int,
    checkpoints: Path | None = None,
    plain: bool = True,
    progress: Callable[[str], object] = lambda what: None,
) -> EndToEnd:
    """Measure the whole way.

    Args:
        source: The two states between which the trainer goes to and fro.
        url: A topic that does not exist yet; it is left behind.
        steps: How many are taken; also how many checkpoints go through the page cache. No more than three are made
            durable and read from the disk, and none is begun after a minute of that.
        checkpoints: A directory in which a checkpoint is saved and loaded at a time, on the disk of the topic, which
            must be a directory itself; None measures none.
        plain: Whether to measure what the backend does with plain bytes.
        progress: Is told what begins.

    Raises:
        ClientError: If a side failed; the message has its words.
        DeltabusError: If the topic lives in this process, as the side raised it.
        WaitTimeoutError: If a side takes too long.
        CorruptPayloadError: If the backend gives other bytes than were stored.
        TransportError: If the backend fails.
    """
    progress("making the model")
    trainer_setup = Setup(role="trainer", source=source, url=url)
    engine_setup = Setup(role="engine", source=source, url=url)
    with start_peer(trainer_setup) as trainer, start_peer(engine_setup) as engine:
        trainer.answer()
        engine.answer()
        measurement = _Measurement(trainer, engine, apart=not in_this_process(url))
        progress("anchor")
        measurement.anchor()
        progress("a newcomer")
        # A process of its own: what it leaves in the memory of another would be counted to the steps.
        with start_peer(engine_setup) as newcomer:
            newcomer.answer()
            measurement.join(newcomer)
            newcomer.ask("close")
        for number in range(1, steps + 1):
            progress(f"step {number}")
            measurement.step(number)
        measurement.note_memory("steps")
        if checkpoints is not None:
            with tempfile.TemporaryDirectory(dir=checkpoints, prefix="deltabus-bench-") as folder:
                for number in range(1, steps + 1):
                    progress(f"checkpoint {number}")
                    measurement.checkpoint(Path(folder, f"{number}.safetensors"))
                topic = directory_of(url)
                assert topic is not None
                _durable_checkpoints(measurement, Path(folder), topic, steps=steps, progress=progress)
        memcpy = trainer.ask("memcpy")
        for side in (engine, trainer):
            side.ask("close")
    speed = None
    if plain:
        progress("plain puts and gets")
        speed = plain_speed(url, measurement.parts, repeats=min(3, steps))
    return measurement.result(source, memcpy, speed)


def _durable_checkpoints(
    measurement: _Measurement, folder: Path, topic: Path, *, steps: int, progress: Callable[[str], object]
) -> None:
    """Take a few, as long as there is time and they are really read from the disk."""
    if not can_drop_pages():
        measurement.left_out = _NOT_DROPPED
    started = time.monotonic()
    for number in range(1, min(steps, _MOST_DURABLE) + 1):
        if measurement.left_out or (number > 1 and time.monotonic() - started > _DURABLE_SECONDS):
            break
        progress(f"durable checkpoint {number}")
        measurement.durable_checkpoint(folder / f"durable-{number}.safetensors", topic, number)


class _Measurement:
    """What was measured so far.

    Attributes:
        left_out: Why durable checkpoints do not count; empty while they do.
    """

    def __init__(self, trainer: Peer, engine: Peer, *, apart: bool) -> None:
        self._trainer, self._engine, self._apart = trainer, engine, apart
        self._memory: dict[str, int] = {}
        self._exact = True
        self._first: Answer = {}
        self._newcomer = 0.0
        self._joined: Answer = {}
        self._sent: list[Answer] = []
        self._taken: list[Answer] = []
        self._cached: list[Answer] = []
        self._durable: list[Answer] = []
        self.left_out = ""

    @property
    def parts(self) -> list[int]:
        """Sizes of the anchor's parts."""
        return list(self._first["parts"])

    def anchor(self) -> None:
        """Publish the first state to an engine that waits."""
        self._engine.send("next")
        self._first = self._trainer.ask("open")
        self._newcomer = self._engine.answer()["applied"] - self._first["called"]
        self.note_memory("anchor")
        self._compare()

    def join(self, newcomer: Peer) -> None:
        """Let an engine begin to follow after the anchor is there."""
        self._joined = newcomer.ask("join")
        self._exact = self._exact and self._trainer.ask("digest") == newcomer.ask("digest")

    def step(self, number: int) -> None:
        """Take a step."""
        self._engine.send("next")
        self._sent.append(self._trainer.ask("step", number))
        self._taken.append(self._engine.answer())
        self._compare()

    def checkpoint(self, path: Path) -> None:
        """Take a step, and bring it over as a checkpoint, in a file of its own."""
        saved = self._trainer.ask("save", str(path))
        self._cached.append(saved | self._engine.ask("load", str(path)))
        self._trainer.ask("flush", str(path))  # not counted: the disk is to be at rest when the next one is saved
        self._compare()
        path.unlink()

    def durable_checkpoint(self, path: Path, topic: Path, number: int) -> None:
        """Do the same with one that is made durable and read from the disk; then read a step's files from there."""
        taken = self._trainer.ask("save", str(path)) | self._trainer.ask("flush", str(path))
        taken |= self._engine.ask("load_from_disk", str(path))
        self._compare()
        path.unlink()
        keys = self._sent[number - 1]["keys"]
        files = self._engine.ask("reread", *(str(topic / key) for key in keys))
        if not (taken["from_disk"] and files["from_disk"]):
            self.left_out = _NOT_FETCHED
        self._durable.append(taken | files)

    def note_memory(self, phase: str) -> None:
        """Note the most memory that either side has held since this was called last."""
        for name, side in (("trainer", self._trainer), ("engine", self._engine)):
            extra = side.ask("memory")["extra"]
            if self._apart and extra is not None:
                self._memory[f"{name}, {phase}"] = extra

    def _compare(self) -> None:
        self._exact = self._exact and self._trainer.ask("digest") == self._engine.ask("digest")

    def result(self, source: Source, memcpy: Answer, plain: Plain | None) -> EndToEnd:
        """Return the medians."""
        schema = schema_of(source)
        stages = [_stages(*both) for both in zip(self._sent, self._taken, strict=True)]
        applied = _whole([sent | taken for sent, taken in zip(self._sent, self._taken, strict=True)])
        cached = durable = reread = None
        if self._cached:
            cached = Checkpoint(_whole(self._cached), _medians(self._cached, _CACHED), applied)
        if self._durable and not self.left_out:
            reread = _median(self._durable, "reread")
            # Not by the clock, which went on while pages were dropped.
            whole = statistics.median(sum(each[stage] for stage in _DURABLE) for each in self._durable)
            durable = Checkpoint(whole, _medians(self._durable, _DURABLE), applied + reread)
        return EndToEnd(
            total=schema.total,
            model=schema.nbytes,
            changed=int(_median(self._sent, "changed")),
            nbytes=int(_median(self._sent, "nbytes")),
            anchor=self._first["nbytes"],
            memcpy=memcpy["memcpy"],
            shared_memcpy=memcpy["shared"],
            applied=applied,
            stages=_medians(stages, stages[0]),
            newcomer=self._newcomer,
            anchor_up=self._first["durable"],
            anchor_down=self._joined["seconds"],
            exact=self._exact,
            plain=plain,
            cached=cached,
            durable=durable,
            left_out=self.left_out,
            reread=reread,
            memory=self._memory,
        )


def _median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(answer[key] for answer in answers))


def _medians(answers: Sequence[dict[str, Any]], keys: Iterable[str]) -> dict[str, float]:
    return {key: _median(answers, key) for key in keys}


def _whole(ways: Sequence[Answer]) -> float:
    """Return the median time from the call on one side until it is applied on the other."""
    return float(statistics.median(way["applied"] - way["called"] for way in ways))


def _stages(sent: Answer, taken: Answer) -> dict[str, float]:
    """Return the stages of one step; they add up to the whole way."""
    encode = sent["seconds"]["encode"]
    stages = {"blocked": sent["blocked"], "encode": encode, "upload": sent["seconds"]["upload"] - encode}
    stages |= {stage: taken["seconds"][stage] for stage in ("download", "decode", "apply")}
    return stages | {"between": max(0.0, taken["applied"] - sent["called"] - sum(stages.values()))}
