"""What every request passes first, and what becomes of errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
from aiohttp import ClientError, web
from aiohttp.typedefs import Middleware

from deltabus.bus.errors import AccessDeniedError, DeltabusError

from .access import Access, Grant, Scope, is_loopback
from .limits import Rates
from .metrics import Metrics
from .sending import CutOffError, RangeError
from .taking import SlowClientError, TooLargeError
from .topics import GapError
from .wire import ERROR_HEADER, KINDS, READER_HEADER, Failure, code_of

__all__ = ["ROUTE", "Door", "ForbiddenError", "UnauthorizedError", "check_client", "make_guard", "make_recorder"]

ROUTE = "deltabus.route"
"""Where a request holds the pattern that it matched, for figures and logs."""

_log = logging.getLogger("deltabus.http.requests")
_faults = logging.getLogger("deltabus.http")
_PATH = re.compile(r"/(?:[A-Za-z0-9._=/-]|%3[Dd])*")  # some write = as %3D, which is the same
_GRANT = "deltabus.grant"
_UNMATCHED = "none"
_LEFT = 499
"""The status of an answer whose client left, or was cut off; nobody gets it."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


class UnauthorizedError(AccessDeniedError):
    """Nobody knows who asks."""


class ForbiddenError(AccessDeniedError):
    """Who asks may not do that."""


class _RefusedError(Exception):
    """A request that is not looked at any further."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_client(request: web.Request, access: Access, scope: Scope, topic: str | None) -> Grant:
    """Return what a request may do, if that is enough.

    Raises:
        UnauthorizedError: If it shows no token that is known.
        ForbiddenError: If its token is not enough.
    """
    try:
        grant = access.find(request.headers.get("Authorization"))
    except AccessDeniedError as error:
        raise UnauthorizedError(f"{error}") from None
    request[_GRANT] = grant.name
    if not grant.allows(scope, topic):
        where = "the service" if topic is None else f"topic {topic[:80]!r}"
        raise ForbiddenError(f"the token of {grant.name!r} does not allow to {scope.name.lower()} {where}")
    return grant


class Door:
    """Counts the requests that are being served, and lets no more in when it is closed.

    Servers of aiohttp stop to read when they end, so that a body that is half there would be lost.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._empty = asyncio.Event()
        self.closed = False

    def enter(self) -> None:
        """Count a request."""
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Count it no more."""
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def close(self, limit: float) -> None:
        """Let no more in, and wait until all have left, for so many seconds at most."""
        self.closed = True
        if self._inside:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._empty.wait()


def make_guard(rates: Rates, door: Door, *, local: bool) -> Middleware:
    """Return what refuses requests that no client of ours makes.

    Args:
        rates: How many each may make.
        door: Whether any are let in.
        local: Whether the service is for this machine alone, and open to everybody here: then pages of elsewhere that
            a browser on this machine shows must not reach it under a name of their own.
    """

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not _PATH.fullmatch(request.raw_path.partition("?")[0]):
            raise _RefusedError("bad_request", "a path holds letters, digits and / . _ = - alone")
        if len(request.headers.getall("Host", [])) > 1 or len(request.headers.getall("Authorization", [])) > 1:
            raise _RefusedError("bad_request", "a header is there twice")
        host = request.headers.get("Host", "")
        if local and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            raise _RefusedError("forbidden", f"this service is for this machine alone, not for {host[:80]!r}")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise _RefusedError("forbidden", "pages of other origins may not use this service")
        if not rates.take(request.remote or ""):
            raise _RefusedError("busy", "too many requests; wait a second")
        if door.closed:
            raise _RefusedError("stopping", "the service is being stopped; connect again")
        return await handler(request)

    return guard


def make_recorder(metrics: Metrics, door: Door) -> Middleware:
    """Return what counts and logs each request, and makes answers of errors."""

    @web.middleware
    async def record(request: web.Request, handler: _Handler) -> web.StreamResponse:
        begun = time.perf_counter()
        door.enter()
        try:
            response = await _answer(request, handler, metrics)
        finally:
            door.leave()
        if door.closed:
            response.force_close()
        seconds = time.perf_counter() - begun
        route = request.get(ROUTE, _UNMATCHED)
        status = _LEFT if request.get("deltabus.left") else response.status
        metrics.requests.labels(route, str(status)).inc()
        if not route.endswith("/events"):
            metrics.seconds.labels(route).observe(seconds)
        if _log.isEnabledFor(logging.INFO):
            told = {
                "method": request.method[:16],
                "path": request.path[:600],
                "status": status,
                "ms": round(1000 * seconds, 1),
                "client": request.remote,
                "who": request.get(_GRANT, "nobody"),
                "reader": request.headers.get(READER_HEADER, "")[:100],
            }
            text = " ".join(f"{name}={json.dumps(value)}" for name, value in told.items())
            _log.info("request %s", text, extra={"told": told})
        return response

    return record


async def _answer(request: web.Request, handler: _Handler, metrics: Metrics) -> web.StreamResponse:
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except _RefusedError as error:
        code, message = error.code, str(error)
    except web.HTTPException as error:
        code = _OF_STATUS.get(error.status, "bad_request")
        message = f"{error.reason}: {request.method[:16]} {request.path[:200]}"
        if "Allow" in error.headers:
            headers["Allow"] = error.headers["Allow"]
    except RangeError as error:
        code, message = "range", str(error)
        if error.size is not None:
            headers["Content-Range"] = f"bytes */{error.size}"
    except CutOffError as error:
        _faults.info("%s %s is cut off: %s", request.method, request.path, error)
        metrics.cut_off.inc()
        return _leave(request)
    except (ConnectionError, ClientError, web.RequestPayloadError):
        return _leave(request)
    except DeltabusError as error:
        code, message = _code(error), str(error)
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception:
        _faults.exception("%s %s failed", request.method, request.path)
        code, message = "internal", "the service failed; its log has more"
    metrics.errors.labels(code).inc()
    if code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    if KINDS[code][0] in {429, 503}:
        headers["Retry-After"] = "1"
    return _failure(code, message, headers)


def _code(error: DeltabusError) -> str:
    for kind, code in (
        (UnauthorizedError, "unauthorized"),
        (ForbiddenError, "forbidden"),
        (TooLargeError, "too_large"),
        (GapError, "gap"),
        (SlowClientError, "slow"),
    ):
        if isinstance(error, kind):
            return code
    return code_of(error)


def _failure(code: str, message: str, headers: dict[str, str]) -> web.Response:
    body = msgspec.json.encode(Failure(error=code, message=message))
    return web.Response(
        status=KINDS[code][0],
        body=body,
        content_type="application/json",
        headers={ERROR_HEADER: code, "Cache-Control": "no-store", **headers},
    )


def _leave(request: web.Request) -> web.StreamResponse:
    """Close the connection of a client that left, or must not take what it got for whole."""
    request["deltabus.left"] = True
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=_LEFT)
