"""What people and their monitors look at: the page, the state of the service, and its figures."""

from __future__ import annotations

import asyncio
import importlib.resources
import time

from aiohttp import web

from deltabus.bus.errors import DeltabusError, TransientTransportError

from .access import Access, Scope
from .cache import Cache
from .guards import ROUTE, check_client
from .metrics import CONTENT_TYPE, Metrics
from .routes import event_response, json_response
from .topics import Topic, Topics
from .wire import BEAT

__all__ = ["Page"]

_SHOWN_TOPICS = 50
_PAUSE = 0.5
_BEAT = 10.0
_READY_SECONDS = 5.0
_CATCH_UP_PAUSE = 2.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Page:
    """Serves `/`, `/-/status`, `/-/events`, `/healthz`, `/readyz` and `/metrics`.

    Args:
        metrics: What is counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = time.time()
        self._version = 0
        self._news = asyncio.Event()
        self._closed = False
        self._caught_up: dict[str, float] = {}
        self._html = importlib.resources.files(__package__).joinpath("page.html").read_bytes()

    def serve(self, topics: Topics, access: Access, cache: Cache | None) -> None:
        """Say what is shown, and to whom."""
        self._topics = topics
        self._access = access
        self._cache = cache

    def changed(self, topic: str) -> None:
        """Say that a topic has something new to show."""
        self._version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End the lines of those who look."""
        self._closed = True
        self.changed("")

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        for path, handler in (
            ("/", self._page),
            ("/-/status", self._status),
            ("/-/events", self._events),
            ("/healthz", self._health),
            ("/readyz", self._ready),
            ("/metrics", self._figures),
        ):
            app.router.add_get(path, handler)

    async def _page(self, request: web.Request) -> web.Response:
        request[ROUTE] = "/"
        return web.Response(
            body=self._html,
            content_type="text/html",
            charset="utf-8",
            headers={
                "Content-Security-Policy": _POLICY,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-cache",
            },
        )

    async def _health(self, request: web.Request) -> web.Response:
        request[ROUTE] = "/healthz"
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        request[ROUTE] = "/readyz"
        if self._closed:
            raise TransientTransportError("the service is being stopped")
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await self._topics.check()
        except (DeltabusError, TimeoutError) as error:
            raise TransientTransportError(f"the backend does not answer: {error or 'in time'}") from None
        return web.Response(text="ready\n")

    async def _figures(self, request: web.Request) -> web.Response:
        request[ROUTE] = "/metrics"
        check_client(request, self._access, Scope.READ, None)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _status(self, request: web.Request) -> web.Response:
        request[ROUTE] = "/-/status"
        grant = check_client(request, self._access, Scope.READ, None)
        used = sorted(self._topics, key=lambda topic: topic.used, reverse=True)
        guards = ((topic, self._topics.source_of(topic.name) or topic.name) for topic in used)
        mine = [topic for topic, guard in guards if grant.allows(Scope.READ, guard)][:_SHOWN_TOPICS]
        await asyncio.gather(*(self._catch_up(topic) for topic in mine))
        makers = {topic.name: maker for topic in mine if (maker := self._topics.transcoder_of(topic.name)) is not None}
        shown = [
            {"topic": topic.name, **topic.ledger.as_json(), "transcoder": makers.get(topic.name)}
            for topic in mine
            if topic.name in makers or not topic.ledger.empty
        ]
        return json_response(
            {
                "upstream": self._topics.url,
                "uptime": round(time.time() - self._begun, 1),
                "now": time.time(),
                "hit_rate": self._metrics.hit_rate(),
                "cached": None if self._cache is None else len(self._cache),
                "totals": self._metrics.totals(),
                "errors": self._metrics.error_counts(),
                "topics": sorted(shown, key=lambda topic: str(topic["topic"])),
            }
        )

    async def _catch_up(self, topic: Topic) -> None:
        """Read what did not pass by itself, but not each time that somebody looks."""
        now = time.monotonic()
        if now - self._caught_up.get(topic.name, -_CATCH_UP_PAUSE) < _CATCH_UP_PAUSE:
            return
        self._caught_up = {n: t for n, t in self._caught_up.items() if now - t < _CATCH_UP_PAUSE} | {topic.name: now}
        await topic.catch_up()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        request[ROUTE] = "/-/events"
        check_client(request, self._access, Scope.READ, None)
        response = event_response()
        await response.prepare(request)
        await response.write(BEAT)
        shown = self._version
        while not self._closed:
            if shown == self._version:
                try:
                    async with asyncio.timeout(_BEAT):
                        await self._news.wait()
                except TimeoutError:
                    await response.write(BEAT)
                continue
            shown = self._version
            await response.write(b"event: changed\ndata: {}\n\n")
            await asyncio.sleep(_PAUSE)  # not more often than a person can see
        return response
