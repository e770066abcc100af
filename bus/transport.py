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
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

__all__ = ["Buffer", "Guarantees", "Record", "StoredBlob", "Transport"]

Buffer = bytes | bytearray | memoryview


class Record(NamedTuple):
    """One entry of a log.

    Attributes:
        position: Its place, from 0.
        data: Its bytes.
    """

    position: int
    data: bytes


class StoredBlob(NamedTuple):
    """A blob that a backend holds.

    Attributes:
        key: Where it lies in the topic.
        size: Its length in bytes; None where the backend does not tell it cheaply.
        stored: When it was stored, in seconds since 1970 on the backend's own clock, which may differ from this
            machine's; None where the backend does not tell. Of one topic such times can be compared with each other.
    """

    key: str
    size: int | None
    stored: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """How a transport keeps the contract, and what it does beyond it; the documentation shows it as a table.

    Attributes:
        conditional_append: Whether the backend itself lets one of several racing writers win a position. Where it does
            not, the transport decides among those that were written, by a rule that every reader follows.
        push: Whether readers are told of a new record; otherwise they ask again and again.
        durable: Whether what was acknowledged survives the death of every process involved.
        atomic_visibility: Whether the backend itself never shows part of a blob or record.
        remark: What to know about it, in one sentence.
    """

    conditional_append: bool
    push: bool
    durable: bool
    atomic_visibility: bool
    remark: str


class Transport(abc.ABC):
    """One topic on one backend; use it as `async with`.

    Attributes:
        url: The topic's URL, without secrets, for errors and logs.
        guarantees: How the contract is kept; of the class, unless it depends on the address.
    """

    url: str
    guarantees: Guarantees

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
    async def blobs(self, folder: str) -> list[StoredBlob]:
        """Return the blobs whose keys begin with `folder` and a slash, sorted by key.

        What was stored, or removed, while this runs may be among them or not. The keys are all held in memory.

        Raises:
            UsageError: If the folder is malformed; it is written like a key.
            AccessDeniedError: If the backend refuses to be read.
            TransientTransportError: If the backend did not answer, or not in time.
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
    async def trim(self, log: str, before: int) -> None:
        """Remove the records in front of a position, oldest first; those that are gone already count as removed.

        A log keeps its last record, whatever is asked for, so that it goes on where it ended. A call that fails or
        dies halfway leaves a log that begins later than before, never one with a hole; readers go on with what is left.
        Leave what an `append` that is still under way may stand behind: where the backend cannot refuse a write behind
        a removed record, one that slept meanwhile would put its own in front of the log.

        Raises:
            UsageError: If the log's name is malformed, or the position negative.
            AccessDeniedError: If the backend refuses.
            TransientTransportError: If the backend did not answer, or not in time; some may be gone.
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
