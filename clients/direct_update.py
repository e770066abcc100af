"""What a `DirectSubscriber` yields: `DirectUpdate`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from deltabus.bus.errors import StaleUpdateError
from deltabus.bus.message import Kind, Message

__all__ = ["DirectUpdate"]


class DirectUpdate:
    """What leads from what a model holds to the newest state.

    Args:
        messages: What it is made of.
        ahead: Payloads that were fetched, by position.
        seconds: Durations so far.
        write: Writes one message into the model, and returns how many elements.
        tell: Told when all were written.

    Attributes:
        messages: What it is made of, in order.
        seconds: Duration of each stage: `download`, and after `apply` also `apply`.
    """

    def __init__(
        self,
        messages: tuple[Message, ...],
        ahead: dict[int, list[bytes]],
        seconds: dict[str, float],
        *,
        write: Callable[[Message, list[bytes] | None], Awaitable[int]],
        tell: Callable[[DirectUpdate, int], object],
    ) -> None:
        self.messages, self.seconds = messages, seconds
        self._ahead, self._write, self._tell = ahead, write, tell
        self._stale = False

    def __repr__(self) -> str:
        return f"<DirectUpdate to step {self.step}, version {self.version}, {len(self.messages)} messages>"

    @property
    def step(self) -> int:
        """The training step that the weights belong to."""
        return self.messages[-1].step

    @property
    def version(self) -> int:
        """The writer's state counter."""
        return self.messages[-1].version

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(message.nbytes for message in self.messages)

    @property
    def whole(self) -> bool:
        """Whether it carries the whole state."""
        return self.messages[0].kind is Kind.ANCHOR

    @property
    def metadata(self) -> Mapping[str, str]:
        """The publisher's key-value pairs of the newest message."""
        return self.messages[-1].metadata

    async def apply(self) -> None:
        """Write the update into the model, message by message, each delta all or nothing.

        Where one fails, the model holds the state that those before it lead to; a whole state that fails midway leaves
        a mixture. In either case the next update makes it good. Nothing else may write to the model, or read from it,
        meanwhile.

        Raises:
            DivergedError: If touched elements do not hold the bits that the publisher had.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
            CorruptPayloadError: If a payload is damaged.
            StaleUpdateError: If another update was asked for since, or it was applied.
            TransportError: If a payload that was not fetched ahead cannot be fetched.
        """
        if self._stale:
            raise StaleUpdateError(f"the update to step {self.step} was applied, or overtaken; ask for the next one")
        self._stale = True
        started, changed = time.perf_counter(), 0
        for message in self.messages:
            changed += await self._write(message, self._ahead.pop(message.position, None))
        self.seconds["apply"] = time.perf_counter() - started
        self._tell(self, changed)

    def retire(self) -> None:
        """Called when the next update is asked for."""
        self._stale = True
        self._ahead.clear()
