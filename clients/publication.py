"""What `publish` returns: a handle now, and the facts of the stored message later."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from deltabus.bus.errors import WaitTimeoutError
from deltabus.bus.message import Message

__all__ = ["Publication", "Published"]


@dataclass(frozen=True, slots=True)
class Published:
    """The durable message that carries a published step.

    Attributes:
        message: The message as it stands in the log.
        steps: Every step that it covers, oldest first; more than one when publications were folded together.
        seconds: Duration of each stage: `blocked` (inside `publish`), `encode`, `upload`, `total` (from the call of
            `publish` until durable). Encoding and uploading overlap.
    """

    message: Message
    steps: tuple[int, ...]
    seconds: Mapping[str, float]

    @property
    def step(self) -> int:
        """The newest step that the message covers."""
        return self.message.step

    @property
    def version(self) -> int:
        """The writer's state counter after the message."""
        return self.message.version

    @property
    def position(self) -> int:
        """The message's place in the log."""
        return self.message.position

    @property
    def kind(self) -> str:
        """`anchor` or `delta`."""
        return str(self.message.kind)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.message.nbytes

    @property
    def changed(self) -> int:
        """Elements that changed."""
        return self.message.stats.changed

    @property
    def held(self) -> int:
        """Elements that differ from the newest step's still: `threshold` or `budget` held them back."""
        return self.message.stats.held

    @property
    def total(self) -> int:
        """Elements of the state."""
        return self.message.stats.total

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.message.stats.density


class Publication:
    """A step on its way; wait for it with `result()` in synchronous code, or `await` it.

    Attributes:
        step: The step that was handed to `publish`.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._future: concurrent.futures.Future[Published] = concurrent.futures.Future()

    def __repr__(self) -> str:
        state = "durable" if self.done() and not self._future.exception() else "failed" if self.done() else "on its way"
        return f"<Publication of step {self.step}, {state}>"

    def done(self) -> bool:
        """Return whether the step is durable, or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Published:
        """Wait until the step is durable, and return the message that carries it.

        Args:
            timeout: Limit in seconds; None waits as long as the publisher itself tries.

        Raises:
            WaitTimeoutError: If the limit is reached; the publication goes on.
            PublishError: If the step could not be stored. Its changes are not lost: they travel with the next one.
            FencedError: If another process took the log over.
            SignatureError: If somebody without an accepted key wrote to the log.
            ClosedError: If the publisher was closed before.
        """
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self.done():
                raise
            raise WaitTimeoutError(f"step {self.step} was not durable within {timeout} s; it is still tried") from error

    def __await__(self) -> Generator[Any, None, Published]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def succeed(self, published: Published) -> None:
        """Say that the step is durable; the sender does."""
        if not self._future.done():
            self._future.set_result(published)

    def fail(self, error: BaseException) -> None:
        """Say that the step could not be stored; the sender does."""
        if not self._future.done():
            self._future.set_exception(error)
