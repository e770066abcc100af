"""The benchmark that is installed: bytes, bits, times and memory on one's own weights, machine and backend.

`deltabus bench` runs it. It measures as ratios in one run, and compares every bit. Importing this package imports no
torch.
"""

from __future__ import annotations

__all__: list[str] = []
