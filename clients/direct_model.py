"""The model that a `DirectSubscriber` writes into: what it holds, and how messages get into it without a copy of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from torch import Tensor, nn

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import CorruptPayloadError, DivergedError, UsageError
from deltabus.bus.message import Kind, Message
from deltabus.bus.planner import Fingerprint
from deltabus.codecs.apply import Target
from deltabus.codecs.changes import Bits
from deltabus.codecs.container import decode_anchor, decode_delta
from deltabus.codecs.digest import advanced, digest_delta
from deltabus.codecs.schema import Schema

from .bindings import Bindings
from .fetching import Fetcher, in_thread
from .lanes import UNAVAILABLE
from .sender import newest_state

__all__ = ["DirectModel", "leads_to_same"]

_log = logging.getLogger("deltabus.subscriber")


class DirectModel:
    """A model that one writer's messages are written into.

    Args:
        model: A model, or a mapping of names to tensors.
        reader: Where schemas are read.
        fetcher: Where payloads are fetched.
        topic: Named in errors.

    Attributes:
        held: The message that leads to the state that it holds; None when it is not known, or holds none.
        recognised: Whether that was found out since something else may have been written to it.
        pool: Where decoding runs in parallel.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Tensor], reader: TopicReader, fetcher: Fetcher, *, topic: str
    ) -> None:
        self._model, self._reader, self._fetcher, self._topic = model, reader, fetcher, topic
        self._bindings = Bindings()
        self._schemas: dict[bytes, Schema] = {}
        self.held: Message | None = None
        self.recognised = False
        self.pool: Executor | None = None

    async def schema(self, message: Message) -> Schema:
        """Return the schema of a message.

        Raises:
            KeyNotFoundError: If it is not there.
            CorruptPayloadError: If it is damaged.
            TransportError: If it cannot be fetched.
        """
        blob = message.schema
        if blob.checksum not in self._schemas:
            self._schemas[blob.checksum] = Schema.decode(await self._reader.schema(blob))
        return self._schemas[blob.checksum]

    async def recognise(self, messages: Sequence[Message]) -> None:
        """Find out which of the states that messages lead to the model holds, if any.

        Raises:
            SchemaMismatchError: If the model cannot hold the tensors of the newest.
            UsageError: If it has only a part of them.
            TransportError: If the schema cannot be fetched.
        """
        newest = newest_state(messages)
        if newest is None:
            return
        found: Message | None = None
        try:
            digest = await in_thread((await self._target(newest)).digest, self.pool)
        except DivergedError as error:
            _log.warning(
                "%s: the model's copies of tensor %r differ; the whole state is fetched", self._topic, error.tensor
            )
        except UNAVAILABLE as error:
            _log.warning(
                "%s: %s What the model holds cannot be recognised; the whole state is fetched.", self._topic, error
            )
        else:
            state = Fingerprint(digest, newest.schema.checksum)
            found = newest_state(message for message in messages if Fingerprint.after(message) == state)
        self.held, self.recognised = found, True

    async def verify(self) -> None:
        """Compare every element with the state that the model should hold; if it holds another, that is forgotten.

        Raises:
            DivergedError: If it holds another, or none is known that it should hold.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
        """
        held = self.held
        if held is None:
            raise DivergedError("no update was applied yet, and the model held none of the topic's states")
        target = await self._target(held)
        why, tensor = "its digest is another", ""
        try:
            if await in_thread(target.digest, self.pool) == held.digest_after:
                return
        except DivergedError as error:
            why, tensor = f"its copies of tensor {error.tensor!r} differ", error.tensor
        self._forget()
        raise DivergedError(
            f"the model does not hold version {held.version} of {self._topic}: {why}, because somebody else wrote to "
            "it; the next update writes the whole state",
            tensor=tensor,
        )

    async def write(self, message: Message, parts: list[bytes] | None) -> int:
        """Write a message into the model, a delta all or nothing, and return how many elements.

        Args:
            message: What is written.
            parts: Its payload, if it was fetched.

        Raises:
            DivergedError: If touched elements do not hold the bits that the publisher had.
            SchemaMismatchError: If tensors are missing, or of another shape or dtype.
            CorruptPayloadError: If the payload is damaged.
            TransportError: If the payload cannot be fetched.
        """
        if leads_to_same(message, self.held):
            self._hold(message)  # the trainer came back to the very state
            return 0
        schema = await self.schema(message)
        target = await self._target(message)
        write = partial(self._change, message, schema, target)
        if message.kind is Kind.ANCHOR:
            write = partial(self._load, message, schema, target)
        if parts is not None:
            return await in_thread(write, parts)
        return await self._fetcher.decode(message.blobs, [0.0], write)

    async def _target(self, message: Message) -> Target:
        """Return the model's tensors for a message."""
        (target,) = await in_thread(self._bindings.bind, self._model, [await self.schema(message)])
        if not target.complete:
            raise UsageError(f"the model has only a part of the tensors of {self._topic}; follow it with `Subscriber`")
        return target

    def _change(self, message: Message, schema: Schema, target: Target, parts: Iterable[bytes]) -> int:
        held = self.held
        self._forget()
        if held is None or Fingerprint.after(held) != Fingerprint.before(message):
            raise DivergedError(
                f"version {message.version} does not start from what the model holds; ask for an update"
            )
        changes = decode_delta(iter(parts), schema, target.read, pool=self.pool)
        if advanced(held.digest_after, digest_delta(changes)) != message.digest_after:
            raise DivergedError(
                f"the update to version {message.version} does not fit the model: with the bits that it holds where it "
                "is touched, the digest comes out wrong, because somebody else wrote to it; nothing was changed, and "
                "the next update writes the whole state"
            )
        target.stage(changes).write()
        self._hold(message)
        return changes.count

    def _load(self, message: Message, schema: Schema, target: Target, parts: Iterator[bytes]) -> int:
        states = decode_anchor(parts, schema, pool=self.pool)

        def read(index: int) -> Bits:
            found, bits = next(states, (-1, None))
            if bits is None or found != index:
                raise CorruptPayloadError(f"the anchor lacks segment {index}; publish another anchor")
            return bits

        self._forget()
        target.load(read)
        for index, _ in states:  # the end of the payload is checked when it is asked for
            raise CorruptPayloadError(f"the anchor holds segment {index} after its last; publish another anchor")
        if target.digest(self.pool) != message.digest_after:
            raise DivergedError(
                f"the model does not hold version {message.version} after it was written; apply it again"
            )
        self._hold(message)
        return schema.total

    def _forget(self) -> None:
        """Count the model as unknown, before something that may fail; then it is found out anew what it holds."""
        self.held, self.recognised = None, False

    def _hold(self, message: Message) -> None:
        self.held, self.recognised = message, True


def leads_to_same(one: Message, other: Message | None) -> bool:
    """Return whether two messages lead to the very same bits."""
    return other is not None and Fingerprint.after(one) == Fingerprint.after(other)
