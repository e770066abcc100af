"""Going through a log with one state in memory: each delta applied, each anchor and each skip delta compared.

Where a skip delta starts from a version that was passed before, a snapshot of that version is kept: what changed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor

from deltabus.bus.errors import CorruptPayloadError
from deltabus.bus.message import Kind, Message
from deltabus.codecs.changes import Bits
from deltabus.codecs.container import decode_anchor, decode_delta
from deltabus.codecs.digest import advanced, digest_delta, digest_of
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Shadow, Snapshot

__all__ = ["Replay"]


class Replay:
    """Holds the state of one version of one writer, and goes on from it message by message.

    Args:
        pool: Where decoding runs in parallel.
        log: The messages that will be taken, by position.
    """

    def __init__(self, pool: Executor, log: Sequence[Message]) -> None:
        self._pool = pool
        self._awaited = Counter(message.base[message.writer] for message in _skips(log))
        self._passed: dict[int, Snapshot] = {}
        self._shadow: Shadow | None = None
        self._version = 0
        self._digests: dict[int, int] = {}

    @property
    def bases(self) -> set[int]:
        """The versions that a delta may start from now."""
        return {self._version, *self._passed}

    def can_take(self, message: Message, schema: Schema) -> bool:
        """Return whether the message can be decoded: an anchor always, a delta if what it starts from is held."""
        if message.kind is Kind.ANCHOR:
            return True
        if self._is_skip(message):
            passed = self._passed.get(message.base[message.writer])
            return passed is not None and passed.schema == schema
        held = self._version > 0 and self._version == message.base[message.writer]
        return held and self._shadow is not None and self._shadow.schema == schema

    def take(self, message: Message, schema: Schema, parts: Iterable[bytes]) -> None:
        """Decode a message and check where it leads; on an error the state is that from before, or none.

        An anchor, or a delta from an older base, of a version that was reached already is only compared with it.

        Raises:
            CorruptPayloadError: If the payload is damaged, or leads to another digest than its message says, or than
                the version had when it was reached before.
            DivergedError: If a delta does not start from the state held, where that shows.
            SchemaMismatchError: If a part is of another schema.
        """
        if message.kind is Kind.ANCHOR:
            self._take_anchor(message, schema, parts)
        elif self._is_skip(message):
            self._take_skip(message, schema, parts)
        else:
            self._take_delta(message, schema, parts)

    def _is_skip(self, message: Message) -> bool:
        return message.kind is Kind.DELTA and message.version in self._digests

    def _take_skip(self, message: Message, schema: Schema, parts: Iterable[bytes]) -> None:
        base = message.base[message.writer]
        held, known = self._digests[base], self._digests[message.version]
        if message.digest_before != held:
            raise _misled("its delta starts from", held, message.digest_before)
        changes = decode_delta(parts, schema, self._passed[base].read, pool=self._pool)
        digest = advanced(held, digest_delta(changes))
        if digest != known:
            what = f"version {message.version} was reached by deltas, and its delta from version {base} leads to"
            raise _misled(what, digest, known)
        if digest != message.digest_after:
            raise _misled("its delta leads to", digest, message.digest_after)
        self._awaited[base] -= 1
        if not self._awaited[base]:
            self._passed.pop(base).release()

    def _take_delta(self, message: Message, schema: Schema, parts: Iterable[bytes]) -> None:
        shadow = self._shadow
        assert shadow is not None
        held = self._digests[self._version]
        if message.digest_before != held:
            raise _misled("its delta starts from", held, message.digest_before)
        changes = decode_delta(parts, schema, shadow.read, pool=self._pool)
        digest = advanced(held, digest_delta(changes))
        if digest != message.digest_after:
            raise _misled("its delta leads to", digest, message.digest_after)
        shadow.advance(changes)
        self._reached(message.version, digest)

    def _take_anchor(self, message: Message, schema: Schema, parts: Iterable[bytes]) -> None:
        known = self._digests.get(message.version)
        if known is not None:
            digest = self._digest_of_parts(schema, parts, None)
            if digest != known:
                raise _misled(f"version {message.version} was reached by deltas, and its anchor holds", digest, known)
        else:
            # The old state goes first, so that there are never two; what is loaded counts only when all is there.
            self._version = 0
            if self._shadow is None or self._shadow.schema != schema:
                self._shadow = None
                self._shadow = Shadow.empty(schema)
            digest = self._digest_of_parts(schema, parts, self._shadow)
        if digest != message.digest_after:
            raise _misled("its anchor holds", digest, message.digest_after)
        if known is None:
            self._reached(message.version, digest)

    def _digest_of_parts(self, schema: Schema, parts: Iterable[bytes], shadow: Shadow | None) -> int:
        """Return the digest of an anchor's state, in the memory of a few segments; load it into the shadow too."""
        states = decode_anchor(parts, schema, pool=self._pool)

        def read(index: int) -> Bits:
            found, bits = next(states, (-1, None))
            if bits is None or found != index:
                raise CorruptPayloadError(f"the anchor lacks segment {index}; publish another anchor")
            if shadow is not None:
                shadow.load(index, bits)
            return bits

        digest = digest_of(schema, read)
        for index, _ in states:  # the end of the payload is checked when it is asked for
            raise CorruptPayloadError(f"the anchor holds segment {index} after its last; publish another anchor")
        return digest

    def _reached(self, version: int, digest: int) -> None:
        self._version = version
        self._digests[version] = digest
        if self._awaited[version] > 0 and self._shadow is not None:
            self._passed[version] = self._shadow.snapshot()


def _skips(log: Sequence[Message]) -> Iterator[Message]:
    """Yield the deltas that lead again to versions that stand before them."""
    reached: set[int] = set()
    for message in log:
        if message.kind is Kind.DELTA and message.version in reached:
            yield message
        reached.add(message.version)


def _misled(what: str, found: int, said: int | None) -> CorruptPayloadError:
    return CorruptPayloadError(f"{what} digest {found:016x}, where {said or 0:016x} was promised; publish an anchor")
