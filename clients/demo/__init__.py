"""The demo: a real model is fine-tuned and followed, processes are killed, and every bit is compared.

It runs with `deltabus demo` or `python -m deltabus.demo`. The trainer and the followers are processes of their own;
only they import torch.
"""

from __future__ import annotations

from .stage import run_demo

__all__ = ["run_demo"]
