"""`file://` between processes: whoever races for a place, one wins, and all agree on who it was."""

import asyncio
import json
import sys
from pathlib import Path

from deltabus.transports import open_transport

from .conformance import collected

PROCESSES = 4
COUNT = 40


async def start(root, name):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        Path(__file__).with_name("racing_writer.py"),
        root,
        name,
        str(COUNT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_of_many_processes_one_wins_each_place(tmp_path):
    names = [f"writer-{number}" for number in range(PROCESSES)]
    async with asyncio.timeout(90), open_transport(tmp_path) as transport:
        reader = asyncio.create_task(collected(transport, "main", -1, COUNT))
        processes = await asyncio.gather(*(start(tmp_path, name) for name in names))
        for process in processes:
            process.stdin.write(b"go\n")
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        assert [process.returncode for process in processes] == [0] * PROCESSES
        won = {name: json.loads(output) for name, (output, _) in zip(names, outputs, strict=True)}

        seen = await reader
        assert seen == await transport.read("main")
        for place in ("positions", "keys"):
            assert sorted(number for wins in won.values() for number in wins[place]) == list(range(COUNT))
        for name, wins in won.items():
            for number in wins["positions"]:
                assert seen[number] == (number, f"{name}:{number}".encode())
            for number in wins["keys"]:
                assert await transport.get(f"blobs/{number}") == name.encode() * 10_000
    assert not list(tmp_path.rglob(".*"))
