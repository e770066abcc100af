"""Runs: deltas composed segment by segment, kept small, and encoded against the state they lead to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabus.bus.errors import DivergedError, UsageError
from deltabus.codecs.changes import Changes, compose, reverse, validate
from deltabus.codecs.container import decode_delta, encode_delta
from deltabus.codecs.digest import digest_delta
from deltabus.codecs.runs import Run
from deltabus.codecs.shadow import Shadow, capture
from deltabus.codecs.state import collect

PLAIN, PACKED = 1 << 40, -1


def tensors(generator: np.random.Generator) -> dict[str, torch.Tensor]:
    """Weights of several types in several segments of 64 elements, some with the same bits for ever."""
    weights = torch.from_numpy(generator.normal(size=300).astype(np.float32)).to(torch.bfloat16)
    return {
        "a": weights,
        "b": torch.arange(150, dtype=torch.int32),
        "c": torch.zeros(70, dtype=torch.bool),
        "d": torch.ones(10),
    }


def step(held: dict[str, torch.Tensor], generator: np.random.Generator, share: float) -> None:
    """Change a share of the elements; some go back to what they were."""
    for tensor in held.values():
        chosen = torch.from_numpy(generator.random(tensor.shape) < share)
        if tensor.dtype is torch.bool:
            tensor.logical_xor_(chosen)
        elif tensor.is_floating_point():
            tensor[chosen] += torch.from_numpy(generator.choice([-1.0, 1.0], int(chosen.sum()))).to(tensor.dtype)
        else:
            tensor[chosen] ^= 1


def same(one: Changes, other: Changes) -> bool:
    return one.segments.keys() == other.segments.keys() and all(
        np.array_equal(getattr(one.segments[index], field), getattr(other.segments[index], field))
        for index in one.segments
        for field in ("positions", "old", "new")
    )


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([0.0, 0.02, 0.5, 1.0]), min_size=8, max_size=8),
    st.lists(st.sampled_from([PLAIN, PACKED]), min_size=3, max_size=3),
    st.booleans(),
)
def test_a_run_is_its_deltas_one_after_the_other(seed, shares, plain, goes_on):
    generator = np.random.default_rng(seed)
    held = tensors(generator)
    shadow = Shadow.of(collect(held, segment_elements=64))
    schema = shadow.schema
    deltas: list[Changes] = []
    kept: list = []
    for number, share in enumerate(shares, 1):
        step(held, generator, share)
        changes = capture(collect(held, segment_elements=64), shadow)
        shadow.advance(changes)
        deltas.append(changes)
        with shadow.snapshot() as view:
            if goes_on:  # the trainer does not wait for what happens in the background
                later = {name: tensor.clone() for name, tensor in held.items()}
                step(later, generator, 0.5)
                moved = capture(collect(later, segment_elements=64), shadow)
                shadow.advance(moved)
            run, level = Run(view, changes), 0
            while number % (2 << level) == 0:
                run = Run(view, run, kept.pop())
                level += 1
                expected = deltas[-1]
                for earlier in reversed(deltas[-(1 << level) : -1]):
                    expected = compose(earlier, expected)
                assert run.measure() == expected.count
                assert same(run.changes, expected)
                assert run.digest_delta == digest_delta(expected)
                validate(run.changes)
                parts = [part.data for part in encode_delta(run.changes, base=run.before)]
                base = Shadow(schema, [np.array(view.read(index)) for index in range(len(schema.segments))])
                base.advance(reverse(expected))
                assert same(decode_delta(parts, schema, base.read), expected)
            if level < 3:
                kept.append(run.kept(plain=plain[level]))
            if goes_on:
                shadow.advance(reverse(moved))


def two_runs(share: float = 0.2):
    generator = np.random.default_rng(1)
    held = tensors(generator)
    shadow = Shadow.of(collect(held, segment_elements=64))
    views, deltas = [], []
    for _ in range(2):
        step(held, generator, share)
        deltas.append(capture(collect(held, segment_elements=64), shadow))
        shadow.advance(deltas[-1])
        views.append(shadow.snapshot())
    return views, deltas


def test_what_is_packed_takes_a_fraction_of_the_memory():
    generator = np.random.default_rng(2)
    weights = torch.from_numpy(generator.normal(size=1 << 18).astype(np.float32)).to(torch.bfloat16) * 0.02
    shadow = Shadow.of(collect({"w": weights}))
    bits = weights.view(torch.int16)
    bits += torch.from_numpy((generator.random(1 << 18) < 0.02).astype(np.int16))
    changes = capture(collect({"w": weights}), shadow)
    shadow.advance(changes)
    with shadow.snapshot() as view:
        run = Run(view, changes)
        plain, packed = run.kept(plain=PLAIN), run.kept(plain=PACKED)
    assert plain.nbytes == sum(each.nbytes for each in changes.segments.values())
    assert packed.nbytes < plain.nbytes / 6


def test_halves_that_do_not_follow_one_another_are_refused():
    views, deltas = two_runs()
    kept = Run(views[1], deltas[1]).kept(plain=PLAIN)
    with pytest.raises(DivergedError):
        Run(views[1], deltas[1], kept).measure()


def test_a_run_ends_with_its_snapshot():
    views, deltas = two_runs()
    kept = Run(views[0], deltas[0]).kept(plain=PACKED)
    run = Run(views[1], deltas[1], kept)
    views[1].release()
    with pytest.raises(UsageError, match="released"):
        run.measure()


def test_segments_that_do_not_change_are_not_there():
    views, deltas = two_runs(share=0.004)
    run = Run(views[0], deltas[0])
    assert set(run.changes.segments) == set(deltas[0].segments)
    assert len(run.changes.segments) == len(deltas[0].segments) < len(views[0].schema.segments)
    still = set(range(len(views[0].schema.segments))) - set(deltas[0].segments)
    with pytest.raises(KeyError):
        run.changes.segments[still.pop()]
