"""`file://` when the system fails: each call in turn, full disks, read-only directories, killed writers."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltabus.bus.errors import (
    AccessDeniedError,
    AppendUnknownError,
    KeyNotFoundError,
    PositionTakenError,
    StorageFullError,
    TransientTransportError,
    TransportError,
)
from deltabus.transports import atomic, open_transport

from .killed_writer import CALLS, RECORDS, blob

DATA = bytes(range(250)) * 10
ERRORS = {
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EACCES: AccessDeniedError,
    errno.EROFS: AccessDeniedError,
    errno.EIO: TransientTransportError,
    errno.ESTALE: TransientTransportError,
    errno.ENAMETOOLONG: TransportError,
}


class FaultyOS:
    """Stands for the module `os`; notes calls, and lets the one with a number fail."""

    def __init__(self, faulty=-1, number=0, *, done=False):
        self.calls = []
        self._faulty = faulty
        self._number = number
        self._done = done

    def __getattr__(self, name):
        function = getattr(os, name)
        return self._wrap(name, function) if name in CALLS - {"close"} else function

    def _wrap(self, name, function):
        def call(*arguments, **options):
            self.calls.append(name)
            fails = len(self.calls) - 1 == self._faulty
            if fails and not self._done:
                raise OSError(self._number, os.strerror(self._number))
            result = function(*arguments, **options)
            if fails:
                raise OSError(self._number, os.strerror(self._number))
            return result

        return call


async def put(transport):
    await transport.put("blobs/main/key", DATA)


async def append(transport):
    await transport.append("main", 0, DATA)


async def present(transport, operation):
    """Whether what the operation writes can be read."""
    if operation is append:
        return await transport.read("main") == [(0, DATA)]
    try:
        return await transport.get("blobs/main/key") == DATA
    except KeyNotFoundError:
        return False


def hidden(root):
    return [path for path in root.rglob("*") if path.name.startswith(".")]


async def calls_of(operation, root, monkeypatch):
    """The calls that an operation makes in a new topic."""
    system = FaultyOS()
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "os", system)
        async with open_transport(root) as transport:
            await operation(transport)
    return system.calls


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(atomic, "CHUNK", 1000)


@pytest.mark.parametrize("operation", [put, append])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
async def test_each_call_may_fail_and_nothing_is_half_done(tmp_path, monkeypatch, operation, number):
    calls = await calls_of(operation, tmp_path / "dry", monkeypatch)
    assert {"mkdir", "open", "write", "fsync", "link", "unlink"} == set(calls)
    assert calls.count("write") == 3
    for faulty, name in enumerate(calls):
        root = tmp_path / f"{faulty}-{name}"
        named = faulty > calls.index("link")
        uncertain = name == "link" and ERRORS[number] is TransientTransportError
        expected = ERRORS[number]
        if named or uncertain:
            expected = AppendUnknownError if operation is append else TransientTransportError
        async with open_transport(root) as transport:
            with monkeypatch.context() as patch:
                patch.setattr(atomic, "os", FaultyOS(faulty, number))
                if name == "unlink":
                    # The outcome is decided by then; the file that stays is removed when it is old.
                    await operation(transport)
                    assert len(hidden(root)) == 1
                else:
                    with pytest.raises(expected) as caught:
                        await operation(transport)
                    assert type(caught.value) is expected
                    assert caught.value.url == root.as_uri() in str(caught.value)
                    assert ("main" if operation is append else "blobs/main/key") in str(caught.value)
                    assert hidden(root) == []
            assert await present(transport, operation) == named
            await operation(transport)
            assert await present(transport, operation)
        async with open_transport(root) as transport:
            await operation(transport)


async def test_a_link_whose_answer_was_lost(tmp_path, monkeypatch):
    """The link was made, but the file server's answer did not arrive."""
    faulty = (await calls_of(append, tmp_path / "dry", monkeypatch)).index("link")
    async with open_transport(tmp_path / "topic") as transport:
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "os", FaultyOS(faulty, errno.EIO, done=True))
            with pytest.raises(AppendUnknownError, match="who won"):
                await append(transport)
        assert hidden(tmp_path) == []
        assert await present(transport, append)
        await append(transport)
        with pytest.raises(PositionTakenError):
            await transport.append("main", 0, b"other")


async def test_a_link_that_was_made_and_then_asked_for_again(tmp_path, monkeypatch):
    """NFS repeats a request whose answer was lost, and is told that the name is taken: by the very same file."""
    faulty = (await calls_of(append, tmp_path / "dry", monkeypatch)).index("link")
    async with open_transport(tmp_path / "topic") as transport:
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "os", FaultyOS(faulty, errno.EEXIST, done=True))
            await append(transport)
        assert await present(transport, append)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
async def test_a_file_system_whose_directories_cannot_be_forced(tmp_path, monkeypatch, number):
    synced = []

    def sync(file):
        synced.append(file)
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic.os, "fsync", sync)
    async with open_transport(tmp_path / "topic") as transport:
        await put(transport)
        await append(transport)
    assert len(synced) > 4


async def test_a_topic_whose_name_is_not_ours_to_force(tmp_path, monkeypatch):
    """The directory that holds the topic cannot be read; what is inside can be written all the same."""
    (tmp_path / "topic").mkdir()
    opened = []

    def open_inside(path, *arguments, **options):
        opened.append(path)
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return os.open(path, *arguments, **options)

    monkeypatch.setattr(atomic, "os", FaultyOS())
    monkeypatch.setattr(atomic.os, "open", open_inside, raising=False)
    monkeypatch.setattr(atomic.os, "access", lambda path, mode: path != str(tmp_path), raising=False)
    async with open_transport(tmp_path / "topic") as transport:
        await put(transport)
        assert await present(transport, put)
    assert str(tmp_path / "topic") in opened


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
async def test_reading_may_fail(tmp_path, monkeypatch, number):
    def refuse(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    async with open_transport(tmp_path / "topic") as transport:
        await put(transport)
        await append(transport)
        with monkeypatch.context() as patch:
            patch.setattr(atomic.os, "pread", refuse)
            for read in (transport.get("blobs/main/key"), transport.read("main"), anext(transport.tail("main"))):
                with pytest.raises(ERRORS[number]) as caught:
                    await read
                assert type(caught.value) is ERRORS[number]
                assert "main" in str(caught.value)
        assert await present(transport, put)
        assert await present(transport, append)


@contextlib.contextmanager
def mounted(path, options):
    """Mount a small file system in memory; skip where that is not allowed."""
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"needs to mount a file system: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def forbid_writing(root):
    # Permission bits would not do: root may write regardless of them.
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)


async def test_a_full_disk(tmp_path):
    with mounted(tmp_path / "disk", "size=1m") as root:
        async with open_transport(root) as transport:
            await transport.put("blobs/first", b"x" * 300_000)
            await transport.append("main", 0, b"0")
            with pytest.raises(StorageFullError, match="blobs/large") as caught:
                await transport.put("blobs/large", b"x" * 2_000_000)
            assert root.as_uri() in str(caught.value)
            assert hidden(root) == []
            with pytest.raises(KeyNotFoundError):
                await transport.get("blobs/large")
            (root / "ballast").write_bytes(b"x" * (os.statvfs(root).f_bavail * os.statvfs(root).f_frsize))
            with pytest.raises(StorageFullError, match="position 1"):
                await transport.append("main", 1, b"1")
            assert hidden(root) == []
            assert await transport.read("main") == [(0, b"0")]
            (root / "ballast").unlink()
            await transport.append("main", 1, b"1")
            assert await transport.read("main") == [(0, b"0"), (1, b"1")]


async def test_a_read_only_directory(tmp_path):
    with mounted(tmp_path / "disk", "size=1m") as root:
        async with open_transport(root) as transport:
            await put(transport)
            await append(transport)
        forbid_writing(root)
        async with open_transport(root) as transport:
            for write in (
                transport.put("blobs/main/other", b"x"),
                transport.put("elsewhere/other", b"x"),
                transport.append("main", 1, b"x"),
                transport.append("second", 0, b"x"),
                transport.delete(["blobs/main/key"]),
            ):
                with pytest.raises(AccessDeniedError, match="permissions"):
                    await write
            # What is there already can be read, and counts as written.
            assert await present(transport, put)
            assert await present(transport, append)
            await put(transport)
            await append(transport)
            assert await transport.logs() == ["main"]


def kill_writers(root):
    script = Path(__file__).with_name("killed_writer.py")
    return subprocess.run([sys.executable, script, root], capture_output=True, text=True, timeout=100, check=False)


async def test_writers_killed_at_every_call_leave_a_topic_that_goes_on(tmp_path):
    done = kill_writers(tmp_path)
    assert done.returncode == 0, done.stderr
    killed = {moment: int(count) for moment, count in (line.split() for line in done.stdout.splitlines())}
    # Each of the three blobs and records takes at least these calls: open, write, fsync, link, unlink, fsync.
    assert killed["before"] == killed["after"] > RECORDS * 2 * 6

    left = 0
    for directory in sorted(tmp_path.iterdir()):
        acknowledged = (directory / "acknowledged").read_bytes()
        left += len(hidden(directory))
        async with open_transport(directory / "topic") as transport:
            records = await transport.read("main")
            assert records == [(number, f"blobs/main/{number}".encode()) for number in range(len(records))], directory
            assert len(records) >= acknowledged.count(b"r"), directory
            for number in range(max(len(records), acknowledged.count(b"b"))):
                assert await transport.get(f"blobs/main/{number}") == blob(number), directory
            assert await transport.logs() == (["main"] if records else []), directory
            for number in range(len(records), RECORDS + 1):
                await transport.put(f"blobs/main/{number}", blob(number))
                await transport.append("main", number, f"blobs/main/{number}".encode())
            assert len(await transport.read("main")) == RECORDS + 1, directory
    assert left > 0, "no writer died with a temporary file, so that none of the interesting moments was met"
