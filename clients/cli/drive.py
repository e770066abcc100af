"""`deltabus drive`: inference engines that follow a topic, told when to write."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from deltabus.integrations.vllm.driver import Driven, DriveSettings, drive

from .output import count_text, plain_text

__all__ = ["drive_servers"]


def drive_servers(urls: Sequence[str], settings: DriveSettings, *, as_json: bool) -> bool:
    """Drive servers, and print a line for each update of each; return whether all went well.

    Raises:
        UsageError: If an argument is wrong.
        DeltabusError: If the topic cannot be read.
    """

    def tell(driven: Driven) -> None:
        text = json.dumps(asdict(driven)) if as_json else plain_text(_line(driven))
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    return asyncio.run(drive(urls, settings, tell=tell))


def _line(driven: Driven) -> str:
    lag = f"; {count_text(driven.behind, 'version')} behind" if driven.behind else ""
    if driven.failure:
        return f"{driven.server} does not have step {driven.step}{lag}: {driven.failure}"
    return (
        f"{driven.server} has step {driven.step} (version {driven.version}): {count_text(driven.changed, 'element')}, "
        f"ready after {driven.ready_seconds:.2f} s, paused for {1e3 * driven.paused_seconds:.0f} ms{lag}"
    )
