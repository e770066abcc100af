"""Skip deltas: several deltas composed into one, so that a reader that fell behind reads few messages.

Theory of operation. Versions are divided into blocks of 2, 4, 8, ... versions, aligned as in a binary counter: the
block of level `k` that ends with version `v`, a multiple of `2^k`, begins at `v - 2^k`. When a block ends, its two
halves are there: the left one was kept, the right one has just ended too. So what is kept is at most one block of each
level, left halves that wait for their right ones, and each level costs one composition for each pair. `Ladder` says
which halves to join; whoever drives it holds the changes themselves.

A block is published as one message where that pays (`SkipPolicy.pays`), and in any case where it replaces `m` messages.
A reader that is `n` versions behind climbs to ever larger blocks and down again. On each side it takes a block of each
level at most, and those of `log2 m` levels in a row take at most `m - 1` messages together: `2 (m - 1) log_m n` in all.

No clock, no randomness and no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import UsageError
from .planner import MESSAGE_COST

__all__ = ["Ladder", "SkipPolicy", "Span", "join", "parse_skips"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of versions, and the cheapest messages published so far that lead through it.

    Attributes:
        base: The version that it starts from.
        version: The version that it leads to.
        nbytes: Payload bytes of the messages.
        messages: Number of the messages.
        written: Elements that the messages change, added up.
    """

    base: int
    version: int
    nbytes: int
    messages: int
    written: int

    @property
    def steps(self) -> int:
        """Versions from one end to the other."""
        return self.version - self.base

    def estimate(self, changed: int) -> int:
        """Return about how many payload bytes one message takes that changes so many elements in the whole span.

        Each element takes what it took in the messages that are there; a little less in truth, since positions that
        lie closer together are written in fewer bits.
        """
        return math.ceil(self.nbytes * changed / self.written) if self.written else 0

    def published(self, nbytes: int, changed: int) -> Span:
        """Return the span once a single message leads through it."""
        return Span(self.base, self.version, nbytes, 1, changed)


def join(left: Span, right: Span) -> Span:
    """Return the span of two that follow one another.

    Raises:
        UsageError: If they do not.
    """
    if left.version != right.base:
        raise UsageError(f"versions up to {left.version} and from {right.base} do not follow one another")
    return Span(
        left.base,
        right.version,
        left.nbytes + right.nbytes,
        left.messages + right.messages,
        left.written + right.written,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPolicy:
    """When to publish several deltas composed into one.

    With the default of 1/2, a block is published where one message costs readers at most half of those that it
    replaces. So the skips that pay take no more bytes than the deltas: each level of them takes at most half of the one
    below it, and `1/2 + 1/4 + ... = 1`. Where composing saves nothing, because hardly an element changes twice, a block
    is published when it replaces `most` messages: the deltas' bytes once more for each factor of `most` steps.

    Args:
        share: Cost of one message over that of the messages replaced, at most; above 0, at most 1. With 1, blocks of
            every power of two are published that cost readers nothing.
        most: Messages that a block may replace before it is published in any case; at least 2.
        levels: The longest skip takes `2^levels` steps; 0 publishes none.
        anchor: A skip may take this share of the last anchor's bytes; beyond that readers better take an anchor.
        memory: Composed changes that wait may take this share of the model's bytes; where they would take more, the
            longest are given up, and skips end there.

    Raises:
        UsageError: If a figure is out of range.
    """

    share: float = 0.5
    most: int = 8
    levels: int = 20
    anchor: float = 0.5
    memory: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(
                f"skips that cost {self.share} of what they replace are not possible; use 0.5, or at most 1"
            )
        if self.most < 2:
            raise UsageError(f"a skip cannot replace {self.most} messages; use 2 or more")
        if not 0 <= self.levels <= 40:
            raise UsageError(f"skips of 2^{self.levels} steps are not possible; use 0 to 40 levels")
        for name, value in (("anchor", self.anchor), ("memory", self.memory)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"a share of {value} for `{name}` is not possible; use a positive number")

    def fits(self, span: Span, changed: int, *, anchor: int | None) -> bool:
        """Return whether one message through a span is of use beside the last anchor; if not, no longer one is.

        Args:
            span: What it would replace.
            changed: Elements that it would change.
            anchor: Payload bytes of the last anchor; None when there is none.
        """
        return anchor is None or span.estimate(changed) <= self.anchor * anchor

    def pays(self, span: Span, changed: int) -> bool:
        """Return whether to publish a span as one message.

        Args:
            span: What it would replace.
            changed: Elements that it would change.
        """
        replaced = span.nbytes + span.messages * MESSAGE_COST
        cheap = span.estimate(changed) + MESSAGE_COST <= self.share * replaced
        return span.messages > 1 and (cheap or span.messages >= self.most)


class Ladder:
    """Says which blocks of versions to join, as versions come.

    Feed it each delta's span with `enter`; while `left` has a block to join with, join the two and `enter` the result.

    Args:
        levels: The largest block has `2^levels` versions.
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._waiting: list[Span] = []

    @property
    def waiting(self) -> tuple[Span, ...]:
        """The blocks that wait for the one behind them, the largest first; they follow one another."""
        return tuple(self._waiting)

    def enter(self, block: Span) -> Span | None:
        """Take a block; return the one to join it with, which waits no longer, or None when it is this one that waits.

        A block that nothing can be joined with any more does not wait; those that do not lead to it are forgotten.

        Raises:
            UsageError: If the block is not aligned: as many versions as a power of two, which divides its ends.
        """
        steps = block.steps
        if steps < 1 or steps & (steps - 1) or block.version % steps:
            raise UsageError(f"versions {block.base} to {block.version} are no aligned block of a power of two")
        if self._waiting and self._waiting[-1].version != block.base:
            self.clear()
        if steps >= 1 << self._levels:
            return None
        if block.version % (2 * steps):
            self._waiting.append(block)
            return None
        # The right half of a block. Without its left half no larger block that holds it can be whole either.
        if not self._waiting or self._waiting[-1].steps != steps:
            self.clear()
            return None
        return self._waiting.pop()

    def drop_longest(self) -> None:
        """Forget the largest block that waits, and with it all larger ones to come until versions start anew."""
        del self._waiting[:1]

    def clear(self) -> None:
        """Forget all blocks that wait."""
        self._waiting.clear()


def parse_skips(value: str | int | SkipPolicy) -> SkipPolicy:
    """Return the policy that a word, or the number of levels, stands for; a policy is returned as it is.

    >>> parse_skips("auto") == SkipPolicy(), parse_skips("off").levels, parse_skips("all").share, parse_skips(6).levels
    (True, 0, 1.0, 6)

    Raises:
        UsageError: If it is not `"auto"`, `"all"`, `"off"` or a number of levels.
    """
    if isinstance(value, SkipPolicy):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return SkipPolicy(levels=value)
    match value:
        case "auto":
            return SkipPolicy()
        case "all":
            return SkipPolicy(share=1.0, most=2)
        case "off":
            return SkipPolicy(levels=0)
    raise UsageError(f"skips={value!r} is not 'auto', 'all', 'off', a number of levels or a `SkipPolicy`")
