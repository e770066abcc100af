"""From `publish` at a trainer to applied at an engine, over a backend, against a saved and loaded checkpoint."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .backend import Plain, plain_speed
from .peer import Answer, Setup
from .peers import Peer, in_this_process, start_peer
from .source import Source, schema_of

__all__ = ["EndToEnd", "count_stages", "run"]


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
        applied: From the call of `publish` until the engine holds the step.
        stages: Of that way, one after the other: `blocked` (inside `publish`), `encode`, `upload` (what comes after
            encoding), `download`, `decode`, `apply`, and `between` (the record, and until it is noticed).
        newcomer: From the first `publish` until an engine that waited and held nothing has the whole state.
        anchor_up: From the call of the first `publish` until the anchor is durable.
        anchor_down: From opening a subscriber until an engine that held nothing has the whole state.
        plain: What the backend does with plain bytes; None where it was not measured.
        full: From the call of `save_file` until the engine holds the whole state; None where it was not measured.
        full_stages: Of that way: `save`, `load`, `copy`.
        flush: How long it takes besides to make a checkpoint durable, as deltabus's messages are.
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
    applied: float
    stages: dict[str, float]
    newcomer: float
    anchor_up: float
    anchor_down: float
    exact: bool
    plain: Plain | None = None
    full: float | None = None
    full_stages: dict[str, float] = field(default_factory=dict)
    flush: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def loading(self) -> float | None:
        """Seconds from a checkpoint on disk to a model that holds it: `load` and `copy`."""
        return self.full_stages["load"] + self.full_stages["copy"] if self.full_stages else None


def count_stages(steps: int, *, checkpoints: bool, plain: bool) -> int:
    """Return how often `run` tells its progress."""
    return 3 + steps * (1 + checkpoints) + plain


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
        steps: How many are taken; also how many checkpoints.
        checkpoints: A directory in which a checkpoint is saved and loaded at a time; None measures none.
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
        memcpy = float(trainer.ask("memcpy")["memcpy"])
        for side in (engine, trainer):
            side.ask("close")
    speed = None
    if plain:
        progress("plain puts and gets")
        speed = plain_speed(url, measurement.parts, repeats=min(3, steps))
    return measurement.result(source, memcpy, speed)


class _Measurement:
    """What was measured so far."""

    def __init__(self, trainer: Peer, engine: Peer, *, apart: bool) -> None:
        self._trainer, self._engine, self._apart = trainer, engine, apart
        self._memory: dict[str, int] = {}
        self._exact = True
        self._first: Answer = {}
        self._newcomer = 0.0
        self._joined: Answer = {}
        self._sent: list[Answer] = []
        self._taken: list[Answer] = []
        self._saved: list[Answer] = []
        self._loaded: list[Answer] = []
        self._flushed: list[Answer] = []

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
        self._saved.append(self._trainer.ask("save", str(path)))
        self._loaded.append(self._engine.ask("load", str(path)))
        self._flushed.append(self._trainer.ask("flush", str(path)))
        self._compare()
        path.unlink()

    def note_memory(self, phase: str) -> None:
        """Note the most memory that either side has held since this was called last."""
        for name, side in (("trainer", self._trainer), ("engine", self._engine)):
            extra = side.ask("memory")["extra"]
            if self._apart and extra is not None:
                self._memory[f"{name}, {phase}"] = extra

    def _compare(self) -> None:
        self._exact = self._exact and self._trainer.ask("digest") == self._engine.ask("digest")

    def result(self, source: Source, memcpy: float, plain: Plain | None) -> EndToEnd:
        """Return the medians."""
        schema = schema_of(source)
        stages = [_stages(*both) for both in zip(self._sent, self._taken, strict=True)]
        saved = bool(self._saved)
        return EndToEnd(
            total=schema.total,
            model=schema.nbytes,
            changed=int(_median(self._sent, "changed")),
            nbytes=int(_median(self._sent, "nbytes")),
            anchor=self._first["nbytes"],
            memcpy=memcpy,
            applied=_way(self._sent, self._taken),
            stages={stage: _median(stages, stage) for stage in stages[0]},
            newcomer=self._newcomer,
            anchor_up=self._first["durable"],
            anchor_down=self._joined["seconds"],
            exact=self._exact,
            plain=plain,
            full=_way(self._saved, self._loaded) if saved else None,
            full_stages={
                "save": _median(self._saved, "save"),
                "load": _median(self._loaded, "load"),
                "copy": _median(self._loaded, "copy"),
            }
            if saved
            else {},
            flush=_median(self._flushed, "flush") if saved else None,
            memory=self._memory,
        )


def _median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(answer[key] for answer in answers))


def _way(begun: Sequence[Answer], ended: Sequence[Answer]) -> float:
    """Return the median time from the call on one side until it is applied on the other."""
    return float(statistics.median(b["applied"] - a["called"] for a, b in zip(begun, ended, strict=True)))


def _stages(sent: Answer, taken: Answer) -> dict[str, float]:
    """Return the stages of one step; they add up to the whole way."""
    encode = sent["seconds"]["encode"]
    stages = {"blocked": sent["blocked"], "encode": encode, "upload": sent["seconds"]["upload"] - encode}
    stages |= {stage: taken["seconds"][stage] for stage in ("download", "decode", "apply")}
    return stages | {"between": max(0.0, taken["applied"] - sent["called"] - sum(stages.values()))}
