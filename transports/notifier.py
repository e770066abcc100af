"""What announcements need: of the broker that carries them, and of the store whose readers they wake.

An announcement says that a log has a record at a position. It is a hint and never the truth: one that is lost, late,
repeated, forged or about something else at most makes a reader look into the store, which alone says what is there.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

from deltabus.bus.transport import Transport

__all__ = ["Notifier", "WakeableTransport"]


class Notifier(abc.ABC):
    """One channel of announcements on a broker; it connects when it is first used, and belongs to one event loop.

    Attributes:
        url: The channel's URL, without secrets, for errors and logs.
    """

    url: str

    @abc.abstractmethod
    async def announce(self, news: Mapping[str, int]) -> None:
        """Tell whoever listens that logs have grown, and return when the broker has taken it; it keeps nothing.

        Args:
            news: The newest position of each log.

        Raises:
            AccessDeniedError: If the broker refuses it.
            TransientTransportError: If the broker cannot be reached, or did not answer in time.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def listen(self, hear: Callable[[str, int], None], *, ready: Callable[[], None]) -> None:
        """Hand over announcements as they come, until cancelled or the line is lost; it does not connect again.

        Args:
            hear: Called with log and position of each; what makes no sense is left out.
            ready: Called once, when all that is announced from now on will be heard.

        Raises:
            AccessDeniedError: If the broker refuses it.
            TransientTransportError: If the broker cannot be reached, or the line is lost.
            TransportError: On any other fault.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections and tasks; may be called more than once, and never raises for what is already closed."""


class WakeableTransport(Transport):
    """A transport whose tails look for new records from time to time, and can be told to look now."""

    @abc.abstractmethod
    def wake(self, log: str | None = None) -> None:
        """Let the tails of a log, or all, look at once; where they find nothing, nothing else changes."""
