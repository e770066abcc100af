"""A slow line to try the example on: a service of this machine, behind a proxy that lets only so much through."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_BLOCK = 1 << 14


@contextlib.contextmanager
def slow_service(directory: Path, megabits: float) -> Iterator[str]:
    """Serve topics from a directory over HTTP, at so many Mbit/s each way in all, and yield their URL."""
    command = [sys.executable, "-m", "deltabus.cli", "serve", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:  # noqa: S603 - our own command
        try:
            assert service.stdout is not None
            port = urlsplit(service.stdout.readline().strip()).port
            assert port is not None, "the service did not start"
            with _proxy(port, megabits * 1e6 / 8) as there:
                yield f"http://127.0.0.1:{there}"
        finally:
            service.kill()


class _Line:
    """One direction; whoever sends waits for those who sent before."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        while block := await reader.read(_BLOCK):
            self._free = max(now(), self._free) + len(block) / self._rate
            await asyncio.sleep(self._free - now())
            writer.write(block)
            await writer.drain()


@contextlib.contextmanager
def _proxy(target: int, rate: float) -> Iterator[int]:
    """Pass bytes to and from a port of this machine, at so many bytes a second, and yield another port for it."""
    there, back = _Line(rate), _Line(rate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        ways = {
            asyncio.create_task(there.carry(reader, far_writer)),
            asyncio.create_task(back.carry(far_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            far_writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop).result(10)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
