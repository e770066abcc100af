"""What a user says of a publisher and its steps, checked and brought into the form that is needed."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from deltabus.bus.errors import UsageError
from deltabus.bus.message import check_step_and_metadata, check_writer_name
from deltabus.bus.version import VersionVector

__all__ = ["check_follows", "checked_busy", "rests_on", "said"]


def said(step: int, metadata: Mapping[str, str] | None) -> tuple[int, dict[str, str]]:
    """Return a step and its metadata as a message can carry them.

    Raises:
        UsageError: If it cannot.
    """
    try:
        step, pairs = operator.index(step), dict(metadata or {})
    except (TypeError, ValueError) as error:
        raise UsageError(f"a step is a whole number, and metadata map text to text: {error}") from error
    check_step_and_metadata(step, pairs)
    return step, pairs


def rests_on(after: Mapping[str, int] | None, writer: str) -> VersionVector:
    """Return what weights rest on of other writers than this one.

    Raises:
        UsageError: If it does not map names of writers to versions.
    """
    try:
        return VersionVector(
            {check_writer_name(name): operator.index(v) for name, v in (after or {}).items() if name != writer}
        )
    except (TypeError, AttributeError) as error:
        raise UsageError(f"after={after!r} does not map names of writers to versions") from error


def checked_busy(on_busy: str | None, *, alone: bool) -> str:
    """Return what is done while earlier steps are on their way: `"coalesce"` or `"wait"`.

    Raises:
        UsageError: If it is neither, or members of a group would fold steps.
    """
    chosen = on_busy or ("coalesce" if alone else "wait")
    if chosen not in ("coalesce", "wait"):
        raise UsageError(f"on_busy={on_busy!r} is not 'coalesce' or 'wait'")
    if chosen == "coalesce" and not alone:
        raise UsageError("on_busy='coalesce' is not for groups: members would fold other steps, and share none")
    return chosen


def check_follows(step: int, taken: int | None) -> None:
    """Check that a group takes no step twice, or readers would put what is of two tries of it together.

    Raises:
        UsageError: If it does not come behind the step that was taken last; None is none.
    """
    if taken is not None and step <= taken:
        raise UsageError(
            f"step {step} comes behind step {taken}; a group takes each step once: restart it with a new generation "
            "to go back"
        )
