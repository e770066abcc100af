"""From paths to what is done."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from deltabus.bus.errors import DeltabusError, TransientTransportError, UsageError
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.bus.transport import Record

from ..names import check_after, check_log, check_position
from .access import Access, Scope
from .cache import Cache
from .guards import ROUTE, ForbiddenError, check_client
from .limits import Limits
from .metrics import Metrics
from .sending import parse_range, send_content, send_pages, write
from .taking import Body, take_json, take_small
from .topics import Topic, Topics
from .wire import (
    BEAT,
    HEARTBEAT_HEADER,
    READER_HEADER,
    Deletion,
    Failure,
    ListedBlob,
    Listing,
    Logs,
    check_own_key,
    check_reader,
    check_topic,
    code_of,
    is_own_key,
)

__all__ = ["Routes", "event_response", "json_response"]

_PAGE = 64
_MAX_LIMIT = 1 << 16
_MOST = (1 << 63) - 1
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_SHORT_LIVED = ("leases/", "marks/")
"""Where blobs lie that who may write may also remove."""

_Handler = Callable[[web.Request, Topic], Awaitable[web.StreamResponse]]


class _Changes(enum.Enum):
    """What a request changes of a topic; of one that the service makes that is nothing but what readers leave."""

    NOTHING = enum.auto()
    SOME_BLOBS = enum.auto()
    """The handler looks which."""

    LOGS = enum.auto()


# JSON has one kind of numbers, so that 3.0 is an integer as well.
_Version = Annotated[int, msgspec.Meta(ge=0, le=_MOST)] | Annotated[float, msgspec.Meta(ge=0, multiple_of=1)]


class _Progress(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How far a reader has come."""

    holds: Annotated[dict[str, _Version], msgspec.Meta(max_length=1024)]


class Routes:
    """What is done with topics.

    Args:
        topics: The topics.
        access: Who may do what.
        limits: How much.
        metrics: What is counted.
        cache: Where bodies go that may be kept.
        spool: Where other large ones go.
    """

    def __init__(
        self,
        topics: Topics,
        *,
        access: Access,
        limits: Limits,
        metrics: Metrics,
        cache: Cache | None,
        spool: Path | None,
    ) -> None:
        self._topics = topics
        self._access = access
        self._limits = limits
        self._metrics = metrics
        self._cache = cache
        self._spool = spool

    def add_to(self, app: web.Application) -> None:
        """Add the routes of topics to an application."""
        topic = "/{topic:[^-/][^/]*(?:/[^-/][^/]*)*}/-"
        for method, path, scope, changes, handler in (
            ("GET", "/blobs", Scope.READ, _Changes.NOTHING, self._list),
            ("HEAD", "/blobs/{key:.+}", Scope.READ, _Changes.NOTHING, self._look),
            ("GET", "/blobs/{key:.+}", Scope.READ, _Changes.NOTHING, self._get),
            ("PUT", "/blobs/{key:.+}", Scope.WRITE, _Changes.SOME_BLOBS, self._put),
            ("POST", "/delete", Scope.WRITE, _Changes.SOME_BLOBS, self._delete),
            ("GET", "/logs", Scope.READ, _Changes.NOTHING, self._logs),
            ("GET", "/logs/{log}", Scope.READ, _Changes.NOTHING, self._read),
            ("DELETE", "/logs/{log}", Scope.ADMIN, _Changes.LOGS, self._trim),
            ("GET", "/logs/{log}/events", Scope.READ, _Changes.NOTHING, self._follow),
            ("PUT", "/logs/{log}/{position}", Scope.WRITE, _Changes.LOGS, self._append),
            ("POST", "/readers/{reader}", Scope.READ, _Changes.NOTHING, self._tell),
            ("GET", "/status", Scope.READ, _Changes.NOTHING, self._status),
        ):
            app.router.add_route(method, topic + path, self._with_topic(path, scope, changes, handler))

    def _with_topic(
        self, path: str, scope: Scope, changes: _Changes, handler: _Handler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def run(request: web.Request) -> web.StreamResponse:
            request[ROUTE] = re.sub(r":[^}]*", "", path)
            name = request.match_info["topic"]
            source = self._topics.source_of(name)
            check_client(request, self._access, scope, name if source is None else source)
            if source is not None and changes is _Changes.LOGS:
                raise ForbiddenError(f"{name[:80]!r} is made by this service of {source[:80]!r}; publish to that one")
            async with self._topics.use(check_topic(name)) as topic:
                return await handler(request, topic)

        return run

    # Blobs

    async def _list(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request, "folder")
        folder = check_own_key(request.query.get("folder", ""))
        stored = [blob for blob in await topic.transport.blobs(folder) if is_own_key(blob.key)]
        found = [ListedBlob(key=blob.key, size=blob.size, stored=blob.stored) for blob in stored]
        return json_response(Listing(blobs=found))

    async def _look(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        size = await topic.exists(check_own_key(request.match_info["key"]))
        response = web.Response(headers={"Accept-Ranges": "bytes", "Cache-Control": "no-store"})
        response.content_type = "application/octet-stream"
        if size is not None:
            response.content_length = size
        return response

    async def _get(self, request: web.Request, topic: Topic) -> web.StreamResponse:
        _only(request)
        key = check_own_key(request.match_info["key"])
        self._hear(request, topic, key=key)
        wanted = parse_range(request.headers.get("Range"))
        content = await topic.open(key, wanted.span if wanted is not None else None)
        try:
            return await send_content(request, content, wanted, limits=self._limits, metrics=self._metrics)
        finally:
            await content.close()

    async def _put(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        key = check_own_key(request.match_info["key"])
        if topic.made and not key.startswith(_SHORT_LIVED):
            raise ForbiddenError(f"{topic.name!r} is made by this service; publish to the topic that it is made of")
        body = Body()
        try:
            cache = self._cache if topic.is_named_by_content(key) else None
            await body.take(request, self._limits, cache=cache, spool=self._spool)
            self._metrics.received_bytes.inc(len(memoryview(body.data)))
            await topic.put(key, body.data, body.draft)
        finally:
            body.close()
        return web.Response(status=204)

    async def _delete(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        keys = (await take_json(request, self._limits, Deletion)).keys
        for key in keys:
            check_own_key(key)
        if not all(key.startswith(_SHORT_LIVED) for key in keys):
            if topic.made:
                raise ForbiddenError(f"{topic.name!r} is made by this service, which removes what is old by itself")
            check_client(request, self._access, Scope.ADMIN, topic.name)
        await topic.delete(keys)
        return web.Response(status=204)

    # Logs

    async def _logs(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        return json_response(Logs(logs=await topic.transport.logs()))

    async def _read(self, request: web.Request, topic: Topic) -> web.StreamResponse:
        _only(request, "after", "limit")
        log = check_log(request.match_info["log"])
        after, limit = _integer(request, "after", -1), min(_integer(request, "limit", 1024), _MAX_LIMIT)
        check_after(after, limit)

        async def pages() -> AsyncIterator[list[Record]]:
            at, left, size = after, limit, _PAGE
            while left > 0:
                asked = min(left, size)
                page = await topic.read(log, at, asked)
                if page:
                    yield page
                    at, left = page[-1].position, left - len(page)
                if len(page) < asked:
                    return
                if sum(len(record.data) for record in page) < MAX_RECORD_BYTES:
                    size = min(2 * size, 1024)

        return await send_pages(request, pages(), limits=self._limits, metrics=self._metrics)

    async def _append(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        log = check_log(request.match_info["log"])
        text = request.match_info["position"]
        if not _INTEGER.fullmatch(text):
            raise UsageError(f"position {text[:40]!r} is no number")
        position = check_position(int(text))
        record = await take_small(request, self._limits, MAX_RECORD_BYTES)
        self._metrics.received_bytes.inc(len(record))
        await topic.append(log, position, record)
        return web.Response(status=204)

    async def _trim(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request, "before")
        if "before" not in request.query:
            raise UsageError("before is missing; say ?before=POSITION")
        log = check_log(request.match_info["log"])
        await topic.transport.trim(log, check_position(_integer(request, "before", 0)))
        return web.Response(status=204)

    async def _follow(self, request: web.Request, topic: Topic) -> web.StreamResponse:
        _only(request, "after")
        log = check_log(request.match_info["log"])
        last = request.headers.get("Last-Event-ID", "")
        after = int(last) if _INTEGER.fullmatch(last) else _integer(request, "after", -1)
        check_after(after)
        beat = self._limits.heartbeat
        response = event_response({HEARTBEAT_HEADER: f"{beat:g}"})
        reader = self._hear(request, topic, following=1)
        self._metrics.followers.inc()
        try:
            async with contextlib.aclosing(topic.feed(log).follow(after, beat=beat)) as events:
                async for found in events:
                    if not response.prepared:
                        await response.prepare(request)
                    await write(response, b"".join(found) or BEAT, self._limits)
                    self._metrics.events.inc(len(found))
        except DeltabusError as error:
            if not response.prepared:
                raise
            if not isinstance(error, TransientTransportError):  # that ends the line, and is tried again
                told = msgspec.json.encode(Failure(error=code_of(error), message=str(error)))
                await write(response, b"event: error\ndata: %s\n\n" % told, self._limits)
        finally:
            self._metrics.followers.dec()
            if reader:
                topic.ledger.heard(reader, following=-1)
        return response

    # Readers

    async def _tell(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        name = check_reader(request.match_info["reader"])
        progress = await take_json(request, self._limits, _Progress)
        topic.ledger.heard(name, holds={writer: int(version) for writer, version in progress.holds.items()})
        return web.Response(status=204)

    async def _status(self, request: web.Request, topic: Topic) -> web.Response:
        _only(request)
        await topic.catch_up()
        maker = self._topics.transcoder_of(topic.name)
        return json_response({"topic": topic.name, **topic.ledger.as_json(), "transcoder": maker})

    def _hear(self, request: web.Request, topic: Topic, *, key: str = "", following: int = 0) -> str:
        """Take note of who asks, if that is said."""
        name = request.headers.get(READER_HEADER, "")
        with contextlib.suppress(UsageError):
            topic.ledger.heard(check_reader(name), key=key, following=following)
            return name
        return ""


def event_response(headers: dict[str, str] | None = None) -> web.StreamResponse:
    """Return an answer of server-sent events, not begun yet."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
    response.content_type = "text/event-stream"
    return response


def json_response(value: object) -> web.Response:
    """Return an answer that is JSON."""
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _only(request: web.Request, *known: str) -> None:
    """Check what stands in the query.

    Raises:
        UsageError: If something is not known, or there twice.
    """
    names = set(request.query)
    if names - set(known) or len(names) != len(request.query.items()):
        raise UsageError(f"what may follow '?' here is {', '.join(known) or 'nothing'}, each once")


def _integer(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not _INTEGER.fullmatch(text) or int(text) > _MOST:
        raise UsageError(f"{name} {text[:40]!r} is no number up to 2^63 - 1")
    return int(text)
