"""`?notify=nats://...` with a broker that is not there, goes away, says nothing or refuses."""

import asyncio
import time

import pytest
import pytest_asyncio

from deltabus.bus.errors import AccessDeniedError, TransientTransportError, TransportError
from deltabus.transports.registry import _open_notifier

from .announced import SLOW, channel, following, told, topics_below, warnings_in
from .conformance import LIMIT, fill, until
from .nats_server import NatsServer, told_by_libraries
from .proxy import Proxy

SECRET = "hunter2"


@pytest.fixture
def make_topic(tmp_path, broker):
    return topics_below(tmp_path, broker)


@pytest_asyncio.fixture(autouse=True)
async def nothing_left():
    """Each test ends with the tasks it began with."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


@pytest.fixture
def frail(tmp_path):
    """A broker that a test may kill and start."""
    server = NatsServer(tmp_path / "frail", jetstream=None)
    yield server
    server.kill()


async def test_a_broker_that_is_down_costs_latency_and_one_warning(make_topic, frail, caplog):
    topic = make_topic(channel(frail))
    async with topic.open() as writer, topic.open() as reader, following(reader) as found:
        for position in range(4):
            before = time.perf_counter()
            await writer.append("main", position, b"%d" % position)
            assert time.perf_counter() - before < 1
            await found.have(position + 1)
            assert found.times[-1] - before < SLOW / 5  # a look a second, although `poll` is half a minute
        assert len(warnings_in(caplog)) == 2
        assert any(w.startswith(f"records of {topic.url} are not announced over nats://") for w in warnings_in(caplog))
        frail.start()
        await told(reader)
        before = time.perf_counter()
        await writer.append("main", 4, b"4")
        await found.have(5)
    assert len(warnings_in(caplog)) == 2
    assert not told_by_libraries(caplog)


async def test_a_broker_that_is_killed_and_started_again_and_again(make_topic, frail, caplog):
    frail.start()
    topic = make_topic(channel(frail))
    async with topic.open() as writer, topic.open() as reader, following(reader) as found:
        await told(reader)
        for round_ in range(3):
            await fill(writer, "main", 5, start=10 * round_)
            frail.kill()
            await until(lambda: not reader._told)
            await fill(writer, "main", 5, start=10 * round_ + 5)
            await found.have(10 * round_ + 10)
            frail.start()
            await told(reader)
        await writer.append("main", 30, b"30")
        await found.have(31)
        assert found.records == [(position, b"%d" % position) for position in range(31)]
    assert len(warnings_in(caplog)) <= 6  # one for each end and outage
    assert not told_by_libraries(caplog)


async def test_what_was_written_during_an_outage_is_seen_when_the_broker_is_back(make_topic, frail):
    frail.start()
    topic = make_topic(channel(frail))
    async with topic.open() as writer, topic.open() as reader, following(reader) as found:
        await told(reader)
        await fill(writer, "main", 1)
        await found.have(1)
        async with Proxy(frail.port) as proxy:
            late = make_topic(f"nats://127.0.0.1:{proxy.port}/{topic.options['notify'].split('/', 3)[3]}")
            late.url = topic.url
            proxy.refusing = True
            async with late.open() as cut_off:
                await cut_off.append("main", 1, b"1")  # only this writer has lost the broker
                proxy.refusing = False
                await found.have(2)
        assert found.times[-1] - found.times[-2] < SLOW / 2


async def test_a_broker_that_says_nothing_delays_neither_append_nor_close(make_topic, broker):
    async with Proxy(broker.port) as proxy:
        proxy.silent = True
        topic = make_topic(f"nats://127.0.0.1:{proxy.port}/run")
        before = time.perf_counter()
        async with topic.open() as writer:
            await fill(writer, "main", 20)
            assert time.perf_counter() - before < 2
            tail = writer.tail("main")
            assert await anext(tail) == (0, b"0")
            await tail.aclose()
        assert time.perf_counter() - before < 8


async def test_a_tail_that_is_held_costs_nothing_once_its_transport_is_closed(make_topic, frail):
    async with make_topic(channel(frail)).open() as transport:
        await fill(transport, "main", 1)
        tail = transport.tail("main")
        assert await anext(tail) == (0, b"0")
        (attention,) = transport._tails
        assert attention._timer is not None
    assert attention._timer is None
    with pytest.raises(TransportError, match="closed"):
        await anext(tail)


async def test_a_broker_that_refuses_is_named_without_its_password(make_topic, tmp_path, caplog):
    with NatsServer(tmp_path / "locked", 'authorization { user: u, password: "other" }', jetstream=None) as server:
        topic = make_topic(f"nats://u:{SECRET}@{server.host}/run")
        async with topic.open() as writer, topic.open() as reader, following(reader) as found:
            await fill(writer, "main", 2)
            await found.have(2)
            await until(lambda: len(warnings_in(caplog)) == 2)
    assert all("refuses who logs in" in warning for warning in warnings_in(caplog))
    assert SECRET not in caplog.text


async def test_missing_permissions_are_told(make_topic, tmp_path, caplog):
    config = """
        authorization { users: [
            { user: w, password: p, permissions: { publish: "nothing", subscribe: "_INBOX.>" } }
        ] }
    """
    with NatsServer(tmp_path / "strict", config, jetstream=None) as server:
        topic = make_topic(f"nats://w:p@{server.host}/run")
        async with topic.open() as writer, topic.open() as reader, following(reader) as found:
            await fill(writer, "main", 2)
            await found.have(2)
            await until(lambda: len(warnings_in(caplog)) == 2)
        told = " ".join(warnings_in(caplog)).lower()
        assert 'violation for publish to "deltabus.run.news.main"' in told
        assert 'violation for subscription to "deltabus.run.news.*"' in told
        notifier = _open_notifier(topic.options["notify"])
        try:
            with pytest.raises(AccessDeniedError, match="administrator"):
                await asyncio.wait_for(notifier.announce({"main": 0}), LIMIT)
            with pytest.raises(AccessDeniedError, match="administrator"):
                await asyncio.wait_for(notifier.listen(print, ready=print), LIMIT)
        finally:
            await notifier.close()


async def test_a_line_that_is_lost_ends_listening(frail):
    frail.start()
    notifier = _open_notifier(channel(frail))
    ready = asyncio.Event()
    task = asyncio.create_task(notifier.listen(print, ready=ready.set))
    await asyncio.wait_for(ready.wait(), LIMIT)
    frail.kill()
    with pytest.raises(TransientTransportError, match="lost its connection"):
        await asyncio.wait_for(task, LIMIT)
    await notifier.close()
    await notifier.close()
