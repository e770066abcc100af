"""Records as they come: a line of server-sent events, taken up behind the last record when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from deltabus.bus.errors import DeltabusError, TransientTransportError, TransportError
from deltabus.bus.transport import Record

from .session import Session
from .wire import HEARTBEAT_HEADER, KINDS, Failure, split_events

__all__ = ["follow"]

_FIRST_PAUSE = 0.05
_MAX_EVENT = 2 << 20
_MISSED = 2.5
"""Signs of life that may be missing before a line counts as lost."""


async def follow(session: Session, log: str, after: int, *, timeout: float, poll: float) -> AsyncIterator[Record]:
    """Yield the records behind a position, as `Transport.tail` does.

    Args:
        session: Makes the requests.
        log: Whose records.
        after: Behind which position.
        timeout: Seconds for which a lost service is looked for before that is an error.
        poll: Most seconds between two attempts.
    """
    pause = _FIRST_PAUSE
    heard = time.monotonic()
    while True:
        try:
            async with contextlib.aclosing(_listen(session, log, after)) as lines:
                async for records in lines:
                    heard, pause = time.monotonic(), _FIRST_PAUSE
                    for record in records:
                        if record.position > after:
                            yield record
                            after = record.position
        except TransientTransportError:
            if time.monotonic() - heard > timeout:
                raise
        # Not all at once, when a service with many followers comes back.
        await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
        session.check_open()
        pause = min(2 * pause, poll)


async def _listen(session: Session, log: str, after: int) -> AsyncGenerator[list[Record], None]:
    """Yield what comes on one line, until it ends; no records are a sign of life."""
    held = bytearray()
    what = f"follow log {log!r} after {after}"
    headers = {"Accept": "text/event-stream"}
    async with session.request(
        "GET", f"logs/{log}/events", what=what, query={"after": after}, headers=headers
    ) as answer:
        answer.leave()
        limit = _MISSED * _seconds(answer.headers.get(HEARTBEAT_HEADER, ""))
        yield []
        while piece := await answer.next_piece(limit):
            held += piece
            try:
                events = [event for event in split_events(held) if event is not None]
            except (ValueError, KeyError) as error:
                raise TransportError(
                    f"cannot {what} in {session.url}: malformed event ({error})", url=session.url
                ) from None
            if len(held) > _MAX_EVENT:
                raise TransportError(f"cannot {what} in {session.url}: an event without an end", url=session.url)
            for event in events:
                if event.name == "error":
                    raise _error(event.data, what, session.url)
            yield [Record(event.position, event.data) for event in events]


def _seconds(text: str) -> float:
    """Return the time between signs of life that the service promises; a minute unless it does."""
    try:
        return min(max(float(text), 0.1), 60.0)
    except ValueError:
        return 60.0


def _error(data: bytes, what: str, url: str) -> DeltabusError:
    """Return the error that a service ends a line with."""
    failure = msgspec.json.decode(data, type=Failure)
    kind = KINDS.get(failure.error, (0, TransportError))[1]
    message = f"cannot {what} in {url}: {failure.message}"
    return kind(message, url=url) if issubclass(kind, TransportError) else kind(message)
