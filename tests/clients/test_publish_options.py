"""What `publish` can be told: what to hold back, where the shadow lives, what to skip, when to go by itself."""

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deltabus import Publisher, Subscriber, mapped
from deltabus.bus.errors import ClosedError, StorageFullError, UsageError
from deltabus.bus.message import Stats, decode_message
from deltabus.cli.log import print_log, read_log
from deltabus.cli.verify import verify_topic
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.shadow import Shadow
from deltabus.codecs.state import collect
from deltabus.mapped import allocator
from deltabus.transports import open_transport
from deltabus.transports.memory import drop_topic

from .support import LIMIT, bits, faulty, once, small_model, train, wait_until


@pytest.fixture
def url(request):
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    yield f"memory://{name}"
    drop_topic(name)


def patterns(tensor):
    """A tensor's bits as integers."""
    return tensor.detach().view(torch.int16).numpy().copy()


class Follower:
    """Follows a topic version by version, in step with a test."""

    def __init__(self, url, model, **options):
        self._updates = Subscriber(url, latest=False, idle_timeout=LIMIT, **options).sync()
        self.model = model

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._updates.close()

    def follow_to(self, step):
        for update in self._updates:
            update.apply(self.model)
            if update.step == step:
                return update
        raise AssertionError("the topic ended")


def nudge(tensor, *, places, ulp=1):
    """Move the first elements of a bfloat16 tensor away from zero by so many representable values."""
    with torch.no_grad():
        flat = tensor.view(torch.int16).view(-1)
        flat[:places] += ulp


def one_tensor(size=1000):
    return {"w": torch.full((size,), 0.5, dtype=torch.bfloat16)}


# Holding back


def test_small_changes_wait_until_they_add_up(url):
    model = one_tensor()
    with Publisher(url, threshold=2, on_busy="wait") as publisher, Follower(url, one_tensor()) as follower:
        publisher.publish(0, model)
        start = bits_of(model)
        for step in (1, 2):
            nudge(model["w"], places=10)
            published = publisher.publish(step, model).result(LIMIT)
            assert (published.changed, published.held, published.nbytes) == (0, 10, 0)
            follower.follow_to(step)
            assert bits_of(follower.model) == start
        nudge(model["w"], places=4)
        published = publisher.publish(3, model).result(LIMIT)
        assert (published.changed, published.held) == (4, 6)
        follower.follow_to(3)
        assert patterns(follower.model["w"])[:4].tolist() == patterns(model["w"])[:4].tolist()
        assert bits_of(follower.model) != bits_of(model)
    assert verify_topic(url).ok


def bits_of(tensors):
    return {name: patterns(tensor).tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_no_small_change_waits_longer_than_patience(url, patience):
    model = one_tensor()
    with (
        Publisher(url, threshold=1000, patience=patience, on_busy="wait") as publisher,
        Follower(url, one_tensor()) as follower,
    ):
        publisher.publish(0, model)
        waiting = 0
        for step in range(1, 12):
            nudge(model["w"], places=step)
            held = publisher.publish(step, model).result(LIMIT).held
            waiting = waiting + 1 if held else 0
            assert waiting < patience
            if not held:
                follower.follow_to(step)
                assert bits_of(follower.model) == bits_of(model)
        assert waiting == 11 % patience


@pytest.mark.parametrize(
    "options", [{"threshold": 50, "patience": 5}, {"budget": 400}, {"threshold": 50, "budget": 400}]
)
def test_followers_reach_the_trainers_bits_once_it_stops(url, options):
    model = small_model()
    with Publisher(url, on_busy="wait", **options) as publisher, Follower(url, small_model(9)) as follower:
        publisher.publish(0, model)
        for step in range(1, 4):
            train(model, step)
            assert publisher.publish(step, model).result(LIMIT).held
        for step in range(4, 200):
            if not publisher.publish(step, model).result(LIMIT).held:
                break
        follower.follow_to(step)
        assert bits(follower.model) == bits(model)
    assert verify_topic(url).ok


def test_the_last_step_can_be_sent_whole(url):
    model = small_model()
    with Publisher(url, threshold=1 << 14, budget=300, on_busy="wait") as publisher:
        publisher.publish(0, model)
        train(model, 1)
        assert publisher.publish(1, model).result(LIMIT).held
        assert publisher.publish(2, model, everything=True).result(LIMIT).held == 0
    with Publisher(url, have=model) as publisher:  # and is what a successor goes on from
        train(model, 3)
        assert publisher.publish(3, model).result(LIMIT).kind == "delta"
    with Follower(url, small_model(9)) as follower:
        follower.follow_to(3)
        assert bits(follower.model) == bits(model)


def large_model():
    generator = torch.Generator().manual_seed(3)
    return {"w": (torch.randn(1 << 19, generator=generator) * 0.02)}


def train_large(model, seed):
    generator = torch.Generator().manual_seed(seed)
    model["w"] += torch.randn(model["w"].shape, generator=generator) * 4e-6


@pytest.mark.parametrize("encoding", [None, "step", "overwrite"])
def test_a_budget_bounds_every_message(url, encoding):
    model, budget = large_model(), 6000
    with Publisher(url, budget=budget, encoding=encoding, dtype=torch.bfloat16, on_busy="wait") as publisher:
        publisher.publish(0, model)
        for step in range(1, 4):
            train_large(model, step)
            published = publisher.publish(step, model).result(LIMIT)
            assert published.held
            assert 0.8 * budget < published.nbytes < 1.1 * budget + 600  # 600: what a part says of itself


def test_a_budget_bounds_folded_messages_too(url, monkeypatch):
    model, budget = large_model(), 6000
    with faulty(monkeypatch) as faults, Publisher(url, budget=budget, dtype=torch.bfloat16) as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.gate.clear()
        for step in range(1, 6):
            train_large(model, step)
            publication = publisher.publish(step, model)
            if step == 1:
                wait_until(lambda: publisher._outbox.empty)
        faults.gate.set()
        published = publication.result(LIMIT)
        assert published.steps == (2, 3, 4, 5)
        assert published.held
        assert published.nbytes < 1.1 * budget + 600
    assert verify_topic(url).ok


def test_nothing_is_lost_when_a_held_back_step_fails(url, monkeypatch):
    model = small_model()
    with faulty(monkeypatch) as faults, Publisher(url, budget=400, on_busy="wait") as publisher:
        publisher.publish(0, model).result(LIMIT)
        faults.before = once(StorageFullError("no room", url=url), "put", "blobs/")
        train(model, 1)
        assert publisher.publish(1, model)._future.exception(LIMIT) is not None
        publisher._sender.failure = None
        train(model, 2)
        assert publisher.publish(2, model).result(LIMIT).held
        assert publisher.publish(3, model, everything=True).result(LIMIT).held == 0
    with Follower(url, small_model(9)) as follower:
        follower.follow_to(3)
        assert bits(follower.model) == bits(model)
    assert verify_topic(url).ok


def test_an_anchor_holds_what_was_published_and_says_what_is_not(url):
    model = one_tensor()
    with Publisher(url, threshold=2, on_busy="wait") as publisher:
        publisher.publish(0, model)
        start = bits_of(model)
        nudge(model["w"], places=10)
        publisher.request_anchor()
        publisher.publish(1, model)
    log = read_log(url, now=0.0)
    assert [(row["kind"], row["held"]) for row in log["messages"]] == [("anchor", 0), ("delta", 10), ("anchor", 10)]
    with Follower(url, one_tensor()) as follower:
        nudge(follower.model["w"], places=1)
        follower.follow_to(1)
        assert bits_of(follower.model) == start
    assert verify_topic(url).ok


def test_the_log_shows_what_was_held_back_only_where_something_was(url, capsys):
    model = one_tensor()
    with Publisher(url, threshold=2, on_busy="wait") as publisher:
        publisher.publish(0, model).result(LIMIT)
        print_log(read_log(url, now=0.0))
        assert "held" not in capsys.readouterr().out
        nudge(model["w"], places=10)
        publisher.publish(1, model)
    print_log(read_log(url, now=0.0))
    shown = capsys.readouterr().out
    assert "held" in shown
    assert "10" in shown


async def test_readers_that_do_not_know_what_was_held_ignore_it(url):
    import msgspec

    class OldStats(msgspec.Struct):
        changed: int
        total: int

    stats = msgspec.msgpack.encode(Stats(changed=1, total=2, held=3))
    assert msgspec.msgpack.decode(stats, type=OldStats) == OldStats(1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(OldStats(1, 2)), type=Stats).held == 0
    with Publisher(url) as publisher:
        publisher.publish(0, one_tensor())
    async with open_transport(url) as transport:
        (record,) = await transport.read("trainer")
    assert decode_message(record.data).stats.held == 0


@pytest.mark.parametrize("options", [{"threshold": -1}, {"budget": 0}, {"budget": 2.5}, {"patience": 0}])
def test_limits_out_of_range_are_refused_before_anything_is_opened(options, tmp_path):
    with pytest.raises(UsageError, match=f"{next(iter(options))}="):
        Publisher(tmp_path / "topic", **options)
    assert not list(tmp_path.iterdir())


# Where the shadow lives


@pytest.mark.parametrize("shadow", [None, "ram", "disk"])
def test_shadows_live_where_they_are_told_to(url, shadow, tmp_path):
    place = tmp_path / "scratch" / "shadows" if shadow == "disk" else shadow
    model = small_model()
    with Publisher(url, shadow=place, on_busy="wait") as publisher:
        publisher.publish(0, model)
        with Follower(url, small_model(9), shadow=place) as follower:
            for step in range(1, 4):
                train(model, step)
                publisher.publish(step, model)
                follower.follow_to(step)
                assert bits(follower.model) == bits(model)
            mapping = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
            assert len(mapping) == (2 if shadow == "disk" else 0)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert verify_topic(url).ok


def test_a_mapped_shadow_can_be_recognised_and_changes_its_schema(url, tmp_path):
    model = small_model()
    with Publisher(url, shadow=tmp_path, on_busy="wait") as publisher:
        publisher.publish(0, model)
    with Publisher(url, have=model, shadow=tmp_path, on_busy="wait") as publisher:
        train(model, 1)
        assert publisher.publish(1, model).result(LIMIT).kind == "delta"
        assert publisher.publish(2, one_tensor()).result(LIMIT).kind == "anchor"
        with Follower(url, one_tensor(), have=one_tensor(), shadow=tmp_path) as follower:
            changed = one_tensor()
            nudge(changed["w"], places=3)
            publisher.publish(3, changed)
            follower.follow_to(3)
            assert bits_of(follower.model) == bits_of(changed)


def test_mapped_arrays_are_aligned_zero_and_apart(tmp_path):
    specs = [
        TensorSpec(name=name, dtype=name, shape=(shape,)) for name, shape in {"BF16": 70, "F64": 9, "U8": 3}.items()
    ]
    schema = Schema.of(specs, segment_elements=32)
    shadow = Shadow.empty(schema, allocate=allocator(tmp_path))
    for segment in schema.segments:
        held = shadow.read(segment.index)
        assert (held.dtype, held.size, held.any()) == (segment.dtype.bits, segment.size, False)
        assert held.__array_interface__["data"][0] % 64 == 0
        shadow.load(segment.index, np.full(segment.size, segment.index + 1, segment.dtype.bits))
    assert [set(shadow.read(s.index).tolist()) for s in schema.segments] == [{s.index + 1} for s in schema.segments]
    assert list(tmp_path.iterdir()) == []
    assert allocator(tmp_path)(Schema.of([])) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_an_error_before_anything_is_published(url, tmp_path, monkeypatch, code):
    def full(*arguments):
        raise OSError(code, os.strerror(code))

    model = small_model()
    with Publisher(url, shadow=tmp_path) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(mapped.os, "posix_fallocate", full)
            with pytest.raises(StorageFullError, match=r"no room for a shadow of .* nothing was captured"):
                publisher.publish(0, model)
        assert publisher.version == 0
        assert publisher._outbox.empty
        assert publisher.publish(0, model).result(LIMIT).version == 1
        with monkeypatch.context() as patch:
            patch.setattr(mapped.os, "posix_fallocate", full)
            with (
                Follower(url, small_model(9), shadow=tmp_path) as follower,
                pytest.raises(StorageFullError, match="no room for a shadow"),
            ):
                follower.follow_to(0)


@pytest.mark.parametrize("known", [False, True], ids=["no such call", "refused"])
def test_space_is_taken_also_where_it_cannot_be_reserved(tmp_path, monkeypatch, known):
    def refused(*arguments):
        raise OSError(errno.EOPNOTSUPP, "not here")

    if known:
        monkeypatch.setattr(mapped.os, "posix_fallocate", refused)
    else:
        monkeypatch.delattr(mapped.os, "posix_fallocate")
    monkeypatch.setattr(mapped, "_CHUNK", 1000)
    with (tmp_path / "file").open("wb") as file:
        mapped._reserve(file.fileno(), 100_001)
        assert os.fstat(file.fileno()).st_size == 100_001
        assert os.fstat(file.fileno()).st_blocks * 512 >= 100_001


def test_a_shadow_that_cannot_be_anywhere_is_refused(tmp_path):
    (tmp_path / "file").write_text("no directory")
    for make in (Publisher, Subscriber):
        with pytest.raises(UsageError, match="is no directory that can be written to"):
            make(tmp_path / "topic", shadow=tmp_path / "file")
    assert not (tmp_path / "topic").exists()


# What need not be compared


class Compared:
    """Counts how often each tensor of a state is read."""

    def __init__(self, monkeypatch):
        self.names = []
        from deltabus.codecs import state

        piece = state.State.piece

        def counted(this, run):
            self.names.append(this.schema.tensors[run.tensor].name)
            return piece(this, run)

        monkeypatch.setattr(state.State, "piece", counted)

    def taken(self):
        names, self.names = sorted(set(self.names)), []
        return names


def layers():
    torch.manual_seed(5)
    return nn.ModuleDict({name: nn.Linear(12, 12, bias=False) for name in ("a", "b", "frozen")})


ALL = ["a.weight", "b.weight", "frozen.weight"]


def step_with(optimizer, model):
    optimizer.zero_grad()
    x = torch.randn(4, 12)
    for layer in model.values():
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("attached", [False, True], ids=["by hand", "attached"])
def test_optimizers_are_seen_and_frozen_tensors_cost_nothing(url, make, attached, monkeypatch):
    model = layers()
    model["frozen"].requires_grad_(False)
    optimizer = make(model.parameters())
    compared = Compared(monkeypatch)
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model).result(LIMIT)
        assert compared.taken() == ALL
        handle = publisher.attach(optimizer, model) if attached else None
        for step in range(1, 4):
            step_with(optimizer, model)
            if not attached:
                publisher.publish(step, model)
            publisher.flush(LIMIT)
            assert compared.taken() == ["a.weight", "b.weight"]
            follower.follow_to(step)
            assert bits(follower.model) == bits(model)
        if handle is not None:
            handle.remove()
        publisher.publish(8, model).result(LIMIT)  # twice, as an attached publisher runs before the step is over
        publisher.publish(9, model).result(LIMIT)
        compared.taken()
        assert publisher.publish(10, model).result(LIMIT).changed == 0
        assert compared.taken() == []


def in_place(model):
    with torch.no_grad():
        model["a"].weight.mul_(1.5)


def by_index(model):
    with torch.no_grad():
        model["a"].weight[3, 4] = 7.0


def through_a_view(model):
    with torch.no_grad():
        model["a"].weight.view(-1)[5:9].zero_()


def loaded(model):
    model["a"].load_state_dict({"weight": torch.randn(12, 12)})


def assigned(model):
    model["a"].load_state_dict({"weight": torch.randn(12, 12)}, assign=True)


def replaced(model):
    model["a"].weight = nn.Parameter(torch.randn(12, 12))


def other_memory(model):
    model["a"].weight.data = torch.randn(12, 12)


def turned(model):
    model["a"].weight.data = model["a"].weight.data.t()


def swapped(model):
    model["a"].weight, model["b"].weight = model["b"].weight, model["a"].weight


def foreach(model):
    with torch.no_grad():
        torch._foreach_add_([model["a"].weight], 1.0)


def initialised(model):
    nn.init.orthogonal_(model["a"].weight)


WRITES = [
    in_place, by_index, through_a_view, loaded, assigned, replaced, other_memory, turned, swapped, foreach, initialised
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_that_torch_counts_are_seen(url, write, monkeypatch):
    model = layers()
    compared = Compared(monkeypatch)
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model)
        publisher.publish(1, model).result(LIMIT)
        compared.taken()
        write(model)
        assert publisher.publish(2, model).result(LIMIT).changed
        assert compared.taken() == (["a.weight", "b.weight"] if write is swapped else ["a.weight"])
        follower.follow_to(2)
        assert bits(follower.model) == bits(model)


def by_data(model):
    model["a"].weight.data.mul_(1.5)


def by_numpy(model):
    model["a"].weight.detach().numpy()[2, 3] = 5.0


@pytest.mark.parametrize("write", [by_data, by_numpy], ids=lambda write: write.__name__)
@pytest.mark.parametrize("skip", [False, True], ids=["compared", "skipped"])
def test_writes_that_torch_does_not_count_are_missed_only_with_the_option(url, write, skip):
    model = layers()
    with Publisher(url, skip_unmodified=skip, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model)
        before = bits(model)
        write(model)
        assert (publisher.publish(1, model).result(LIMIT).changed == 0) is skip
        follower.follow_to(1)
        assert bits(follower.model) == (before if skip else bits(model))
        in_place(model)  # the next write that is counted brings the missed one along
        publisher.publish(2, model)
        follower.follow_to(2)
        assert bits(follower.model) == bits(model)


def test_models_that_take_turns_are_compared(url):
    one, other = layers(), layers()
    in_place(other)
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        for step, model in enumerate((one, other, one, one, other)):
            publisher.publish(step, model)
            follower.follow_to(step)
            assert bits(follower.model) == bits(model)


def test_another_object_over_the_same_memory_is_compared(url):
    model = one_tensor()
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher:
        publisher.publish(0, model)
        nudge(model["w"].data, places=5)
        again = {"w": model["w"].data}
        assert (again["w"].data_ptr(), again["w"]._version) == (model["w"].data_ptr(), model["w"]._version)
        assert publisher.publish(1, again).result(LIMIT).changed == 5


def test_what_is_held_back_of_an_unmodified_tensor_is_sent_later(url):
    model = one_tensor()
    with (
        Publisher(url, threshold=9, patience=2, skip_unmodified=True, on_busy="wait") as publisher,
        Follower(url, one_tensor()) as follower,
    ):
        publisher.publish(0, model)
        nudge(model["w"], places=10)
        assert publisher.publish(1, model).result(LIMIT).held == 10
        assert publisher.publish(2, model).result(LIMIT).changed == 10
        follower.follow_to(2)
        assert bits_of(follower.model) == bits_of(model)


def test_inference_tensors_have_no_counter_and_are_compared(url):
    with torch.inference_mode():
        model = one_tensor()
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher:
        publisher.publish(0, model)
        with torch.inference_mode():
            model["w"][:5] = 3.0
        assert publisher.publish(1, model).result(LIMIT).changed == 5


def test_a_refused_step_leaves_the_marks_of_the_last_captured_one(url):
    model = layers()
    with Publisher(url, skip_unmodified=True, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        publisher.publish(0, model)
        in_place(model)
        with pytest.raises(UsageError):
            publisher.publish(1, model, metadata={"a": "b" * (1 << 20)})
        assert publisher.publish(2, model).result(LIMIT).changed
        follower.follow_to(2)
        assert bits(follower.model) == bits(model)


def test_watching_optimizers_ends_with_the_publisher(url):
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    publisher = Publisher(url, skip_unmodified=True)
    assert len(optimizer._global_optimizer_pre_hooks) == before[0] + 1
    publisher.close()
    assert (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)) == before


def test_marks_keep_no_tensor_alive():
    import weakref

    from deltabus.unmodified import Marks

    marks, tensors = Marks(), one_tensor()
    marks.touch(tensors.values())
    marks.keep(marks.look(collect(tensors)))
    held = weakref.ref(tensors["w"])
    assert marks.look(collect(tensors)).unmoved == {0}
    del tensors
    gc.collect()
    assert held() is None


# Publishing by itself


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_attached_publisher_follows_the_optimizer(url, make):
    model = layers()
    optimizer = make(model.parameters())
    with Publisher(url, on_busy="wait") as publisher, Follower(url, layers()) as follower:
        handle = publisher.attach(optimizer, model, every=3)
        assert (handle.step, handle.publication) == (0, None)
        for step in range(1, 8):
            step_with(optimizer, model)
            assert handle.step == step
            if step % 3 == 0:
                assert handle.publication.step == step
                assert handle.publication.result(LIMIT).version == step // 3
                follower.follow_to(step)
                assert bits(follower.model) == bits(model)
        assert handle.publication.step == 6
        handle.remove()
        handle.remove()
        step_with(optimizer, model)
        assert handle.step == 7
        assert publisher.version == 2
    assert "every 3 steps, 7 done" in repr(handle)


def test_a_resumed_run_goes_on_counting(url):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Publisher(url, on_busy="wait") as publisher:
        handle = publisher.attach(optimizer, model, every=10, start=1007)
        for _ in range(3):
            assert handle.publication is None
            step_with(optimizer, model)
        assert handle.publication.step == handle.step == 1010


def test_what_publishing_raises_the_step_raises(url, monkeypatch):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with faulty(monkeypatch) as faults, Publisher(url, on_busy="wait") as publisher:
        handle = publisher.attach(optimizer, model)
        step_with(optimizer, model)
        handle.publication.result(LIMIT)
        faults.before = once(StorageFullError("no room", url=url), "put", "blobs/")
        step_with(optimizer, model)
        failed = handle.publication
        assert failed._future.exception(LIMIT) is not None
        before = bits(model)
        with pytest.raises(Exception, match="no room") as raised:
            step_with(optimizer, model)
        assert type(raised.value).__name__ == "PublishError"
        assert bits(model) != before  # the optimizer's own work is done
        assert (handle.step, handle.publication) == (3, failed)
        step_with(optimizer, model)
        assert handle.publication.result(LIMIT).step == 4
    with pytest.raises(ClosedError):
        step_with(optimizer, model)
    handle.remove()
    step_with(optimizer, model)
    with pytest.raises(ClosedError):
        publisher.attach(optimizer, model)
    with Follower(url, layers()) as follower:
        follower.follow_to(4)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -2}, {"every": 1.5}, {"start": "now"}])
def test_an_attachment_that_makes_no_sense_is_refused(url, options):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Publisher(url) as publisher:
        with pytest.raises(UsageError, match="every="):
            publisher.attach(optimizer, model, **options)
        assert not optimizer._optimizer_step_post_hooks
