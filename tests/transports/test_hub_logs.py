"""`hf://buckets/...` and its logs: the feed and what goes on without it, long logs, and trims that die."""

import asyncio
import contextlib
import hashlib
import itertools

import pytest
from huggingface_hub import HfApi

from deltabus.transports import hub_client, hub_log
from deltabus.transports.hub_rule import name_candidate, trace_log

from .conformance import LIMIT, collected, fill, records_of, until
from .hub_topic import BUCKET, TOKEN

pytestmark = pytest.mark.usefixtures("hub_clients")


@pytest.fixture
def make_topic(hub_topics):
    return lambda: hub_topics(settle=0.05)


# The feed


@pytest.mark.parametrize("fault", [{"status": 404}, {"status": 500}, {"drop": "before"}, {"status": 200}])
async def test_without_the_feed_records_come_later(hub, topic, fault):
    hub.fault("/events$", **fault)
    async with topic.open() as writer, topic.open(poll=0.3) as reader:
        task = asyncio.create_task(collected(reader, "main", -1, 5))
        assert await fill(writer, "main", 5) == await task


@pytest.mark.parametrize("forget", [False, True])
async def test_a_feed_that_sends_its_readers_away_is_taken_up_again(hub, topic, forget):
    async with topic.open() as writer, topic.open(poll=LIMIT) as reader:
        task = asyncio.create_task(collected(reader, "main", -1, 6))
        written = await fill(writer, "main", 2)
        hub.call("POST", "/_test/reconnect", {"forget": forget})
        written += await fill(writer, "main", 2, start=2)
        hub.call("POST", "/_test/reconnect", {})
        written += await fill(writer, "main", 2, start=4)
        assert await task == written


async def test_following_costs_no_requests_while_nothing_happens(hub, topic):
    async with topic.open() as writer, topic.open() as reader, contextlib.aclosing(reader.tail("main")) as tail:
        await fill(writer, "main", 1)
        assert await anext(tail) == (0, b"0")
        waiting = asyncio.create_task(anext(tail))
        await until(lambda: reader._logs._feed.live)
        await reader.logs()
        await asyncio.wait((waiting,), timeout=1)
        hub.requests()
        for _ in range(20):
            assert await reader.logs() == ["main"]
        await asyncio.wait((waiting,), timeout=1)
        assert hub.requests() == []
        await writer.append("second", 0, b"x")
        await until(lambda: reader._logs._names is None)
        assert await reader.logs() == ["main", "second"]
        await writer.append("main", 1, b"1")
        assert await waiting == (1, b"1")


# Long logs


async def test_a_long_log_is_read_from_anywhere_with_few_requests(hub, topic):
    count = 1215
    places = [f"{topic.name}/logs/main/{position:020}" for position in range(count)]
    data = [b"%d" % position for position in range(count)]
    names = [
        name_candidate(place, hashlib.sha256(part).hexdigest(), "0" * 16)
        for place, part in zip(places, data, strict=True)
    ]
    HfApi(endpoint=hub.endpoint, token=TOKEN).batch_bucket_files(BUCKET, add=list(zip(data, names, strict=True)))
    async with topic.open() as transport:
        for after in (-1, 0, 8, 9, 95, 979, 998, 999, 1000, 1207, 1208, 1209, 1213, 1214, 1215):
            for limit in (1, 25):
                hub.requests()
                found = await transport.read("main", after, limit)
                assert found == list(enumerate(data))[after + 1 :][:limit]
                listings = [line for line in hub.requests() if "/tree/" in line]
                assert len(listings) <= 4
                assert len(listings) <= 2 or limit > 1 or after in (-1, 1213, 1215)
        await transport.append("main", count, b"end")
        assert await transport.read("main", count - 1) == records_of(b"end", start=count)


@pytest.mark.parametrize("most", [2, 3, 1000])
async def test_a_trim_that_dies_anywhere_lets_no_loser_become_the_first_record(hub, topic, monkeypatch, most):
    """Each place has a winner and a loser that was stored before the next place's winner, as after a race."""
    monkeypatch.setattr(hub_client, "BATCH", most)
    monkeypatch.setattr(hub_log, "BATCH", most)
    api, names = HfApi(endpoint=hub.endpoint, token=TOKEN), []
    for position in range(4):
        for text in (b"won", b"lost"):
            data = b"%d %s" % (position, text)
            place = f"{topic.name}/logs/main/{position:020}"
            # By its name the loser comes first and last in turn, however they are listed.
            nonce = f"{(text == b'won') ^ position % 2:016}"
            names.append((data, name_candidate(place, hashlib.sha256(data).hexdigest(), nonce)))
            api.batch_bucket_files(BUCKET, add=[names[-1]])
    async with topic.open() as transport:
        log = transport._logs
        written, listing = await transport.read("main"), await log._list("main")
        assert written == [(position, b"%d won" % position) for position in range(4)]
        taken = []
        remove = log._client.remove

        async def note(paths):
            taken.append(list(paths))
            await remove(paths)

        monkeypatch.setattr(log._client, "remove", note)
        await transport.trim("main", 3)
        assert await transport.read("main") == written[3:]
    places = {one.path: position for position, found in listing.items() for one in found}
    for earlier, later in itertools.pairwise(taken):
        assert places[earlier[-1]] < places[later[0]]
    winners, gone = trace_log(listing), set()
    for path in itertools.chain(*taken):
        gone.add(path)
        left = trace_log(
            {position: [one for one in found if one.path not in gone] for position, found in listing.items()}
        )
        assert left == {position: winners[position] for position in left}
        assert max(left) == 3
