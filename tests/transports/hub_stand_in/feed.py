"""The change feed of a bucket, as server-sent events.

A follower that gives a cursor gets what came behind it, unless that is forgotten (`reset`); then it is told that it is
up to date (`ready`), and gets what happens (`changes`) until the server ends it (`reconnect`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientConnectionResetError, web

from .access import refusal
from .buckets import Bucket

__all__ = ["FEEDS", "Feeds", "follow", "routes"]

routes = web.RouteTableDef()


@dataclass(slots=True)
class Feeds:
    """How feeds behave.

    Attributes:
        remembered: Changes that can be asked for again.
        ping: Seconds between signs of life.
        sessions: Counts up when all followers are to come again.
    """

    remembered: int = 10_000
    ping: float = 15.0
    sessions: int = field(default=0)


FEEDS: web.AppKey[Feeds] = web.AppKey("feeds")


async def follow(request: web.Request, bucket: Bucket) -> web.StreamResponse:
    """Answer a request for a bucket's feed, until its follower leaves."""
    feeds, at = request.app[FEEDS], len(bucket.changes)
    forgotten = max(0, at - feeds.remembered)
    wanted = request.query.get("cursor")
    if wanted is not None and not wanted.removeprefix("c").isdigit():
        raise refusal(400, "BadCursor", "this is no cursor of ours")
    since = request.query.get("since")
    if wanted is not None:
        at = min(int(wanted.removeprefix("c")), at)
    elif since:
        at = next((place for place, change in enumerate(bucket.changes) if change["uploadedAt"] > since), at)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    with contextlib.suppress(ClientConnectionResetError):  # its follower left
        await _tell(response, bucket, feeds, at, forgotten)
    return response


async def _tell(response: web.StreamResponse, bucket: Bucket, feeds: Feeds, at: int, forgotten: int) -> None:
    session = feeds.sessions

    async def send(name: str, payload: dict[str, Any]) -> None:
        await response.write(f"event: {name}\ndata: {json.dumps(payload)}\n\n".encode())

    async def catch_up(at: int) -> int:
        end = len(bucket.changes)
        if end > at:
            await send("changes", {"cursor": f"c{end}", "changes": bucket.changes[at:end]})
        return end

    if at < forgotten:
        await send("reset", {"reason": "what came behind this cursor is forgotten"})
        return

    at = await catch_up(at)
    await send("ready", {"cursor": f"c{at}"})
    news = asyncio.Event()
    bucket.followers.add(news)
    try:
        while True:
            news.clear()
            at = await catch_up(at)
            if feeds.sessions != session:
                break
            try:
                async with asyncio.timeout(feeds.ping):
                    await news.wait()
            except TimeoutError:
                await response.write(b": ping\n\n")
    finally:
        bucket.followers.discard(news)
    at = await catch_up(at)
    await send("reconnect", {"cursor": f"c{at}"})
