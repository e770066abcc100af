"""What commands have in common: options, and exit statuses."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["FAILED", "MISUSED", "Keys"]

FAILED, MISUSED = 1, 2

Keys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY|FILE",
        help="Believe messages signed by these keys alone; may be repeated. By default those in DELTABUS_VERIFY_KEYS.",
    ),
]
