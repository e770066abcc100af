"""What a subscriber's route costs, and how long it goes round what could not be had."""

from __future__ import annotations

import pytest

from deltabus.bus.sequencer import Sequencer
from deltabus.bus.version import VersionVector
from deltabus.route import Router

from ..bus.support import anchor, delta, digest


class Watched(Sequencer):
    """Counts how often the whole history is gone through."""

    walks = 0

    @property
    def messages(self):
        self.walks += 1
        return super().messages


def routed(messages, *, latest=True):
    sequencer = Watched(topic="fake://topic")
    sequencer.begin("a", messages[0].position)
    for message in messages:
        sequencer.feed(message)
    return sequencer, Router(sequencer, topic="fake://topic", latest=latest)


def at(version):
    return VersionVector({"a": version})


PRUNED = [anchor(7, 5), *(delta(position, position - 2) for position in range(8, 20))]
STARTS = {"a": 7}


@pytest.mark.parametrize("latest", [True, False])
def test_a_step_of_a_pruned_topic_does_not_go_through_its_history(latest):
    sequencer, router = routed(PRUNED, latest=latest)
    route = router.next(at(16), starts=STARTS)
    assert (route.messages, route.detour) == (tuple(PRUNED[-1:]), "")
    assert sequencer.walks == 0


def test_an_anchor_in_place_of_what_was_removed_is_told_as_a_detour():
    _, router = routed(PRUNED)
    route = router.next(at(2), starts=STARTS)
    assert route.messages[0] is PRUNED[0]
    assert "retention removed what led on from version 2" in route.detour
    # One that is only cheaper than the deltas is none.
    _, router = routed([*PRUNED, anchor(20, 17, size=1)])
    route = router.next(at(6), starts=STARTS)
    assert ([message.position for message in route.messages], route.detour) == ([20], "")


def test_what_could_not_be_had_costs_nothing_once_it_is_passed():
    sequencer, router = routed([*PRUNED, anchor(20, 17), delta(21, 18), delta(22, 19)])
    router.avoid(PRUNED[-1], "it is damaged")
    route = router.next(at(16), starts=STARTS)
    assert ([message.position for message in route.messages], "it is damaged" in route.detour) == ([20, 21, 22], True)
    sequencer.walks = 0
    route = router.next(at(18), starts=STARTS)
    assert ([message.position for message in route.messages], route.detour) == ([22], "")
    assert sequencer.walks == 0


def test_what_lies_behind_is_not_tried_again_and_again_from_one_state():
    # What leads on from version 6 leaves it out, and starts from an anchor that is older.
    round_about = [PRUNED[0], delta(8, 6), delta(9, 7, base=5)]
    _, router = routed(round_about)
    assert [m.position for m in router.next(at(6), starts=STARTS).messages] == [7, 9]
    router.avoid(PRUNED[0], "it is damaged")
    for _ in range(2):
        with pytest.raises(LookupError, match="it is damaged"):
            router.next(at(6), starts=STARTS)


def test_what_lies_before_the_last_anchors_and_the_state_held_is_forgotten():
    log = [anchor(0, 1), delta(1, 2), anchor(2, 2), delta(3, 3), delta(4, 4), anchor(5, 3), delta(6, 5), anchor(7, 5)]
    for here, first in ((None, 0), (at(1), 0), (at(2), 1), (at(3), 3), (at(4), 3), (at(5), 3)):
        sequencer, router = routed(log)
        ways = [sequencer.plan(have=at(v), target=at(5)) for v in range(here.of("a") if here else 0, 5)]
        router.forget(here, "a")
        assert sequencer.messages == tuple(log[first:])
        assert [sequencer.plan(have=at(v), target=at(5)) for v in range(here.of("a") if here else 0, 5)] == ways
        sequencer.feed(delta(8, 6))
        assert [m.version for m in router.next(at(5), starts={}).messages] == [6]
    sequencer, router = routed(log[:2])
    router.forget(at(2), "a")
    assert sequencer.messages == tuple(log[:2])


def test_a_state_that_stayed_the_same_is_a_way_around_what_is_missing():
    """From version 6, an older state that came back at 9, 12 and 15 leads on to whatever starts there."""
    mark = digest("a", 6)
    log = [anchor(0, 5), delta(1, 6)]
    for version in range(7, 17):
        before = mark if (version - 1) % 3 == 0 else digest("a", version - 1)
        after = mark if version % 3 == 0 else digest("a", version)
        log.append(delta(version - 5, version, digest_before=before, digest_after=after))
    _, router = routed(log)
    for version in (7, 8, 9, 10, 11, 13, 14, 16):
        (message,) = (message for message in log if message.version == version)
        router.avoid(message, f"version {version} is damaged")
    route = router.next(at(6), starts={"a": 0})
    assert (route.target, [message.version for message in route.messages]) == (at(15), [15])
    assert route.detour
