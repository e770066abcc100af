"""A process that races others: `python racing_writer.py DIRECTORY NAME COUNT`.

It says `ready`, waits for a line, tries to append its name at each position of one log and to store it under each of as
many keys, and prints as JSON what it won.
"""

import asyncio
import json
import sys

from deltabus.bus.errors import KeyExistsError, PositionTakenError
from deltabus.transports import open_transport


async def race(directory, name, count):
    won = {"positions": [], "keys": []}
    async with open_transport(directory) as transport:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(count):
            try:
                await transport.append("main", number, f"{name}:{number}".encode())
                won["positions"].append(number)
            except PositionTakenError:
                pass
            try:
                await transport.put(f"blobs/{number}", name.encode() * 10_000)
                won["keys"].append(number)
            except KeyExistsError:
                pass
    print(json.dumps(won), flush=True)


if __name__ == "__main__":
    asyncio.run(race(sys.argv[1], sys.argv[2], int(sys.argv[3])))
