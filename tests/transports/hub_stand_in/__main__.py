"""Run the stand-in: `python -m hub_stand_in --root DIRECTORY`, from the directory that holds this package.

--port 0              the port to listen on; 0 is any that is free, and it is told on the first line of output
--token TEXT          a token that may write; may be given again; without any token, everybody may do everything
--read-token TEXT     a token that may read
--quota BYTES         how much may be stored
--bucket NAME         a bucket, `namespace/name`, to create at the start
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from aiohttp import web

from .app import make_app
from .buckets import timestamp
from .hub_api import HUB


async def _serve(arguments: argparse.Namespace) -> None:
    app = make_app(arguments.root, writers=arguments.token, readers=arguments.read_token, quota=arguments.quota)
    buckets = app[HUB].buckets
    for name in arguments.bucket:
        if name not in buckets.by_id:
            buckets.record(what="create", bucket=name, private=True, at=timestamp())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=False, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", arguments.port, reuse_address=True).start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="hub_stand_in", description="A Hugging Face Hub with buckets, for tests.")
    parser.add_argument("--root", type=Path, required=True, help="the directory that holds all that lasts")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; 0 is any that is free")
    parser.add_argument("--token", action="append", default=[], help="a token that may write")
    parser.add_argument("--read-token", action="append", default=[], help="a token that may read")
    parser.add_argument("--quota", type=int, help="bytes that may be stored")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to create at the start")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
