"""A bucket of the Hub over HTTP: what `huggingface_hub` does for buckets, bounded in time, without its repetitions.

Its session, headers, token and endpoint are those of `huggingface_hub`, so that what a user has configured holds here
too. Its bucket methods are not used: they wait without a limit, block a thread each, and send a change again when its
answer was lost, which would give a file a later time than readers may have seen.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import get_async_session, get_token
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from deltabus.bus.errors import TransientTransportError, TransportError

from .hub_errors import StatusError, UnansweredError, clean, judge_status
from .hub_rule import Candidate, parse_candidate

__all__ = ["BATCH", "HubClient", "Lent"]

BATCH = 1000
"""Operations that the Hub takes at once."""

_CONNECT = 10.0
_SILENCE = 90.0
"""Seconds after which a feed counts as dead; the Hub gives a sign of life every 30."""

_GRACE = 1.0
_LEAST_PAUSE = 0.25  # seconds until a request is made again, whatever the server says
_SAFETY = 60.0  # seconds before its end at which a lent token is not used any more
_NOTHING_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """What opens the Hub's store for a while; its token is a secret."""

    endpoint: str
    token: str
    end: int
    refresh: str
    headers: dict[str, str]

    def __repr__(self) -> str:
        # Also a dump of local variables must not show it.
        return f"Lent({self.endpoint!r}, end={self.end})"


class HubClient:
    """One bucket; belongs to one event loop.

    Args:
        bucket: `namespace/name`.
        endpoint: The Hub's address.
        token: A token; None is the one that `huggingface_hub` finds.
        timeout: Seconds that a request may take, or stand still if it carries much.
        create: Whether to create the bucket when it is found missing.
        url: The topic's URL without secrets, for errors.
    """

    def __init__(
        self, bucket: str, *, endpoint: str, token: str | None, timeout: float, create: bool, url: str
    ) -> None:
        self.bucket = bucket
        self.url = url
        self._endpoint = endpoint.rstrip("/")
        self._api = f"{self._endpoint}/api/buckets/{bucket}"
        self._token = token
        self._timeout = timeout
        self._create = create
        self._session: httpx2.AsyncClient | None = None
        self._headers: dict[str, str] = {}
        self._lent: dict[str, Lent] = {}
        self._running: set[asyncio.Task[httpx2.Response]] = set()
        self._closed = False

    @property
    def secret(self) -> str:
        """The token in use, to be kept out of texts."""
        return self._token or get_token() or ""

    async def candidates(self, prefix: str) -> list[Candidate]:
        """Return the candidates whose names begin with a prefix; other files are left out."""
        found = []
        for item in await self._tree(prefix, recursive=True):
            try:
                if item["type"] == "file":
                    size, content = int(item["size"]), str(item["xetHash"])
                    found.append(parse_candidate(item["path"], stored=item["uploadedAt"], size=size, content=content))
            except (ValueError, KeyError, TypeError):
                raise self._strange(f"list {prefix!r}") from None
        return [candidate for candidate in found if candidate is not None]

    async def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below one, whose name ends in `/`."""
        found = await self._tree(prefix, recursive=False)
        return [item["path"].removeprefix(prefix) for item in found if item["type"] == "directory"]

    async def add(self, path: str, content: str) -> None:
        """Give stored bytes a name; this is sent at most once.

        Raises:
            UnansweredError: If it may or may not have happened.
        """
        operation = {"type": "addFile", "path": path, "xetHash": content, "mtime": int(time.time() * 1000)}
        await self._batch([operation], f"add {path!r}", resend=False)

    async def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there count as removed."""
        for start in range(0, len(paths), BATCH):
            part = paths[start : start + BATCH]
            operations = [{"type": "deleteFile", "path": path} for path in part]
            await self._batch(operations, f"remove {len(part)} files", resend=True)

    async def fetch(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of a file, or of a range that is not empty and begins within the file.

        Raises:
            FileMissingError: If it is not there.
        """
        headers = {"Accept-Encoding": "identity"}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        url = f"{self._endpoint}/buckets/{self.bucket}/resolve/{quote(path, safe='')}"
        answer = await self._call("GET", url, f"read {path!r}", headers=headers)
        data: bytes = answer.content
        # A server may answer a range with all.
        return data[start:stop] if answer.status_code == httpx2.codes.OK and "Range" in headers else data

    async def lend(self, scope: str, *, fresh: bool = False) -> Lent:
        """Return what opens the store for `read` or `write`; `fresh` asks for another than the one in use."""
        held = self._lent.get(scope)
        if held is None or fresh or held.end < time.time() + _SAFETY:
            refresh = f"{self._api}/xet-{scope}-token"
            answer = await self._call("GET", refresh, f"open the store to {scope}")
            try:
                told = answer.json()
                endpoint, token, end = str(told["casUrl"]), str(told["accessToken"]), int(told["exp"])
            except (ValueError, KeyError, TypeError):
                raise self._strange(f"open the store to {scope}") from None
            held = Lent(endpoint=endpoint, token=token, end=end, refresh=refresh, headers=dict(self._headers))
            self._lent[scope] = held
        return held

    @asynccontextmanager
    async def events(self, cursor: str | None) -> AsyncIterator[AsyncIterator[str]]:
        """Open the change feed behind a cursor, or where it is now, and give its lines.

        Raises:
            TransientTransportError: If it cannot be opened, or breaks off.
            TransportError: If there is none for this bucket, or the cursor is refused.
        """
        what = "follow the change feed"
        session = self._open()
        wanted = session.build_request(
            "GET",
            f"{self._api}/events",
            params={} if cursor is None else {"cursor": cursor},
            headers={**self._headers, "Accept": "text/event-stream"},
            timeout=httpx2.Timeout(_CONNECT, read=_SILENCE),
        )
        try:
            answer = await self._finish(session.send(wanted, stream=True))
            async with aclosing(answer):
                if answer.status_code != httpx2.codes.OK:
                    await answer.aread()
                    raise self._refused(answer, what)
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise self._strange(what)
                yield answer.aiter_lines()
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TransientTransportError(f"{self.url}: the change feed broke off: {error!r}", url=self.url) from error

    def shut(self) -> None:
        """Refuse all further requests."""
        self._closed = True

    async def close(self) -> None:
        """Close all connections; requests that run have a moment to end, and are broken off then."""
        self.shut()
        if self._running:
            await asyncio.wait(self._running, timeout=_GRACE)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._session is not None:
            await self._session.aclose()

    def check_open(self) -> None:
        """Do nothing, unless it was closed.

        Raises:
            TransportError: If it was.
        """
        if self._closed:
            raise TransportError(f"the transport of {self.url} is closed; open another", url=self.url)

    def _open(self) -> httpx2.AsyncClient:
        self.check_open()
        if self._session is None:
            self._session = get_async_session()
            self._headers = build_hf_headers(token=self._token, library_name="deltabus")
        return self._session

    async def _tree(self, prefix: str, *, recursive: bool) -> list[dict[str, Any]]:
        what = f"list {prefix!r}"
        url: str | None = f"{self._api}/tree/{quote(prefix, safe='')}" if prefix else f"{self._api}/tree"
        params = {"recursive": "true"} if recursive else None
        found: list[dict[str, Any]] = []
        seen: set[str] = set()
        while url is not None:
            if url in seen:
                raise self._strange(what)
            seen.add(url)
            answer = await self._call("GET", url, what, params=params)
            try:
                page = answer.json()
                if not all(isinstance(item["path"] + item["type"], str) for item in page):
                    raise self._strange(what)
                found += page
                url = answer.links["next"]["url"] if "next" in answer.links else None
            except (ValueError, KeyError, TypeError):
                raise self._strange(what) from None
            params = None  # even an empty one would take the cursor out of the address
        return found

    async def _batch(self, operations: Iterable[dict[str, Any]], what: str, *, resend: bool) -> None:
        content = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
        headers = {"Content-Type": "application/x-ndjson"}
        answer = await self._call(
            "POST", f"{self._api}/batch", what, content=content, headers=headers, resend=resend, accept=(422,)
        )
        try:
            failed = answer.json().get("failed", [])
        except ValueError:
            raise self._strange(what) from None
        if failed:
            said = clean("; ".join(f"{one.get('path')}: {one.get('error')}" for one in failed), self.secret)
            raise TransportError(f"cannot {what} in {self.url}: {said}", url=self.url)

    async def _call(
        self,
        method: str,
        url: str,
        what: str,
        *,
        resend: bool = True,
        accept: Sequence[int] = (),
        **request: Any,  # noqa: ANN401 - as `httpx2` takes it
    ) -> httpx2.Response:
        """Make a request, and turn every fault into ours.

        Args:
            method: HTTP's.
            url: Where.
            what: For the error.
            resend: Whether it may be made again although it may have had its effect.
            accept: Statuses that are not faults.
            request: Its other parts.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._timeout
        created, broken = not self._create, False
        while True:
            try:
                answer = await self._send(method, url, what, **request)
            except UnansweredError:
                # A connection that was kept for later may have been closed meanwhile; that is worth one more attempt.
                if broken or not resend or loop.time() >= limit:
                    raise
                broken = True
                continue
            if answer.is_success or answer.status_code in accept:
                return answer
            refused = self._refused(answer, what)
            missing = isinstance(refused, StatusError) and answer.headers.get("x-error-code") == "RepoNotFound"
            if missing and not created:
                created = True
                # Private, because a namespace may make public what nobody decides on.
                made = await self._send("POST", self._api, f"{what} in a new bucket", json={"visibility": "private"})
                if not made.is_success and made.status_code != httpx2.codes.CONFLICT:
                    raise self._refused(made, f"create bucket {self.bucket} for this")
                continue
            pause = _retry_after(answer)
            if answer.status_code == httpx2.codes.TOO_MANY_REQUESTS or (resend and pause is not None):
                if pause is not None and loop.time() + pause < limit:
                    await asyncio.sleep(pause)
                    continue
            elif not resend and answer.status_code >= 500 and isinstance(refused, TransientTransportError):
                raise UnansweredError(str(refused), url=self.url)
            raise refused

    async def _send(
        self,
        method: str,
        url: str,
        what: str,
        **request: Any,  # noqa: ANN401 - as `httpx2` takes it
    ) -> httpx2.Response:
        session = self._open()
        headers = {**self._headers, **request.pop("headers", {})}
        limits = httpx2.Timeout(self._timeout, connect=min(_CONNECT, self._timeout))
        try:
            wanted = session.build_request(method, url, headers=headers, timeout=limits, **request)
            return await self._finish(session.send(wanted))
        except _NOTHING_SENT as error:
            raise TransientTransportError(
                f"cannot {what} in {self.url}: no connection to {self._endpoint} ({type(error).__name__}); look at the "
                "network, HF_ENDPOINT and the option 'endpoint'",
                url=self.url,
            ) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise UnansweredError(
                f"cannot {what} in {self.url}: {self._endpoint} did not answer ({type(error).__name__}); raise the "
                f"option 'timeout' if {self._timeout:g} s are too few",
                url=self.url,
            ) from error
        except OfflineModeIsEnabled:
            raise TransportError(
                f"cannot {what} in {self.url}: offline mode is on; unset HF_HUB_OFFLINE", url=self.url
            ) from None
        except RuntimeError:
            self.check_open()  # its session was closed meanwhile
            raise

    async def _finish(self, request: Coroutine[Any, Any, httpx2.Response]) -> httpx2.Response:
        """Return the answer to a request; one whose sender is cancelled has a moment to end, and is broken off then.

        A connection that is broken off while it is made may be left open by the libraries below.
        """
        task = asyncio.create_task(request)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait((task,), timeout=_GRACE)
            task.cancel()
            (answer,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(answer, httpx2.Response):
                await answer.aclose()
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():
                self.check_open()  # it was `close` that broke the request off
            raise

    def _refused(self, answer: httpx2.Response, what: str) -> TransportError:
        said = answer.headers.get("x-error-message", "")
        if not said:
            try:
                said = str(answer.json().get("error", ""))
            except (ValueError, AttributeError):
                said = answer.reason_phrase
        code = answer.headers.get("x-error-code", "")
        said = clean(said, self.secret)
        return judge_status(answer.status_code, code, said, what=what, url=self.url, bucket=self.bucket)

    def _strange(self, what: str) -> TransportError:
        return TransportError(
            f"cannot {what} in {self.url}: {self._endpoint} does not answer as a Hub does; check HF_ENDPOINT and the "
            "option 'endpoint'",
            url=self.url,
        )


def _retry_after(answer: httpx2.Response) -> float | None:
    """Return for how long to leave the server alone, in seconds; None if it says nothing that can be understood."""
    text = answer.headers.get("retry-after", "").strip()
    return max(float(text), _LEAST_PAUSE) if text.isdigit() else None
