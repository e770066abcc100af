"""An event loop whose time is made up: it jumps to the next thing that is to happen, and nothing ever waits.

What runs in it is deterministic: callbacks run in the order in which they became due, and work for threads is done at
once, in the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["StuckError", "VirtualLoop"]


class StuckError(AssertionError):
    """Nothing is left to happen though somebody still waits, or things happen for ever without an end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop on a virtual clock, which begins at 0.

    Args:
        most_turns: Turns of the loop after which it counts as one that never ends.

    Attributes:
        turns: How often it turned.
    """

    def __init__(self, *, most_turns: int = 1_000_000) -> None:
        super().__init__()
        self.turns = 0
        self._most_turns = most_turns
        self._now = 0.0
        self._selector = self  # what the base class waits with

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time go by that the base class would wait for events from outside, of which there are none."""
        self.turns += 1
        if timeout is None:
            raise StuckError(f"at {self._now:.3f} s nothing is left to happen, but somebody waits")
        if self.turns > self._most_turns:
            raise StuckError(f"at {self._now:.3f} s the loop has turned {self.turns} times")
        self._now += timeout
        return []

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
