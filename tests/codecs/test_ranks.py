"""Ranks within classes, against what follows from their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import UsageError
from deltabus.codecs.changes import SegmentChanges
from deltabus.codecs.dtypes import by_name
from deltabus.codecs.kernels import classes
from deltabus.codecs.kernels.columns import NO_COLUMN
from deltabus.codecs.ranks import Classes, _columns, places_of, ranks_of
from deltabus.codecs.schema import Piece, Segment
from deltabus.codecs.scratch import Scratch

TILE = 4096


def segment_of(name, size):
    return Segment(0, by_name(name), size, (Piece(0, 0, size, 0),))


@st.composite
def changed(draw):
    """A segment, its bits, and changes of some of them; sizes around tiles, classes few or many, even or skewed."""
    name = draw(st.sampled_from(["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I32", "BOOL"]))
    size = draw(st.sampled_from([1, 63, 64, 65, TILE - 1, TILE, TILE + 1, 3 * TILE + 17]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    segment = segment_of(name, size)
    kind = draw(st.sampled_from(["noise", "normal", "zero", "rare"]))
    if kind == "noise":
        base = random.integers(0, 256, (size, segment.dtype.size), np.uint8).view(segment.dtype.bits).reshape(-1)
    else:
        base = np.zeros(size, segment.dtype.bits)
        if kind == "normal":
            exponents = np.minimum(random.geometric(0.5, size), 30)
            base += (exponents << min(segment.dtype.mantissa, 20)).astype(segment.dtype.bits)
        elif kind == "rare":  # a class that no sample need meet
            base[random.integers(0, size)] = segment.dtype.bits.type(1) << segment.dtype.bits.type(
                segment.dtype.size * 8 - 2
            )
    touched = random.random(size) < draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    touched[random.integers(0, size)] = True
    positions = np.flatnonzero(touched).astype(np.uint32)
    old = base[positions]
    return segment, base, SegmentChanges(positions, old, old ^ old.dtype.type(1))


def expected_ranks(segment, base, changes):
    classed = Classes.of(segment.dtype)
    all_classes, counts, order, gaps = classed(base), [], [], []
    for number in range(classed.number):
        members = np.flatnonzero(all_classes == number)
        ranks = np.flatnonzero(np.isin(members, changes.positions))
        counts.append(ranks.size)
        order += np.searchsorted(changes.positions, members[ranks]).tolist()
        gaps += np.diff(ranks, prepend=-1).tolist()
    return counts, order, [gap - 1 for gap in gaps]


@given(changed())
def test_ranks_are_what_their_definition_says(case):
    ranks = ranks_of(*case, Scratch())
    assert tuple(each.tolist() for each in ranks) == expected_ranks(*case)


@given(changed())
def test_places_lead_back(case):
    segment, base, changes = case
    ranks = ranks_of(*case, Scratch())
    positions, order, old = places_of(segment, base, ranks.counts, ranks.gaps, Scratch())
    assert positions.tolist() == changes.positions.tolist()
    assert old.tolist() == changes.old.tolist()
    assert ranks.order[order].tolist() == list(range(positions.size))


@given(changed(), st.integers(0, 3))
def test_a_gap_behind_the_last_element_finds_no_place(case, beyond):
    segment, base, changes = case
    ranks = ranks_of(*case, Scratch())
    last = int(np.flatnonzero(ranks.counts)[-1])
    members = int((Classes.of(segment.dtype)(base) == last).sum())
    gaps = ranks.gaps.copy()
    gaps[-1] += np.uint32(members + beyond)
    positions, _, _ = places_of(segment, base, ranks.counts, gaps, Scratch())
    assert positions.size < changes.positions.size
    assert (positions < segment.size).all()


def test_another_base_is_refused():
    segment = segment_of("BF16", 10)
    base = np.zeros(10, np.uint16)
    changes = SegmentChanges(np.array([3], np.uint32), np.array([7], np.uint16), np.array([8], np.uint16))
    with pytest.raises(UsageError, match="element 3"):
        ranks_of(segment, base, changes, Scratch())


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.95])
def test_nearly_all_trained_weights_are_counted_together(zeros):
    random = np.random.default_rng(1)
    weights = random.standard_normal(1 << 18).astype(np.float32) * np.float32(0.02)
    weights[random.random(weights.size) < zeros] = 0
    base = (weights.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    classed = Classes.of(by_name("BF16"))
    assert np.mean(_columns(classed, base).of[classed(base)] == NO_COLUMN) < 0.001


@classes.loop
def both_ways(word, n):
    return classes._nth_one(word, n), classes._nth_one_anywhere(word, n)


@given(st.integers(1, 2**64 - 1))
def test_the_nth_one_of_a_word_is_found(word):
    places = [place for place in range(64) if word >> place & 1]
    for n, place in enumerate(places):
        assert both_ways(np.uint64(word), np.uint64(n)) == (place, place)
