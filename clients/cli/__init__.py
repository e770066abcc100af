"""The command line `deltabus`.

Commands are thin: each has a module with a plain function that does the work. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; it ends by `SystemExit` with the exit status.

    0 is success, 1 an error, 2 wrong usage (`UsageError` included), 130 an interruption.

    Args:
        arguments: As on the command line; None takes them from there.
    """
    from .interrupts import INTERRUPTED, importing

    try:
        with importing():
            from .app import app
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    app(args=None if arguments is None else list(arguments), prog_name="deltabus")
