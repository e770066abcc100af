"""The whole stand-in as one application."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from aiohttp import web

from . import cas_api, hub_api
from .access import Access
from .buckets import Buckets
from .cas_api import CAS, Cas
from .faults import Faults
from .feed import FEEDS, Feeds
from .hub_api import HUB, Hub
from .store import Store

__all__ = ["make_app"]


def make_app(
    root: Path, *, writers: Iterable[str] = (), readers: Iterable[str] = (), quota: int | None = None
) -> web.Application:
    """Return the application.

    Args:
        root: The directory that holds all that lasts.
        writers: Tokens that may write.
        readers: Tokens that may read.
        quota: Bytes that may be stored.
    """
    root.mkdir(parents=True, exist_ok=True)
    identity = root / "identity"
    if not identity.exists():
        identity.write_text(secrets.token_hex(8))
    access, store, buckets = Access(frozenset(writers), frozenset(readers)), Store(root, quota=quota), Buckets(root)
    app = web.Application(client_max_size=1 << 30)
    app[CAS] = Cas(store, access)
    app[HUB] = Hub(buckets, store, access, identity.read_text())
    app[FEEDS] = Feeds()
    app.add_routes([*cas_api.routes, *hub_api.routes])
    Faults().install(app)

    async def life(_app: web.Application) -> AsyncIterator[None]:
        yield
        buckets.close()

    app.cleanup_ctx.append(life)
    return app
