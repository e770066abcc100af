"""Who may do what: tokens of the Hub, and those that it lends for the store."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field

from aiohttp import web

__all__ = ["Access", "refusal"]

_LENT_FOR = 3600


def refusal(status: int, code: str, message: str) -> web.HTTPException:
    """Return an error as the Hub answers it."""
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        403: web.HTTPForbidden,
        404: web.HTTPNotFound,
        507: web.HTTPInsufficientStorage,
    }
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return kinds[status](text=json.dumps({"error": message}), content_type="application/json", headers=headers)


@dataclass(slots=True)
class Access:
    """The tokens.

    Attributes:
        writers: Tokens of the Hub that may read and write; if there are neither these nor readers, everybody may.
        readers: Tokens of the Hub that may read.
    """

    writers: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    _lent: dict[str, tuple[str, float]] = field(default_factory=dict)

    def check(self, request: web.Request, *, write: bool = False) -> None:
        """Refuse a request to the Hub whose token does not allow it."""
        token = _bearer(request)
        if not self.writers | self.readers or token in self.writers:
            return
        if token not in self.readers:
            raise refusal(401, "Unauthorized", "Invalid username or password.")
        if write:
            raise refusal(403, "Forbidden", "This token may only read; a token that may write is needed.")

    def lend(self, scope: str) -> tuple[str, int]:
        """Return a new token for the store, for `read` or `write`, and when it ends."""
        token, end = f"xet_{secrets.token_urlsafe(16)}", int(time.time()) + _LENT_FOR
        self._lent[token] = scope, end
        return token, end

    def check_lent(self, request: web.Request) -> None:
        """Refuse a request to the store whose token does not allow it."""
        scope, end = self._lent.get(_bearer(request), ("", 0.0))
        if end < time.time() or (request.method == "POST" and scope != "write"):
            raise refusal(401, "Unauthorized", "invalid xet token")


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")
