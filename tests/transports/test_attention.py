"""When a tail looks besides its own polling, with time as a number."""

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.transports.attention import Attention


class Clock:
    """The part of an event loop that is used, where time passes when it is told to."""

    def __init__(self):
        self.now = 100.0
        self._calls = []
        self._numbers = itertools.count()

    def time(self):
        return self.now

    def call_at(self, when, function):
        timer = Timer(when)
        heapq.heappush(self._calls, (when, next(self._numbers), timer, function))
        return timer

    def advance(self, seconds):
        end = self.now + seconds
        while self._calls and self._calls[0][0] <= end:
            when, _, timer, function = heapq.heappop(self._calls)
            self.now = max(self.now, when)
            if not timer.cancelled:
                function()
        self.now = end

    @property
    def waiting(self):
        return sum(not timer.cancelled for _, _, timer, _ in self._calls)


class Timer:
    def __init__(self, when):
        self._when = when
        self.cancelled = False

    def when(self):
        return self._when

    def cancel(self):
        self.cancelled = True


class Tail:
    """A tail of a log with `there` records, which a store may show only some time after they were announced."""

    def __init__(self, *, seen=-1, told=True):
        self.clock = Clock()
        self.looks = []
        self.attention = Attention(lambda: self.looks.append(self.clock.now), seen=seen, told=told, loop=self.clock)

    def waited(self, seconds):
        """The times since now of the looks in the next seconds."""
        begin, before = self.clock.now, len(self.looks)
        self.clock.advance(seconds)
        return [round(at - begin, 3) for at in self.looks[before:]]


def test_nothing_heard_nothing_looked_for():
    tail = Tail()
    assert tail.waited(1000) == []
    assert tail.clock.waiting == 0


def test_an_announcement_is_looked_for_at_once_and_then_a_few_times_more():
    tail = Tail()
    tail.clock.advance(10)
    tail.attention.hear(0)
    assert tail.waited(1000) == [0, 0.05, 0.15, 0.35, 0.75, 1.55]
    tail.attention.hear(0)
    assert tail.waited(0.01) == [0]


def test_a_record_that_was_found_is_looked_for_no_more():
    tail = Tail()
    tail.attention.hear(0)
    assert tail.waited(0) == [0]
    tail.attention.see(0)
    assert tail.waited(1000) == []
    for position in (0, -1):
        tail.attention.hear(position)
    assert tail.waited(1000) == []
    tail.attention.hear(1)
    assert tail.waited(0) == [0]


def test_while_records_are_missing_a_found_one_begins_the_pauses_anew():
    tail = Tail()
    tail.attention.hear(3)
    assert tail.waited(0.5) == [0, 0.05, 0.15, 0.35]
    tail.attention.see(2)
    assert tail.waited(1000) == [0.05, 0.1]  # of the tries that were left
    tail.attention.see(3)
    assert tail.waited(1000) == []


def test_without_announcements_there_is_a_look_a_second():
    tail = Tail(told=False)
    assert tail.waited(3.5) == [1, 2, 3]
    tail.attention.see(0)
    assert tail.waited(2.5) == [1, 2]
    tail.attention.hear(1)  # a last one, on its way
    assert tail.waited(0.1) == [0]


def test_when_announcements_begin_one_look_finds_what_was_missed():
    tail = Tail(told=False)
    tail.clock.advance(0.5)
    tail.attention.turn(told=True)
    assert tail.waited(1000) == [0]
    tail.attention.turn(told=False)
    assert tail.waited(2.5)[-1] <= 2.5
    assert tail.waited(2) == [0.5, 1.5]


def test_a_closed_one_looks_no_more():
    tail = Tail(told=False)
    tail.attention.hear(7)
    tail.attention.close()
    assert tail.waited(1000) == []
    assert tail.clock.waiting == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_flood_costs_about_a_look_a_second(told):
    tail = Tail(told=told)
    for number in range(10_000):
        tail.attention.hear(number % 77)
        tail.clock.advance(0.01)
    assert 100 <= len(tail.looks) <= 106


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), st.integers(-1, 50) | st.just(10**18)),
        st.tuples(st.just("turn"), st.booleans()),
        st.tuples(st.just("wait"), st.floats(0, 3)),
        st.tuples(st.just("see"), st.just(None)),
    ),
    max_size=60,
)


@given(events=_EVENTS, told=st.booleans())
def test_whatever_comes_looks_are_bounded_and_news_are_looked_for(events, told):
    tail = Tail(told=told)
    seen, found, begin = -1, 0, tail.clock.now
    for name, value in events:
        if name == "hear":
            tail.attention.hear(value)
        elif name == "turn":
            told = value
            tail.attention.turn(told=told)
        elif name == "wait":
            tail.clock.advance(value)
        else:
            seen, found = seen + 1, found + 1
            tail.attention.see(seen)
    # Between two records at most five looks come faster than one a second.
    assert len(tail.looks) <= (tail.clock.now - begin) + 6 * (found + 1)
    tail.attention.hear(seen + 1)
    assert tail.waited(1.001)
    tail.attention.see(seen + 1)
    looks = tail.waited(100)
    assert len(looks) <= (6 if told else 106)
    assert tail.clock.waiting == (0 if told else 1)
