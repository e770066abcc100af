"""The bytes of a bucket, through `hf_xet`: uploads and downloads of large content in threads, with limits.

`hf_xet` retries by itself, and verifies nothing; whoever downloads must. It waits five minutes for the answer to an
upload, because the upload itself counts; so a watch on its progress finds those that stand still.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import hf_xet  # type: ignore[import-untyped]

from deltabus.bus.errors import AccessDeniedError, TransientTransportError, TransportError

from .hub_client import HubClient, Lent
from .hub_errors import judge_store

__all__ = ["HubStore"]

_Result = TypeVar("_Result")

_PIECE = 8 << 20
_SLOWEST = 64 << 10
"""Bytes a second below which a download counts as standing still."""


class HubStore:
    """What a bucket's files hold; belongs to one event loop.

    Args:
        client: The bucket.
        timeout: Seconds after which a transfer that stands still is given up.
    """

    def __init__(self, client: HubClient, *, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        self._sessions: dict[str, Any] = {}

    async def upload(self, view: memoryview, what: str) -> str:
        """Store bytes, and return what Xet calls them; nothing names them yet.

        Raises:
            StorageFullError: If there is no room.
            AccessDeniedError: If the token may not write.
            TransientTransportError: If the store did not answer, or stood still.
            TransportError: On any other fault.
        """

        async def attempt(lent: Lent) -> str:
            commits: list[Any] = []
            future = _start(lambda: self._upload(view, lent, commits))
            await self._watch(future, commits, what)
            return future.result()

        return await self._with_token("write", attempt, what)

    async def download(self, content: str, size: int, start: int, stop: int, what: str) -> tuple[bytes, str]:
        """Return a range of stored bytes, and its SHA-256 in hexadecimal.

        Args:
            content: What Xet calls all bytes.
            size: How many these are.
            start: Where the range begins.
            stop: Where it ends.
            what: For the error.

        Raises:
            AccessDeniedError: If the token may not read.
            TransientTransportError: If the store did not answer, or stood still.
            TransportError: If the bytes are not there, or on any other fault.
        """

        async def attempt(lent: Lent) -> tuple[bytes, str]:
            future = _start(lambda: self._download(content, size, start, stop, lent))
            limit = 2 * self._timeout + (stop - start) / _SLOWEST
            await asyncio.wait((future,), timeout=limit)
            if not future.done():
                raise TransientTransportError(
                    f"cannot {what} in {self._client.url}: it took over {limit:.0f} s", url=self._client.url
                )
            return future.result()

        return await self._with_token("read", attempt, what)

    async def _with_token(self, scope: str, attempt: Callable[[Lent], Awaitable[_Result]], what: str) -> _Result:
        client = self._client
        lent = await client.lend(scope)
        for last in (False, True):
            try:
                return await attempt(lent)
            except TransportError:
                raise
            except (RuntimeError, OSError, hf_xet.XetObjectNotFoundError, hf_xet.XetAuthenticationError) as error:
                judged = judge_store(error, what=what, url=client.url, bucket=client.bucket, secret=client.secret)
                if last or not isinstance(judged, AccessDeniedError):
                    raise judged from None  # its text may hold the signature of an address
            # The token was lent a while ago, and may not be known any more.
            lent = await client.lend(scope, fresh=True)
        raise AssertionError("the last attempt returns or raises")

    def _upload(self, view: memoryview, lent: Lent, commits: list[Any]) -> str:
        commit = self._session("upload").new_upload_commit(**_opening(lent))
        commits.append(commit)
        if view.nbytes <= _PIECE:
            handle = commit.start_upload_bytes(bytes(view), sha256=hf_xet.SKIP_SHA256)
        else:
            # In pieces, because it takes bytes only, and a whole copy may be large.
            handle = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
            for start in range(0, view.nbytes, _PIECE):
                handle.write(bytes(view[start : start + _PIECE]))
            handle.finish()
        commit.wait_to_finish()
        done = handle.try_finish() if view.nbytes > _PIECE else handle.result()
        return str(done.xet_info.hash)

    async def _watch(self, future: asyncio.Future[str], commits: list[Any], what: str) -> None:
        """Wait for an upload as long as it goes on; end it when it does not, or when nobody waits any more."""
        seen: object = None
        try:
            while not future.done():
                await asyncio.wait((future,), timeout=self._timeout)
                progress = commits[0].progress() if commits else None
                now = progress and (progress.total_bytes_completed, progress.total_transfer_bytes_completed)
                if not future.done() and now == seen:
                    _abort(commits)
                    raise TransientTransportError(
                        f"cannot {what} in {self._client.url}: the upload stood still for {self._timeout:g} s; look at "
                        "the network, or raise the option 'timeout'",
                        url=self._client.url,
                    )
                seen = now
        except asyncio.CancelledError:
            future.cancel()  # it may not have begun
            _abort(commits)
            raise

    def _download(self, content: str, size: int, start: int, stop: int, lent: Lent) -> tuple[bytes, str]:
        group = self._session("download").new_download_stream_group(**_opening(lent))
        digest, parts = hashlib.sha256(), []
        for part in group.download_stream(hf_xet.XetFileInfo(content, size), start, stop):
            digest.update(part)
            parts.append(part)
        group.finish()
        return parts[0] if len(parts) == 1 else b"".join(parts), digest.hexdigest()

    def _session(self, kind: str) -> Any:  # noqa: ANN401 - hf_xet has no types
        if kind not in self._sessions:
            seconds = f"{max(1, round(self._timeout / 2))}s"
            settings: dict[str, object] = {"client.connect_timeout": seconds, "client.retry_max_attempts": 2}
            settings["client.retry_max_duration"] = f"{round(self._timeout) + 1}s"
            if kind == "download":
                settings["client.read_timeout"] = seconds
            self._sessions[kind] = hf_xet.XetSession(hf_xet.XetConfig().with_config(settings))
        return self._sessions[kind]


def _start(function: Callable[[], _Result]) -> asyncio.Future[_Result]:
    future = asyncio.get_running_loop().run_in_executor(None, function)
    # Whoever stops waiting leaves the outcome to nobody; asyncio would report it as forgotten.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _opening(lent: Lent) -> dict[str, Any]:
    return {
        "endpoint": lent.endpoint,
        "token": lent.token,
        "token_expiry_unix_secs": lent.end,
        "token_refresh_url": lent.refresh,
        "token_refresh_headers": lent.headers,
        "custom_headers": {name: value for name, value in lent.headers.items() if name.lower() != "authorization"},
    }


def _abort(commits: list[Any]) -> None:
    for commit in commits:
        commit.abort()
