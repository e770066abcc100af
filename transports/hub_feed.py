"""The change feed of a bucket: server-sent events that say which files came and went.

It is a shortcut, never the only way: whoever waits for news also looks by itself from time to time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from deltabus.bus.errors import TransientTransportError, TransportError

__all__ = ["Feed", "parse_events"]

_PAUSES = (0.1, 30.0)
_HEALTHY = 10.0
_MOST_TEXT = 64 << 20

_logger = logging.getLogger(__name__)


class Feed:
    """Follows a feed, and takes it up again for ever.

    Args:
        connect: Opens the feed behind a cursor, or where it is now, and gives its lines.
        change: Called with the path of each file that came or went, and whether it came.
        gap: Called when changes may have been missed, and when the feed begins to be complete.
    """

    def __init__(
        self,
        connect: Callable[[str | None], AbstractAsyncContextManager[AsyncIterator[str]]],
        *,
        change: Callable[[str, bool], None],
        gap: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._change = change
        self._gap = gap
        self._cursor: str | None = None
        self.live = False

    async def run(self) -> None:
        """Follow until cancelled; while `live` is true, every change is told."""
        loop = asyncio.get_running_loop()
        pause, longest = _PAUSES
        while True:
            began = loop.time()
            try:
                await self._session()
            except TransportError as error:
                if not isinstance(error, TransientTransportError):
                    self._cursor = None  # it may be what the server does not like
                _logger.debug("the change feed broke off: %s", error)
            finally:
                self.live = False
            self._gap()
            pause = _PAUSES[0] if loop.time() - began > _HEALTHY else min(2 * pause, longest)
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - readers must not come back together

    async def _session(self) -> None:
        async with self._connect(self._cursor) as lines:
            async for name, payload in parse_events(lines):
                cursor = payload.get("cursor")
                if name == "reset":
                    self._cursor = None
                    return
                if isinstance(cursor, str):
                    self._cursor = cursor
                if name == "reconnect":
                    return
                if name == "ready":
                    self.live = True
                    self._gap()
                elif name == "changes":
                    for change in payload.get("changes", []):
                        self._change(str(change["path"]), change.get("op") != "delete")


async def parse_events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the events in the lines of a stream as (name, payload); what is malformed or has no payload is left out.

    The format is that of server-sent events (WHATWG HTML, section 9.2.6); payloads are JSON objects.

    Raises:
        TransportError: If an event is absurdly long.
    """
    name, data, length = "", list[str](), 0
    async for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        length += len(line)
        if length > _MOST_TEXT:
            raise TransportError(f"an event of the change feed is over {_MOST_TEXT} letters; it is not followed")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif not line:
            payload = _parse("\n".join(data))
            if payload is not None:
                yield name, payload
            name, data, length = "", [], 0


def _parse(text: str) -> dict[str, Any] | None:
    try:
        payload = json.loads(text)
    except ValueError:
        return None
    if not isinstance(payload, dict):
        return None
    changes = payload.get("changes", [])
    if not isinstance(changes, list) or not all(isinstance(c, dict) and "path" in c for c in changes):
        return None
    return payload
