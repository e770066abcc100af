"""Checkpoints that `deltabus bench` compares with: what is said to come from the disk does so, or is left out."""

import os
import stat
import sys
from pathlib import Path

import pytest

from deltabus.bench import end_to_end, page_cache, peer
from deltabus.bench.page_cache import drop_pages, fetched
from deltabus.bench.peer import Engine, Trainer
from deltabus.bench.peers import LocalPeer
from deltabus.bench.source import Source
from deltabus.bench.tables import ratios_table, stages_table

from .support import lies_on_a_disk

NBYTES = 1 << 20


def measure(tmp_path, *, steps=5):
    """Measure the whole way with both sides in this process; also return what it said meanwhile."""
    said = []
    url = (tmp_path / "topic").as_uri()
    (tmp_path / "saved").mkdir()
    source = Source(shape="tiny", density=0.05)
    way = end_to_end.run(source, url, steps=steps, checkpoints=tmp_path / "saved", plain=False, progress=said.append)
    assert list((tmp_path / "saved").iterdir()) == []
    assert len(said) <= end_to_end.count_stages(steps, checkpoints=True, plain=False)
    return way, said


@pytest.fixture
def disk(monkeypatch):
    """A disk that is said to give whatever is read, but for what the test puts in here: numbers of readings."""
    kept = set()
    readings = []

    def tell(work, nbytes):
        readings.append(nbytes)
        return work(), len(readings) not in kept

    monkeypatch.setattr(end_to_end, "start_peer", LocalPeer)
    monkeypatch.setattr(peer, "fetched", tell)
    return kept


def durable(said):
    return [what for what in said if what.startswith("durable")]


def test_no_more_than_three_checkpoints_are_made_durable(disk, tmp_path):
    way, said = measure(tmp_path)
    assert durable(said) == [f"durable checkpoint {number}" for number in (1, 2, 3)]
    assert len(said) == end_to_end.count_stages(5, checkpoints=True, plain=False)
    assert way.exact
    assert way.left_out == ""
    assert list(way.durable.stages) == ["save", "flush", "load", "copy"]
    assert list(way.cached.stages) == ["save", "load", "copy"]
    assert min(way.durable.stages.values()) > 0
    assert way.cached.applied == way.applied
    assert way.durable.applied == way.applied + way.reread > way.applied
    assert way.durable.loading == way.durable.stages["load"] + way.durable.stages["copy"]
    names = [row[0] for row in stages_table(way, where="here").rows]
    assert {"checkpoint on the disk: flush", "checkpoint in the page cache: copy"} < set(names)
    assert "files of a step, read from the disk" in names
    assert len([row for row in ratios_table(way).rows if row[0].startswith("checkpoint")]) == 2


@pytest.mark.parametrize(("reading", "taken"), [(1, 1), (2, 1), (3, 2)])
def test_what_was_not_read_from_the_disk_is_left_out(disk, tmp_path, reading, taken):
    """The checkpoint, the files of a step, and the second checkpoint."""
    disk.add(reading)
    way, said = measure(tmp_path, steps=3)
    assert len(durable(said)) == taken
    assert (way.durable, way.reread, list(way.checkpoints)) == (None, None, ["in the page cache"])
    assert ("checkpoint on the disk: nothing shows that it was read there", "left out") in ratios_table(way).rows
    assert not [row for row in stages_table(way, where="here").rows if "on the disk" in row[0] or "files" in row[0]]


def test_a_system_that_cannot_drop_pages_measures_the_page_cache_alone(disk, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    way, said = measure(tmp_path, steps=1)
    assert durable(said) == []
    assert (way.durable, list(way.checkpoints)) == (None, ["in the page cache"])
    assert ("checkpoint on the disk: this system cannot drop its pages", "left out") in ratios_table(way).rows


def test_no_durable_checkpoint_is_begun_when_the_time_is_over(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end, "_DURABLE_SECONDS", -1.0)
    way, said = measure(tmp_path, steps=3)
    assert durable(said) == ["durable checkpoint 1"]
    assert way.durable is not None


def test_a_wrong_bit_from_the_disk_is_told(disk, tmp_path, monkeypatch):
    load = Engine.load_from_disk

    def spoil(self, path):
        answer = load(self, path)
        self.model.lines[0][0] ^= 1
        return answer

    monkeypatch.setattr(Engine, "load_from_disk", spoil)
    way, _ = measure(tmp_path, steps=1)
    assert not way.exact


def test_a_checkpoint_is_durable_with_its_name_and_dropped_before_it_is_read_from_the_disk(tmp_path, monkeypatch):
    calls = []

    def sync(file):
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")

    def tell(work, nbytes):
        calls.append(nbytes)
        return work(), True

    saved = tmp_path / "saved.safetensors"
    trainer = Trainer(Source(shape="tiny"), "memory://durable")
    engine = Engine(Source(shape="tiny"), "memory://durable")
    trainer.save(str(saved))
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(peer, "drop_pages", calls.append)
    monkeypatch.setattr(peer, "fetched", tell)
    assert trainer.flush(str(saved))["flush"] > 0
    assert engine.load_from_disk(str(saved))["from_disk"]
    assert calls == ["file", "folder", saved, saved.stat().st_size]
    assert engine.digest() == trainer.digest()


@pytest.mark.parametrize(("grown", "shown"), [(NBYTES, True), (NBYTES * 98 // 100, False), (0, False), (None, False)])
def test_the_disk_has_given_what_the_system_counts(tmp_path, monkeypatch, grown, shown):
    counters = tmp_path / "io"
    monkeypatch.setattr(page_cache, "_COUNTERS", counters)

    def count(nbytes):
        counters.write_text(f"rchar: 1\nread_bytes: {nbytes}\nwrite_bytes: 9\n")

    def work():
        if grown is not None:
            count(700 + grown)
        return "done"

    if grown is not None:
        count(700)
    assert fetched(work, NBYTES) == ("done", shown)


def stored(folder):
    path = Path(folder, "file")
    with path.open("wb") as file:
        file.write(os.urandom(NBYTES))
        file.flush()
        os.fsync(file.fileno())
    return path


def test_a_file_that_was_dropped_comes_from_the_disk_once(tmp_path):
    if not lies_on_a_disk(tmp_path):
        pytest.skip("the temporary directory is on no disk whose reads are counted")
    path = stored(tmp_path)
    assert not fetched(path.read_bytes, NBYTES)[1]
    drop_pages(path)
    assert fetched(path.read_bytes, NBYTES)[1]
    assert not fetched(path.read_bytes, NBYTES)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has tmpfs")
def test_a_file_in_memory_never_comes_from_the_disk(place):
    if lies_on_a_disk(place):
        pytest.skip("there is no directory in memory")
    path = stored(place)
    drop_pages(path)
    assert not fetched(path.read_bytes, NBYTES)[1]
