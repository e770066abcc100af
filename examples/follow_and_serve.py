"""Serve the newest weights over HTTP by reloading them from a directory that follows a topic.

    python examples/plain_loop.py run-7 &
    python examples/follow_and_serve.py run-7 weights --port 8080
    curl http://127.0.0.1:8080/ -d '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]'

It stands for an engine that loads by path. Requests go on with the old weights until the new ones are loaded.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from plain_loop import make_model
from safetensors.torch import load_model
from torch import nn

from deltabus.following import follow


class Engine:
    """A model that is exchanged whole, between two requests."""

    def __init__(self) -> None:
        self._serving: tuple[int, nn.Module] | None = None
        self.ready = threading.Event()

    def load(self, version: int, directory: Path) -> None:
        """Load a version from its directory, and serve it from now on."""
        model = make_model().bfloat16()
        load_model(model, directory / "model.safetensors")
        self._serving = version, model
        self.ready.set()

    def answer(self, inputs: list[float]) -> dict[str, float]:
        """Return the model's output, and the version that made it."""
        assert self._serving is not None
        version, model = self._serving
        with torch.no_grad():
            return {"version": version, "output": model(torch.tensor(inputs).bfloat16()).item()}


def serve(engine: Engine, port: int) -> ThreadingHTTPServer:
    """Answer requests in the background."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            inputs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(engine.answer(inputs)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Follow, and serve once there is something to serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()

    engine, server = Engine(), None
    for version in follow(options.url, options.directory):
        engine.load(version.version, version.directory)
        server = server or serve(engine, options.port)
        print(f"version {version.version} at http://127.0.0.1:{server.server_port}/", flush=True)


if __name__ == "__main__":
    main()
