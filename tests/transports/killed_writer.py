"""Writers that are killed: `python killed_writer.py DIRECTORY`.

For each call into the system that writing makes, and for the moments before and after it, a child process writes blobs
and records into a topic of its own and dies there by SIGKILL. What it had been told is done it notes beside the topic.
"""

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path

from deltabus.transports import atomic
from deltabus.transports.file import FileTransport

RECORDS = 3
CALLS = {"open", "mkdir", "write", "fsync", "link", "unlink", "close"}


def blob(number):
    """The bytes of a blob; large enough to be written in several calls."""
    return b"%d" % number * 2500


class DeadlyOS:
    """Stands for the module `os`, and kills the process around the call with a number."""

    def __init__(self, deadly, moment):
        self._deadly = deadly
        self._moment = moment
        self._calls = 0

    def __getattr__(self, name):
        function = getattr(os, name)
        return self._wrap(function) if name in CALLS else function

    def _wrap(self, function):
        def call(*arguments, **options):
            self._calls += 1
            deadly = self._calls == self._deadly
            if deadly and self._moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*arguments, **options)
            finally:
                if deadly:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call


async def write(directory, acknowledged):
    async with FileTransport(directory / "topic") as transport:
        for number in range(RECORDS):
            await transport.put(f"blobs/main/{number}", blob(number))
            os.write(acknowledged, b"b")
            await transport.append("main", number, f"blobs/main/{number}".encode())
            os.write(acknowledged, b"r")


def run(directory, deadly, moment):
    """Write in a child process, and return whether it was killed."""
    directory.mkdir()
    acknowledged = os.open(directory / "acknowledged", os.O_WRONLY | os.O_CREAT)
    process = os.fork()
    if process == 0:
        status = 1
        try:
            atomic.os = DeadlyOS(deadly, moment)
            atomic.CHUNK = 1000
            asyncio.run(write(directory, acknowledged))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(acknowledged)
    _, status = os.waitpid(process, 0)
    if status not in (0, signal.SIGKILL):
        sys.exit(f"a writer failed by itself in {directory}")
    return status == signal.SIGKILL


def main(root):
    for moment in ("before", "after"):
        deadly = 1
        while run(root / f"{moment}-{deadly:03}", deadly, moment):
            deadly += 1
        print(moment, deadly - 1, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
