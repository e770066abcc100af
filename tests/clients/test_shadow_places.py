"""Where a publisher's copy of the bits lives."""

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from deltabus import Publisher, Subscriber, mapped
from deltabus.bus.errors import StorageFullError, UsageError
from deltabus.cli.verify import verify_topic
from deltabus.codecs.schema import Schema, TensorSpec
from deltabus.codecs.shadow import Shadow
from deltabus.mapped import allocator

from .stepwise import Follower, bits_of, nudge, one_tensor
from .support import LIMIT, bits, small_model, train

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
