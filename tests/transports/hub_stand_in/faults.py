"""Faults that tests order, and the log of all requests.

A rule is matched by method and path, both regular expressions, and applies `times` times (for ever, if not given):

    status, headers   answer with this instead of doing it
    delay             wait so many seconds before doing it
    drop              "before": break the connection instead of doing it; "after": do it, and break the connection then
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

__all__ = ["Faults", "routes"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_KEY: web.AppKey[Faults] = web.AppKey("faults")
routes = web.RouteTableDef()


@dataclass(slots=True)
class Faults:
    """The rules in force, and the requests so far."""

    rules: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def install(self, app: web.Application) -> None:
        """Let the application suffer from them."""
        app[_KEY] = self
        app.add_routes(routes)
        app.middlewares.insert(0, _suffer)

    def take(self, request: web.Request) -> dict[str, Any] | None:
        """Return the first rule that matches a request, and count it as applied."""
        for rule in self.rules:
            if re.fullmatch(rule.get("method", ".*"), request.method) and re.search(rule["path"], request.path):
                rule["times"] = rule.get("times", -1) - 1
                if rule["times"] == 0:
                    self.rules.remove(rule)
                return rule
        return None


@web.middleware
async def _suffer(request: web.Request, handler: Handler) -> web.StreamResponse:
    faults = request.app[_KEY]
    if request.path.startswith("/_test/"):
        return await handler(request)
    faults.log.append(f"{request.method} {request.path_qs}")
    rule = faults.take(request) or {}
    if rule:
        await request.read()  # what was sent has its effect, whether or not its sender waits for it
    await asyncio.sleep(rule.get("delay", 0))
    drop = rule.get("drop")
    if drop == "after":
        await handler(request)
    if drop:
        assert request.transport is not None
        request.transport.abort()
    if "status" in rule or drop:
        body = {"error": rule.get("message", "a fault that a test ordered")}
        return web.json_response(body, status=rule.get("status", 500), headers=rule.get("headers"))
    return await handler(request)


@routes.post("/_test/faults")
async def _add(request: web.Request) -> web.Response:
    """Add a rule; an empty one takes all away."""
    faults, rule = request.app[_KEY], json.loads(await request.text())
    faults.rules[:] = [*faults.rules, rule] if rule else []
    return web.json_response({})


@routes.get("/_test/log")
async def _tell(request: web.Request) -> web.Response:
    """Give the requests so far, and forget them."""
    faults = request.app[_KEY]
    told, faults.log = faults.log, []
    return web.json_response(told)
