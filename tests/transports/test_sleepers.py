"""Writers that sleep in the middle of an append while others go on and the log is trimmed."""

import asyncio
import functools
import itertools

import pytest

from deltabus.bus.errors import PositionTakenError
from deltabus.transports import open_transport

from .conformance import fill, in_another_loop

_runs = itertools.count()


@pytest.fixture(params=["file", "memory filesystem", "s3"])
def open_topic(request, tmp_path):
    """Opens transports of one topic whose backend cannot refuse a write behind a removed record."""
    if request.param == "s3":
        return request.getfixturevalue("s3_topics")().open
    url = {"file": f"file://{tmp_path}/run", "memory filesystem": f"fsspec+memory://sleepers/{next(_runs)}"}
    options = {"settle": 0.001} if request.param == "memory filesystem" else {}
    return functools.partial(open_transport, url[request.param], **options)


def around_the_write(monkeypatch, transport, *, before=None, after=None):
    """Let others work right before, or right after, the transport writes a record."""
    if not hasattr(transport, "_store"):
        write = transport._create

        def create_in_thread(*arguments):
            if before is not None:
                asyncio.run(before())
            write(*arguments)
            if after is not None:
                asyncio.run(after())

        monkeypatch.setattr(transport, "_create", create_in_thread)
        return
    create = transport._store.create

    async def create_in_loop(name, data):
        if before is not None:
            await in_another_loop(before)
        created = await create(name, data)
        if after is not None:
            await in_another_loop(after)
        return created

    monkeypatch.setattr(transport._store, "create", create_in_loop)


@pytest.mark.parametrize(("position", "before"), [(6, 12), (6, 7), (0, 4)])
async def test_who_slept_across_a_trim_is_refused_and_leaves_nothing(open_topic, monkeypatch, position, before):
    async def go_on():
        async with open_topic() as other:
            await fill(other, "main", 14 - position, start=position)
            await other.trim("main", before)

    async with open_topic() as sleeper, open_topic() as reader:
        await fill(sleeper, "main", position)
        around_the_write(monkeypatch, sleeper, before=go_on)
        with pytest.raises(PositionTakenError):
            await sleeper.append("main", position, b"zombie")
        expected = [(place, b"%d" % place) for place in range(before, 14)]
        assert await reader.read("main") == expected
        await fill(reader, "main", 1, start=14)


async def test_the_last_record_stays_though_all_in_front_of_it_was_trimmed_at_once(open_topic, monkeypatch):
    async def trim():
        async with open_topic() as other:
            await other.trim("main", 1000)

    async with open_topic() as writer, open_topic() as reader:
        await fill(writer, "main", 3)
        around_the_write(monkeypatch, writer, after=trim)
        await writer.append("main", 3, b"last")
        assert await reader.read("main") == [(3, b"last")]
        await fill(reader, "main", 1, start=4)


async def test_the_first_record_stays_though_it_is_followed_at_once(open_topic, monkeypatch):
    async def follow():
        async with open_topic() as other:
            await other.append("main", 1, b"1")

    async with open_topic() as writer, open_topic() as reader:
        around_the_write(monkeypatch, writer, after=follow)
        await writer.append("main", 0, b"0")
        assert await reader.read("main") == [(0, b"0"), (1, b"1")]
