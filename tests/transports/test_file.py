"""`file://`: the contract, with and without notifications, and what only it has."""

import asyncio
import contextlib
import errno
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltabus.bus.errors import (
    AppendUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    PositionTakenError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.bus.message import MAX_RECORD_BYTES
from deltabus.transports import atomic, open_transport, records
from deltabus.transports import watch as watching
from deltabus.transports.file import FileTransport
from deltabus.transports.threads import Work

from .conformance import LIMIT, Topic, TransportConformance, collected, fill, until, waiting


class FileTopic(Topic):
    def __init__(self, root, **options):
        super().__init__(root.as_uri(), **options)
        self.root = root

    def record(self, log, position):
        return self.root / "logs" / log / f"{position:020}"

    async def stored_blob(self, key):
        path = self.root / key
        return path.read_bytes() if path.exists() else None

    async def remove_records(self, log, before):
        for position in range(before):
            self.record(log, position).unlink()


@pytest.fixture
def topics(tmp_path):
    """Makes fresh topics, and in the end looks for what should not be left in them."""
    counter = itertools.count()

    def make(**options):
        return FileTopic(tmp_path / "new" / f"run {next(counter)}", **options)

    yield make
    assert hidden(tmp_path) == []


@pytest.fixture
def topic(topics):
    return topics()


def hidden(root):
    return [path for path in root.rglob("*") if path.name.startswith(".")]


class TestFileTransport(TransportConformance):
    @pytest.fixture
    def make_topic(self, topics):
        return topics


class TestFileTransportWithoutNotifications(TransportConformance):
    @pytest.fixture
    def make_topic(self, topics):
        return lambda: topics(watch=False, poll=0.02)


# Layout


@pytest.mark.parametrize("position", [0, 1])
async def test_a_record_that_comes_between_a_look_and_the_write_is_compared(tmp_path, monkeypatch, position):
    async with open_transport(tmp_path.as_uri()) as transport:
        for place in range(position + 1):
            await transport.append("main", place, b"same")
        has_record = records.has_record
        monkeypatch.setattr(records, "has_record", lambda d, p: p != position and has_record(d, p))
        await transport.append("main", position, b"same")
        with pytest.raises(PositionTakenError):
            await transport.append("main", position, b"other")


async def test_the_layout_is_as_documented(topic):
    async with topic.open() as transport:
        await transport.put("blobs/main/1", b"blob")
        await transport.append("main", 0, b"record")
    files = {str(path.relative_to(topic.root)) for path in topic.root.rglob("*") if path.is_file()}
    assert files == {"blobs/main/1", "logs/main/00000000000000000000"}


async def test_opening_and_reading_create_nothing(topic):
    async with topic.open() as transport:
        assert await transport.logs() == []
        assert await transport.read("main") == []
        with pytest.raises(KeyNotFoundError):
            await transport.get("key")
        await transport.delete(["key"])
        with pytest.raises(UsageError):
            await transport.append("main", 1, b"x")
    assert not topic.root.exists()


async def test_names_in_a_url_are_decoded(tmp_path):
    async with open_transport(f"file://{tmp_path}/a%20b%23c%3Fd%25e") as transport:
        await transport.put("key", b"x")
        assert transport.url == (tmp_path / "a b#c?d%e").as_uri()
    assert (tmp_path / "a b#c?d%e" / "key").read_bytes() == b"x"


async def test_a_directory_name_need_not_be_unicode(tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    async with open_transport(root) as transport:
        await transport.put("key", b"x")
        async with open_transport(transport.url) as again:
            assert await again.get("key") == b"x"
    assert (root / "key").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["file://", "file:///", "file://run", "file://run/7", "file://./run", "file://a@/run"])
def test_a_url_that_is_no_absolute_directory_is_refused(url):
    with pytest.raises(UsageError, match="file:///"):
        open_transport(url)


def test_localhost_is_this_machine():
    assert open_transport("file://localhost/data/run").url == "file:///data/run"


async def test_strangers_in_the_directory_are_ignored(topic):
    async with topic.open() as transport:
        written = await fill(transport, "main", 2)
        for name in ("logs/main/README", "logs/main/2", "logs/main/00000000000000000009.bak", "logs/note", "logs/.x"):
            (topic.root / name).write_bytes(b"x")
        (topic.root / "logs" / "empty").mkdir()
        (topic.root / "logs" / "main (copy)").mkdir()
        topic.record("main (copy)", 0).write_bytes(b"x")
        (topic.root / "logs" / ".hidden").mkdir()
        assert await transport.logs() == ["main"]
        assert await transport.read("main") == written
        for name in ("note", ".x", "main/README"):
            (topic.root / "logs" / name).unlink()
        (topic.root / "logs" / ".hidden").rmdir()


async def test_a_record_that_is_too_long_is_not_read(topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        topic.record("main", 1).write_bytes(b"x" * (MAX_RECORD_BYTES + 1))
        with pytest.raises(TransportError, match="position 1"):
            await transport.read("main")


async def test_a_topic_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    async with open_transport(tmp_path / "file") as transport:
        for call in (
            lambda: transport.put("key", b"x"),
            lambda: transport.get("key"),
            lambda: transport.append("main", 0, b"x"),
            lambda: transport.read("main"),
            lambda: transport.logs(),
        ):
            with pytest.raises(TransportError, match=r"[Nn]ot a directory") as caught:
                await call()
            assert caught.value.url == (tmp_path / "file").as_uri()
    assert (tmp_path / "file").read_bytes() == b"x"


async def test_a_link_that_leads_nowhere_and_a_name_too_long(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for root in (tmp_path / "loop", tmp_path / ("n" * 300)):
        async with open_transport(root) as transport:
            with pytest.raises(TransportError, match="path"):
                await transport.put("key", b"x")
            with pytest.raises(TransportError, match="path"):
                await transport.get("key")


async def test_a_blob_cannot_stand_where_others_have_a_directory(topic):
    async with topic.open() as transport:
        await transport.put("a/b", b"x")
        with pytest.raises(TransportError, match="'a'"):
            await transport.put("a", b"x")
        with pytest.raises(TransportError, match="'a/b/c'"):
            await transport.put("a/b/c", b"x")
        assert await transport.get("a/b") == b"x"


async def test_a_directory_removed_meanwhile_is_made_again(topic):
    async with topic.open() as transport:
        await transport.append("main", 0, b"x")
        topic.record("main", 0).unlink()
        (topic.root / "logs" / "main").rmdir()
        with pytest.raises(TransientTransportError):
            await transport.append("main", 0, b"x")
        await transport.append("main", 0, b"x")
        assert len(await transport.read("main")) == 1


# Temporary files


async def test_temporary_files_are_ignored_and_removed_when_old(topic):
    async with topic.open() as transport:
        await fill(transport, "main", 1)
        await transport.put("blobs/one", b"x")
    old = [topic.root / "logs/main/.tmp-1-old", topic.root / "blobs/.tmp-1-old"]
    young = [topic.root / "logs/main/.tmp-2-young", topic.root / "blobs/.tmp-2-young"]
    for path in old + young:
        path.write_bytes(b"half")
    for path in old:
        os.utime(path, (time.time() - 3700,) * 2)
    async with topic.open() as transport:
        assert await transport.logs() == ["main"]
        assert len(await transport.read("main")) == 1
        assert set(hidden(topic.root)) == {*old, *young}
        await transport.append("main", 1, b"x")
        await transport.put("blobs/two", b"x")
    assert set(hidden(topic.root)) == set(young)
    for path in young:
        path.unlink()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
async def test_without_hard_links_files_are_renamed(topic, monkeypatch, number):
    def link(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    async with topic.open() as transport:
        await transport.put("key", b"x")
        await transport.put("key", b"x")
        with pytest.raises(KeyExistsError):
            await transport.put("key", b"y")
        assert await fill(transport, "main", 3) == await transport.read("main")

        # Another writer comes between the look and the rename.
        monkeypatch.setattr(atomic, "_stands", first_blind(atomic._stands))
        with pytest.raises(KeyExistsError):
            await transport.put("key", b"z")
        assert await transport.get("key") == b"x"
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_arguments, **_options: None)
        with pytest.raises(TransportError, match="hard links") as caught:
            await transport.put("other", b"x")
        assert type(caught.value) is TransportError


def first_blind(function):
    """The function, but its first call finds nothing."""
    calls = itertools.count()
    return lambda *arguments: bool(next(calls)) and function(*arguments)


# Waiting


async def test_a_disk_that_hangs_is_given_up(topic, monkeypatch):
    released = threading.Event()
    sync = os.fsync

    def hang(file):
        released.wait(LIMIT)
        sync(file)

    async with topic.open(timeout=0.2) as transport:
        await fill(transport, "main", 1)
        monkeypatch.setattr(atomic.os, "fsync", hang)
        try:
            with pytest.raises(AppendUnknownError, match="timeout"):
                await transport.append("main", 1, b"1")
            with pytest.raises(TransientTransportError, match="timeout"):
                await transport.put("key", b"x")
        finally:
            released.set()
        # What was given up must not be done later, behind the caller's back.
        await until(lambda: not hidden(topic.root))
        monkeypatch.undo()
        assert len(await transport.read("main")) == 1
        with pytest.raises(KeyNotFoundError):
            await transport.get("key")
        await transport.append("main", 1, b"1")


async def test_a_slow_disk_that_makes_progress_is_waited_for(topic, monkeypatch):
    write = os.write

    def slow(file, data):
        time.sleep(0.05)  # stands for a disk, not for a wait
        return write(file, data)

    monkeypatch.setattr(atomic, "CHUNK", 1000)
    monkeypatch.setattr(atomic.os, "write", slow)
    async with topic.open(timeout=0.3) as transport:
        await transport.put("key", b"x" * 12_000)
        assert await transport.get("key") == b"x" * 12_000


async def test_a_cancelled_write_leaves_no_temporary_file(topic, monkeypatch):
    """Cancelled in the midst of writing, the blob is not stored, and that is final when the caller goes on."""
    begun, released = threading.Event(), threading.Event()
    write = os.write

    def slow(file, data):
        begun.set()
        released.wait(LIMIT)
        return write(file, data)

    async with topic.open() as transport:
        monkeypatch.setattr(atomic.os, "write", slow)
        task = asyncio.create_task(transport.put("blobs/key", b"x" * 1000))
        await until(begun.is_set)
        task.cancel()
        await waiting(task)
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert hidden(topic.root) == []
        with pytest.raises(KeyNotFoundError):
            await transport.get("blobs/key")


async def test_short_writes_are_continued(topic, monkeypatch):
    write = os.write
    monkeypatch.setattr(atomic.os, "write", lambda file, data: write(file, data[:7]))
    async with topic.open() as transport:
        await transport.put("key", bytes(range(100)))
        assert await transport.get("key") == bytes(range(100))


# Reading while others write and remove


async def test_reading_the_next_record_lists_no_directory(topic, monkeypatch):
    async with topic.open() as transport:
        await fill(transport, "main", 3)
        monkeypatch.setattr(records.os, "scandir", None)
        assert len(await transport.read("main", 0)) == 2
        assert await transport.read("main", 2) == []
        await transport.append("main", 3, b"3")
        assert len(await transport.read("main", 2)) == 1


async def test_a_listing_that_misses_a_record_does_not_skip_it(topic, monkeypatch):
    async with topic.open() as transport:
        written = await fill(transport, "main", 4)
        await topic.remove_records("main", 1)
        scandir = os.scandir

        @contextlib.contextmanager
        def missing(folder):
            with scandir(folder) as entries:
                yield [entry for entry in entries if not entry.name.endswith(("1", "2"))]

        monkeypatch.setattr(records.os, "scandir", missing)
        assert await transport.read("main") == written[1:]


async def test_records_that_vanish_while_they_are_read(topic, monkeypatch):
    """Whoever removes the oldest records is faster than the reader, once, and then always."""
    find_first = records._find_first
    async with topic.open() as transport:
        written = await fill(transport, "main", 12)
        topic.record("main", 0).unlink()

        calls = itertools.count()

        def racing(folder, after):
            first = find_first(folder, after)
            if next(calls) < 2:
                topic.record("main", first).unlink()
            return first

        monkeypatch.setattr(records, "_find_first", racing)
        assert await transport.read("main") == written[3:]

        def always(folder, after):
            first = find_first(folder, after)
            topic.record("main", first).unlink()
            return first

        monkeypatch.setattr(records, "_find_first", always)
        with pytest.raises(TransientTransportError, match="vanish"):
            await transport.read("main")


def test_a_hole_ends_what_is_read(topic):
    directory = topic.root / "logs" / "main"
    directory.mkdir(parents=True)
    for position in (4, 5, 7):
        topic.record("main", position).write_bytes(b"x")
    found = records.read_records(str(directory), -1, 100, Work())
    assert [record.position for record in found] == [4, 5]


# Notifications


async def test_notifications_come_soon(topic, record_property):
    """With looks a minute apart only a notification can bring a record; how long that takes is reported."""
    count = 30
    async with topic.open(poll=60.0) as writer, topic.open(poll=60.0) as reader:
        await fill(writer, "main", 1)
        async with asyncio.timeout(LIMIT), contextlib.aclosing(reader.tail("main", 0)) as tail:
            await settled(writer, tail, reader)
            position = (await writer.read("main"))[-1].position
            delays = []
            for number in range(position + 1, position + 1 + count):
                waiter = asyncio.create_task(anext(tail))
                await waiting(waiter)
                await writer.append("main", number, b"x")
                appended = time.perf_counter()
                assert (await waiter).position == number
                delays.append(time.perf_counter() - appended)
    milliseconds = 1000 * statistics.median(delays)
    record_property("tail_latency_ms", round(milliseconds, 1))
    print(f"from append to tail: median {milliseconds:.1f} ms, worst {1000 * max(delays):.1f} ms")
    assert milliseconds < 500


async def settled(writer, tail, reader):
    """Append until the watching thread has begun to report; the tail is at the log's end then."""
    woken = 0

    def counted(log=None):
        nonlocal woken
        woken += 1
        wake(log)

    wake, reader._watcher.wake = reader._watcher.wake, counted
    position = 0
    while woken < 1:
        position += 1
        waiter = asyncio.create_task(anext(tail))
        await writer.append("main", position, b"x")
        await waiter


async def test_watching_begins_when_the_directory_appears(topic):
    async with (
        asyncio.timeout(LIMIT),
        topic.open() as writer,
        topic.open(poll=60.0) as reader,
        contextlib.aclosing(reader.tail("main")) as tail,
    ):
        first = asyncio.create_task(anext(tail))
        await waiting(first)
        assert not topic.root.exists()
        await fill(writer, "main", 1)
        assert await first == (0, b"0")
        await settled(writer, tail, reader)


async def test_one_thread_watches_for_all_tails_and_ends_with_the_last(topic):
    def watchers():
        return [thread for thread in threading.enumerate() if thread.name.startswith("deltabus-watch")]

    async with topic.open() as transport:
        await fill(transport, "main", 1)
        tails = [transport.tail("main") for _ in range(5)]
        for tail in tails:
            await anext(tail)
        assert len(watchers()) == 1
        for tail in tails:
            assert len(watchers()) == 1
            await tail.aclose()
        await until(lambda: not watchers())
        tail = transport.tail("main")
        await anext(tail)
        assert len(watchers()) == 1
        await tail.aclose()
        await until(lambda: not watchers())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left for watches"), RuntimeError("inotify")])
async def test_where_watching_fails_looking_goes_on(topic, monkeypatch, caplog, error):
    def broken(*_arguments, **_options):
        raise error

    monkeypatch.setattr(watching, "watch", broken)
    caplog.set_level("DEBUG", logger="deltabus")
    async with topic.open(poll=0.02) as transport:
        task = asyncio.create_task(collected(transport, "main", -1, 3))
        await until(lambda: "polling instead" in caplog.text)
        assert await fill(transport, "main", 3) == await task
    assert {record.levelname for record in caplog.records if record.name.startswith("deltabus")} == {"DEBUG"}


async def test_a_tail_survives_that_the_whole_topic_is_replaced(topic):
    async with topic.open(poll=0.02) as transport:
        written = await fill(transport, "main", 2)
        async with asyncio.timeout(LIMIT), contextlib.aclosing(transport.tail("main")) as tail:
            assert [await anext(tail), await anext(tail)] == written
            topic.root.rename(topic.root.with_name("elsewhere"))
            async with topic.open() as another:
                await fill(another, "main", 3)
            assert await anext(tail) == (2, b"2")


def test_a_program_that_forgets_its_tail_still_ends(topic):
    program = (
        "import asyncio, sys\n"
        "from deltabus.transports import open_transport\n"
        "loop = asyncio.new_event_loop()\n"
        "tail = open_transport(sys.argv[1]).tail('main')\n"
        "task = loop.create_task(anext(tail))\n"
        "loop.run_until_complete(asyncio.wait([task], timeout=0.1))\n"
        "print('done')\n"
    )
    (topic.root / "logs").mkdir(parents=True)
    for root in (topic.root, topic.root / "missing"):
        done = subprocess.run([sys.executable, "-c", program, root], capture_output=True, timeout=LIMIT, check=True)
        assert done.stdout == b"done\n"


# Light


def test_opening_loads_no_torch(topic):
    program = (
        "import asyncio, sys\n"
        "import deltabus.transports as transports\n"
        "assert not {'watchfiles', 'deltabus.transports.file'} & set(sys.modules), 'a backend was imported too soon'\n"
        "async def main():\n"
        "    for url in (sys.argv[1], 'memory://run'):\n"
        "        async with transports.open_transport(url) as transport:\n"
        "            await transport.append('main', 0, b'x')\n"
        "            assert await transport.read('main') == [(0, b'x')]\n"
        "asyncio.run(main())\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'numba')))\n"
    )
    run = [sys.executable, "-c", program, topic.root]
    assert subprocess.run(run, capture_output=True, timeout=60, check=True).stdout == b"[]\n"


def test_a_relative_directory_starts_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert FileTransport("run").url == (tmp_path / "run").as_uri()
