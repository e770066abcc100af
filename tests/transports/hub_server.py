"""Starts the stand-in Hub as a process on a free port, kills it, starts it again, and orders faults."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import set_async_client_factory
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils._http import default_async_client_factory

__all__ = ["HubServer", "small_clients"]

LIMIT = 30.0


@contextlib.contextmanager
def small_clients(home):
    """Let the clients keep their things in a directory of the tests, retry soon, and load no certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "50ms")
        patch.delenv("HF_TOKEN", raising=False)
        disable_progress_bars()
        set_async_client_factory(lambda: httpx2.AsyncClient(follow_redirects=True, timeout=None, verify=False))
        yield
        set_async_client_factory(default_async_client_factory)


class HubServer:
    """One stand-in Hub with its data in a directory; `with` it."""

    def __init__(self, root, *arguments):
        self.root = Path(root)
        self.arguments = list(arguments)
        self.endpoint = ""
        self._port = "0"
        self._process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """Start it, on the port that it had before, and wait until it serves."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hub_stand_in", "--root", self.root, "--port", self._port, *self.arguments],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        line = self._process.stdout.readline().decode().strip()  # the process ends, or tells where it serves
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+", line), f"the stand-in Hub did not start: {line!r}"
        self.endpoint = line
        self._port = line.rpartition(":")[2]

    def kill(self):
        """End it at once, as the system would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(LIMIT)
            self._process.stdout.close()
            self._process = None

    def call(self, method, path, body=None, *, text=None, token=None):
        """Make a request, and return the answer's JSON, None where it has none."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        text = json.dumps(body) if body is not None else text
        data = None if text is None else text.encode()
        request = urllib.request.Request(f"{self.endpoint}{path}", method=method, data=data, headers=headers)
        with contextlib.closing(urllib.request.urlopen(request, timeout=LIMIT)) as answer:
            told = answer.read()
        return json.loads(told) if told else None

    def fault(self, path, **rule):
        """Order a fault for paths that match; see `hub_stand_in/faults.py`."""
        self.call("POST", "/_test/faults", {"path": path, **rule})

    def heal(self):
        """Take all faults away."""
        self.call("POST", "/_test/faults", {})

    def requests(self):
        """The requests since the last call of this."""
        return self.call("GET", "/_test/log")
