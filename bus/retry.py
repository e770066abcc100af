"""The one place where calls to a backend are made again.

Faults that may pass are tried again after a pause that doubles, drawn at random from nothing to its full length, so
that many readers that failed together do not come back together ("full jitter", Brooker 2015). Everything else, and
cancellation, passes at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from .errors import AppendUnknownError, TransientTransportError, TransportError, UsageError

__all__ = ["Retry"]

_log = logging.getLogger("deltabus.retry")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long and how often to try again.

    Args:
        limit: Seconds after the first attempt began in which another may begin. An attempt that runs is not cut short:
            the transport's contract bounds it, and a large blob may take long on a slow line.
        pause: The full length of the first pause, in seconds.
        longest: The full length of the longest pause, in seconds.
        sleep: Waits; for tests.
        clock: Tells seconds that never go back; for tests.

    Raises:
        UsageError: If a time is negative.
    """

    limit: float = 120.0
    pause: float = 0.1
    longest: float = 10.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if min(self.limit, self.pause, self.longest) < 0:
            raise UsageError(f"limit={self.limit}, pause={self.pause}, longest={self.longest}: no time may be negative")

    async def call(
        self,
        what: str,
        work: Callable[[], Awaitable[_T]],
        *,
        on: tuple[type[TransportError], ...] = (TransientTransportError,),
    ) -> _T:
        """Return what `work` returns, calling it again after faults that may pass.

        Args:
            what: Named in the log and in the error.
            work: May be called more than once.
            on: The faults after which to try again.

        Raises:
            TransientTransportError: If such a fault was the last when the limit was reached; it is chained.
            AppendUnknownError: Likewise, where `on` names it.
            Exception: Whatever else `work` raises, at once.
        """
        started = self.clock()
        try:
            return await work()
        except on as error:
            first = error
        # Most calls succeed, and many take less time than to ask the library: it is given the first outcome.
        attempts = 0

        async def attempt() -> _T:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise first
            return await work()

        def is_over(state: tenacity.RetryCallState) -> bool:
            return self.clock() - started + state.upcoming_sleep > self.limit

        def tell(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            _log.info("%s failed, next attempt in %.2f s: %s", what, state.upcoming_sleep, error)

        retrying = tenacity.AsyncRetrying(
            sleep=self.sleep,
            stop=is_over,
            wait=tenacity.wait_random_exponential(multiplier=self.pause, max=self.longest),
            retry=tenacity.retry_if_exception_type(on),
            before_sleep=tell,
            reraise=True,
        )
        try:
            return await retrying(attempt)
        except on as error:
            kind = AppendUnknownError if isinstance(error, AppendUnknownError) else TransientTransportError
            spent = self.clock() - started
            raise kind(
                f"{what} failed {attempts} times in {spent:.1f} s, and the limit is {self.limit:g} s: {error}",
                url=error.url,
            ) from error
