"""Groups: writers that each publish a part of one state, and reach each step together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from msgspec import UNSET, UnsetType

from .errors import UsageError
from .message import MAX_RANKS, Cohort, check_writer_name, rank_writer

__all__ = ["Group"]

_MAX_NAMES = 4096


@dataclass(frozen=True, slots=True)
class Group:
    """The writers that make a cut, and which incarnation of them this is.

    A reader takes a step when every member has published it, and only what members of one generation published is put
    together. So a group that is restarted, with as many members or with others, takes a greater generation than before:
    all its members the same one. It goes on where it shares a member with the group before; a group that shares none
    with another one is independent of it.

    Attributes:
        members: The names of their logs, in order.
        generation: The incarnation, from 1; 0 is for a writer that is alone.
        stem: What the names of ranks have in common; empty when members are named otherwise.

    Raises:
        UsageError: If a name is malformed or occurs twice, there are too many, or the generation does not fit.

    Examples:
        >>> group = Group.of_ranks("trainer", 4, generation=1)
        >>> group.members
        ('trainer-0', 'trainer-1', 'trainer-2', 'trainer-3')
    """

    members: tuple[str, ...]
    generation: int
    stem: str = ""

    def __init__(self, members: Iterable[str], generation: int = 0, *, stem: str = "") -> None:
        names = tuple(map(check_writer_name, members))
        if not names or len(set(names)) != len(names):
            raise UsageError(f"the group {', '.join(names) or 'of nobody'} must name each of its writers once")
        if len(names) > (MAX_RANKS if stem else _MAX_NAMES):
            raise UsageError(f"a group of {len(names)} is too large; name ranks alike, at most {MAX_RANKS} of them")
        if generation < (len(names) > 1):
            raise UsageError(
                f"generation {generation} does not fit a group of {len(names)}: count its incarnations from 1, the "
                "same number for all members, greater after each restart"
            )
        if stem and names != tuple(rank_writer(stem, rank) for rank in range(len(names))):
            raise UsageError(f"the members of a group of ranks are called {stem}-0, {stem}-1, ...")
        object.__setattr__(self, "members", names)
        object.__setattr__(self, "generation", generation)
        object.__setattr__(self, "stem", stem)

    @classmethod
    def of_ranks(cls, stem: str, count: int, *, generation: int) -> Self:
        """Return the group of so many ranks, named `<stem>-0`, `<stem>-1`, and so on.

        Raises:
            UsageError: If there are none or too many, the stem names no writer, or the generation is not positive.
        """
        if not 0 < count <= MAX_RANKS:
            raise UsageError(f"a group has 1 to {MAX_RANKS} ranks, not {count}")
        if generation < 1:
            raise UsageError(f"generation {generation} is not positive; count the incarnations of the group from 1")
        return cls((rank_writer(stem, rank) for rank in range(count)), generation, stem=stem)

    @property
    def names(self) -> tuple[str, ...]:
        """What a message says in `group`: nothing where `cohort` says it."""
        return () if self.stem else self.members

    @property
    def cohort(self) -> Cohort | UnsetType:
        """What a message says in `cohort`."""
        if not self.generation:
            return UNSET
        return Cohort(generation=self.generation, ranks=len(self.members) if self.stem else 0)
