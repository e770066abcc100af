"""What a subscriber tells of its updates, as events."""

from __future__ import annotations

from .events import Event, EventKind
from .staged import StagedState
from .update import Update

__all__ = ["applied", "received"]


def received(staged: StagedState, *, topic: str, behind: int) -> Event:
    """Return what is told of an update that was downloaded, decoded and verified.

    Args:
        staged: The update.
        topic: The topic's URL.
        behind: How many newer versions are known.
    """
    last = max(staged.messages, key=lambda message: (message.step, message.version))
    return Event(
        kind=EventKind.RECEIVED,
        topic=topic,
        writer=last.writer if len(staged.parts) == 1 else "",
        step=last.step,
        version=sum(staged.state.values()),
        nbytes=sum(part.downloaded for part in staged.parts),
        changed=sum(part.changes.count for part in staged.parts if part.changes is not None),
        total=sum(part.schema.total for part in staged.parts),
        whole=staged.whole,
        behind=behind,
        seconds=staged.seconds,
        metadata=last.metadata,
    )


def applied(update: Update, *, topic: str, behind: int) -> Event:
    """Return what is told of an update that was written into a model; arguments as for `received`."""
    return Event(
        kind=EventKind.APPLIED,
        topic=topic,
        writer=update.message.writer if len(update.state) == 1 else "",
        step=update.step,
        version=update.version,
        nbytes=update.nbytes,
        changed=update.changed,
        total=update.total,
        whole=update.whole,
        behind=behind,
        seconds={"apply": update.seconds["apply"]},
        detail=f"repaired {sum(update.repaired.values())} elements" if update.repaired else "",
        metadata=update.metadata,
    )
