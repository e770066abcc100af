"""What README says of transports is what their classes declare, and its servers start as it says."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltabus.transports import registry
from deltabus.transports.filesystems import guarantees_of

from .conformance import LIMIT
from .seaweed import free_ports

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"```sh\n((?:(?!```).)*?deltabus demo --url file:.*?)```", re.S)
WRITE = """
import asyncio, sys
from deltabus.bus.retry import Retry
from deltabus.transports import open_transport

async def write(url):
    async with open_transport(url) as transport:
        await Retry(limit=30).call("a test", lambda: transport.put("key", b"x"))
        assert await transport.get("key") == b"x"

asyncio.run(write(sys.argv[1]))
"""
PORTS = ("4222", "8333", "8765")


def test_the_table_says_what_the_classes_declare():
    text = README.read_text(encoding="utf-8")
    table = re.search(r"<!-- guarantees -->\n(.*?)<!-- end -->", text, re.S)[1]
    told = {}
    for row in table.splitlines()[2:]:
        url, _, conditional, push = (cell.strip() for cell in row.strip("|").split("|"))
        for scheme in re.findall(r"`([a-z0-9]+)[+<>a-z]*://", url):
            told[scheme] = (conditional, push)
    declared = {
        scheme: guarantees_of(scheme) if scheme in ("gs", "az", "sftp", "fsspec") else registry._load(scheme).guarantees
        for scheme in told
    }
    marks = {True: "yes", False: "no"}
    assert told == {name: (marks[g.conditional_append], marks[g.push]) for name, g in declared.items()}
    assert told.keys() >= {"file", "memory", "s3", "hf", "http", "nats", "gs", "az", "sftp", "fsspec"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing, with which README creates a bucket")
def test_its_servers_start_and_its_topics_can_be_written(tmp_path):
    (script,) = BLOCK.findall(README.read_text(encoding="utf-8"))
    assert re.findall(r"^deltabus demo --url (\w+):", script, re.M) == ["file", "nats", "s3", "hf"]
    master, volume, filer, *free = free_ports(3 + len(PORTS))
    for port, other in zip(PORTS, free, strict=True):
        script = script.replace(port, str(other))
    others = f"weed server -master.port={master} -volume.port={volume} -filer.port={filer} -s3.port.iceberg=0"
    script = script.replace("weed server", f"{others} -s3.port.lance=0")
    script = re.sub(r"^pip .*$", "", script.replace("/tmp/", f"{tmp_path}/"), flags=re.M)
    (tmp_path / "write.py").write_text(WRITE)
    script = script.replace("deltabus demo --url", f"python {tmp_path / 'write.py'}")
    with (tmp_path / "log").open("w+") as log:
        # A session of its own, with which everything ends that the script starts.
        process = subprocess.Popen(
            ["bash", "-euc", script],
            cwd=README.parent,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(3 * LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT)
        log.seek(0)
        assert status == 0, log.read()[-4000:]
