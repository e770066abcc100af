"""The store's HTTP interface, under `/cas/<identity>/`.

The identity is drawn once per directory: `hf_xet` remembers on disk which chunks the store at a URL has, and that must
not outlive the store.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from .access import Access, refusal
from .formats import ProtocolError
from .store import FullError, Store

__all__ = ["CAS", "Cas", "byte_range", "full", "routes"]

routes = web.RouteTableDef()
_CAS = "/cas/{identity}"


@dataclass(frozen=True, slots=True)
class Cas:
    """What the requests need."""

    store: Store
    access: Access


CAS: web.AppKey[Cas] = web.AppKey("cas")


def full() -> web.HTTPException:
    """Return the error of a store that may hold no more."""
    return refusal(507, "StorageFull", "The storage limit of this namespace is reached.")


def byte_range(request: web.Request, size: int) -> tuple[int, int] | None:
    """Return the request's range as (start, end exclusive), None if it wants all."""
    wanted = request.http_range
    if wanted.start is None:
        return None
    start = max(0, size + wanted.start) if wanted.start < 0 else wanted.start
    if start >= size:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    return start, size if wanted.stop is None else min(size, wanted.stop)


@routes.post(_CAS + "/v1/xorbs/{prefix}/{hash}")
async def _put_xorb(request: web.Request) -> web.Response:
    cas, data = request.app[CAS], await request.read()
    cas.access.check_lent(request)
    try:
        inserted = await asyncio.to_thread(cas.store.put_xorb, request.match_info["hash"], data)
    except ProtocolError as error:
        raise refusal(400, "BadXorb", str(error)) from error
    except FullError:
        raise full() from None
    return web.json_response({"was_inserted": inserted})


@routes.post(_CAS + "/{version:v[12]}/shards")
async def _put_shard(request: web.Request) -> web.Response:
    cas = request.app[CAS]
    cas.access.check_lent(request)
    try:
        cas.store.put_shard(await request.read())
    except ProtocolError as error:
        raise refusal(400, "BadShard", str(error)) from error
    if request.match_info["version"] == "v1":
        return web.json_response({"result": 1})
    return web.Response(text='{"type":"result"}\n', content_type="application/x-ndjson")


@routes.get(_CAS + "/{version:v[12]}/reconstructions/{hash}")
async def _reconstruct(request: web.Request) -> web.Response:
    """Say which chunks of which xorbs make up a file, and where they are."""
    cas, file = request.app[CAS], request.match_info["hash"]
    cas.access.check_lent(request)
    if file not in cas.store:
        raise refusal(404, "FileNotFound", "no such file")
    size = cas.store.size(file)
    skip, terms = cas.store.cover(file, *(byte_range(request, size) or (0, size)))
    spans: dict[str, list[list[int]]] = {}
    for xorb, first, last in sorted((term.xorb, term.start, term.end) for term in terms):
        merged = spans.setdefault(xorb, [])
        if merged and first <= merged[-1][1]:  # the client needs them disjoint
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    newer = request.match_info["version"] == "v2"
    fetch: dict[str, list[dict[str, Any]]] = {}
    for xorb, ranges in spans.items():
        places = cas.store.table(xorb)[0]
        for first, last in ranges:  # each with a URL of its own, so that none needs several ranges at once
            url = f"{request.scheme}://{request.host}/xorbs/{xorb}?chunks={first}-{last}"
            chunks, span = {"start": first, "end": last}, {"start": places[first], "end": places[last] - 1}
            entry = {"ranges": [{"chunks": chunks, "bytes": span}]} if newer else {"range": chunks, "url_range": span}
            fetch.setdefault(xorb, []).append({"url": url, **entry})
    told = [{"hash": t.xorb, "unpacked_length": t.length, "range": {"start": t.start, "end": t.end}} for t in terms]
    answer = {"offset_into_first_range": skip, "terms": told, "xorbs" if newer else "fetch_info": fetch}
    return web.json_response(answer)


@routes.get("/xorbs/{hash}")
async def _get_xorb(request: web.Request) -> web.FileResponse:
    """Stand for the signed addresses of an object store: whoever knows one may read."""
    path = request.app[CAS].store.xorbs / request.match_info["hash"]
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


@routes.get(_CAS + "/v1/chunks/{prefix}/{hash}")
async def _find_chunk(_request: web.Request) -> web.Response:
    raise refusal(404, "ChunkNotFound", "chunks of others are not offered")


@routes.post("/v1/telemetry")
async def _listen(request: web.Request) -> web.Response:
    """Take what clients tell of themselves; they send it to the host, whatever the store's path."""
    await request.read()
    return web.json_response({})
