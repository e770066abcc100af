"""Models that drifted, whole comparisons, and writes that are interrupted."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from deltabus import Publisher, Subscriber
from deltabus.bindings import Bindings
from deltabus.bus.errors import DivergedError, StaleUpdateError, UsageError
from deltabus.codecs.apply import Staged, Target
from deltabus.codecs.changes import changes_between
from deltabus.codecs.state import as_integers, collect
from deltabus.holdings import Holdings
from deltabus.update import Update
from deltabus.verification import Verification

from .interrupts import Steps, alarm, failing_write, may_strike_finalizers
from .ranks import Ranks, blank, following, make_weights, move, same, take
from .support import LIMIT


def odd_model() -> dict[str, torch.Tensor]:
    """Takes the weights of `tied_weights` in other layouts, and a tied tensor twice."""
    model = blank()
    model["embed"] = torch.zeros(6, 13, dtype=torch.bfloat16).t()
    model["layer.weight"] = torch.zeros(9, 22, dtype=torch.bfloat16)[:, ::2]
    model["head"] = torch.zeros(13, 6, dtype=torch.bfloat16)
    return model


def tied_weights() -> dict[str, torch.Tensor]:
    weights = make_weights()
    return {**weights, "head": weights["embed"]}


def cloned(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def hold(model: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.items():
        tensor.copy_(weights[name])


def disturb(tensor: torch.Tensor, *places: tuple[int, ...], unseen: bool = False) -> None:
    """Change single elements; `unseen` leaves no trace in torch's counter."""
    for place in places:
        as_integers(tensor.data if unseen else tensor)[place] ^= 5


@contextmanager
def publishing(url, kind):
    """Yields what publishes a step: a single trainer, or three ranks."""
    if kind == "ranks":
        with Ranks(url, 3, 1) as ranks:
            yield ranks.publish
    else:
        with Publisher(url, workers=1) as publisher:
            yield lambda step, weights: publisher.publish(step, weights).result(LIMIT)


each_kind = pytest.mark.parametrize("kind", ["single", "ranks"])


@each_kind
async def test_drift_where_an_update_writes_nothing_is_refused_with_names(tmp_path, kind):
    url, weights, model = tmp_path.as_uri(), tied_weights(), odd_model()
    with publishing(url, kind) as publish:
        publish(1, weights)
        async with following(url) as subscriber:
            (await take(subscriber)).apply(model)
            disturb(model["embed"], (12, 3))
            disturb(model["layer.bias"], (0,), (7,))
            before = cloned(model)
            disturb(weights["scale"], ())
            publish(2, weights)
            update = await take(subscriber)
            for _ in range(2):
                with pytest.raises(
                    DivergedError, match=r"3 elements differ: 1 of 'embed', 2 of 'layer.bias'.*on_drift='repair'"
                ) as caught:
                    update.apply(model)
                assert caught.value.tensor == "embed"
            assert same(model, before)
            assert (update.applied, update.verified, update.repaired) == (False, False, {})
            disturb(model["embed"], (12, 3))
            disturb(model["layer.bias"], (0,), (7,))
            update.apply(model)
            assert same(model, weights)
            assert update.verified


@pytest.mark.parametrize("shadow", [None, torch.device("cpu")], ids=["array", "tensor"])
@each_kind
async def test_a_model_that_drifted_is_repaired(tmp_path, kind, shadow, caplog):
    url, weights, model = tmp_path.as_uri(), tied_weights(), odd_model()
    with publishing(url, kind) as publish:
        publish(1, weights)
        # Every version: the subscriber's own copy runs ahead of the update that is repaired.
        async with following(url, latest=False, on_drift="repair", shadow=shadow) as subscriber:
            (await take(subscriber)).apply(model)
            states = []
            for step in (2, 3, 4, 5):
                move(weights, step)
                states.append(cloned(weights))
                publish(step, weights)
            steps = iter(states)

            touched = (states[0]["layer.weight"] != model["layer.weight"]).nonzero().tolist()
            untouched = (states[0]["layer.weight"] == model["layer.weight"]).nonzero().tolist()
            disturb(model["layer.weight"], *map(tuple, touched[:2]), *map(tuple, untouched[:3]))
            disturb(model["head"], (0, 0))  # of two copies, one
            update = await take(subscriber)
            update.apply(model)
            assert same(model, next(steps))
            assert update.repaired == {"layer.weight": 5, "embed": 1}
            assert (update.applied, update.verified) == (True, True)
            assert "step 2 was applied: 6 elements differ: 1 of 'embed', 5 of 'layer.weight'" in caplog.text

            update = await take(subscriber)
            update.apply(model)
            assert same(model, next(steps))
            assert (update.repaired, update.verified) == ({}, False)

            other = odd_model()  # it never saw an update
            update = await take(subscriber)
            update.apply(other)
            update.apply(model)
            assert same(other, states[2])
            assert same(model, next(steps))
            assert sum(update.repaired.values()) > 100

            (await take(subscriber)).apply(other)
            assert same(other, weights)


@pytest.mark.parametrize("on_drift", ["refuse", "repair"])
@each_kind
async def test_the_whole_model_is_compared_every_few_updates(tmp_path, kind, on_drift):
    url, weights, model = tmp_path.as_uri(), tied_weights(), odd_model()
    verified = []
    with publishing(url, kind) as publish:
        async with following(url, verify="full", verify_every=3, on_drift=on_drift) as subscriber:
            for step in range(1, 9):
                publish(step, weights)
                update = await take(subscriber)
                update.apply(model)
                verified.append(update.verified)
                assert same(model, weights)
                disturb(weights["scale"], ())
            assert verified == [False, False, True, False, False, True, False, False]
            disturb(model["layer.bias"], (3,), unseen=True)
            publish(9, weights)
            update = await take(subscriber)
            if on_drift == "repair":
                update.apply(model)
                assert (update.verified, update.repaired) == (True, {"layer.bias": 1})
                assert same(model, weights)
                return
            for _ in range(2):
                with pytest.raises(DivergedError, match=r"1 element differs: 1 of 'layer.bias'"):
                    update.apply(model)
            disturb(weights["scale"], ())
            publish(10, weights)
            update = await take(subscriber)
            with pytest.raises(DivergedError, match=r"1 element differs: 1 of 'layer.bias'"):
                update.apply(model)
            disturb(model["layer.bias"], (3,), unseen=True)
            update.apply(model)
            assert update.verified
            assert same(model, weights)


@pytest.mark.parametrize("on_drift", ["refuse", "repair"])
async def test_an_update_is_verified_on_request(tmp_path, on_drift):
    url, weights, model = tmp_path.as_uri(), tied_weights(), odd_model()
    with Publisher(url, workers=1) as publisher:
        async with following(url, on_drift=on_drift) as subscriber:
            for step in (1, 2):
                publisher.publish(step, weights).result(LIMIT)
                update = await take(subscriber)
                update.apply(model)
                assert not update.verified
                update.verify(model)
                assert (update.verified, update.repaired) == (True, {})
                move(weights, step)
            state = cloned(model)
            publisher.publish(3, weights).result(LIMIT)  # the copy goes on meanwhile
            disturb(model["layer.weight"], (8, 10), unseen=True)
            disturb(model["embed"], (0, 0), unseen=True)
            if on_drift == "refuse":
                with pytest.raises(DivergedError, match=r"2 elements differ: 1 of 'embed', 1 of 'layer.weight'"):
                    update.verify(model)
            else:
                update.verify(model)
                assert update.repaired == {"embed": 1, "layer.weight": 1}
                assert same(model, state)
            later = await take(subscriber)
            with pytest.raises(StaleUpdateError):
                update.verify(model)
            hold(model, state)
            later.apply(model)
            later.verify(model)
            assert same(model, weights)


async def test_elements_that_two_writers_hold_are_the_later_ones(tmp_path):
    url, weights = tmp_path.as_uri(), make_weights()
    model = blank()
    part = {name: weights[name].clone() for name in ("layer.bias", "scale")}
    with Publisher(url, writer="first") as first, Publisher(url, writer="second") as second:
        first.publish(1, weights).result(LIMIT)
        async with following(url, on_drift="repair", verify="full") as subscriber:
            update = await take(subscriber)
            update.apply(model)
            for step in (2, 3):
                move(part, step)
                second.publish(step, part, after=update.state).result(LIMIT)
                update = await take(subscriber)
                assert update.whole
                update.apply(model)
                assert (update.verified, update.repaired) == (True, {})
                assert same({**weights, **part}, model)
            disturb(model["layer.bias"], (1,), (2,), unseen=True)
            disturb(model["embed"], (1, 1), unseen=True)
            update.verify(model)
            assert update.repaired == {"embed": 1, "layer.bias": 2}
            assert same({**weights, **part}, model)


async def test_what_a_comparison_behind_the_write_finds_is_told_as_it_is(tmp_path, monkeypatch):
    """Somebody else writes to the model while it is given a whole state: with no undo, and with one."""
    url, weights, model = tmp_path.as_uri(), make_weights(), blank()
    part, real, strikes = {"scale": weights["scale"].clone()}, Target.load, True

    def disturbed(write):
        def wrapper(*arguments, **options):
            write(*arguments, **options)
            if strikes:
                disturb(model["layer.bias"], (1,), unseen=True)

        return wrapper

    monkeypatch.setattr(Target, "load", disturbed(real))
    monkeypatch.setattr(Staged, "write", disturbed(Staged.write))
    with Publisher(url, writer="first") as first, Publisher(url, writer="second") as second:
        first.publish(1, weights).result(LIMIT)
        async with following(url, verify="full") as subscriber:
            update = await take(subscriber)
            with pytest.raises(DivergedError, match=r"1 of 'layer.bias'; the rest of it was written; open"):
                update.apply(model)
            disturb(model["layer.bias"], (1,), unseen=True)
            assert same(model, weights)
            strikes = False
            update.apply(model)
            disturb(part["scale"], ())
            second.publish(2, part, after=update.state).result(LIMIT)
            update = await take(subscriber)
            assert update.whole
            before, strikes = cloned(model), True
            with pytest.raises(DivergedError, match=r"1 of 'layer.bias'; it was taken back; open"):
                update.apply(model)
            disturb(model["layer.bias"], (1,), unseen=True)
            assert same(model, before)
            assert not update.applied
            strikes = False
            update.apply(model)
            assert same(model, {**weights, **part})


async def test_a_copy_that_is_damaged_repairs_nothing(tmp_path):
    url, weights, model = tmp_path.as_uri(), tied_weights(), odd_model()
    with Publisher(url, workers=1) as publisher:
        publisher.publish(1, weights).result(LIMIT)
        async with following(url, on_drift="repair") as subscriber:
            update = await take(subscriber)
            update.apply(model)
            for index in range(2):
                subscriber._intake._lanes._stagers["trainer"].shadow.read(0)[index] ^= 1
            disturb(model["layer.bias"], (0,))
            before = cloned(model)
            with pytest.raises(DivergedError, match=r"own copy of .* is damaged"):
                update.verify(model)
            assert same(model, before)


def test_options_are_checked(tmp_path):
    for options in ({"on_drift": "ignore"}, {"verify": "some"}, {"verify": "full", "verify_every": 0}):
        with pytest.raises(UsageError, match=next(reversed(options))):
            Subscriber(tmp_path, **options)


class Trials:
    """The same update, again and again, into a model that holds the state before.

    Attributes:
        model: The model.
    """

    def __init__(self, model, states, steps):
        self.model = model
        self.states = states
        self._steps = steps

    def begin(self):
        """Return the update, for the model that is known to hold the state before."""
        hold(self.model, self.states[0])
        self._holdings, self._bindings = Holdings(), Bindings()
        schemas = [part.schema for part in self._steps[0].parts]
        self._holdings.record(self._bindings.bind(self.model, schemas), self._steps[0].state)
        return self._update(_copied(self._steps[1]))

    def end(self, update):
        """Check that the model holds one of the two states, and that it can go on; return which."""
        outcome = 1 if same(self.model, self.states[1]) else 0
        assert same(self.model, self.states[outcome])
        if random.getrandbits(1):
            update.apply(self.model)
            assert update.applied
            assert same(self.model, self.states[1])
        left = update.retire()
        following = _copied(self._steps[2])
        self._update(left.followed_by(following) if left else following).apply(self.model)
        assert same(self.model, self.states[2])
        return outcome

    def _update(self, staged):
        verification = Verification(on_drift="refuse", verify=None, every=1)
        return Update(staged, self._holdings, self._bindings, verification)


def _copied(staged):
    return replace(staged, parts=tuple(replace(part, snapshot=part.snapshot.again()) for part in staged.parts))


@contextmanager
def cut_anew(url):
    """Yields what publishes a step: three ranks the first one, two ranks of a new generation all others."""
    with ExitStack() as stack:
        ranks = [stack.enter_context(Ranks(url, 3, 1))]

        def publish(step, weights):
            if step == 2:
                ranks.append(stack.enter_context(Ranks(url, 2, 2)))
            ranks[-1].publish(step, weights)

        yield publish


@pytest.fixture(params=["single", "ranks", "whole"])
async def trials(request, tmp_path):
    """A step of one trainer, of three ranks, and the whole state of a group that was cut anew."""
    url, weights, kind = tmp_path.as_uri(), tied_weights(), request.param
    states, steps = [], []
    async with following(url, latest=False) as subscriber:
        with cut_anew(url) if kind == "whole" else publishing(url, kind) as publish:
            for step in (1, 2, 3):
                publish(step, weights)
                update = await take(subscriber)
                assert update.whole == (step == 1 or (step == 2 and kind == "whole"))
                states.append(cloned(weights))
                steps.append(_copied(update._staged))
                update.mark_applied()
                move(weights, step)
        yield Trials(odd_model(), states, steps)


@may_strike_finalizers
def test_an_interrupt_anywhere_leaves_old_bits_or_new_ones(trials):
    random.seed(1)
    update = trials.begin()
    with Steps() as steps:
        update.apply(trials.model)
    places = random.sample(range(1, steps.count + 1), min(steps.count, 200))
    outcomes, struck = [], 0
    for at in places:
        update = trials.begin()
        try:
            with Steps(at):
                update.apply(trials.model)
        except KeyboardInterrupt:
            struck += 1
        outcomes.append(trials.end(update))
    assert struck > 0.95 * len(places)  # what is computed once is missing the second time
    assert 0 < sum(outcomes) < len(outcomes)


@may_strike_finalizers
def test_what_is_marked_as_written_is_written_wherever_it_is_interrupted():
    old, new, model = tied_weights(), tied_weights(), odd_model()
    move(new, 1)
    states = [collect(weights) for weights in (old, new)]
    changes = changes_between(states[0].schema, states[0].read, states[1].read)
    target = Target.bind(model, states[0].schema)
    for at in itertools.count(1):
        hold(model, old)
        staged = target.stage(changes)
        try:
            with Steps(at):
                staged.write()
        except KeyboardInterrupt:
            assert same(model, new if staged.written else old)
            continue
        assert staged.written and same(model, new)
        break
    assert at > 20


@may_strike_finalizers
def test_an_interrupt_at_any_time_leaves_old_bits_or_new_ones(trials):
    random.seed(2)
    struck = 0
    for _ in range(2):  # the first one may compile
        update = trials.begin()
        update.apply(trials.model)
        trials.end(update)
    for _ in range(150):
        began = trials.begin()
        try:
            with alarm(random.uniform(1e-6, update.seconds["apply"])):
                began.apply(trials.model)
        except KeyboardInterrupt:
            struck += 1
        trials.end(began)
    assert struck > 20


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), KeyboardInterrupt()])
def test_an_error_of_any_write_leaves_the_old_bits(trials, monkeypatch, error):
    random.seed(3)
    update = trials.begin()
    with failing_write(monkeypatch, error, at=0) as calls:
        update.apply(trials.model)
    assert len(calls) >= 4
    for at in range(1, len(calls) + 1):
        update = trials.begin()
        with failing_write(monkeypatch, error, at=at), pytest.raises(type(error)):
            update.apply(trials.model)
        assert not update.applied
        assert trials.end(update) == 0
