"""`python -m deltabus.cli` is `deltabus`."""

from __future__ import annotations

from . import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
