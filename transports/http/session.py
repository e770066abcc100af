"""Requests to a service: one aiohttp session, limits on silence, and which of our errors a failure is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from deltabus.bus.errors import (
    AccessDeniedError,
    DeltabusError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.transport import Buffer

from .settings import Settings
from .wire import ERROR_HEADER, KINDS, READER_HEADER, Failure

__all__ = ["Answer", "LostError", "Session"]

_PIECE = 1 << 18
_MAX_ERROR_BYTES = 1 << 16
_MAX_LINE = 1 << 14
_ADVICE = {
    401: "give a token that the service knows, as the option 'token' or 'token_file', or in DELTABUS_TOKEN",
    403: "let the administrator of the service allow it, or take another token",
    404: "check host, port and path: is a deltabus service there?",
    413: "let the administrator of the service, or of a proxy before it, raise the limit",
}


class LostError(TransientTransportError):
    """The line broke, or nothing came for too long, after the request may have arrived."""


class _Silence:
    """Ends what waits when nothing was heard for too long."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.timeout = asyncio.timeout(limit)

    def heard(self) -> None:
        """Begin to wait anew."""
        self.timeout.reschedule(asyncio.get_running_loop().time() + self._limit)

    def stop(self) -> None:
        """Wait no more."""
        self.timeout.reschedule(None)


class Answer:
    """An answer whose body is read piece by piece.

    Attributes:
        status: As in HTTP.
        headers: As in HTTP.
    """

    def __init__(self, response: aiohttp.ClientResponse, silence: _Silence) -> None:
        self._response = response
        self._silence = silence
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes as they come."""
        async for piece in self._response.content.iter_any():
            self._silence.heard()
            yield piece

    async def read(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            TransportError: If it is over the limit.
        """
        found = bytearray()
        async for piece in self.pieces():
            found += piece
            if len(found) > limit:
                raise TransportError(f"{self._response.url.host} answers more than {limit} bytes; is it deltabus?")
        return bytes(found)

    def leave(self) -> None:
        """Stop watching for silence: from now on `next_piece` has a limit of its own.

        A limit around code of the caller's would cancel that.
        """
        self._silence.stop()

    async def next_piece(self, limit: float) -> bytes:
        """Return what comes next; nothing at the end.

        Raises:
            TimeoutError: If nothing comes within so many seconds.
        """
        async with asyncio.timeout(limit):
            return await self._response.content.readany()


class Session:
    """Makes requests, for one topic, in one event loop; it connects with the first one.

    Args:
        settings: Where, who and how.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """The topic's URL, without secrets."""
        return self._settings.url

    def check_open(self) -> None:
        """Raise `TransportError` if it was closed."""
        if self._closed:
            raise TransportError(f"the transport of {self.url} is closed; open another", url=self.url)

    async def close(self) -> None:
        """Release the connections; what waits on them ends."""
        self._closed = True
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Buffer | None = None,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        also: tuple[int, ...] = (),
    ) -> AsyncIterator[Answer]:
        """Make a request, and give its answer if it is a success.

        Args:
            method: As in HTTP.
            path: Behind the topic's own, and its `/-/`; one that begins with `/` is the service's own.
            what: Named in errors: "store blob 'a'".
            body: Bytes to send; not to be changed before the end.
            query: What follows the path.
            headers: Besides those that all requests have.
            also: Statuses that are no failure.

        Raises:
            LostError: If the answer was lost, or did not come in time.
            TransientTransportError: If the service cannot be reached, so that surely nothing happened.
            DeltabusError: Whatever the service answers with.
        """
        self.check_open()
        limit = self._settings.timeout
        place = path if path.startswith("/") else f"/{self._settings.topic}/-/{path}"
        url = f"{self._settings.base}{place}"
        silence = _Silence(limit)
        try:
            async with silence.timeout:
                sent: dict[str, Any] = {"headers": dict(headers or {})}
                if body is not None:
                    view = memoryview(body)
                    sent["headers"]["Content-Length"] = str(view.nbytes)
                    sent["data"] = _body(view, silence)
                async with self._session().request(method, url, params=query, **sent) as response:
                    if response.status >= 300 and response.status not in also:
                        raise await self._failure(response, what)
                    yield Answer(response, silence)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.check_open()
            raise self._unreachable(error, what) from None
        except TimeoutError:
            self.check_open()
            raise LostError(
                f"{self.url} was silent for {limit:g} s when told to {what}; look at the service and the line, or "
                "raise the option 'timeout'",
                url=self.url,
            ) from None
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            # aiohttp raises RuntimeError for a session that is closed meanwhile.
            self.check_open()
            if isinstance(error, RuntimeError):
                raise
            reason = str(error) or type(error).__name__
            raise LostError(
                f"cannot {what} in {self.url}: the line broke ({reason}); it may be done again", url=self.url
            ) from None

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            token = self._settings.read_token()
            headers = {READER_HEADER: self._settings.reader, "Accept-Encoding": "identity"}
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            context = self._settings.make_context()
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=True if context is None else context),
                timeout=aiohttp.ClientTimeout(total=None, connect=0.9 * self._settings.timeout),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_PIECE,
                max_line_size=_MAX_LINE,
                max_field_size=_MAX_LINE,
            )
        return self._http

    def _unreachable(self, error: Exception, what: str) -> TransportError:
        """Return which error it is that no connection was made, so that surely nothing happened."""
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return AccessDeniedError(
                f"{self.url}: the service's certificate is not trusted ({error.certificate_error}); give the option "
                "'ca_file'",
                url=self.url,
            )
        return TransientTransportError(
            f"cannot {what} in {self.url}: no connection ({error}); is the service running?", url=self.url
        )

    async def _failure(self, response: aiohttp.ClientResponse, what: str) -> DeltabusError:
        """Return the error that an answer is."""
        text = await response.content.read(_MAX_ERROR_BYTES)
        try:
            failure = msgspec.json.decode(text, type=Failure)
        except (msgspec.DecodeError, UnicodeDecodeError):
            code = response.headers.get(ERROR_HEADER, "")
            failure = Failure(error=code, message=f"status {response.status}")
        _, kind = KINDS.get(failure.error, (0, _kind_of_status(response.status)))
        advice = f"; {_ADVICE[response.status]}" if failure.error not in KINDS or response.status in {401, 403} else ""
        message = f"cannot {what} in {self.url}: {failure.message}{advice if response.status in _ADVICE else ''}"
        if issubclass(kind, TransportError):
            return kind(message, url=self.url)
        return kind(message)


def _kind_of_status(status: int) -> type[DeltabusError]:
    """Return which error a status is that no service of ours explains: a proxy's, or a stranger's."""
    if status in {502, 504}:  # a proxy lost the service, maybe after the request arrived
        return LostError
    if status in {408, 429, 500, 503}:
        return TransientTransportError
    if status in {401, 403, 407}:
        return AccessDeniedError
    return UsageError if status in {400, 413} else TransportError


def _body(data: memoryview, silence: _Silence) -> bytes | AsyncIterator[bytes]:
    """Return what to send: small bodies whole, so that a connection that had gone stale is no failure."""
    if data.nbytes <= _PIECE:
        return bytes(data)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, data.nbytes, _PIECE):
            yield bytes(data[at : at + _PIECE])
            silence.heard()

    return pieces()
