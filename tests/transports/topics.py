"""Topics as the tests of transports use them: how they are made, filled, read and waited for."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from deltabus.transports import open_transport

LIMIT = 30.0
"""Seconds that any wait in these tests may take."""

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".a",
    "a/.b",
    "a/..",
    "../a",
    "a b",
    "a\\b",
    "é",
    "a\n",
    "a\0",
    "=a",
    "a/=b",
    "k" * 513,
]
BAD_KEYS += ["a/" + "k" * 256, "logs", "logs/main/00000000000000000000", "a?b", "a#b", "a%2fb", "a*"]
BAD_LOGS = ["", ".", "..", "a/b", "a.b", "-a", "_a", "a b", "a\n", "é", "l" * 64, "a*", "a>"]


class Topic:
    """One fresh topic, and ways around its transport."""

    def __init__(self, url: str, **options):
        self.url = url
        self.options = options

    def open(self, **options):
        """Return one more transport of the topic; call it in the loop that will use it."""
        return open_transport(self.url, **self.options, **options)

    async def stored_blob(self, key):
        """Back door: the blob's bytes, None when there is none, read without the transport."""
        pytest.skip("this backend has no back door to its blobs")

    async def remove_records(self, log, before):
        """Back door: remove the records in front of a position, oldest first, as retention does."""
        pytest.skip("this backend has no back door to its records")


async def collected(transport, log, after, count):
    """The next `count` records of a tail, within the limit."""
    records = []
    async with asyncio.timeout(LIMIT), contextlib.aclosing(transport.tail(log, after)) as tail:
        while len(records) < count:
            records.append(await anext(tail))
    return [tuple(record) for record in records]


async def in_another_loop(function, *arguments):
    """Run a coroutine function in a thread with an event loop of its own."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(function(*arguments))), LIMIT)


async def until(condition):
    """Wait until a condition holds, within the limit."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - the conditions are of threads, files and processes
            await asyncio.sleep(0.005)


async def within(limit, condition):
    """Wait until an async condition gives something true, and return it."""
    async with asyncio.timeout(limit):
        while True:
            found = await condition()
            if found:
                return found
            await asyncio.sleep(0.02)


def records_of(*texts, start=0):
    return [(position, text) for position, text in enumerate(texts, start)]


async def fill(transport, log, count, start=0):
    """Append `count` records, and return them."""
    records = [(position, b"%d" % position) for position in range(start, start + count)]
    for position, data in records:
        await transport.append(log, position, data)
    return records


async def waiting(task):
    """Let a task run until it has surely begun to wait."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
