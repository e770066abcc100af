"""From `publish` in one process to applied in another, over a local disk, against a saved and loaded checkpoint."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from deltabus.codecs.schema import Schema

__all__ = ["EndToEnd", "run"]

_LIMIT = 900.0


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
        full: From the call of `save_file` until the engine holds the whole state.
        full_stages: Of that way: `save`, `load`, `copy`.
        newcomer: From the first `publish` until an engine that held nothing has the whole state.
        memory: The most memory held beside the model, while the anchor and while steps went by, for either side.
        exact: Whether the engine held the trainer's bits after each step, and after the checkpoint.
    """

    total: int
    model: int
    changed: int
    nbytes: int
    anchor: int
    memcpy: float
    applied: float
    stages: dict[str, float]
    full: float
    full_stages: dict[str, float]
    newcomer: float
    memory: dict[str, int]
    exact: bool


class _Peer:
    """A process that answers commands; see `peer.py`."""

    def __init__(self, role: str, schema: Path, url: str, density: float) -> None:
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), role]
        command += ["--schema", str(schema), "--url", url, "--density", str(density)]
        self._role = role
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._timer = threading.Timer(_LIMIT, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()

    def send(self, *command: object) -> None:
        """Give a command, and go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:  # noqa: ANN401 - what stands in it depends on the command
        """Wait for the answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._role} ended with status {self._process.wait()} or took over {_LIMIT:.0f} s")
        return json.loads(line)

    def ask(self, *command: object) -> Any:  # noqa: ANN401 - as `answer`
        """Give a command and wait for its answer."""
        self.send(*command)
        return self.answer()


def run(
    schema: Schema, density: float, *, steps: int, place: Path, progress: Callable[[str], object] = lambda what: None
) -> EndToEnd:
    """Measure the whole way; about ten times the model's bytes of disk are used in `place` meanwhile."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        table = Path(folder, "schema.json")
        table.write_bytes(schema.encode())
        url = Path(folder, "topic").as_uri()
        with _Peer("trainer", table, url, density) as trainer, _Peer("engine", table, url, density) as engine:
            progress("making the model")
            for peer in (trainer, engine):
                peer.answer()
            return _measure(trainer, engine, steps, schema, Path(folder, "checkpoint.safetensors"), progress)


def _measure(  # noqa: PLR0917 - private, called in one place
    trainer: _Peer, engine: _Peer, steps: int, schema: Schema, checkpoint: Path, progress: Callable[[str], object]
) -> EndToEnd:
    progress("anchor")
    engine.send("next")
    anchor = trainer.ask("open")
    newcomer = engine.answer()["applied"] - anchor["called"]
    sides = {"trainer": trainer, "engine": engine}
    memory = {f"{side}, anchor": peer.ask("memory")["extra"] for side, peer in sides.items()}
    exact = trainer.ask("digest") == engine.ask("digest")

    sent, taken = [], []
    for number in range(1, steps + 1):
        progress(f"step {number}")
        engine.send("next")
        sent.append(trainer.ask("step", number))
        taken.append(engine.answer())
        exact = exact and trainer.ask("digest") == engine.ask("digest")
    memory |= {f"{side}, steps": peer.ask("memory")["extra"] for side, peer in sides.items()}

    saved, loaded = [], []
    for number in range(steps):
        progress(f"checkpoint {number + 1}")
        saved.append(trainer.ask("save", str(checkpoint)))
        loaded.append(engine.ask("load", str(checkpoint)))
        exact = exact and trainer.ask("digest") == engine.ask("digest")

    def median(values: list[dict[str, float]], key: str) -> float:
        return statistics.median(value[key] for value in values)

    stages = [_stages(*both) for both in zip(sent, taken, strict=True)]
    return EndToEnd(
        total=schema.total,
        model=schema.nbytes,
        changed=int(statistics.median(step["changed"] for step in sent)),
        nbytes=int(statistics.median(step["nbytes"] for step in sent)),
        anchor=anchor["nbytes"],
        memcpy=trainer.ask("memcpy")["memcpy"],
        applied=statistics.median(b["applied"] - a["called"] for a, b in zip(sent, taken, strict=True)),
        stages={stage: statistics.median(step[stage] for step in stages) for stage in stages[0]},
        full=statistics.median(b["applied"] - a["called"] for a, b in zip(saved, loaded, strict=True)),
        full_stages={"save": median(saved, "save"), "load": median(loaded, "load"), "copy": median(loaded, "copy")},
        newcomer=newcomer,
        memory=memory,
        exact=exact,
    )


def _stages(sent: dict[str, Any], taken: dict[str, Any]) -> dict[str, float]:
    """Return the stages of one step; they add up to the whole way."""
    encode = sent["seconds"]["encode"]
    stages = {"blocked": sent["blocked"], "encode": encode, "upload": sent["seconds"]["upload"] - encode}
    stages |= {stage: taken["seconds"][stage] for stage in ("download", "decode", "apply")}
    return stages | {"between": max(0.0, taken["applied"] - sent["called"] - sum(stages.values()))}
