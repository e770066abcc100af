"""OpenTelemetry spans of requests; imported only where somebody traces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from opentelemetry.propagate import extract
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from .guards import ROUTE
from .wire import READER_HEADER

__all__ = ["make_spans"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_spans(tracer: Tracer) -> Middleware:
    """Return what makes a span of each request, below the one in its header `traceparent`; not of lines that stay.

    Args:
        tracer: Where to.
    """

    @web.middleware
    async def trace(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path.endswith("/events"):
            return await handler(request)
        method = request.method[:16]
        with tracer.start_as_current_span(method, context=extract(request.headers), kind=SpanKind.SERVER) as span:
            response = await handler(request)
            route = str(request.get(ROUTE, "none"))
            span.update_name(f"{method} {route}")
            told: dict[str, str | int] = {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": response.status,
                "url.path": request.path[:600],
                "deltabus.topic": request.match_info.get("topic", "")[:200],
                "deltabus.reader": request.headers.get(READER_HEADER, "")[:100],
            }
            span.set_attributes({name: value for name, value in told.items() if value != ""})
            if response.status >= 500:
                span.set_status(StatusCode.ERROR)
            return response

    return trace
