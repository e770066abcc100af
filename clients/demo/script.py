"""The demo's plot: who is started, killed and let go, and when. Pure: it is told what happened and says what to do.

The plot: the trainer and two followers start. One follower is killed in the middle of the run and started again. A
third follower joins late. The trainer is killed while it trains, and started again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from deltabus.bus.errors import UsageError

from .reports import Line, Ready, StepApplied, StepPublished

__all__ = ["EARLY", "FOLLOWERS", "LATE", "LEAST_STEPS", "TRAINER", "VICTIM", "Action", "Milestone", "Order", "Script"]

TRAINER = "trainer"
EARLY, VICTIM, LATE = "follower-a", "follower-b", "follower-c"
FOLLOWERS = (EARLY, VICTIM, LATE)
LEAST_STEPS = 4
"""With fewer steps there is no room for the plot."""


class Milestone(enum.StrEnum):
    """What must have happened before the demo may call itself complete."""

    FOLLOWER_KILLED = f"{VICTIM} was killed"
    FOLLOWER_BACK = f"{VICTIM} came back with the weights it had saved, and went on from them"
    FOLLOWER_JOINED = f"{LATE} joined late"
    TRAINER_KILLED = f"{TRAINER} was killed"
    TRAINER_RESUMED = f"{TRAINER} resumed from its checkpoint"


class Order(enum.Enum):
    """What to do with a process."""

    START = "start"
    KILL = "kill"
    GO = "go"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    Attributes:
        order: What.
        name: With which process.
    """

    order: Order
    name: str


@dataclass(slots=True)
class _Part:
    """What is known of one process."""

    lives: int = 0
    ready: bool = False
    held: int | None = None
    going: bool = False
    killed: bool = False
    over: bool = False
    failure: str = ""


@dataclass(slots=True)
class Script:
    """Tells the stage what to do next.

    Args:
        steps: The last training step, at least `LEAST_STEPS`.

    Attributes:
        reached: What has happened so far of what must happen, in order.

    Raises:
        UsageError: If there are too few steps.
    """

    steps: int
    reached: list[Milestone] = field(default_factory=list)
    _parts: dict[str, _Part] = field(default_factory=lambda: {name: _Part() for name in (TRAINER, *FOLLOWERS)})

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise UsageError(
                f"the demo needs at least {LEAST_STEPS} steps to kill and restart things, not {self.steps}"
            )

    @property
    def finished(self) -> bool:
        """Whether every process has done its part, or one has failed."""
        return self.failure != "" or all(part.over for part in self._parts.values())

    @property
    def failure(self) -> str:
        """Why the demo cannot go on; empty when it can."""
        return next((part.failure for part in self._parts.values() if part.failure), "")

    @property
    def missing(self) -> list[Milestone]:
        """What must still happen."""
        return [milestone for milestone in Milestone if milestone not in self.reached]

    @property
    def cast(self) -> list[str]:
        """The followers that were started so far."""
        return [name for name in FOLLOWERS if self._parts[name].lives]

    def lives(self, name: str) -> int:
        """Return how many times a process was started."""
        return self._parts[name].lives

    def begin(self) -> list[Action]:
        """Return what to do first."""
        return [self._start(name) for name in (EARLY, VICTIM, TRAINER)]

    def heard(self, name: str, line: Line) -> list[Action]:
        """Return what to do now that a process has reported something."""
        part = self._parts[name]
        if isinstance(line, Ready):
            part.ready, part.held = True, line.held
            return self._let_go()
        if isinstance(line, StepPublished):
            return self._published(part, line)
        return self._applied(name, part, line)

    def ended(self, name: str, status: int) -> list[Action]:
        """Return what to do now that a process has ended with this exit status."""
        part = self._parts[name]
        part.ready = part.going = False
        if part.killed and part.lives == 1 and status < 0:  # by a signal: it was not faster than the kill
            self.reached.append(Milestone.TRAINER_KILLED if name == TRAINER else Milestone.FOLLOWER_KILLED)
            return [self._start(name)]
        if status == 0:
            part.over = True
        else:
            part.failure = f"{name} ended with status {status}"
        return []

    def _published(self, part: _Part, line: StepPublished) -> list[Action]:
        actions = []
        if part.lives > 1 and part.held is not None:
            self._reach(Milestone.TRAINER_RESUMED)
        if line.step >= max(2, self.steps // 2) and not self._parts[LATE].lives:
            actions.append(self._start(LATE))
        if line.step >= min(self.steps - 1, self.steps * 2 // 3) and not part.killed:
            part.killed = True
            actions.append(Action(Order.KILL, TRAINER))
        return actions

    def _applied(self, name: str, part: _Part, line: StepApplied) -> list[Action]:
        if name == LATE:
            self._reach(Milestone.FOLLOWER_JOINED)
        if name != VICTIM:
            return []
        if part.lives > 1 and part.held is not None and not line.whole:
            self._reach(Milestone.FOLLOWER_BACK)
        if max(1, self.steps // 4) <= line.step < self.steps and not part.killed:
            part.killed = True
            return [Action(Order.KILL, VICTIM)]
        return []

    def _start(self, name: str) -> Action:
        self._parts[name].lives += 1
        return Action(Order.START, name)

    def _let_go(self) -> list[Action]:
        """Let the trainer train when all who are on stage are ready, so that everybody sees every step live."""
        trainer = self._parts[TRAINER]
        waiting = [part for name, part in self._parts.items() if part.lives and not part.ready and not part.over]
        if waiting or trainer.going or trainer.over:
            return []
        trainer.going = True
        return [Action(Order.GO, TRAINER)]

    def _reach(self, milestone: Milestone) -> None:
        if milestone not in self.reached:
            self.reached.append(milestone)
