"""How carefully a subscriber's updates look at a model, and what they do about one that drifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from deltabus.bus.errors import DivergedError, UsageError
from deltabus.codecs.apply import Target
from deltabus.codecs.drift import Meant, count_drift, overwriting

from .staged import StagedState

__all__ = ["OnDrift", "Verification", "Verify", "check_base", "holds", "listed", "refusal"]

OnDrift = Literal["refuse", "repair"]
Verify = Literal["full"]

_NAMED = 3
"""Tensors that a message names."""


class Verification:
    """What updates are to do about drift, and when the next whole comparison is due; one for all of a subscriber.

    Args:
        on_drift: As `Subscriber` has it.
        verify: As `Subscriber` has it.
        every: Updates from one whole comparison to the next.

    Raises:
        UsageError: If one of them is none of the possible values.
    """

    def __init__(self, *, on_drift: OnDrift, verify: Verify | None, every: int) -> None:
        if on_drift not in get_args(OnDrift):
            raise UsageError(f"on_drift={on_drift!r} is neither 'refuse' nor 'repair'")
        if verify is not None and verify not in get_args(Verify):
            raise UsageError(f"verify={verify!r} is neither None nor 'full'")
        if every < 1:
            raise UsageError(f"verify_every={every} is less than 1, which verifies every update")
        self.repairs = on_drift == "repair"
        self._every = every if verify is not None else None
        self._since = 0

    @property
    def due(self) -> bool:
        """Whether the next update is to be applied with a comparison of the whole model."""
        return self._every is not None and self._since + 1 >= self._every

    def count(self, *, verified: bool) -> None:
        """Count an update that was applied."""
        self._since = 0 if verified else self._since + 1


def holds(targets: Sequence[Target], staged: StagedState) -> bool:
    """Return whether a model holds the state that an update leads to: every element, by its digest.

    Where several writers hold the same elements, or a sharded model holds only some, no digest is of what the model
    must hold, and it is compared with the subscriber's copy; when that was given back, it counts as another.
    """
    parts = staged.parts
    if any(overwriting([part.schema for part in parts])) or not all(target.complete for target in targets):
        return staged.readable and not count_drift(
            [(target, part.read) for target, part in zip(targets, parts, strict=True)]
        )
    return all(_has(target, part.digest) for target, part in zip(targets, parts, strict=True))


def check_base(targets: Sequence[Target], staged: StagedState) -> None:
    """Check that a model holds the state that an update starts from: every element, by its digest.

    Raises:
        DivergedError: If it does not; the tensors that differ are named, as long as the subscriber has their bits.
    """
    pairs = list(zip(targets, staged.parts, strict=True))
    if all(target.complete and _has(target, part.base_digest) for target, part in pairs):
        return
    sharded = not all(target.complete for target in targets)
    if sharded and staged.readable and not count_drift([(target, part.read_before) for target, part in pairs]):
        return
    what = f"{staged.base}, which this update to {staged.state} starts from"
    raise refusal(what, [(target, part.read_before) for target, part in pairs] if staged.readable else [])


def refusal(what: str, meant: Sequence[Meant], *, done: str = "nothing was changed") -> DivergedError:
    """Return the error for a model that does not hold a state.

    Args:
        what: The state, in words.
        meant: The bits that it should hold; none when they were given back.
        done: What was written, in words.
    """
    counts = count_drift(meant)
    advice = "open a subscriber with on_drift='repair', or with have=model, which starts from what it holds"
    return DivergedError(
        f"the model does not hold {what}: {listed(counts) if counts else 'its digest is another'}; {done}; {advice}",
        tensor=next(iter(counts), ""),
    )


def _has(target: Target, digest: int | None) -> bool:
    try:
        return target.digest() == digest
    except DivergedError:  # a tensor that the model has several times is not the same everywhere
        return False


def listed(counts: Mapping[str, int]) -> str:
    """Return in words how many elements of which tensors differ; the first few by name.

    >>> listed({"head": 1, "embed": 2})
    "3 elements differ: 1 of 'head', 2 of 'embed'"
    """
    named = ", ".join(f"{count} of {name!r}" for name, count in list(counts.items())[:_NAMED])
    more = f", and {len(counts) - _NAMED} tensors more" if len(counts) > _NAMED else ""
    total = sum(counts.values())
    return f"{total} element{'s differ' if total != 1 else ' differs'}: {named}{more}"
