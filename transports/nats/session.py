"""One connection to a server, until it is lost, and the answers that are awaited on it.

The library's own reconnection is not used: it would send what it holds back long after its caller gave up, and it ends
for good at errors of the server. Here a session that is lost tells everyone who waits, and another one is begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from deltabus.bus.errors import AccessDeniedError, TransientTransportError, TransportError
from deltabus.bus.transport import Buffer

__all__ = ["Listener", "Session", "UnansweredError"]

_log = logging.getLogger("deltabus.nats")

_PING_INTERVAL = 30
_LARGE = 64 << 10  # bytes from which on messages are handed to the library one by one
_UNBOUNDED = 1 << 40
_CLOSING = 1.0

Listener = Callable[[Msg | Exception], None]


class UnansweredError(TransientTransportError):
    """A request was sent, but its answer did not come: the server may have done what it was asked to do."""


class _TlsClient(Client):
    """Logs in over TLS or not at all: the library would send a password in the clear where a server asks for no TLS."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        if not hasattr(Client, "_connect_command"):
            raise TransportError(f"{url}: this version of nats-py cannot be held to TLS; install an older one", url=url)

    def _connect_command(self) -> bytes:
        line = getattr(self._transport, "_io_writer", None)
        if line is None or line.get_extra_info("ssl_object") is None:
            server = getattr(self._current_server, "uri", None)
            raise TransportError(
                f"{self._url}: the server at {server.netloc if server else 'its address'} does not ask for TLS, and "
                "nothing was sent to it; set up TLS there, or use nats:// without the options of TLS",
                url=self._url,
            )
        return super()._connect_command()


class Session:
    """A client of the library, connected once; `options` go to its `connect`.

    Args:
        url: The topic's URL, for errors.
        inbox_prefix: What the subjects of answers begin with.
        tls: Whether nothing may be sent without TLS.
        on_end: Called once, when the connection is lost or closed.
    """

    def __init__(self, *, url: str, inbox_prefix: str, tls: bool, on_end: Callable[[Session], None]) -> None:
        self.client = _TlsClient(url) if tls else Client()
        self.faults: list[Exception] = []
        self._url = url
        self._prefix = inbox_prefix
        self._on_end = on_end
        self._inbox = ""
        self._turn = asyncio.Lock()
        self._count = 0
        self._denied = ""
        self._listeners: dict[str, tuple[str, Listener]] = {}
        self._subscription: Subscription | None = None
        self._begun = False
        self._ended = False

    @property
    def alive(self) -> bool:
        """Whether requests can be sent."""
        return not self._ended and self.client.is_connected

    async def begin(self, server: str, *, limit: float, **options: Any) -> None:  # noqa: ANN401 - as the library has them
        """Connect to one server, once.

        Raises:
            TransportError: If there must be TLS and there is none; nothing was sent.
            Exception: Whatever the library raises; what it kept to itself is in `faults`.
        """
        await self.client.connect(
            servers=[server],
            name="deltabus",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=limit,  # type: ignore[arg-type] # any number of seconds
            ping_interval=_PING_INTERVAL,
            # How much may be under way is decided here; the library would wait without a limit, deaf to cancellation.
            pending_size=_UNBOUNDED,
            error_cb=self._notice,
            closed_cb=self._closed,
            inbox_prefix=self._prefix,
            **options,
        )
        self._begun = True
        reading = getattr(self.client, "_reading_task", None)
        if reading is not None:
            # The library says nothing when a line that is cut holds what was not sent yet.
            reading.add_done_callback(lambda _: self._tell_end())
        self._inbox = self.client.new_inbox()
        self._subscription = await self.client.subscribe(f"{self._inbox}.*", cb=self._deliver)

    @contextlib.contextmanager
    def listening(self, subject: str, listener: Listener) -> Iterator[str]:
        """Give a subject for answers to what is sent to `subject`; each goes to the listener, and so does the end."""
        self._count += 1
        token = str(self._count)
        self._listeners[token] = (subject, listener)
        try:
            yield f"{self._inbox}.{token}"
        finally:
            del self._listeners[token]

    @contextlib.asynccontextmanager
    async def subscribed(self, subject: str, listener: Listener) -> AsyncIterator[str]:
        """Give a subject for answers as `listening` does, for messages that arrive under the subject they came by."""

        async def deliver(message: Msg) -> None:
            listener(message)

        inbox = self.client.new_inbox()
        with self.listening(subject, listener), _faults_as_ours(self._url):
            subscription = await self.client.subscribe(inbox, cb=deliver)
            try:
                yield inbox
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()

    async def send(
        self, subject: str, payload: Buffer, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message; a small one does not wait, a large one until the line has room for more, or is cut.

        Raises:
            AccessDeniedError: If the server takes nothing from here.
            TransientTransportError: If the connection is lost; nothing was sent.
        """
        if len(payload) < _LARGE:
            await self._publish(subject, payload, reply, headers)
            return
        # Whatever waits in the library is joined and copied, three times, before the line takes it; one message is not.
        async with self._turn:
            await self._publish(subject, payload, reply, headers)
            await asyncio.sleep(0)  # now the library hands it to the line
            if (line := self._line()) is not None:
                with contextlib.suppress(OSError):  # whoever waits for an answer is told
                    await line.drain()

    async def _publish(self, subject: str, payload: Buffer, reply: str, headers: dict[str, str] | None) -> None:
        if self._denied:
            raise AccessDeniedError(self._denied, url=self._url)
        with _faults_as_ours(self._url):
            # The library copies it at once, behind what the protocol puts in front, so that a view will do.
            await self.client.publish(subject, cast(bytes, payload), reply=reply, headers=headers)

    async def end(self) -> None:
        """Close the connection, in a second or two, and tell everyone who waits."""
        self._tell_end()
        if not self._begun:
            # There is only a line; the library would wait for the end of one whose handshake failed, for ever.
            self._abort()
            await asyncio.sleep(0)
            return
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.wait((closing,), timeout=_CLOSING)
        finally:
            if not closing.done():
                self._abort()
                await asyncio.wait((closing,), timeout=_CLOSING)
                closing.cancel()
            if not closing.cancelled() and closing.done() and closing.exception():
                _log.debug("closing a connection to %s: %r", self._url, closing.exception())

    async def _close(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
        await self.client.close()
        # What the library leaves behind after an end that it did not expect.
        self._abort()
        for subscription in list(getattr(self.client, "_subs", {}).values()):
            subscription._stop_processing()

    def _abort(self) -> None:
        """Cut the line of a server that no longer reads; the library would wait for it."""
        line = self._line()
        if line is not None:
            line.transport.abort()

    def _line(self) -> asyncio.StreamWriter | None:
        """Return what the library writes to; None where there is no line, or the library keeps it elsewhere."""
        return getattr(getattr(self.client, "_transport", None), "_io_writer", None)

    def _tell_end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for subject, listener in list(self._listeners.values()):
            listener(UnansweredError(f"{self._url} lost its connection before {subject} was answered", url=self._url))
        self._on_end(self)

    async def _closed(self) -> None:
        self._tell_end()

    async def _deliver(self, message: Msg) -> None:
        _, listener = self._listeners.get(message.subject.rpartition(".")[2], ("", None))
        if listener is not None:
            listener(message)

    async def _notice(self, error: Exception) -> None:
        """Take what the library reports besides; it would log a traceback otherwise."""
        self.faults.append(error)
        del self.faults[:-8]
        text = str(error)
        _log.debug("connection to %s: %r", self._url, error)
        if "permissions violation" not in text.lower():
            return
        advice = f"{self._url} refuses: {text}; let the account's administrator allow it, or log in as another user"
        if "subscription" in text.lower():
            # No answer can come: all of them come on one subject.
            self._denied = f"{advice}, or set the option 'inbox_prefix'"
            refused = list(self._listeners.values())
        else:
            refused = [(s, listener) for s, listener in self._listeners.values() if f'"{s.lower()}"' in text.lower()]
        for _, listener in refused:
            listener(AccessDeniedError(self._denied or advice, url=self._url))


@contextlib.contextmanager
def _faults_as_ours(url: str) -> Iterator[None]:
    try:
        yield
    except nats.errors.Error as error:
        raise TransientTransportError(f"{url} cannot send: {error}; it may be done again", url=url) from error
