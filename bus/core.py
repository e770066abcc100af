"""The two movers of the bus: what writes a log, and what reads a topic."""

from __future__ import annotations

from .reader import TopicReader
from .writer import LogWriter

__all__ = ["LogWriter", "TopicReader"]
