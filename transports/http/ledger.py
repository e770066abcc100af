"""What is known of a topic without asking its backend: from the records and requests that pass through.

Nothing here decides anything; it is for people, and for telling a blob's size and checksum beforehand.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deltabus.bus.errors import MessageFormatError
from deltabus.bus.message import Blob, Kind, Message, decode_message
from deltabus.bus.transport import Record

__all__ = ["Ledger", "Reader"]

_KEPT = 512
_KEPT_BLOBS = 1 << 14
_MAX_WRITERS = 1024
_MAX_READERS = 1024
_READER_SECONDS = 3600.0
_PAYLOAD = re.compile(r"blobs/([A-Za-z0-9][A-Za-z0-9_-]{0,62})/([0-9]{1,19})-.*")
_WIDTHS = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]


class _Schema(msgspec.Struct):
    tensors: list[_Tensor]


_decode_schema = msgspec.json.Decoder(_Schema).decode


@dataclass(slots=True)
class Reader:
    """How far a reader has come.

    Attributes:
        name: As it calls itself.
        seen: When it was last heard of, in seconds of a clock that never goes back.
        holds: The version of each writer that it says it holds.
        fetched: The newest version of each writer of which it fetched a payload.
        following: How many logs it follows now.
    """

    name: str
    seen: float
    holds: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    following: int = 0

    def version_of(self, writer: str) -> int | None:
        """Return how far it has come, as far as that is known."""
        return self.holds.get(writer, self.fetched.get(writer))


class Ledger:
    """What passed of one topic.

    Args:
        clock: Tells seconds that never go back.
        changed: Is called when there is something new to show.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._changed = changed
        self._messages: dict[str, deque[Message]] = {}
        self._last: dict[str, int] = {}
        self._blobs: OrderedDict[str, Blob] = OrderedDict()
        self._readers: dict[str, Reader] = {}
        self._model_bytes: dict[str, int] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing has passed yet."""
        return not self._messages and not self._readers

    def last_position(self, log: str) -> int:
        """Return the last position of a log that passed; -1 when none has."""
        return self._last.get(log, -1)

    def see(self, log: str, record: Record) -> None:
        """Take note of a record."""
        if log not in self._last and len(self._last) >= _MAX_WRITERS:
            return
        if record.position <= self._last.get(log, -1):
            return
        self._last[log] = record.position
        try:
            message = decode_message(record.data)
        except MessageFormatError:
            return  # readers refuse it; here it is nothing to show
        self._messages.setdefault(log, deque(maxlen=_KEPT)).append(message)
        for blob in (message.schema, *message.blobs):
            self._blobs[blob.key] = blob
            self._blobs.move_to_end(blob.key)
        while len(self._blobs) > _KEPT_BLOBS:
            self._blobs.popitem(last=False)
        self._changed()

    def blob(self, key: str) -> Blob | None:
        """Return what the messages say of a blob; None when none names it."""
        return self._blobs.get(key)

    def schemas(self) -> list[str]:
        """Return the schemas whose model's size is not known yet."""
        keys = {messages[-1].schema.key for messages in self._messages.values() if messages}
        return sorted(keys - self._model_bytes.keys())

    def learn_schema(self, key: str, data: bytes) -> None:
        """Take note of the size of a model, from its schema."""
        try:
            schema = _decode_schema(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._model_bytes[key] = 0
            return
        total = 0
        for tensor in schema.tensors:
            count = _WIDTHS.get(tensor.dtype, 1)
            for length in tensor.shape:
                count *= length
            total += count
        self._model_bytes[key] = total
        self._changed()

    def heard(self, name: str, *, key: str = "", holds: Mapping[str, int] | None = None, following: int = 0) -> None:
        """Take note of a reader.

        Args:
            name: As it calls itself.
            key: The blob that it asks for, if it does.
            holds: The version of each writer that it says it holds, if it does.
            following: 1 if it begins to follow a log, -1 if it ends.
        """
        now = self._clock()
        reader = self._readers.get(name)
        if reader is None:
            if len(self._readers) >= _MAX_READERS:
                self._forget(now)
            if len(self._readers) >= _MAX_READERS:
                return
            reader = self._readers[name] = Reader(name=name, seen=now)
            self._changed()
        reader.seen = now
        reader.following += following
        if holds is not None and reader.holds != dict(holds):
            reader.holds = dict(holds)
            self._changed()
        payload = _PAYLOAD.fullmatch(key)
        if payload:
            writer, version = payload[1], int(payload[2])
            if version > reader.fetched.get(writer, -1) and len(reader.fetched) < _MAX_WRITERS:
                reader.fetched[writer] = version
                self._changed()

    def readers(self) -> list[Reader]:
        """Return those who were heard of within an hour, or follow."""
        self._forget(self._clock())
        return sorted(self._readers.values(), key=lambda reader: reader.name)

    def versions(self) -> dict[str, int]:
        """Return the newest version of each writer."""
        return {log: max(message.version for message in messages) for log, messages in self._messages.items()}

    def greatest_lag(self) -> int | None:
        """Return how many versions the slowest reader is behind; None when nothing is known of any."""
        newest = self.versions()
        lags = [lag for reader in self.readers() if (lag := self._lag(reader, newest)) is not None]
        return max(lags, default=None)

    def as_json(self, *, last: int = 100) -> dict[str, Any]:
        """Return all of it for people, with so many of the newest messages of each log."""
        newest = self.versions()
        now = self._clock()
        return {
            "logs": [
                {
                    "log": log,
                    "version": newest[log],
                    "position": self._last[log],
                    "model_bytes": self._model_bytes.get(messages[-1].schema.key) or None,
                    "messages": [_shown(message) for message in list(messages)[-last:]],
                }
                for log, messages in sorted(self._messages.items())
            ],
            "readers": [
                {
                    "name": reader.name,
                    "idle": round(now - reader.seen, 1),
                    "following": reader.following,
                    "versions": reader.fetched | reader.holds,
                    "lag": self._lag(reader, newest),
                }
                for reader in self.readers()
            ],
        }

    def _lag(self, reader: Reader, newest: Mapping[str, int]) -> int | None:
        """Return how many versions a reader is behind, at most of all writers."""
        lags = [newest[log] - version for log in newest if (version := reader.version_of(log)) is not None]
        return max(0, *lags) if lags else None

    def _forget(self, now: float) -> None:
        for name, reader in list(self._readers.items()):
            if not reader.following and now - reader.seen > _READER_SECONDS:
                del self._readers[name]


def _shown(message: Message) -> dict[str, Any]:
    base = message.base.get(message.writer)
    kind = "delta" if base == message.version - 1 else "skip"
    return {
        "position": message.position,
        "version": message.version,
        "step": message.step,
        "kind": "anchor" if message.kind is Kind.ANCHOR else kind,
        "base": base,
        "bytes": message.nbytes,
        "changed": message.stats.changed,
        "total": message.stats.total,
        "created": message.created,
    }
