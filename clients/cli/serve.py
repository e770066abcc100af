"""`deltabus serve`: one process that serves topics over HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from deltabus.keys import ACCEPTED_KEYS, SIGNING_KEY, VERIFY_KEYS
from deltabus.transports.http.service import Service, ServiceSettings

__all__ = ["JsonLines", "serve", "set_up_logs", "transcoder"]


class JsonLines(logging.Formatter):
    """Writes each entry of the log as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "told", None)
        if isinstance(fields, dict):
            told |= {"message": "request", **fields}
        else:
            told["message"] = record.getMessage()
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def set_up_logs(*, as_json: bool, requests: bool, stream: TextIO | None = None) -> None:
    """Log to a stream, standard error unless given.

    Args:
        as_json: Whether each entry is a line of JSON.
        requests: Whether each request is logged.
        stream: Where to.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    if as_json:
        handler.setFormatter(JsonLines())
    else:
        text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        text.converter = time.gmtime
        handler.setFormatter(text)
    root = logging.getLogger("deltabus")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # What is no HTTP is answered with 400; it is not worth a traceback each time.
    logging.getLogger("deltabus.http.malformed").setLevel(logging.CRITICAL)
    logging.getLogger("deltabus.http.requests").setLevel(logging.INFO if requests else logging.WARNING)


def transcoder(
    *, key: Path | None, keys: Sequence[str], accepted: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command of a process that transcodes, before source and target, and its variables besides ours.

    Args:
        key: The file of the key that it signs with; None is what the environment says.
        keys: Whose messages it believes; none are those that the environment says.
        accepted: Behind whose messages it goes on besides; none are those that the environment says.
    """
    variables = {}
    if key is not None:
        variables[SIGNING_KEY] = str(key.absolute())
    if keys:  # not as arguments, which everybody on the machine can read
        variables[VERIFY_KEYS] = ",".join(keys)
    if accepted:
        variables[ACCEPTED_KEYS] = ",".join(accepted)
    return (sys.executable, "-m", "deltabus.cli", "transcode", "--attended", "--json"), variables


def serve(settings: ServiceSettings, *, announce: TextIO) -> None:
    """Serve until a signal says to stop; then answer those who are being served, and take no more.

    Args:
        settings: What, where, and to whom.
        announce: Where the address is told, on one line.

    Raises:
        UsageError: If the settings make no sense, or the address cannot be listened on.
    """
    asyncio.run(_serve(settings, announce))


async def _serve(settings: ServiceSettings, announce: TextIO) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with Service(settings) as service:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        announce.write(f"{service.url}\n")
        announce.flush()
        await stop.wait()
        logging.getLogger("deltabus.http").info("stopping: those who are being served have %g s", settings.drain)
