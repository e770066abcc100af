"""The rule by which readers of a bucket agree: its parts, and a model of racing writers, sleepers and readers."""

from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabus.transports.hub_rule import Candidate, Sightings, choose, name_candidate, parse_candidate, trace_log

SETTLE = 10
START = datetime(2026, 1, 1, tzinfo=UTC)


def candidate(position, number, stored):
    identity = f"{number:064x}"
    place = f"logs/main/{position:020}"
    return Candidate(
        path=name_candidate(place, identity, f"{number:016x}"),
        place=place,
        identity=identity,
        stored=START + timedelta(milliseconds=stored),
        size=1,
        content="",
    )


def test_names_are_read_back():
    path = name_candidate("a/b/key.bin", "0a" * 32, "1b" * 8)
    found = parse_candidate(path, stored="2026-01-01T00:00:00.001Z", size=3, content="c")
    assert (found.path, found.place, found.identity, found.size) == (path, "a/b/key.bin", "0a" * 32, 3)
    assert found.stored == START + timedelta(milliseconds=1)


@pytest.mark.parametrize(
    "path", ["a/b", "a~b", f"a~{'0' * 64}", f"a~{'0' * 63}-{'1' * 16}", f"a~b~{'0' * 64}-{'1' * 16}"]
)
def test_other_files_are_no_candidates(path):
    assert parse_candidate(path, stored="2026-01-01T00:00:00.001Z", size=3, content="c") is None


@pytest.mark.parametrize("stored", ["", "yesterday", "2026-01-01T00:00:00"])
def test_a_malformed_time_is_refused(stored):
    with pytest.raises(ValueError, match=r"time zone|isoformat"):
        parse_candidate(name_candidate("a", "0a" * 32, "1b" * 8), stored=stored, size=3, content="c")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), unique_by=lambda one: one[0]), st.randoms())
def test_the_one_stored_first_stands_there_whatever_the_order(candidates, random):
    found = [candidate(0, number, stored) for number, stored in candidates]
    shuffled = random.sample(found, len(found))
    winner = choose(shuffled)
    assert winner == choose(found)
    assert (
        winner is None if not found else all((winner.stored, winner.identity) <= (c.stored, c.identity) for c in found)
    )


def test_a_log_is_the_last_run_in_the_order_of_time():
    assert trace_log({}) == {}
    listing = {p: [candidate(p, p, 100 * p)] for p in (1, 2, 4, 5, 6)}
    assert list(trace_log(listing)) == [4, 5, 6]
    listing[3] = [candidate(3, 3, 10_000)]  # from somebody who slept until 3 and all before it were removed
    assert list(trace_log(listing)) == [4, 5, 6]
    listing[3].append(candidate(3, 7, 300))
    assert list(trace_log(listing)) == [1, 2, 3, 4, 5, 6]


def test_the_last_record_is_decided_after_a_while():
    sightings = Sightings(SETTLE)
    assert sightings.ready("main", 0) == 0
    assert not sightings.decide("main", 0, "a", began=0, now=1)
    assert sightings.ready("main", 0) == sightings.expect("main") == 11
    assert not sightings.decide("main", 0, "a", began=10, now=20)
    assert sightings.decide("main", 0, "a", began=11, now=12)
    assert not sightings.decide("main", 0, "b", began=30, now=31)  # one that was stored before it
    sightings.note("main", 0, "c", 35)
    assert sightings.decide("main", 0, "b", began=41, now=42)
    sightings.note("main", 1, "d", 50)
    assert (sightings.ready("main", 1), sightings.ready("main", 0), sightings.expect("main")) == (60, 0, 60)
    assert sightings.decide("main", 1, "d", began=60, now=61)
    assert sightings.ready("other", 0) == sightings.expect("other") == 0


class Hub:
    """A bucket whose clock is off by less than `SETTLE`, differently each time."""

    def __init__(self):
        self.now = 0
        self.files = {}
        self.count = 0

    def add(self, position, error):
        self.count += 1
        added = candidate(position, self.count, self.now + error)
        self.files.setdefault(position, []).append(added)
        return added

    def look(self, sightings):
        """What a listing shows now: the log, and whether its last record is decided."""
        run = trace_log(self.files)
        last = max(run, default=-1)
        decided = last < 0 or sightings.decide("main", last, run[last].path, began=self.now, now=self.now)
        return run, last, decided


class Agent:
    """Writes, or only reads, one step after the other; what it believes must never turn out wrong."""

    def __init__(self, hub, history):
        self.hub = hub
        self.history = history
        self.sightings = Sightings(SETTLE)
        self.steps = self.run()

    def believe(self, run, last, decided):
        for position, found in run.items():
            if position < last or decided:
                assert self.history.setdefault(position, found.path) == found.path


class Reader(Agent):
    def run(self):
        while True:
            run, last, decided = self.hub.look(self.sightings)
            self.believe(run, last, decided)
            yield


class Writer(Agent):
    def run(self):
        while True:
            run, last, decided = self.hub.look(self.sightings)
            self.believe(run, last, decided)
            error = yield
            if not decided:
                continue
            position = last + 1
            mine = self.hub.add(position, error)  # perhaps long after the look
            if error % 3:  # the answer is lost now and then
                self.sightings.note("main", position, mine.path, self.hub.now)
            while True:
                yield
                run, last, decided = self.hub.look(self.sightings)
                self.believe(run, last, decided)
                if position < last or decided or position not in run:
                    break
            if position not in run:  # it slept until its position was removed, whoever had won that
                continue
            won = run[position].path == mine.path
            assert won == (self.history.get(position) == mine.path)
            if not won and mine in self.hub.files.get(position, []) and error % 2:  # the loser may die before this
                self.hub.files[position].remove(mine)


@settings(max_examples=400)
@given(st.integers(0, 1 << 32))
def test_all_who_ever_looked_agree(seed):
    random = Random(seed)
    hub, history = Hub(), {}
    agents = [kind(hub, history) for kind in (Writer, Writer, Writer, Reader, Reader)]
    for agent in agents:
        next(agent.steps)
    asleep = {}
    for step in range(300):
        hub.now += random.choice([0, 0, 0, 1, 1, 2, 3, SETTLE - 1, SETTLE])
        agent = random.choice(agents)
        if random.random() < 0.02:
            asleep[agent] = step + 80
        if asleep.get(agent, 0) <= step:
            agent.steps.send(random.choice([0, 0, 1, 2, SETTLE - 2, SETTLE - 1]))
        if len(history) > 3 and random.random() < 0.1:  # retention: the oldest go, the last two stay
            for position in [position for position in hub.files if position < max(history) - 1]:
                del hub.files[position]
    assert sorted(history) == list(range(len(history)))
    assert len(history) > 3


def test_the_model_notices_a_clock_that_is_too_wrong():
    hub, history = Hub(), {}
    slow, fast, reader = (kind(hub, history) for kind in (Writer, Writer, Reader))
    for agent in (slow, fast, reader):
        next(agent.steps)
    slow.steps.send(1)
    for _ in range(2):
        hub.now += SETTLE
        next(reader.steps)
    with pytest.raises(AssertionError):
        fast.steps.send(-5 * SETTLE)
        for _ in range(3):
            hub.now += SETTLE
            next(fast.steps)
