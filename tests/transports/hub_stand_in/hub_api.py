"""The Hub's HTTP interface: buckets, their files, and what leads to their bytes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from .access import Access, refusal
from .buckets import Bucket, Buckets, timestamp
from .cas_api import byte_range, full
from .feed import FEEDS, follow
from .store import Store

__all__ = ["HUB", "Hub", "routes"]

routes = web.RouteTableDef()
_BUCKET = "/api/buckets/{namespace}/{name}"
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Hub:
    """What the requests need."""

    buckets: Buckets
    store: Store
    access: Access
    identity: str

    def bucket(self, request: web.Request, *, write: bool = False) -> Bucket:
        """Return the bucket of a request that may be made."""
        self.access.check(request, write=write)
        found = self.buckets.by_id.get(_bucket_id(request))
        if found is None:
            raise refusal(404, "RepoNotFound", "Bucket not found")
        return found


HUB: web.AppKey[Hub] = web.AppKey("hub")


def _bucket_id(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['name']}"


def _origin(request: web.Request) -> str:
    return f"{request.scheme}://{request.host}"


@routes.get("/api/whoami-v2")
async def _whoami(request: web.Request) -> web.Response:
    request.app[HUB].access.check(request)
    return web.json_response({"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}})


@routes.post(_BUCKET)
async def _create(request: web.Request) -> web.Response:
    hub, name = request.app[HUB], _bucket_id(request)
    hub.access.check(request, write=True)
    body = json.loads(await request.text() or "{}")
    answer = {"url": f"{_origin(request)}/buckets/{name}", "name": name, "id": name}
    if name in hub.buckets.by_id:
        return web.json_response({**answer, "error": "You already created this bucket"}, status=409)
    private = body.get("visibility") == "private" or bool(body.get("private"))
    hub.buckets.record(what="create", bucket=name, private=private, at=timestamp())
    return web.json_response(answer)


@routes.get(_BUCKET)
async def _info(request: web.Request) -> web.Response:
    return web.json_response(request.app[HUB].bucket(request).as_json())


@routes.get("/api/buckets/{namespace}")
async def _list(request: web.Request) -> web.Response:
    hub, head = request.app[HUB], request.match_info["namespace"] + "/"
    hub.access.check(request)
    wanted = request.query.get("search", "")
    found = [bucket for bucket in hub.buckets.by_id.values() if bucket.id.startswith(head) and wanted in bucket.id]
    return web.json_response([bucket.as_json() for bucket in found])


@routes.delete(_BUCKET)
async def _remove(request: web.Request) -> web.Response:
    hub = request.app[HUB]
    hub.buckets.record(what="remove", bucket=hub.bucket(request, write=True).id)
    return web.Response(status=204)


@routes.put(_BUCKET + "/settings")
async def _set(request: web.Request) -> web.Response:
    hub = request.app[HUB]
    private = bool((await request.json())["private"])
    hub.buckets.record(what="settings", bucket=hub.bucket(request, write=True).id, private=private)
    return web.json_response({})


@routes.post("/api/repos/move")
async def _move(request: web.Request) -> web.Response:
    hub, body = request.app[HUB], await request.json()
    hub.access.check(request, write=True)
    if body["fromRepo"] not in hub.buckets.by_id:
        raise refusal(404, "RepoNotFound", "Bucket not found")
    hub.buckets.record(what="move", bucket=body["fromRepo"], to=body["toRepo"])
    return web.json_response({})


@routes.get(_BUCKET + "/xet-{scope:(?:read|write)}-token")
async def _lend(request: web.Request) -> web.Response:
    hub, scope = request.app[HUB], request.match_info["scope"]
    hub.bucket(request, write=scope == "write")
    token, end = hub.access.lend(scope)
    url = f"{_origin(request)}/cas/{hub.identity}"
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(end)}
    return web.json_response({"casUrl": url, "exp": end, "accessToken": token}, headers=headers)


def _as_json(path: str, file: dict[str, Any]) -> dict[str, Any]:
    return {"type": "file", "path": path, **file}


@routes.get(_BUCKET + "/tree")
@routes.get(_BUCKET + "/tree/{prefix:.+}")
async def _tree(request: web.Request) -> web.Response:
    """List what begins with a prefix, letter by letter; folders below it are one entry each, unless all is wanted."""
    bucket, prefix = request.app[HUB].bucket(request), request.match_info.get("prefix", "")
    recursive = request.query.get("recursive", "").lower() == "true"
    after, limit = request.query.get("cursor", ""), int(request.query.get("limit", _PAGE))
    depth = len(prefix) if not prefix or prefix.endswith("/") else len(prefix) + 1
    entries: dict[str, dict[str, Any]] = {}
    for path, file in bucket.files.items():
        if not path.startswith(prefix):
            continue
        cut = path.find("/", depth)
        if recursive or cut < 0:
            entries[path] = _as_json(path, file)
        else:
            folder = entries.setdefault(path[:cut], {"type": "directory", "path": path[:cut], "uploadedAt": ""})
            folder["uploadedAt"] = max(folder["uploadedAt"], file["uploadedAt"])
    page = [entries[path] for path in sorted(entries) if path > after]
    headers = {}
    if len(page) > limit:
        page = page[:limit]
        following = request.url.update_query(cursor=page[-1]["path"])
        headers["Link"] = f'<{following}>; rel="next"'
    return web.json_response(page, headers=headers)


@routes.post(_BUCKET + "/paths-info")
async def _paths_info(request: web.Request) -> web.Response:
    files, body = request.app[HUB].bucket(request).files, await request.json()
    return web.json_response([_as_json(path, files[path]) for path in body["paths"] if path in files])


@routes.post(_BUCKET + "/batch")
async def _batch(request: web.Request) -> web.Response:
    """Apply operations, one a line, in order; those that cannot be applied are told, and the others stay."""
    hub = request.app[HUB]
    text = await request.text()
    bucket = hub.bucket(request, write=True)
    operations = [json.loads(line) for line in text.splitlines() if line.strip()]
    changes: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for operation in operations:
        path, kind = operation["path"], operation["type"]
        if kind == "deleteFile":
            if path in bucket.files:
                changes.append({"op": "delete", "path": path, "uploadedAt": timestamp()})
        elif hub.store.quota is not None and hub.store.stored >= hub.store.quota:
            raise full()
        elif operation["xetHash"] not in hub.store:
            failed.append({"path": path, "error": f"unknown xet hash {operation['xetHash']}"})
        else:
            changes.append(
                {
                    "op": "update" if path in bucket.files else "add",
                    "path": path,
                    "size": hub.store.size(operation["xetHash"]),
                    "xetHash": operation["xetHash"],
                    "contentType": operation.get("contentType"),
                    "mtime": timestamp(operation.get("mtime", time.time() * 1000) / 1000),
                    "uploadedAt": timestamp(),
                }
            )
    if changes:
        hub.buckets.record(what="files", bucket=bucket.id, changes=changes)
        bucket.wake()
    done = len(operations) - len(failed)
    answer = {"success": not failed, "processed": len(operations), "succeeded": done, "failed": failed}
    return web.json_response(answer, status=200 if done or not failed else 422)


@routes.get(_BUCKET + "/events")
async def _events(request: web.Request) -> web.StreamResponse:
    return await follow(request, request.app[HUB].bucket(request))


@routes.post("/_test/reconnect")
async def _send_away(request: web.Request) -> web.Response:
    """Tell all followers to come again; `forget` makes the server forget what happened so far."""
    feeds, body = request.app[FEEDS], await request.json()
    feeds.sessions += 1
    if body.get("forget"):
        feeds.remembered = 0
    for bucket in request.app[HUB].buckets.by_id.values():
        bucket.wake()
    return web.json_response({})


@routes.get("/buckets/{namespace}/{name}/resolve/{path:.+}")
async def _resolve(request: web.Request) -> web.Response:
    """Give a file's bytes, or for HEAD where they are found."""
    hub = request.app[HUB]
    bucket, path = hub.bucket(request), request.match_info["path"]
    file = bucket.files.get(path)
    if file is None:
        raise refusal(404, "EntryNotFound", "Entry not found")
    size, content = file["size"], file["xetHash"]
    headers = {
        "X-Xet-Hash": content,
        "X-Linked-Size": str(size),
        "ETag": f'"{content}"',
        "Link": f'<{_origin(request)}/api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"',
        "Accept-Ranges": "bytes",
        "Content-Type": file["contentType"] or "application/octet-stream",
    }
    part = byte_range(request, size)
    start, end = part or (0, size)
    if part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    if request.method == "HEAD":
        return web.Response(headers={**headers, "Content-Length": str(end - start)})
    body = await asyncio.to_thread(hub.store.read, content, start, end)
    return web.Response(status=206 if part else 200, body=body, headers=headers)
