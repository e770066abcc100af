"""The port: what a backend must do to carry a topic.

A transport keeps two kinds of things for one topic. Blobs are large, immutable byte strings under keys. Logs are small
records at positions 0, 1, 2, ... that are appended one at a time, by at most one winner per position. It knows nothing
of what either means. Order, retries, checksums and history are the business of `deltabus.bus.core`.

Contract, which `tests/transports/conformance.py` holds every implementation to:

- **Atomic visibility.** A reader sees a blob or record whole, or not at all.
- **Write once.** Neither a blob nor a record ever changes. Writing the same bytes again is a success, so that a call
  whose answer was lost may be made again; writing other bytes is an error.
- **Mutual exclusion.** Of all callers that append different records at one position exactly one succeeds.
- **Durability.** When `put` or `append` returns, the bytes survive the death of every process involved (and of the
  machine, where the backend has a disk).
- **Order.** A blob whose `put` returned before an `append` began can be read by whoever sees that record.
- **Bounded.** No call waits for ever: an operation that makes no progress raises `TransientTransportError`. Only
  `tail` waits, until its consumer stops.
- **Cancellation.** A cancelled call leaves a state that one of its two outcomes could have left.

A transport belongs to one event loop. Several transports, in several loops, threads and processes, may serve one topic.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import NamedTuple, Self

__all__ = ["Buffer", "Record", "Transport"]

Buffer = bytes | bytearray | memoryview


class Record(NamedTuple):
    """One entry of a log.

    Attributes:
        position: Its place, from 0.
        data: Its bytes.
    """

    position: int
    data: bytes


class Transport(abc.ABC):
    """One topic on one backend; use it as `async with`.

    Attributes:
        url: The topic's URL, without secrets, for errors and logs.
    """

    url: str

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abc.abstractmethod
    async def put(self, key: str, data: Buffer) -> None:
        """Store a blob, write-once; return when it is durable and visible.

        Raises:
            KeyExistsError: If other bytes are stored under the key.
            UsageError: If the key is malformed.
            StorageFullError: If the backend has no room; nothing is left behind.
            AccessDeniedError: If the backend refuses to be written.
            TransientTransportError: If the backend did not answer, or not in time; the blob may or may not be stored.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` (exclusive; None is the end) of a blob, fewer where it ends sooner.

        Raises:
            KeyNotFoundError: If there is no such blob.
            UsageError: If the key is malformed or the range negative.
            AccessDeniedError: If the backend refuses to be read.
            TransientTransportError: If the backend did not answer, or not in time.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def delete(self, keys: Iterable[str]) -> None:
        """Remove blobs; those that are not there count as removed.

        Raises:
            UsageError: If a key is malformed.
            AccessDeniedError: If the backend refuses.
            TransientTransportError: If the backend did not answer, or not in time; some may be gone.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def append(self, log: str, position: int, record: Buffer) -> None:
        """Write a record at a position that is empty, or holds these very bytes; return when it is durable and visible.

        The log's first record stands at 0; the position before must be taken (a log has no holes).

        Raises:
            PositionTakenError: If another record is there.
            UsageError: If the log's name is malformed, the position negative, the position before it empty, or the
                record over `deltabus.bus.message.MAX_RECORD_BYTES`.
            AppendUnknownError: If the answer was lost; read the position to learn who won.
            StorageFullError: If the backend has no room; nothing is left behind.
            AccessDeniedError: If the backend refuses to be written.
            TransientTransportError: If the backend did not answer and surely wrote nothing.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:
        """Return the records behind position `after`, in order, at most `limit`; an empty list when there are none.

        A log that does not exist is empty.

        Raises:
            UsageError: If the log's name is malformed.
            AccessDeniedError: If the backend refuses to be read.
            TransientTransportError: If the backend did not answer, or not in time.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:
        """Yield the records behind position `after`, in order, each once, and wait for more, for ever.

        A log that does not exist yet is waited for. Close the iterator (`aclose`) to stop.

        Raises:
            UsageError: If the log's name is malformed.
            AccessDeniedError: If the backend refuses to be read.
            TransientTransportError: If the backend did not answer in time; tail again from the last record seen.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def logs(self) -> list[str]:
        """Return the names of the logs that hold at least one record, sorted; an empty list for a new topic.

        Raises:
            AccessDeniedError: If the backend refuses to be read.
            TransientTransportError: If the backend did not answer, or not in time.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections and tasks; may be called more than once, and never raises for what is already closed."""
