"""One session after another: whoever has a request gets one that is alive, or learns why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncIterator

from nats.aio.client import RawCredentials
from nats.aio.msg import Msg

from deltabus.bus.errors import AccessDeniedError, TransientTransportError, TransportError
from deltabus.bus.transport import Buffer

from .session import Session, UnansweredError
from .settings import Settings

__all__ = ["Connection"]

_OLDEST = (2, 10)
_DIALING = 5.0
_REFUSALS = ("authorization violation", "authentication", "authorization", "nkey", "jwt")


class Connection:
    """Connects when it is first used, and again whenever it has to.

    Args:
        settings: Where, who and how.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = settings.url
        self._others: set[str] = set()
        self._session: Session | None = None
        self._dialing: asyncio.Task[Session] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._answered = time.monotonic()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether there is a session that is alive."""
        return not self._closed and self._session is not None and self._session.alive

    @property
    def max_payload(self) -> int:
        """Bytes that the server takes in one message, headers included; what is usual while there is no session."""
        return self._session.client.max_payload if self._session else 1 << 20

    def check_open(self) -> None:
        """Check that it was not closed.

        Raises:
            TransportError: If it was.
        """
        if self._closed:
            raise TransportError(f"the transport of {self._url} is closed; open another", url=self._url)

    async def session(self) -> Session:
        """Return a session that is alive.

        Raises:
            AccessDeniedError: If the servers refuse who logs in.
            TransientTransportError: If no server can be reached.
            TransportError: If the servers cannot be used, or the connection is closed.
        """
        self.check_open()
        if self._session is not None and self._session.alive:
            return self._session
        if self._dialing is None or self._dialing.done():
            # Everyone waits for one attempt, which goes on if those who wait are cancelled.
            self._dialing = asyncio.create_task(self._dial())
            self._dialing.add_done_callback(lambda done: done.cancelled() or done.exception())
        dialing = self._dialing
        await asyncio.wait((dialing,))
        self.check_open()
        return dialing.result()

    async def request(
        self, subject: str, payload: Buffer = b"", *, headers: dict[str, str] | None = None, patient: bool = False
    ) -> Msg:
        """Send a request and return its answer.

        Args:
            subject: Where to.
            payload: What; a view is of bytes, which do not change meanwhile.
            headers: Besides.
            patient: Whether the time begins anew with each answer to another request, for one of many on a slow line.

        Raises:
            UnansweredError: If no answer came: it may have been done.
            AccessDeniedError: If the server refuses it.
            TransientTransportError: If there is no connection; nothing was sent.
            TransportError: If there can be none.
        """
        session = await self.session()
        loop = asyncio.get_running_loop()
        limit = self._settings.timeout
        answer: asyncio.Future[Msg | Exception] = loop.create_future()
        since = time.monotonic()
        watch: asyncio.TimerHandle

        def listener(news: Msg | Exception) -> None:
            if not answer.done():
                answer.set_result(news)

        def expire() -> None:
            nonlocal watch
            left = (max(since, self._answered) if patient else since) + limit - time.monotonic()
            if left > 0:
                watch = loop.call_later(left, expire)
                return
            listener(
                UnansweredError(
                    f"{self._url} did not answer {subject} within {limit:g} s; look at the server, or raise the option "
                    "'timeout'",
                    url=self._url,
                )
            )
            self._drop(session)

        watch = loop.call_later(limit, expire)
        try:
            with session.listening(subject, listener) as reply:
                await session.send(subject, payload, reply=reply, headers=headers)
                news = await answer
        finally:
            watch.cancel()
        if isinstance(news, Exception):
            raise news
        self._answered = time.monotonic()
        return news

    @contextlib.asynccontextmanager
    async def inbox(
        self, subject: str, *, own: bool = False
    ) -> AsyncIterator[tuple[Session, str, asyncio.Queue[Msg | Exception]]]:
        """Give a session, a subject for any number of answers to what is sent to `subject`, and where they arrive.

        The end of the session arrives there as an `UnansweredError`.

        Args:
            subject: Where requests will be sent.
            own: Whether the answers keep another subject, as messages of a consumer do.

        Raises:
            TransportError: As `session` does.
        """
        session = await self.session()
        arrived: asyncio.Queue[Msg | Exception] = asyncio.Queue()
        if own:
            async with session.subscribed(subject, arrived.put_nowait) as reply:
                yield session, reply, arrived
        else:
            with session.listening(subject, arrived.put_nowait) as reply:
                yield session, reply, arrived

    async def next_of(self, arrived: asyncio.Queue[Msg | Exception], *, what: str, limit: float | None = None) -> Msg:
        """Return the next answer that arrives in an inbox.

        Args:
            arrived: As `inbox` gives it.
            what: The subject that the request was sent to.
            limit: Seconds to wait; None is the usual time.

        Raises:
            UnansweredError: If none comes, or the session ended.
            AccessDeniedError: If the server refuses the request.
        """
        limit = self._settings.timeout if limit is None else limit
        try:
            async with asyncio.timeout(limit):
                news = await arrived.get()
        except TimeoutError:
            raise UnansweredError(
                f"{self._url} sent nothing on {what} within {limit:g} s; look at the server", url=self._url
            ) from None
        if isinstance(news, Exception):
            raise news
        return news

    async def close(self) -> None:
        """Close it for good; it may be called more than once."""
        self._closed = True
        if self._dialing is not None:
            self._dialing.cancel()
            await asyncio.wait((self._dialing,))
        if self._session is not None:
            self._drop(self._session)
        while self._ending:
            await asyncio.wait(self._ending)

    def _drop(self, session: Session) -> None:
        """End a session, in the background: one that leaves requests unanswered may have a dead line."""
        if self._session is session:
            self._session = None
        task = asyncio.create_task(session.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _on_end(self, session: Session) -> None:
        if self._session is session:
            self._drop(session)

    async def _dial(self) -> Session:
        """Try each server once: those of the URL first, as a cluster may tell of servers that cannot be reached."""
        faults: list[str] = []
        own, others = list(self._settings.servers), list(self._others)
        random.shuffle(own)  # readers spread over the servers of a cluster
        random.shuffle(others)
        begun = time.monotonic()
        for server in own + others:
            if faults and time.monotonic() - begun > self._settings.timeout:
                break
            session = Session(
                url=self._url,
                inbox_prefix=self._settings.inbox_prefix,
                tls=self._settings.tls.required,
                on_end=self._on_end,
            )
            try:
                await self._begin(session, server)
            except BaseException as error:
                await session.end()
                fault = self._judge(error, server, session.faults)
                if not isinstance(fault, TransientTransportError):
                    raise fault from (error if fault is not error else None)
                faults.append(str(fault))
            else:
                self._session = session
                known = {uri.netloc.rpartition("@")[2] for uri in session.client.servers}
                self._others = known - set(self._settings.servers)
                return session
        raise TransientTransportError(
            f"{self._url}: no server can be reached ({'; '.join(faults)}); check that it runs and that host and port "
            "are right",
            url=self._url,
        )

    async def _begin(self, session: Session, server: str) -> None:
        settings = self._settings
        limit = min(settings.timeout, _DIALING)
        creds = settings.login.read_creds(url=self._url)
        context = settings.tls.make_context(url=self._url) if settings.tls.required else None
        async with asyncio.timeout(limit):
            await session.begin(
                f"{'tls' if settings.tls.required else 'nats'}://{server}",
                limit=limit,
                user=settings.login.user,
                password=settings.login.password,
                token=settings.login.token,
                nkeys_seed_str=settings.login.read_seed(url=self._url),
                user_credentials=None if creds is None else RawCredentials(creds),
                tls=context,
                tls_hostname=settings.tls.hostname,
                tls_handshake_first=settings.tls.first,
            )
        version = session.client.connected_server_version
        if (version.major, version.minor) < _OLDEST:
            raise TransportError(
                f"{self._url}: the server at {server} is {version!r}; 2.10 or later is needed, so update it",
                url=self._url,
            )

    def _judge(self, error: BaseException, server: str, noticed: list[Exception]) -> BaseException:
        """Return which of our errors a failed attempt is."""
        if isinstance(error, TransportError) or not isinstance(error, Exception):
            return error
        causes = [error, *reversed(noticed)]
        text = "; ".join(dict.fromkeys(str(cause) or type(cause).__name__ for cause in causes))
        if any(isinstance(cause, ssl.SSLError) for cause in causes):
            return TransportError(
                f"{self._url}: no TLS with the server at {server} ({text}); check the options 'ca_file' and "
                "'tls_hostname', and whether the server wants a certificate or 'tls_first'",
                url=self._url,
            )
        if any(word in text.lower() for word in _REFUSALS):
            return AccessDeniedError(
                f"{self._url}: the server at {server} refuses who logs in ({text}); check user and password, 'token', "
                "'nkey_file' or 'creds_file'",
                url=self._url,
            )
        return TransientTransportError(f"{server}: {text}", url=self._url)
