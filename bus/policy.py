"""When to publish a writer's whole state besides its deltas.

Anchors cost the publisher bytes; too few of them cost every newcomer a long chain of deltas. Whatever the policy, the
first message of a log is an anchor, and one can always be asked for.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from .errors import UsageError

__all__ = ["Adaptive", "AnchorPolicy", "Every", "Never", "SinceAnchor", "parse_policy"]


@dataclass(frozen=True, slots=True)
class SinceAnchor:
    """What a log got since its last anchor.

    Attributes:
        anchor: Payload bytes of the last anchor; None when there was none.
        delta_bytes: Payload bytes of the deltas after it.
        deltas: Number of the deltas after it.

    >>> SinceAnchor().after_anchor(100).after_delta(3).after_delta(4)
    SinceAnchor(anchor=100, delta_bytes=7, deltas=2)
    """

    anchor: int | None = None
    delta_bytes: int = 0
    deltas: int = 0

    def after_anchor(self, nbytes: int) -> SinceAnchor:
        """Return the figures after an anchor of this many payload bytes."""
        return SinceAnchor(nbytes)

    def after_delta(self, nbytes: int) -> SinceAnchor:
        """Return the figures after a delta of this many payload bytes."""
        return SinceAnchor(self.anchor, self.delta_bytes + nbytes, self.deltas + 1)


class AnchorPolicy(abc.ABC):
    """Decides from figures alone whether an anchor is due."""

    __slots__ = ()

    def due(self, since: SinceAnchor) -> bool:
        """Return whether the next publication is to be an anchor too; always so for the first."""
        return since.anchor is None or self.due_again(since, since.anchor)

    @abc.abstractmethod
    def due_again(self, since: SinceAnchor, anchor: int) -> bool:
        """Return whether the next publication is to be an anchor too, after an anchor of `anchor` payload bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(AnchorPolicy):
    """An anchor when the deltas since the last one exceed a share of its size.

    With the default of 1, anchors at most double what the publisher uploads, and a newcomer downloads at most about two
    anchors' worth. A share `s` makes that `1 + 1/s` times the deltas for the publisher and `1 + s` anchors for a
    newcomer; where many join late, a smaller share pays.

    Args:
        share: Bytes of deltas over bytes of the last anchor; positive and finite.

    Raises:
        UsageError: If the share is not.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and self.share > 0):
            raise UsageError(f"the adaptive anchor policy has share {self.share}; use a positive number such as 1.0")

    def due_again(self, since: SinceAnchor, anchor: int) -> bool:
        """Return whether the deltas outweigh the share."""
        return since.delta_bytes > self.share * anchor


@dataclass(frozen=True, slots=True)
class Every(AnchorPolicy):
    """An anchor with every so many published versions.

    Args:
        steps: Versions from one anchor to the next; 1 makes one with each.

    Raises:
        UsageError: If it is less than 1.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"an anchor every {self.steps} steps is not possible; use 1 or more, or 'never'")

    def due_again(self, since: SinceAnchor, anchor: int) -> bool:
        """Return whether the next version is that many after the last anchor's."""
        return since.deltas + 1 >= self.steps


@dataclass(frozen=True, slots=True)
class Never(AnchorPolicy):
    """Only the first anchor, and those that are asked for."""

    def due_again(self, since: SinceAnchor, anchor: int) -> bool:
        """Return False."""
        return False


def parse_policy(text: str | int | AnchorPolicy) -> AnchorPolicy:
    """Return the policy that a text, or a number of steps, stands for; a policy is returned as it is.

    >>> parse_policy("adaptive:0.5"), parse_policy("every:100"), parse_policy(100), parse_policy("never")
    (Adaptive(share=0.5), Every(steps=100), Every(steps=100), Never())

    Raises:
        UsageError: If it is not `adaptive`, `adaptive:SHARE`, `every:STEPS`, `never` or a number of steps.
    """
    if isinstance(text, AnchorPolicy):
        return text
    if isinstance(text, int) and not isinstance(text, bool):
        return Every(text)
    name, colon, value = str(text).partition(":")
    try:
        match name, bool(colon):
            case "adaptive", False:
                return Adaptive()
            case "adaptive", True:
                return Adaptive(share=float(value))
            case "every", True:
                return Every(int(value))
            case "never", False:
                return Never()
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"anchor policy {text!r} has {value!r} where a number belongs") from error
    raise UsageError(
        f"anchor policy {text!r} is not known; use 'adaptive', 'adaptive:SHARE', 'every:STEPS', 'never' or a number"
    )
