"""Announcements over plain NATS, which keeps nothing: JetStream is not needed.

The newest position of a log is published, in decimal digits, on the subject `deltabus.<topic>.news.<log>`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import nats.errors
from nats.aio.msg import Msg

from deltabus.bus.errors import TransientTransportError

from ..notifier import Notifier
from ..options import Option
from ..registry import Address
from .connection import Connection
from .session import Session
from .settings import OPTIONS, Settings, read_settings

__all__ = ["NatsNotifier"]

_OF_STREAMS = frozenset({"domain", "replicas", "storage", "max_bytes", "max_age"})
_MOST_DIGITS = 19  # of a position, which is below 2^63


class NatsNotifier(Notifier):
    """A channel of announcements on NATS servers.

    Args:
        settings: Where, who and how; the topic names the channel.
    """

    options: ClassVar[Sequence[Option]] = tuple(option for option in OPTIONS if option.name not in _OF_STREAMS)

    def __init__(self, settings: Settings) -> None:
        self.url = settings.url
        self._connection = Connection(settings)
        self._prefix = f"deltabus.{settings.topic.replace('/', '=')}.news"
        self._timeout = settings.timeout
        self._confirming: set[asyncio.Task[None]] = set()

    @classmethod
    def from_address(cls, address: Address, **options: Any) -> Self:  # noqa: ANN401 - as declared in `options`
        """Return the channel that the URL names.

        Raises:
            UsageError: If the URL names no server or channel, or several ways to log in.
        """
        return cls(read_settings(address, **options))

    async def announce(self, news: Mapping[str, int]) -> None:  # noqa: D102
        session = await self._connection.session()
        fault = _Fault()
        with contextlib.ExitStack() as stack:
            for log, position in news.items():
                subject = f"{self._prefix}.{log}"
                stack.enter_context(session.listening(subject, fault.note))
                await session.send(subject, b"%d" % position)
            await self._confirm(session, fault)

    async def listen(self, hear: Callable[[str, int], None], *, ready: Callable[[], None]) -> None:  # noqa: D102
        async def deliver(message: Msg) -> None:
            digits = message.data
            if len(digits) <= _MOST_DIGITS and digits.isdigit():
                hear(message.subject.rpartition(".")[2], int(digits))

        session = await self._connection.session()
        pattern, fault = f"{self._prefix}.*", _Fault()
        with session.listening(pattern, fault.note), self._lost_as_ours():
            subscription = await session.client.subscribe(pattern, cb=deliver)
            try:
                await self._confirm(session, fault)
                ready()
                raise await fault.noted
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()

    async def close(self) -> None:  # noqa: D102
        await self._connection.close()
        for task in self._confirming:
            task.cancel()
        await asyncio.gather(*self._confirming, return_exceptions=True)

    async def _confirm(self, session: Session, fault: _Fault) -> None:
        """Wait until the server has read what was sent, or says what is wrong with it."""
        # The library stumbles over an answer that nobody waits for any more: this goes on until the connection ends.
        confirming = asyncio.create_task(self._flush(session))
        self._confirming.add(confirming)
        confirming.add_done_callback(self._confirming.discard)
        confirming.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait((confirming, fault.noted), return_when=asyncio.FIRST_COMPLETED)
        if fault.noted.done():
            raise fault.noted.result()
        await confirming

    async def _flush(self, session: Session) -> None:
        with self._lost_as_ours():
            await session.client.flush(self._timeout)  # type: ignore[arg-type] # any number of seconds

    @contextlib.contextmanager
    def _lost_as_ours(self) -> Iterator[None]:
        try:
            yield
        except nats.errors.Error as error:
            raise TransientTransportError(
                f"{self.url} lost its connection, or did not answer within {self._timeout:g} s ({error})", url=self.url
            ) from error


class _Fault:
    """The first thing that goes wrong with what was sent."""

    def __init__(self) -> None:
        self.noted: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def note(self, news: Msg | Exception) -> None:
        if isinstance(news, Exception) and not self.noted.done():
            self.noted.set_result(news)
