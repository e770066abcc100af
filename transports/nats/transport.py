"""`nats://host:port/topic`: a topic in JetStream streams, as a `Transport`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, ClassVar, Self

from deltabus.bus.transport import Buffer, Guarantees, Record, StoredBlob, Transport

from ..names import (
    byte_view,
    check_after,
    check_key,
    check_keys,
    check_log,
    check_position,
    check_range,
    check_record,
)
from ..options import Option
from ..registry import Address
from .blobs import Blobs
from .chunks import Chunks
from .connection import Connection
from .jetstream import JetStream
from .log import Log
from .settings import OPTIONS, Settings, read_settings
from .streams import Streams
from .tail import follow

__all__ = ["NatsTransport"]

_SETTLING = 2.0


class NatsTransport(Transport):
    """A topic on NATS servers, whose streams the first write creates.

    Args:
        settings: Where, who and how; `read_settings` makes it from a URL.
    """

    guarantees = Guarantees(
        conditional_append=True,
        push=True,
        durable=True,
        atomic_visibility=True,
        remark="Survives the death of server processes; of a whole machine with replicas=3, or with sync_interval: "
        "always in the server's configuration.",
    )
    options: ClassVar[Sequence[Option]] = OPTIONS

    def __init__(self, settings: Settings) -> None:
        self.url = settings.url
        if settings.limits.storage == "memory":
            self.guarantees = Guarantees(
                conditional_append=True,
                push=True,
                durable=False,
                atomic_visibility=True,
                remark="In the memory of the servers (storage=memory), and gone with them.",
            )
        self._connection = Connection(settings)
        self._jetstream = JetStream(self._connection, url=self.url, domain=settings.domain)
        self._streams = Streams(self._jetstream, settings.topic, settings.limits, url=self.url)
        chunks = Chunks(self._jetstream, url=self.url, timeout=settings.timeout)
        self._blobs = Blobs(self._jetstream, self._streams, chunks, url=self.url, timeout=settings.timeout)
        self._log = Log(self._jetstream, self._streams, chunks, url=self.url)

    @classmethod
    def from_address(cls, address: Address, **options: Any) -> Self:  # noqa: ANN401 - as declared in `options`
        """Return the topic that the URL names.

        Raises:
            UsageError: If the URL names no server or topic, or several ways to log in.
        """
        return cls(read_settings(address, **options))

    async def put(self, key: str, data: Buffer) -> None:  # noqa: D102
        self._connection.check_open()
        check_key(key)
        await self._blobs.put(key, byte_view(data))

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:  # noqa: D102
        self._connection.check_open()
        check_key(key)
        check_range(start, stop)
        return await self._blobs.get(key, start, stop)

    async def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        self._connection.check_open()
        await self._blobs.delete(check_keys(keys))

    async def blobs(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        self._connection.check_open()
        return await self._blobs.find(check_key(folder))

    async def append(self, log: str, position: int, record: Buffer) -> None:  # noqa: D102
        self._connection.check_open()
        check_log(log)
        check_position(position)
        await self._log.append(log, position, check_record(record))

    async def read(self, log: str, after: int = -1, limit: int = 1024) -> list[Record]:  # noqa: D102
        self._connection.check_open()
        check_log(log)
        check_after(after, limit)
        records, _ = await self._log.read(log, after, limit)
        return records

    def tail(self, log: str, after: int = -1) -> AsyncIterator[Record]:  # noqa: D102
        self._connection.check_open()
        check_log(log)
        check_after(after)
        return follow(log, after, records=self._log, jetstream=self._jetstream, streams=self._streams, url=self.url)

    async def trim(self, log: str, before: int) -> None:  # noqa: D102
        self._connection.check_open()
        check_log(log)
        check_position(before)
        await self._log.trim(log, before)

    async def logs(self) -> list[str]:  # noqa: D102
        self._connection.check_open()
        return await self._log.logs()

    async def close(self) -> None:  # noqa: D102
        await self._blobs.settle(_SETTLING)
        await self._connection.close()
