"""What may go: the decision itself, in tables and against simple rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabus.bus.errors import ConflictError, UsageError
from deltabus.bus.leases import HeldLease
from deltabus.bus.message import Blob
from deltabus.bus.planner import plan
from deltabus.bus.retention import (
    Retention,
    garbage,
    parse_duration,
    parse_retention,
    parse_size,
    plan_removal,
)
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.transport import StoredBlob
from deltabus.bus.version import VersionVector

from .support import SCHEMA, anchor, delta

NOW = 1e6


def named(message, *, size=None):
    """The message, with a blob of its own of the name that writers give."""
    key = f"blobs/{message.writer}/{message.version:012}-{message.kind}-{message.position}"
    blob = Blob(key=key, size=message.nbytes if size is None else size, checksum=bytes(32))
    return type(message)(**{f: getattr(message, f) for f in message.__struct_fields__} | {"blobs": (blob,)})


def log_of(text, *, writer="a", group=None):
    """A log: `A5` an anchor of version 5, `5` the delta to it, `2-5` one that skips."""
    log = []
    fields = {"writer": writer, "group": group or (writer,)}
    for position, word in enumerate(text.split()):
        if word.startswith("A"):
            log.append(named(anchor(position, int(word[1:]), **fields)))
        else:
            base, _, version = word.rpartition("-")
            log.append(named(delta(position, int(version), base=int(base) if base else None, **fields)))
    return log


def stored_of(*logs, age=1e5, ages=None):
    times = {}
    for message in (message for log in logs for message in log):
        for blob in (message.schema, *message.blobs):
            times[blob.key] = StoredBlob(blob.key, blob.size, NOW - (ages or {}).get(message.position, age))
    return times


def lease(version, *, writer="a", ends=NOW + 1, reader="r"):
    holds = None if version is None else {writer: version}
    return HeldLease(key=f"leases/{reader}", reader=reader, holds=holds, ends=ends)


def removed(log, policy, *, leases=(), **options):
    stored = options.pop("stored", None) or stored_of(log, **options)
    return plan_removal(log, stored=stored, leases=leases, now=NOW, policy=policy)


@pytest.mark.parametrize(
    ("log", "keep", "begins"),
    [
        ("A1 2 3 A3 4 5", 1, 3),
        ("A1 2 3 A3 4 5", 2, 0),
        ("A1 2 3 4 A3 5", 1, 3),  # the anchor landed behind a later delta, which leads on from it
        ("A1 2 3 4 5 A3", 1, 3),
        ("A1 2 3 4 5 6 A2 7 A5", 1, 5),
        ("A1 2 3 4 5 6 A2 7 A5", 2, 2),
        ("A1 2 3 1-3 4 3-4 A4", 1, 6),
        ("A1 2 3 A3 1-3 4", 1, 3),
        ("A1", 1, 0),
        ("A1 A2 A3", 1, 2),
        ("A1 A2 A3", 2, 1),
        ("A1 A2 A3", 9, 0),
    ],
)
def test_anchors_are_kept_with_all_that_leads_on_from_them(log, keep, begins):
    log = log_of(log)
    removal = removed(log, Retention(keep_anchors=keep, grace=0))
    assert removal.trims == ({"a": begins} if begins else {})
    assert [message.position for message in removal.records] == list(range(begins))
    assert list(removal.blobs) == [log[position].blobs[0].key for position in range(begins)]
    assert removal.nbytes == sum(message.nbytes for message in log[:begins])
    assert removal.kept == tuple(log[begins:])


@pytest.mark.parametrize(("age", "begins"), [(0, 6), (50, 6), (51, 3), (150, 3), (151, 0), (1e9, 0)])
def test_by_age_every_state_of_that_time_can_still_be_reached(age, begins):
    ages = {0: 300, 1: 250, 2: 200, 3: 150, 4: 100, 5: 75, 6: 50, 7: 0}
    removal = removed(log_of("A1 2 3 A3 4 5 A5 6"), Retention(max_age=age, grace=0), ages=ages)
    assert removal.trims.get("a", 0) == begins


@pytest.mark.parametrize(("most", "begins"), [(3052, 0), (3051, 3), (2032, 3), (2031, 6), (1012, 6), (0, 6)])
def test_by_bytes_the_newest_anchor_stays_in_any_case(most, begins):
    log = log_of("A1 2 3 A3 4 5 A5 6")  # 1000 bytes for an anchor, 10 for a delta, 2 for the schema
    removal = removed(log, Retention(max_bytes=most, grace=0))
    assert removal.trims.get("a", 0) == begins
    if begins < 6:
        kept = sum(message.nbytes for message in removal.kept) + SCHEMA.size
        assert kept <= most


def test_by_bytes_no_message_is_met_again_for_each_number_of_anchors():
    met = 0

    class Counting(tuple):
        def __iter__(self):
            nonlocal met
            met += 1
            return super().__iter__()

    log = log_of("A1 " + " ".join(f"{version} A{version}" for version in range(2, 200)))
    stored = stored_of(log)
    for place, message in enumerate(log):
        fields = {f: getattr(message, f) for f in message.__struct_fields__}
        log[place] = type(message)(**fields | {"blobs": Counting(message.blobs)})
    assert removed(log, Retention(max_bytes=0, grace=0), stored=stored).trims == {"a": 396}
    assert met < 20 * len(log)


def test_the_strictest_limit_counts():
    log = log_of("A1 2 A2 3 A3 4 A4")
    for policy, begins in (
        (Retention(keep_anchors=3, max_bytes=10**9, max_age=1e9, grace=0), 2),
        (Retention(keep_anchors=9, max_bytes=2022, max_age=1e9, grace=0), 4),
        (Retention(keep_anchors=9, max_bytes=10**9, max_age=0, grace=0), 6),
    ):
        assert removed(log, policy).trims == {"a": begins}


def test_a_lease_keeps_what_leads_on_from_what_its_holder_has():
    log = log_of("A1 2 3 4 A4 5 6")
    policy = Retention(keep_anchors=1, grace=0)
    for version, begins in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (6, 4), (99, 4)):
        removal = removed(log, policy, leases=[lease(version)])
        assert removal.trims.get("a", 0) == begins
        assert removal.held_by == (("r",) if version < 3 or begins == 3 else ())
    assert removed(log, policy, leases=[lease(1, ends=NOW)]).trims == {"a": 4}
    assert removed(log, policy, leases=[lease(None)]).trims == {}
    assert removed(log, policy, leases=[lease(3), lease(2, reader="s")]).trims == {"a": 2}
    assert removed(log, policy, leases=[lease(3), lease(2, reader="s")]).held_by == ("r", "s")


def test_records_behind_which_an_append_may_be_under_way_stay():
    log = log_of("A1 2 A2 3 4 A4 5 6")
    policy = Retention(keep_anchors=1, grace=60)
    # Whoever lost the race for position 3 began before the payload of position 4 was stored.
    for young_from, begins in ((8, 5), (7, 5), (6, 4), (4, 2), (3, 1), (1, 0)):
        ages = {position: 10 if position >= young_from else 100 for position in range(8)}
        assert removed(log, policy, ages=ages).trims.get("a", 0) == begins


@pytest.mark.parametrize("fault", ["missing", "short"])
def test_an_anchor_that_is_not_whole_does_not_count(fault):
    log = log_of("A1 2 3 A3 4 5 A5 6")
    stored = stored_of(log)
    key = log[6].blobs[0].key
    stored[key] = stored[key]._replace(size=5)
    if fault == "missing":
        del stored[key]
    assert removed(log, Retention(keep_anchors=1, grace=0), stored=stored).trims == {"a": 3}
    del stored[log[4].blobs[0].key]
    assert removed(log, Retention(keep_anchors=1, grace=0), stored=stored).trims == {}


def test_a_blob_that_a_kept_or_newer_message_names_stays():
    log = log_of("A1 2 3 A3 4")
    shared = log[1].blobs
    log[4] = type(log[4])(**{f: getattr(log[4], f) for f in log[4].__struct_fields__} | {"blobs": shared})
    policy = Retention(keep_anchors=1, grace=0)
    keys = [message.blobs[0].key for message in log]
    assert list(removed(log, policy).blobs) == [keys[0], keys[2]]
    newer = type(log[2])(**{f: getattr(log[2], f) for f in log[2].__struct_fields__} | {"position": 5})
    removal = plan_removal(log, stored=stored_of(log), leases=[], now=NOW, policy=policy, newer=[newer])
    assert list(removal.blobs) == [keys[0]]
    assert SCHEMA.key not in removal.blobs


def test_a_log_without_a_whole_anchor_is_left_alone():
    log = log_of("A1 2 3 A3 4 5")[1:3]
    assert removed(log, Retention(keep_anchors=1, grace=0)).trims == {}
    assert plan_removal([], stored={}, leases=[], now=NOW, policy=Retention(max_age=0)).trims == {}


def test_logs_that_contradict_themselves_are_refused():
    log = log_of("A1 2 3")
    log[2] = named(delta(2, 3, base=2, digest_before=7))
    with pytest.raises(ConflictError):
        removed(log, Retention(keep_anchors=1))


def test_of_several_writers_the_newest_common_state_stays():
    fast = log_of("A1 2 A2 3 A3", writer="a", group=("a", "b"))
    slow = log_of("A1 2", writer="b", group=("a", "b"))
    stored = stored_of(fast, slow)
    removal = plan_removal([*fast, *slow], stored=stored, leases=[], now=NOW, policy=Retention(keep_anchors=1, grace=0))
    assert removal.trims == {"a": 2}  # not 4: step 3 is not complete yet


def test_what_crashes_left_is_found_by_age_and_name():
    log = log_of("A1 2 3 4 A3")
    policy = Retention(keep_anchors=1, garbage_age=100)

    def blob(key, age):
        return StoredBlob(key, 1, None if age is None else NOW - age)

    left = [
        blob("blobs/a/000000000002-delta-0000-ff", 100),
        blob("blobs/a/000000000001-anchor-0000-ff", 101),
        blob("blobs/a/000000000002-delta-0001-ff", 99),  # too young
        blob("blobs/a/000000000003-anchor-0000-ff", 1e5),  # may be under way still, however slowly
        blob("blobs/a/000000000004-anchor-0000-ff", 1e5),
        blob("blobs/a/000000000005-delta-0000-ff", 1e5),
        blob("blobs/a/000000000002-delta-0002-ff", None),
        blob("blobs/b/000000000001-delta-0000-ff", 1e5),  # of a log that is not there yet
        blob("blobs/a/somebody-elses", 1e5),
        blob("schemas/1.json", 1e5),
        blob(log[1].blobs[0].key, 1e5),
    ]
    found = garbage(left, messages=log, now=NOW, policy=policy)
    assert found == (left[1], left[0])


def test_what_an_earlier_incarnation_left_is_found_without_a_further_anchor():
    log = log_of("A1 2 3 4 5")
    log[3:] = [type(m)(**{f: getattr(m, f) for f in m.__struct_fields__} | {"epoch": 2}) for m in log[3:]]
    left = [StoredBlob(f"blobs/a/{version:012}-anchor-0000-ff", 1, 0.0) for version in range(1, 7)]
    policy = Retention(keep_anchors=1, garbage_age=100)
    assert garbage(left, messages=log[:3], now=NOW, policy=policy) == ()
    # The second may have an anchor of versions 4 and 5 under way.
    assert garbage(left, messages=log, now=NOW, policy=policy) == tuple(left[:3])


_WORDS = st.lists(st.sampled_from(["new", "new", "new", "anchor", "late", "skip"]), min_size=1, max_size=25)


@settings(max_examples=200)
@given(
    words=_WORDS,
    keep=st.none() | st.integers(1, 4),
    most=st.none() | st.integers(0, 6000),
    versions=st.lists(st.integers(0, 25), max_size=2),
)
def test_whatever_goes_the_newest_state_stays_and_leases_go_on(words, keep, most, versions):
    text, version = ["A1"], 1
    for word in words:
        if word in ("new", "anchor"):
            version += 1
            text.append(f"{'A' if word == 'anchor' else ''}{version}")
        elif word == "late":
            text.append(f"A{max(1, version - 2)}")
        elif version > 2:
            text.append(f"{version - 2}-{version}")
    log = log_of(" ".join(text))
    if keep is None and most is None:
        keep = 1
    leases = [lease(held) for held in versions]
    removal = removed(log, Retention(keep_anchors=keep, max_bytes=most, grace=0), leases=leases)
    target = VersionVector({"a": version})
    plan(removal.kept, have=None, target=target)
    for held in leases:
        if 0 < held.holds["a"] < version:
            ahead = [message for message in log if message.version > held.holds["a"]]
            assert set(map(id, ahead)) <= set(map(id, removal.kept))
    sequencer = Sequencer()
    sequencer.begin("a", removal.kept[0].position)
    for message in removal.kept:
        sequencer.feed(message)
    assert sequencer.newest_cut().state == target


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_anchors": 0},
        {"max_bytes": -1},
        {"max_age": -1.0},
        {"max_age": float("nan")},
        {"keep_anchors": 1, "grace": -1.0},
        {"keep_anchors": 1, "garbage_age": float("inf")},
    ],
)
def test_policies_out_of_range_are_refused(options):
    with pytest.raises(UsageError):
        Retention(**options)


@pytest.mark.parametrize(
    "text", ["", "anchors", "anchors:x", "anchors:1,anchors:2", "steps:3", "age:7y", "bytes:1XB", 0]
)
def test_texts_that_are_no_policy_are_refused(text):
    with pytest.raises(UsageError):
        parse_retention(text)


@pytest.mark.parametrize("text", ["", "d", "-1d", "7 days", "1e3"])
def test_texts_that_are_no_time_or_size_are_refused(text):
    with pytest.raises(UsageError):
        parse_duration(text)
    with pytest.raises(UsageError):
        parse_size(text)
