import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path):
    """A directory in memory where there is one: what a killed process wrote survives there as well, and sooner."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as directory:
        yield Path(directory)
