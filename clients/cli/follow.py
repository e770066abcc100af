"""`deltabus follow`: a directory that stays current, and a command that hears of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from deltabus.following import Followed

from .output import count_text, plain_text, share_text, size_text

__all__ = ["report"]


def report(followed: Iterable[Followed], *, as_json: bool) -> bool:
    """Print each version on a line of its own as it becomes the current one.

    Args:
        followed: What `follow` yields.
        as_json: Whether each line is JSON.

    Returns:
        Whether the last version's command went well.
    """
    well = True
    for version in followed:
        well = not version.failure
        line = json.dumps(asdict(version), default=str) if as_json else _line(version)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return well


def _line(version: Followed) -> str:
    words = f"version {version.version}, step {version.step}: {version.directory}"
    if version.total:
        share = share_text(version.changed / version.total)
        words += f", {share} of {count_text(version.total, 'element')} in {size_text(version.nbytes)}"
    return plain_text(words + (f"; {version.failure}" if version.failure else ""))
