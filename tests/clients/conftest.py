import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from deltabus.transports.memory import drop_topic


@pytest.fixture
def place(tmp_path):
    """A directory in memory where there is one: what a killed process wrote survives there as well, and sooner."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def backends(tmp_path_factory):
    """Gives the backend of a scheme, whose server is started when it is first asked for."""
    from .backends import open_backend  # the clients of all servers take a second to load

    with contextlib.ExitStack() as stack:
        started = {}

        def give(scheme):
            if scheme not in started:
                started[scheme] = stack.enter_context(open_backend(scheme, tmp_path_factory.mktemp(scheme)))
            return started[scheme]

        yield give


@pytest.fixture
def url(request):
    """A topic in memory of the test's own."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    yield f"memory://{name}"
    drop_topic(name)
