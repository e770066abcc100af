"""How a log is read to its end, and what each record of it has to show before it is trusted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from .errors import SignatureError, TransientTransportError, UsageError
from .message import Message, decode_message
from .retry import Retry
from .signing import NO_RECORD, KeyRing, Seal, check_record
from .transport import Record, Transport

__all__ = ["Entry", "Link", "admit", "parse_seen", "read_last", "read_log", "seen_text"]

_PAGE = 1024
_SEEN = re.compile(r"([A-Za-z0-9_-]{1,63})@([0-9]{1,19}):([0-9a-f]{32}):([0-9a-f]{64})")


class Link(NamedTuple):
    """Where a log stands behind a record: what the next one is checked against.

    Attributes:
        position: The record's.
        identity: The SHA-256 of its bytes.
        log_id: The log's id, as the record's seal says; None when seals are not checked here.
    """

    position: int
    identity: bytes
    log_id: bytes | None

    @classmethod
    def behind(cls, record: Record, log_id: bytes | None) -> Link:
        """Return the link behind a record."""
        return cls(record.position, hashlib.sha256(record.data).digest(), log_id)


class Entry(NamedTuple):
    """A message that may be trusted as far as keys are known, and where its log stands behind it."""

    message: Message
    link: Link


def seen_text(links: Mapping[str, Link]) -> str:
    """Return where logs stand as a text, which `parse_seen` reads; logs whose seals were not checked are left out."""
    return " ".join(
        f"{log}@{link.position}:{link.log_id.hex()}:{link.identity.hex()}"
        for log, link in sorted(links.items())
        if link.log_id is not None
    )


def parse_seen(text: str) -> dict[str, Link]:
    """Return where logs stand, by their names.

    Raises:
        UsageError: If the text is not what `seen_text` makes.
    """
    links: dict[str, Link] = {}
    for part in text.split():
        found = _SEEN.fullmatch(part)
        if not found or found[1] in links:
            raise UsageError(
                f"{part[:80]!r} does not say where a log stands; give what `Subscriber.seen` was, unchanged"
            )
        links[found[1]] = Link(int(found[2]), bytes.fromhex(found[4]), bytes.fromhex(found[3]))
    return links


def admit(
    record: Record, *, topic: str, writer: str, keys: KeyRing | None, after: Link | None, seen: Link | None = None
) -> Entry:
    """Return the message of a record; with keys, only if it is signed, and follows on the record before it.

    Args:
        record: As it stood in the log.
        topic: Named in errors.
        writer: The log that it was read from.
        keys: Those accepted; None checks no signature.
        after: The log behind the last record that was admitted; None when none was. When positions lie between,
            retention removed them, and what they were cannot be checked.
        seen: Where the log stood when somebody who is trusted last looked; None when nobody did.

    Raises:
        MessageFormatError: If the record cannot be read, or belongs elsewhere.
        SignatureError: If it is unsigned, signed by a key that is not accepted, changed, of another log, or follows on
            another record than the one before it.
    """
    place = record.position
    seal = None if keys is None else check_record(record.data, keys, topic=topic, writer=writer, position=place)
    message = decode_message(record.data, topic=topic, writer=writer, position=place)
    link = Link.behind(record, None if seal is None else seal.log_id)
    if seal is not None:
        fault = _fault_of(seal, link, after) or _fault_of(seal, link, seen)
        if fault:
            raise SignatureError(
                f"record {place} of log {writer} in {topic or 'this topic'} {fault}; records were removed, exchanged "
                "or brought here from another log: restore the log from a copy, or publish to a new topic",
                topic=topic,
                writer=writer,
            )
    return Entry(message, link)


def _fault_of(seal: Seal, link: Link, known: Link | None) -> str:
    """Return why a record cannot stand where it does, in a log of which one place is known; nothing when it can."""
    if (seal.previous == NO_RECORD) != (link.position == 0):
        return "is signed, but not for this place: it is the first of a log or it is not"
    if known is None:
        return ""
    if known.log_id != seal.log_id:
        return "is signed, but for another log"
    if known.position + 1 == link.position and known.identity != seal.previous:
        return "is signed, but behind another record than the one that stands before it"
    if known.position == link.position and known.identity != link.identity:
        return "is signed, but another one was seen in its place"
    return ""


async def read_log(
    transport: Transport,
    log: str,
    *,
    after: Link | None = None,
    retry: Retry,
    keys: KeyRing | None = None,
    seen: Link | None = None,
) -> list[Entry]:
    """Return what stands behind a record, to the log's current end; positions have no holes.

    The first may stand further on than the next position: retention removed what was before it.

    Args:
        transport: The topic, opened.
        log: The log's name.
        after: The log behind the last record that is known; None reads from the beginning.
        retry: How long to try what may pass.
        keys: Those accepted; None checks no signature.
        seen: Where the log stood when somebody who is trusted last looked; None when nobody did.

    Raises:
        MessageFormatError: If a record cannot be read, or belongs elsewhere.
        SignatureError: If keys are given, and a record does not show that it belongs there.
        TransientTransportError: If the backend does not answer, or shows a log with a hole, until the limit is reached.
        TransportError: If the backend fails for good.
    """
    entries: list[Entry] = []

    async def read_page() -> bool:
        link = entries[-1].link if entries else after
        at = link.position if link is not None else -1
        page = await transport.read(log, at, _PAGE)
        if page and page[0].position > at + 1 and at >= 0:
            # Either retention removed what lies between, or the backend does not show it yet.
            first = await transport.read(log, -1, 1)
            if not first or first[0].position <= at + 1:
                raise TransientTransportError(
                    f"log {log!r} shows position {page[0].position} but not {at + 1}; the backend lags behind",
                    url=transport.url,
                )
            entries.clear()
        for place, record in enumerate(page, page[0].position if page else 0):
            if record.position != place:
                raise TransientTransportError(
                    f"log {log!r} shows position {record.position} but not {place}; the backend lags behind",
                    url=transport.url,
                )
        found: list[Entry] = []
        for record in page:
            found.append(admit(record, topic=transport.url, writer=log, keys=keys, after=link, seen=seen))
            link = found[-1].link
        entries.extend(found)
        return bool(page)

    while await retry.call(f"reading log {log!r} of {transport.url}", read_page):
        pass
    return entries


async def read_last(transport: Transport, log: str, *, retry: Retry, keys: KeyRing | None = None) -> Entry | None:
    """Return what stands last in a log, None in an empty one; of n records about 2 log2(n) are read.

    Args:
        transport: The topic, opened.
        log: The log's name.
        retry: How long to try what may pass.
        keys: Those accepted; None checks no signature. What stands before is not looked at.

    Raises:
        MessageFormatError: If the record cannot be read, or belongs elsewhere.
        SignatureError: If keys are given, and the record does not show that it belongs there.
        TransportError: If the log cannot be read.
    """

    async def behind(position: int) -> Record | None:
        what = f"reading log {log!r} of {transport.url}"
        found = await retry.call(what, lambda: transport.read(log, position, 1))
        return found[0] if found else None

    last, stride = await behind(-1), 1
    if last is None:
        return None
    while (found := await behind(last.position + stride - 1)) is not None:
        last, stride = found, 2 * stride
    end = last.position + stride  # nothing stands here, nor behind
    while last.position + 1 < end:
        middle = (last.position + end) // 2
        found = await behind(middle - 1)
        if found is None:
            end = middle
        else:
            last = found
    return admit(last, topic=transport.url, writer=log, keys=keys, after=None)
