"""What a reader waits for, told so that people know whom to look at: the rest of a step, and what a step rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Awaited", "Dependence", "Progress"]

_NAMED = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """A step that some members of a group have published, and others not.

    Attributes:
        step: The step.
        missing: The members that have not published it, sorted.
        members: Number of the members.
        last: The last step of each that is missing; None where it published nothing in this generation.
        group: The name of the first writer of the group, over all its generations.
        generation: Of the group.
    """

    step: int
    missing: tuple[str, ...]
    members: int
    last: Mapping[str, int | None]
    group: str
    generation: int

    def __str__(self) -> str:
        last = {writer: "none" if step is None else step for writer, step in self.last.items()}
        named = _listed([f"{writer} (last step {last[writer]})" for writer in self.missing])
        there = self.members - len(self.missing)
        return f"step {self.step} is there from {there} of {self.members} writers, and waits for {named}"


@dataclass(frozen=True, slots=True)
class Dependence:
    """A step whose writers had applied what others have not published.

    Attributes:
        step: The step.
        missing: The writers that it waits for, sorted.
        needs: The version of each of them that it, or something else that it rests on, comes after.
        newest: The newest version of each of them; 0 where there is none.
        group: The name of the first writer of the step's group, over all its generations.
        generation: Of the group.
    """

    step: int
    missing: tuple[str, ...]
    needs: Mapping[str, int]
    newest: Mapping[str, int]
    group: str
    generation: int

    def __str__(self) -> str:
        named = [f"version {self.needs[w]} of {w} (newest version {self.newest[w] or 'none'})" for w in self.missing]
        return f"step {self.step} of {self.group} is there, and waits for what it rests on: {_listed(named)}"


Awaited = Progress | Dependence
"""What keeps a step from its readers."""


def _listed(named: list[str]) -> str:
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more
