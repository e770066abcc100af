"""The application: what is served, and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from deltabus.bus.errors import UsageError

from .access import Access, Grant, Scope, check_exposure, is_loopback
from .cache import Cache, make_temporary
from .guards import Door, make_guard, make_recorder
from .limits import Limits, Rates
from .metrics import Metrics
from .page import Page
from .routes import Routes
from .topics import Topics, normal_url
from .transcode import Transcoders, Transcoding

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

__all__ = ["Service", "ServiceSettings"]

_log = logging.getLogger("deltabus.http")
_DRAIN_SECONDS = 30.0
_CLEANUP_SECONDS = 1.0
_KEEPALIVE = 75.0
_MAX_LINE = 4096
_MAX_SHOWN = 100
_BACKLOG = 1024
_LOCAL_SCHEMES = ("file:", "memory:")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What is served, where, and to whom.

    Attributes:
        upstream: The URL, or local path, that the topics lie below.
        host: The address to listen on.
        port: The port; 0 is any that is free.
        access: Who may do what.
        insecure: Whether to be reached from other machines without tokens.
        cache_dir: Where blobs are kept; None is a temporary place, unless the backend is on this machine.
        cache_size: Bytes that they may take; 0 keeps none.
        certificate: PEM file of the service's certificate, with those that sign it; None is without TLS.
        private_key: PEM file of its key, where that is another.
        limits: How much anybody may do.
        drain: Seconds that those may take who are being served when it stops.
        transcoding: Which topics are made of others, and how; None makes none.
        tracer: Makes OpenTelemetry spans of requests; None makes none.
    """

    upstream: str
    host: str = "127.0.0.1"
    port: int = 8700
    access: Access = field(default_factory=Access)
    insecure: bool = False
    cache_dir: Path | None = None
    cache_size: int = 4 << 30
    certificate: Path | None = None
    private_key: Path | None = None
    limits: Limits = field(default_factory=Limits)
    drain: float = _DRAIN_SECONDS
    transcoding: Transcoding | None = None
    tracer: Tracer | None = None


class Service:
    """Serves topics; use it as `async with`.

    Args:
        settings: What, where, and to whom.

    Attributes:
        url: Where it listens.

    Raises:
        UsageError: If the settings make no sense together, or something that they name cannot be used.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        check_exposure(settings.host, settings.access, allowed=settings.insecure)
        self._settings = settings
        self._context = _context(settings)
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        self.metrics = Metrics()

    async def __aenter__(self) -> Service:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        settings, metrics = self._settings, self.metrics
        spool, cache = self._places()
        page = Page(metrics)
        transcoders = None
        token, access = secrets.token_urlsafe(), settings.access
        if settings.transcoding is not None:
            place = normal_url(settings.upstream)
            transcoders = Transcoders(
                settings.transcoding, cache=settings.cache_dir, upstream=place, changed=page.changed
            )
            self._stack.push_async_callback(transcoders.close)
            access = access.with_token(token, Grant("transcoder", Scope.READ))
        topics = Topics(settings.upstream, cache=cache, metrics=metrics, changed=page.changed, transcoders=transcoders)
        self._stack.push_async_callback(topics.close)
        await topics.find()
        page.serve(topics, access, cache)
        metrics.watch_topics(lambda: _figures(topics))
        if transcoders is not None:
            metrics.watch_transcoders(lambda: _transcoded(topics, transcoders))

        rates = Rates(settings.limits.rate)
        local = settings.access.open and is_loopback(settings.host)
        door = Door()
        middlewares = [make_recorder(metrics, door), make_guard(rates, door, local=local)]
        if settings.tracer is not None:
            from .tracing import make_spans  # only where somebody traces

            middlewares.insert(0, make_spans(settings.tracer))
        app = web.Application(
            middlewares=middlewares,
            client_max_size=settings.limits.body,
        )
        page.add_to(app)
        Routes(topics, access=access, limits=settings.limits, metrics=metrics, cache=cache, spool=spool).add_to(app)

        async def drain() -> None:
            if transcoders is not None:
                await transcoders.close()
            page.close()
            await topics.stop_following()
            await door.close(settings.drain)

        runner = web.AppRunner(
            app,
            access_log=None,
            logger=logging.getLogger("deltabus.http.malformed"),
            shutdown_timeout=_CLEANUP_SECONDS,
            keepalive_timeout=_KEEPALIVE,
            max_line_size=_MAX_LINE,
            max_field_size=_MAX_LINE,
            auto_decompress=False,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        sweeper = asyncio.create_task(topics.run())
        self._stack.callback(sweeper.cancel)
        self._stack.push_async_callback(drain)
        self.url = await self._listen(runner, settings.host, settings.port, self._context)
        if transcoders is not None:
            # Of their own, because who transcodes needs no certificate, whatever the service's name is.
            base = await self._listen(runner, "127.0.0.1", 0, None)
            for name in transcoders.begin(base, token):
                async with topics.use(name) as topic:
                    topic.found = True

    async def _listen(self, runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None) -> str:
        """Listen on an address, and return its URL."""
        settings = self._settings
        serve = runner.server
        assert serve is not None

        def connect() -> asyncio.Protocol:
            if len(serve.connections) >= settings.limits.connections:
                self.metrics.refused.inc()
                return _Refusal()
            return serve()

        try:
            server = await asyncio.get_running_loop().create_server(
                connect, host, port, ssl=context, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
            ) from error
        self._stack.callback(server.close)
        host, port = server.sockets[0].getsockname()[:2]
        return f"{'https' if context else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def _places(self) -> tuple[Path | None, Cache | None]:
        """Return where large bodies go, and the cache; None where there is none."""
        settings = self._settings
        local = "://" not in settings.upstream or settings.upstream.startswith(_LOCAL_SCHEMES)
        directory = settings.cache_dir
        if not settings.cache_size or (directory is None and local):
            return None, None
        if directory is None:
            directory = make_temporary()
            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
        cache = Cache(directory, settings.cache_size)
        self._stack.callback(cache.close)
        self.metrics.cache_limit.set(cache.limit)
        self.metrics.cache_used.set_function(lambda: cache.used)
        return directory, cache


class _Refusal(asyncio.Protocol):
    """Tells a connection that it is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nDeltabus-Error: busy\r\nRetry-After: 1\r\n"
            b"Connection: close\r\nContent-Length: 0\r\n\r\n"
        )
        transport.close()


def _context(settings: ServiceSettings) -> ssl.SSLContext | None:
    if settings.certificate is None:
        if settings.private_key is not None:
            raise UsageError("a private key without a certificate; give --certificate as well")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.certificate, settings.private_key)
    except (OSError, ValueError) as error:
        raise UsageError(f"the certificate {settings.certificate}, or its key, cannot be used: {error}") from error
    return context


def _figures(topics: Topics) -> Iterable[tuple[str, str, int, int | None]]:
    """Give version and lag of the topics that were used last."""
    newest = sorted(topics, key=lambda topic: topic.used, reverse=True)[:_MAX_SHOWN]
    for topic in newest:
        lag = topic.ledger.greatest_lag()
        for log, version in sorted(topic.ledger.versions().items())[:_MAX_SHOWN]:
            yield topic.name, log, version, lag


def _transcoded(topics: Topics, transcoders: Transcoders) -> Iterable[tuple[str, bool, int, int | None]]:
    """Give for each topic that is made whether it is now, restarts, and lag."""
    for made in transcoders:
        told = topics.transcoder_of(made.name)
        yield made.name, made.running, made.restarts, None if told is None else told["lag"]
