"""What the demo's processes tell the stage: one JSON object a line on standard output.

A process is told two things in return, over its standard input: the line `go`, and the end of the file, which means
that the stage is gone and nobody is left to work for. The topic's URL may hold secrets, so it is in the environment,
which others do not see, and not among the arguments.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import IO

import msgspec
from msgspec import Struct

from deltabus.bus.errors import MessageFormatError, WaitTimeoutError

__all__ = ["TOPIC", "Line", "Ready", "Stagehand", "StepApplied", "StepPublished", "decode_line", "encode_line"]

TOPIC = "DELTABUS_DEMO_TOPIC"
"""The environment variable that holds the topic's URL."""

_ORPHANED = 3
"""Exit status of a process whose stage is gone."""


class Ready(Struct, frozen=True, kw_only=True, tag_field="event", tag="ready"):
    """A process has loaded everything and reached the topic.

    Attributes:
        held: The step of the weights that it brought along from an earlier life; None when it brought none.
    """

    held: int | None = None


class StepPublished(Struct, frozen=True, kw_only=True, tag_field="event", tag="published"):
    """The trainer's step is durable in the topic.

    Attributes:
        step: The training step.
        version: The state counter that the step got.
        kind: `anchor` or `delta`.
        nbytes: Bytes of the payload and the record that names it.
        full_nbytes: Bytes of all weights in bf16.
        changed: Elements that the message carries.
        total: Elements of the state.
        loss: The training loss of the step; None for the pretrained weights.
        reference: The file, in the demo's own directory, with the trainer's bf16 weights of this step.
        train: Seconds of forward, backward and optimizer.
        blocked: Seconds that `publish` kept the training thread.
        encode: Seconds of encoding, behind the training thread.
        upload: Seconds from the first encoded byte asked for to the last one stored.
    """

    step: int
    version: int
    kind: str
    nbytes: int
    full_nbytes: int
    changed: int
    total: int
    loss: float | None
    reference: str
    train: float
    blocked: float
    encode: float
    upload: float

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.total if self.total else 0.0


class StepApplied(Struct, frozen=True, kw_only=True, tag_field="event", tag="applied"):
    """A follower has taken a step over, used it, and compared it with the trainer's own weights.

    Attributes:
        step: The training step.
        version: The state counter.
        whole: Whether it came as a whole state, not as changes to what the follower held.
        nbytes: Bytes that were downloaded for it.
        apply: Seconds of the write into the model.
        latency: Seconds from the trainer's call of `publish` until the weights stood in the model.
        compared: Elements that were compared.
        differing: Elements whose bits differ from the trainer's.
        similarity: Cosine of two fixed sentences, embedded with these weights.
    """

    step: int
    version: int
    whole: bool
    nbytes: int
    apply: float
    latency: float
    compared: int
    differing: int
    similarity: float


Line = Ready | StepPublished | StepApplied

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    """Return the line's bytes, with the newline.

    >>> encode_line(Ready(held=4)).decode().rstrip()
    '{"event":"ready","held":4}'
    """
    return _encoder.encode(line) + b"\n"


def decode_line(text: bytes) -> Line:
    """Return what a line says.

    Raises:
        MessageFormatError: If it is not one of the lines above.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageFormatError(f"a process of the demo wrote {text[:80]!r}, which is no report: {error}") from error


class Stagehand:
    """A process's line to the stage that started it; to be made once, first thing in the process.

    Standard output then belongs to the reports alone: what libraries print there goes to standard error. When standard
    input ends, the process ends at once, so that nothing is left running behind a stage that was killed.
    """

    def __init__(self) -> None:
        self._reports: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._going = threading.Event()
        threading.Thread(target=self._listen, name="stage", daemon=True).start()

    def report(self, line: Line) -> None:
        """Tell the stage something."""
        self._reports.write(encode_line(line))
        self._reports.flush()

    def wait_for_go(self, timeout: float) -> None:
        """Wait until the stage says `go`.

        Args:
            timeout: Limit in seconds.

        Raises:
            WaitTimeoutError: If the limit is reached.
        """
        if not self._going.wait(timeout):
            raise WaitTimeoutError(
                f"the stage did not say go within {timeout} s; its other processes did not get ready"
            )

    def _listen(self) -> None:
        # Unbuffered: a buffer's lock, held by a waiting thread, would make the interpreter's own end fail.
        with open(os.dup(sys.stdin.fileno()), "rb", buffering=0) as words:  # noqa: PTH123 - a descriptor has no path
            for line in words:
                if line.strip() == b"go":
                    self._going.set()
        os._exit(_ORPHANED)
