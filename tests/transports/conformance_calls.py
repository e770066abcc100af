"""What every transport must do whatever is called in which order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabus.bus.errors import (
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    UsageError,
)


class CallConformance:
    """A part of `TransportConformance`."""

    def test_any_sequence_of_calls_does_what_two_dicts_do(self, make_topic):
        # Made here, because Hypothesis wants a function of its own for each class that inherits the test.
        @settings(max_examples=self.examples)
        @given(steps=_STEPS)
        def compare(steps):
            asyncio.run(_compare_with_dicts(make_topic(), steps))

        compare()


_KEYS = st.sampled_from(["a", "b/c", "b/d"])
_LOGS = st.sampled_from(["main", "second"])
_DATA = st.sampled_from([b"", b"x", b"xy", b"x" * 5000])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _KEYS, _DATA),
        st.tuples(st.just("get"), _KEYS, st.integers(0, 4), st.none() | st.integers(0, 6000)),
        st.tuples(st.just("delete"), st.lists(_KEYS, max_size=3)),
        st.tuples(st.just("append"), _LOGS, st.integers(0, 5), _DATA),
        st.tuples(st.just("read"), _LOGS, st.integers(-1, 5), st.integers(1, 6)),
    ),
    max_size=25,
)


async def _compare_with_dicts(topic, steps):
    blobs: dict[str, bytes] = {}
    logs: dict[str, list[bytes]] = {}
    async with topic.open() as first, topic.open() as second:
        for number, (name, *arguments) in enumerate(steps):
            transport = (first, second)[number % 2]
            expected: object = None
            if name == "put":
                key, data = arguments
                if blobs.setdefault(key, data) != data:
                    expected = KeyExistsError
            elif name == "get":
                key, start, stop = arguments
                expected = blobs[key][start:stop] if key in blobs else KeyNotFoundError
            elif name == "delete":
                for key in arguments[0]:
                    blobs.pop(key, None)
            elif name == "append":
                log, position, data = arguments
                records = logs.get(log, [])
                if position > len(records):
                    expected = UsageError
                elif position == len(records):
                    logs[log] = [*records, data]
                elif records[position] != data:
                    expected = PositionTakenError
            else:
                log, after, limit = arguments
                expected = list(enumerate(logs.get(log, [])))[after + 1 :][:limit]
            if isinstance(expected, type):
                with pytest.raises(expected):
                    await getattr(transport, name)(*arguments)
            else:
                assert await getattr(transport, name)(*arguments) == expected
        assert await first.logs() == sorted(logs)
