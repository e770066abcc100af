"""Starts `deltabus serve` as a process on a free port, kills it, starts it again, and asks it things."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

__all__ = ["RelayServer"]

LIMIT = 30.0


class RelayServer:
    """One service; `with` it.

    Attributes:
        url: Where it listens.
        log: The file that holds what it logs.
    """

    def __init__(self, directory, upstream, *arguments, port=0):
        self.directory = directory
        self.upstream = upstream
        self.arguments = arguments
        self.url = ""
        self.log = directory / "serve.log"
        self._port = port
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def port(self):
        return self._port

    def start(self):
        """Start it, on the port that it had before, and wait until it serves."""
        command = [sys.executable, "-m", "deltabus.cli", "serve", self.upstream, "--port", str(self._port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self.directory)},
            )
        line = self.process.stdout.readline().decode().strip()  # the process ends, or tells where it serves
        if not re.fullmatch(r"https?://[0-9.]+:[0-9]+", line):
            self.kill()
            raise AssertionError(f"it did not start: {line!r} {self.log.read_text()}")
        self.url = line
        self._port = int(line.rpartition(":")[2])

    def kill(self):
        """End it at once, as the system would."""
        self._end(signal.SIGKILL)

    def stop(self):
        """Tell it to stop, and return its exit status when it has."""
        return self._end(signal.SIGTERM)

    def _end(self, number):
        if self.process is None:
            return None
        process, self.process = self.process, None
        process.send_signal(number)
        status = process.wait(LIMIT)
        process.stdout.close()
        return status

    def call(self, method, path, body=None, *, token=None, headers=None):
        """Make a request, and return status, headers and body of the answer."""
        given = dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"{self.url}{path}", method=method, data=body, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def get(self, path, **options):
        """The JSON that is there."""
        status, _, body = self.call("GET", path, **options)
        assert status == 200, body
        return json.loads(body)

    def figure(self, name, **labels):
        """A figure for Prometheus; 0 while it is not there."""
        _, _, body = self.call("GET", "/metrics")
        wanted = name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")
        found = [line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#")]
        return sum(float(value) for shown, _, value in found if shown == wanted)
