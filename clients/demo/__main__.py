"""Fine-tune a real model, publish every step, kill things, and compare every follower bit by bit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deltabus.bus.errors import DeltabusError

from .stage import run_demo

__all__ = ["main"]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status.

    Args:
        arguments: As on the command line; None takes them from there.
    """
    parser = argparse.ArgumentParser(prog="python -m deltabus.demo", description=__doc__)
    parser.add_argument("--url", help="where to make a topic, and remove it; by default a local disk")
    parser.add_argument("--steps", type=int, default=12, help="steps of training (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--keep", action="store_true", help="leave all files where they are")
    options = parser.parse_args(arguments)
    try:
        return run_demo(options.url, options.steps, json=options.json, keep=options.keep)
    except DeltabusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
