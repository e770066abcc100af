"""vLLM follows a topic: `register` is its plug-in, and `deltabus drive vllm` tells servers when to write.

Serve with `--weight-transfer-config '{"backend": "deltabus"}'`; the rest is in `docs/integrations/vllm.md`.
"""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

BACKEND = "deltabus"
"""The name of the weight-transfer engine."""


def register() -> None:
    """Make the weight-transfer engine known to vLLM, which calls this in each of its processes, maybe more than once.

    Raises:
        MissingExtraError: If this vLLM has no weight-transfer engines.
    """
    from .engine import register_engine

    register_engine(BACKEND)
