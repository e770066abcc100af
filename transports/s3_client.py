"""One client of an S3 server: opened when it is first needed, one attempt per call, every wait bounded."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import io
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError
from botocore.handlers import add_expect_header
from botocore.loaders import Loader

from deltabus.bus.errors import TransportError

from .s3_errors import S3_FAULTS, code_of, explain, status_of

__all__ = ["S3Client", "S3Settings", "md5"]

_Result = TypeVar("_Result")
_Client = Any
"""A client of botocore, whose methods exist only at run time."""

_Work = Callable[[_Client, Callable[[], None]], Awaitable[_Result]]

_CONNECTIONS = 64
_AMAZON = re.compile(r"(^|\.)amazonaws\.com(\.cn)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """Where a bucket is, and who asks; whatever is empty is looked up in the environment and AWS's files.

    Attributes:
        bucket: Its name.
        prefix: What stands in front of all names: empty, or ending with `/`.
        endpoint: The server's URL.
        region: The bucket's region.
        profile: The section of AWS's files.
        addressing: `path`, `virtual` or `auto`: by path, unless the server is Amazon's.
        access_key: The key's name.
        secret_key: The key itself.
        session_token: What goes with a temporary key.
        timeout: Seconds without progress after which a request is given up.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    addressing: str = "auto"
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    timeout: float = 60.0


class S3Client:
    """Calls a server, and turns its errors into ours.

    Args:
        settings: Where it is, and who asks.
        url: The topic's URL, without secrets, for errors.
    """

    def __init__(self, settings: S3Settings, *, url: str) -> None:
        self._settings = settings
        self._url = url
        self._lock = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._client: _Client = None
        self._closed = False

    async def close(self) -> None:
        """Close the connections; what is under way fails."""
        self._closed = True
        async with self._lock:
            self._client = None
            await self._stack.aclose()

    async def call(
        self, operation: str, arguments: Mapping[str, object], *, what: str, missing: bool = False, write: bool = False
    ) -> Any:  # noqa: ANN401 - botocore has no types
        """Return a small answer; see `run` for the options, and for when it is None."""

        async def work(client: _Client, _: Callable[[], None]) -> Any:  # noqa: ANN401
            return await getattr(client, operation)(**arguments)

        return await self.run(work, what=what, missing=missing, write=write)

    async def send(
        self, operation: str, arguments: Mapping[str, object], data: memoryview, *, what: str, write: bool = False
    ) -> Any:  # noqa: ANN401 - botocore has no types
        """Return the answer to a request with a body; see `run` for the options, and for when it is None."""

        async def work(client: _Client, extend: Callable[[], None]) -> Any:  # noqa: ANN401
            given = dict(arguments)
            if client.meta.endpoint_url.startswith("https:"):
                # Let the server check what arrives; without TLS the request's signature covers the body already.
                given["ContentMD5"] = base64.b64encode(await asyncio.to_thread(md5, data)).decode()
            return await getattr(client, operation)(**given, Body=_Body(_whole_bytes(data), extend))

        return await self.run(work, what=what, write=write)

    async def run(
        self, work: _Work[_Result], *, what: str, missing: bool = False, write: bool = False
    ) -> _Result | None:
        """Return what a function that uses the client returns, for as long as it makes progress.

        Args:
            work: Is given botocore's client, and a function to call after each step.
            what: It does, as it stands behind "cannot".
            missing: Whether to return None if there is no such object.
            write: Whether to return None if the server refuses to overwrite, and to tell when an answer was lost.

        Raises:
            UncertainError: If the answer to a write was lost.
            TransportError: On any other fault.
        """
        timeout = self._settings.timeout
        try:
            async with asyncio.timeout(timeout) as deadline:
                client = await self._connected()
                clock, working = asyncio.get_running_loop().time, True

                def extend() -> None:
                    # A server may refuse a body, and so end the call, while it is still sent.
                    if working and not deadline.expired():
                        deadline.reschedule(clock() + timeout)

                try:
                    return await work(client, extend)
                finally:
                    working = False
        except S3_FAULTS as error:
            self._check_open()
            if isinstance(error, ClientError):
                status = status_of(error)
                if (missing and status == 404 and code_of(error) != "NoSuchBucket") or (write and status == 412):
                    return None
            raise explain(error, what, self._url, timeout=timeout, write=write) from error

    async def receive(self, body: Any, extend: Callable[[], None]) -> bytes:  # noqa: ANN401 - it has no types
        """Return all bytes of an answer, for work of `run`, which gives `extend`.

        The library reads them in one go; whether they still come is looked at now and then. They come in hundreds of
        pieces, and to ask for each, and set the clock anew, costs time.
        """
        async with body:
            reading = asyncio.ensure_future(body.read())
            try:
                seen = 0
                while not (await asyncio.wait((reading,), timeout=self._settings.timeout / 4))[0]:
                    came = body.raw_stream.content.total_bytes
                    if came > seen:
                        seen = came
                        extend()
                return bytes(reading.result())
            finally:
                reading.cancel()
                await asyncio.wait((reading,))

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self._url} is closed; open another", url=self._url)

    async def _connected(self) -> _Client:
        async with self._lock:
            self._check_open()
            if self._client is None:
                self._client = await self._connect()
            self._check_open()
            return self._client

    async def _connect(self) -> _Client:
        settings = self._settings
        session = AioSession(profile=settings.profile or None)
        loader = _loader()
        session.register_component("data_loader", loader)
        await asyncio.to_thread(loader.load_service_model, "s3", "service-2")  # a large file, the first time
        # The bucket's name as a part of the host's needs a name server that knows it, which few but Amazon's do.
        if settings.addressing != "auto" or _is_foreign(settings.endpoint):
            return await self._open(session, settings.addressing.replace("auto", "path"))
        client = await self._open(session, "auto")
        if _is_foreign(client.meta.endpoint_url) and not (client.meta.config.s3 or {}).get("addressing_style"):
            return await self._open(session, "path")
        return client

    async def _open(self, session: AioSession, addressing: str) -> _Client:
        settings = self._settings
        config = AioConfig(
            connect_timeout=settings.timeout,
            read_timeout=settings.timeout,
            max_pool_connections=_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Payloads and messages carry checksums of their own, and not every server knows those of newer clients.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3=None if addressing == "auto" else {"addressing_style": addressing},
        )
        client = await self._stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=settings.region or None,
                endpoint_url=settings.endpoint or None,
                aws_access_key_id=settings.access_key or None,
                aws_secret_access_key=settings.secret_key or None,
                aws_session_token=settings.session_token or None,
                config=config,
            )
        )
        # Asking first whether a body is welcome costs a round trip, and makes a server that hears no more after the
        # question store an empty object (SeaweedFS 4.48).
        client.meta.events.unregister("before-call.s3", add_expect_header)
        return client


class _Body(io.BytesIO):
    """Bytes to send, which say when some are fetched."""

    def __init__(self, data: bytes, on_read: Callable[[], None]) -> None:
        super().__init__(data)
        self._on_read = on_read

    def read(self, size: int | None = -1, /) -> bytes:
        self._on_read()
        return super().read(size)


@functools.cache
def _loader() -> Loader:
    """Return the reader of botocore's own files, shared because they are large and never change."""
    return Loader()


def _is_foreign(endpoint: str) -> bool:
    return bool(endpoint) and not _AMAZON.search(urlsplit(endpoint).hostname or "")


def _whole_bytes(data: memoryview) -> bytes:
    """Return a view's bytes, without a copy where it shows all of a bytes object."""
    if isinstance(data.obj, bytes) and data.nbytes == len(data.obj):
        return data.obj
    return data.tobytes()


def md5(data: memoryview | bytes) -> bytes:
    """Return the checksum that the protocol uses; it guards against accidents, not against attacks."""
    return hashlib.md5(data, usedforsecurity=False).digest()
