"""What the relay is compared with, and who waits on it: processes of the benchmark that load little.

python relay_peers.py serve DIRECTORY       a plain file server
python relay_peers.py wait URL COUNT        so many lines that nothing comes on
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

__all__ = ["allow_many_files", "serve_files", "wait_idly"]

_LIMIT = 60.0
_FILES = 16384


def allow_many_files() -> None:
    """Let this process, and those that it starts, have a connection for each follower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))


async def serve_files(directory: str) -> None:
    """Serve files as aiohttp does: what the relay is compared with."""

    async def send(request: web.Request) -> web.FileResponse:
        return web.FileResponse(Path(directory, request.match_info["name"]))

    app = web.Application()
    app.router.add_get("/{name:.+}", send)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def wait_idly(url: str, count: int) -> None:
    """Follow a log that nothing is written to, on so many lines, and say when all are there."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        begun = 0
        all_there = asyncio.Event()

        async def wait() -> None:
            nonlocal begun
            async with session.get(url) as answer:
                async for _ in answer.content.iter_any():
                    begun += 1
                    if begun >= count:
                        all_there.set()

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait()) for _ in range(count)]
            await asyncio.wait_for(all_there.wait(), _LIMIT)
            sys.stdout.write("http: all there\n")
            sys.stdout.flush()
            await asyncio.gather(*waiting)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    allow_many_files()
    asyncio.run(serve_files(sys.argv[2]) if sys.argv[1] == "serve" else wait_idly(sys.argv[2], int(sys.argv[3])))
