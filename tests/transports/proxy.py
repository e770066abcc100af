"""A TCP proxy that makes a network go wrong: answers that are lost after the request took effect, latency, cuts.

    async with Proxy(port) as proxy:
        proxy.drop(b"PUT /", answer=b"HTTP/1.1 200")    # the next such request is carried out, its answer is lost
        ... connect to 127.0.0.1 at proxy.port ...

It knows no protocol: `drop` looks for bytes in what passes. It listens on a free port of 127.0.0.1, and belongs to one
event loop.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

__all__ = ["Proxy"]

_BLOCK = 1 << 16
_REMEMBERED = 2048


@dataclass
class _Rule:
    request: bytes
    answer: bytes
    times: int
    refuse: bool


@dataclass(eq=False)
class _Line:
    """One connection through the proxy."""

    writers: list = field(default_factory=list)
    rule: _Rule | None = None

    def cut(self):
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Passes bytes to and from a port of this machine.

    Attributes:
        port: Where it listens.
        latency: Seconds that each block of an answer is held back.
        refusing: Whether new connections are cut at once.
        silent: Whether nothing is passed on, though connections stay open.
        dropped: How many answers were lost.
        requests: The beginning of each block that clients sent.
    """

    def __init__(self, target, host="127.0.0.1"):
        self.target = target
        self.host = host
        self.port = 0
        self.latency = 0.0
        self.refusing = False
        self.silent = False
        self.dropped = 0
        self.requests = []
        self._rules = []
        self._lines = set()
        self._tasks = set()
        self._server = None

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.refusing = True
        while self._tasks:
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.05)
        await self._server.wait_closed()

    def drop(self, request, *, answer=b"", times=1, refuse=False):
        """Lose the answers to the next `times` requests, and cut their connections.

        Args:
            request: Bytes that a block of the request holds.
            answer: Bytes that the block of the answer holds which is lost; earlier blocks pass. Empty: the first.
            times: How often.
            refuse: Whether to refuse connections from then on.
        """
        self._rules.append(_Rule(request, answer, times, refuse))

    def cut(self):
        """Break all connections that are open."""
        for line in list(self._lines):
            line.cut()

    def count(self, request):
        """How many blocks that clients sent began with these bytes."""
        return sum(block.startswith(request) for block in self.requests)

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        line = _Line([writer])
        self._lines.add(line)
        try:
            if self.refusing:
                return
            there, out = await asyncio.open_connection(self.host, self.target)
            line.writers.append(out)
            ways = [
                asyncio.create_task(self._pass_requests(line, reader, out)),
                asyncio.create_task(self._pass_answers(line, there, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the target is down, which the client learns by the cut
        finally:
            self._lines.discard(line)
            line.cut()
            for each in line.writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pass_requests(self, line, reader, writer):
        while block := await reader.read(_BLOCK):
            self.requests.append(block[:_REMEMBERED])
            for rule in self._rules:
                if rule.times and rule.request in block:
                    rule.times -= 1
                    line.rule = rule
                    break
            if not self.silent:
                writer.write(block)
                await writer.drain()

    async def _pass_answers(self, line, reader, writer):
        while block := await reader.read(_BLOCK):
            if line.rule and line.rule.answer in block:
                self.dropped += 1
                self.refusing |= line.rule.refuse
                return
            if self.latency:
                await asyncio.sleep(self.latency)
            if not self.silent:
                writer.write(block)
                await writer.drain()
