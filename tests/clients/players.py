"""Processes that play the parts of `scenario.py`: forked from one that is ready, heard line by line, killed at will."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from .backends import SECRETS
from .scenario import LIMIT

__all__ = ["Company", "Player", "states"]


class Company:
    """The process that players are forked from; `with` it.

    Args:
        home: Where libraries keep their things.
        script: What it runs instead of `scenario.py`; it must end as that does.
    """

    def __init__(self, home, script=None):
        self._home = home
        self._script = script or Path(__file__).with_name("scenario.py")

    def __enter__(self):
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(LIMIT)
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",  # so that it has no threads and may fork
            "HF_HOME": str(self._home),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "50ms",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(self._script)],
                stdin=theirs,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(LIMIT)
        self._orders.close()

    def wait(self):
        """Wait until it is ready."""
        assert self._orders.recv(64) == b"ready\n", "the company did not get ready"

    def engage(self, part, arguments, streams):
        """Fork a player with these standard streams, and return its id."""
        socket.send_fds(self._orders, [json.dumps([part, *arguments]).encode()], streams)
        return int(self._orders.recv(64))


class Player:
    """A process that plays a part; `async with` it.

    Attributes:
        lines: What it told so far, a list of words for each line.
        ended: Whether it ended well.
    """

    def __init__(self, company, part, *arguments):
        self.part = part
        self.lines = []
        self.ended = False
        self._company = company
        self._arguments = arguments
        self._errors = b""
        self._over = False
        self._told = asyncio.Condition()

    async def __aenter__(self):
        words, self._words = os.pipe()
        (report, reports), (failure, failures) = os.pipe(), os.pipe()
        try:
            self._process = self._company.engage(self.part, self._arguments, [words, reports, failures])
        finally:
            for end in (words, reports, failures):
                os.close(end)
        self._listening = [
            asyncio.create_task(work(end)) for work, end in ((self._hear, report), (self._hear_errors, failure))
        ]
        return self

    async def __aexit__(self, *_):
        await self.kill()
        os.close(self._words)

    async def kill(self):
        """Kill it, unless it has ended, and hear what it told before."""
        self.signal(signal.SIGKILL)
        await self._hear_out()

    def signal(self, number):
        """Send it a signal, unless it has ended."""
        if not self._over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, number)

    def say(self, word):
        os.write(self._words, word.encode() + b"\n")

    async def until(self, condition):
        """Wait until what it told fulfils a condition, as long as it tells anything."""
        await self._listen_until(lambda: condition(self.lines))
        if not condition(self.lines):
            await self._fail()

    async def end(self):
        """Wait until it has ended by itself, well."""
        await self._listen_until(lambda: False)
        if not self.ended:
            await self._fail()
        await self._hear_out()

    async def _listen_until(self, condition):
        async with self._told:
            while not condition() and not self._over:
                async with asyncio.timeout(LIMIT):
                    await self._told.wait()

    async def _hear_out(self):
        _, missing = await asyncio.wait(self._listening, timeout=LIMIT)
        assert not missing, f"the {self.part} did not end"
        assert not any(secret.encode() in self._errors for secret in SECRETS), "a log holds a secret"

    async def _fail(self):
        await self._hear_out()
        raise AssertionError(f"the {self.part} ended after {self.lines[-1:]}: {self._errors.decode()[-4000:]}")

    async def _hear(self, end):
        reader, transport = await _connect(end)
        with contextlib.closing(transport):
            async for line in reader:
                if line.endswith(b"\n"):  # otherwise it was killed in the middle
                    async with self._told:
                        self.ended = line == b"done\n"
                        self.lines += [] if self.ended else [line.decode().split()]
                        self._told.notify_all()
        async with self._told:
            self._over = True
            self._told.notify_all()

    async def _hear_errors(self, end):
        reader, transport = await _connect(end)
        with contextlib.closing(transport):
            self._errors = await reader.read()


async def _connect(end):
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
    )
    return reader, transport


def states(lines):
    """What lines that end in version, step and fingerprint say, as integers and text."""
    return [(int(version), int(step), print_) for *_, version, step, print_ in lines]
