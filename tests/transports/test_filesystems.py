"""Filesystems of fsspec: the contract on two that block and one that is asynchronous, and its limits."""

import asyncio
import errno
import itertools
import json
import os

import fsspec
import pytest

from deltabus.bus.errors import (
    AccessDeniedError,
    AppendUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    MissingExtraError,
    PositionTakenError,
    StorageFullError,
    TransientTransportError,
    TransportError,
    UsageError,
)
from deltabus.transports import open_transport
from deltabus.transports.filesystems import FilesystemTransport, guarantees_of
from deltabus.transports.fsspec_drivers import ThreadDriver, open_driver
from deltabus.transports.fsspec_store import FsspecStore

from .conformance import LIMIT, Topic, TransportConformance, collected, fill, in_another_loop, until
from .seaweed import REGION, WRITER

_runs = itertools.count()
_RACES = "this filesystem cannot create a file only if there is none: its guarantees say conditional_append=False"


class FolderTopic(Topic):
    """A topic on a filesystem that blocks."""

    def __init__(self, url):
        super().__init__(url, settle=0.001)
        self.filesystem, self.path = fsspec.url_to_fs(url.removeprefix("fsspec+"))

    async def stored_blob(self, key):
        path = f"{self.path}/{key}"
        return self.filesystem.cat_file(path) if self.filesystem.exists(path) else None

    async def remove_records(self, log, before):
        for position in range(before):
            self.filesystem.rm_file(f"{self.path}/logs/{log}/{position:020}")


class WithoutRaces(TransportConformance):
    """What is left of the contract where two writers at a time are not safe."""

    @pytest.mark.skip(reason=_RACES)
    async def test_of_many_who_append_at_one_position_one_wins(self):
        pass

    @pytest.mark.skip(reason=_RACES)
    async def test_writers_in_other_loops_share_a_log(self):
        pass

    @pytest.mark.skip(reason=_RACES)
    async def test_of_many_writers_of_different_bytes_one_wins(self):
        pass


class TestMemoryFilesystem(WithoutRaces):
    @pytest.fixture
    def make_topic(self):
        return lambda: FolderTopic(f"fsspec+memory://runs/{next(_runs)}")


class TestLocalFilesystem(WithoutRaces):
    @pytest.fixture
    def make_topic(self, tmp_path):
        yield lambda: FolderTopic(f"fsspec+file://{tmp_path}/run-{next(_runs)}")
        assert list(tmp_path.rglob(".*")) == []


@pytest.fixture
def on_s3(seaweed, bucket):
    """Opens transports of one topic by s3fs, which is asynchronous and can create a file only if there is none."""
    access_key, secret_key = WRITER
    options = {
        "key": access_key,
        "secret": secret_key,
        "endpoint_url": seaweed.endpoint,
        "client_kwargs": {"region_name": REGION},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    url = f"fsspec+s3://{bucket}/run-{next(_runs)}"
    return lambda **changes: open_transport(url, storage_options=json.dumps({**options, **changes}))


async def test_an_asynchronous_filesystem_keeps_the_contract(on_s3):
    async with on_s3() as first, on_s3() as second:
        assert first.guarantees.conditional_append
        assert await second.logs() == await second.read("main") == []
        with pytest.raises(KeyNotFoundError):
            await second.get("a/b")
        for data in (b"", bytes(range(256)) * 1000):
            await first.put(f"a/{len(data)}", data)
            assert await second.get(f"a/{len(data)}") == data
            assert await second.get(f"a/{len(data)}", 5, 300_000) == data[5:]
            assert await second.get(f"a/{len(data)}", 300_000, 300_001) == b""
            await second.put(f"a/{len(data)}", data)
            with pytest.raises(KeyExistsError):
                await second.put(f"a/{len(data)}", b"other")
        written = await fill(first, "main", 5)
        assert await collected(second, "main", -1, 5) == await second.read("main") == written
        with pytest.raises(PositionTakenError):
            await second.append("main", 4, b"other")
        with pytest.raises(UsageError, match="position 6"):
            await second.append("main", 7, b"x")
        assert await second.logs() == ["main"]
        await second.delete(["a/0", "a/missing", "a"])
        with pytest.raises(KeyNotFoundError):
            await first.get("a/0")


async def test_an_asynchronous_filesystem_lets_one_racer_win(on_s3):
    async def write(number):
        async with on_s3() as transport:
            try:
                await transport.append("main", 0, b"%d" % number)
            except PositionTakenError:
                return None
            return number

    (winner,) = [w for w in await asyncio.gather(*(in_another_loop(write, n) for n in range(3))) if w is not None]
    async with on_s3() as transport:
        assert await transport.read("main") == [(0, b"%d" % winner)]


async def test_a_refused_key_is_denied_without_showing_it(on_s3):
    async with on_s3(secret="hunter2-hunter2") as transport:
        with pytest.raises(AccessDeniedError, match="credentials") as caught:
            await transport.get("key")
    assert caught.value.url == transport.url
    assert "hunter2" not in f"{caught.value}{transport.url}{transport!r}"


class Careless(fsspec.get_filesystem_class("memory")):
    """Overwrites although told not to, as old libraries do."""

    async_impl = True

    def __init__(self, *arguments, asynchronous, loop, **options):
        super().__init__(*arguments, **options)

    async def _pipe_file(self, path, value, mode="overwrite"):
        self.pipe_file(path, value)

    async def _info(self, path):
        return self.info(path)

    async def _ls(self, path, detail):
        return self.ls(path, detail=detail)


async def test_a_library_that_overwrites_is_found_out():
    store = FsspecStore(
        "/careless", lambda: open_driver(Careless, {}, timeout=5), url="test://careless", exclusive=True, settle=0.01
    )
    async with FilesystemTransport(store, url="test://careless", protocol="gs") as transport:
        with pytest.raises(TransportError, match=r"overwrites.*newer version"):
            await transport.put("key", b"x")
        with pytest.raises(TransportError, match="overwrites"):
            await transport.append("main", 0, b"x")
    assert Careless(asynchronous=True, loop=None).find("/careless") == ["/careless/.conditional-writes"]


class Hanging(Careless):
    """Holds files whose bytes never come; its calls say how long they were waited for."""

    tells_size = True

    async def _info(self, path):
        return {"name": path, "type": "file", "size": 1000 if self.tells_size else None}

    async def _cat_file(self, path, start=None, end=None):
        await asyncio.Event().wait()

    async def _cp_file(self, source, target):
        await asyncio.Event().wait()


@pytest.mark.parametrize("tells_size", [True, False])
async def test_a_read_or_copy_that_hangs_is_given_up(monkeypatch, tells_size):
    monkeypatch.setattr(Hanging, "tells_size", tells_size)
    monkeypatch.setattr("deltabus.transports.fsspec_drivers._UNTOLD", 1000)
    driver = open_driver(Hanging, {}, timeout=0.05)
    for call in (driver.read("/a", 0, None), driver.read("/a", 5, None), driver.move("/a", "/b", 1000)):
        async with asyncio.timeout(LIMIT) as limit:
            with pytest.raises(TimeoutError):
                await call
        assert not limit.expired()


async def test_a_filesystem_that_blocks_is_not_told_to_refuse_to_overwrite():
    kind = fsspec.get_filesystem_class("memory")
    store = FsspecStore(
        "/blocking", lambda: open_driver(kind, {}, timeout=5), url="test://blocking", exclusive=True, settle=0.01
    )
    async with FilesystemTransport(store, url="test://blocking", protocol="gs") as transport:
        with pytest.raises(TransportError, match="refuse to overwrite"):
            await transport.put("key", b"x")
    assert kind().find("/blocking") == []


class ClientAuthenticationError(Exception):
    """As the library of a cloud calls it."""


class ServiceBusyError(Exception):
    status_code = 503


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClientAuthenticationError("no such account"), AccessDeniedError),
        (ServiceBusyError("come back later"), TransientTransportError),
        (ValueError("account_name is missing"), TransportError),
        (TimeoutError(), TransientTransportError),
    ],
)
async def test_a_filesystem_that_cannot_be_opened_is_told_in_our_words(error, kind):
    def fail():
        raise error

    for connect in (fail, lambda: ThreadDriver(fail, timeout=5)):
        store = FsspecStore("/run", connect, url="test://run", exclusive=False, settle=0.01)
        async with FilesystemTransport(store, url="test://run", protocol="sftp") as transport:
            for call in (lambda: transport.get("key"), lambda: transport.put("key", b"x"), lambda: transport.logs()):
                with pytest.raises(kind, match=str(error) or "TimeoutError") as caught:
                    await call()
                assert type(caught.value) is kind
                assert "test://run" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EACCES, AccessDeniedError),
        (errno.EIO, TransientTransportError),
        (errno.ECONNRESET, TransientTransportError),
    ],
)
async def test_faults_of_a_filesystem_leave_nothing_and_say_what_to_do(tmp_path, monkeypatch, number, kind):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    async with open_transport(f"fsspec+file://{tmp_path}/run", settle=0.001) as transport:
        await transport.append("main", 0, b"x")
        monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", fail)
        with pytest.raises(kind, match=os.strerror(number)) as caught:
            await transport.put("key", b"x")
        assert transport.url in str(caught.value)
        with pytest.raises(kind):
            await transport.append("main", 1, b"x")
        monkeypatch.undo()
        assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["0" * 20]
        await transport.put("key", b"x")


@pytest.mark.parametrize("size", [None, 5])
async def test_a_read_that_failed_is_not_taken_for_an_empty_file(tmp_path, monkeypatch, size):
    local = fsspec.get_filesystem_class("file")
    info = local.info

    def fail(*_, **__):
        raise ConnectionResetError("the way was lost")

    async with open_transport(f"fsspec+file://{tmp_path}/run", settle=0.001) as transport:
        await transport.put("key", b"01234")
        await transport.append("main", 0, b"x")
        monkeypatch.setattr(local, "cat_file", fail)
        monkeypatch.setattr(local, "info", lambda *path, **options: {**info(*path, **options), "size": size})
        for call in (lambda: transport.get("key"), lambda: transport.read("main")):
            with pytest.raises(TransientTransportError, match="the way was lost"):
                await call()


async def test_an_append_whose_move_was_lost_is_unknown_or_found(tmp_path, monkeypatch):
    local = fsspec.get_filesystem_class("file")
    move = local.mv

    def lose(self, source, target, **options):
        move(self, source, target, **options)
        raise ConnectionResetError("the answer was lost")

    def lose_all(*_, **__):
        raise ConnectionResetError("the request was lost")

    async with open_transport(f"fsspec+file://{tmp_path}/run", settle=0.001) as transport:
        monkeypatch.setattr(local, "mv", lose)
        await transport.append("main", 0, b"x")
        with pytest.raises(TransientTransportError, match="lost"):
            await transport.put("key", b"x")
        await transport.put("key", b"x")
        monkeypatch.setattr(local, "mv", lose_all)
        with pytest.raises(AppendUnknownError, match="lost"):
            await transport.append("main", 1, b"x")
        assert len(await transport.read("main")) == 1
    assert list(tmp_path.rglob(".*")) == []


@pytest.mark.parametrize("size", [10, 3 << 20])
@pytest.mark.parametrize("place", [0, -1])
async def test_a_blob_that_was_overwritten_while_it_settled_is_told(tmp_path, monkeypatch, size, place):
    other = bytearray(size)
    other[place] = 1
    async with open_transport(f"fsspec+file://{tmp_path}/run", settle=0.001) as transport:

        async def overwrite(_):
            await asyncio.to_thread((tmp_path / "run/key").write_bytes, other)

        monkeypatch.setattr("deltabus.transports.fsspec_store.asyncio.sleep", overwrite)
        with pytest.raises(KeyExistsError):
            await transport.put("key", bytes(size))


async def test_a_writer_that_stalls_while_it_writes_overwrites_nothing(tmp_path, monkeypatch):
    url = f"fsspec+file://{tmp_path}/run"
    async with open_transport(url, settle=0.001) as stalled, open_transport(url, settle=0.001) as other:
        driver = stalled._store._driver_of()
        write = driver.write

        async def stall(path, data, *, exclusive):
            await write(path, data, exclusive=exclusive)
            await other.append("main", 0, b"acknowledged")
            await other.append("main", 1, b"more")

        monkeypatch.setattr(driver, "write", stall)
        with pytest.raises(PositionTakenError):
            await stalled.append("main", 0, b"late")
        assert await other.read("main") == [(0, b"acknowledged"), (1, b"more")]
    assert list(tmp_path.rglob(".*")) == []


async def test_a_slower_writer_learns_that_it_was_overwritten(tmp_path, monkeypatch):
    """Both find the place empty; the earlier one's record is moved over while it waits to read it back."""
    url = f"fsspec+file://{tmp_path}/run"
    async with open_transport(url, settle=1) as first, open_transport(url, settle=0.001) as second:
        losing = asyncio.create_task(first.append("main", 0, b"first"))
        record = tmp_path / "run/logs/main" / ("0" * 20)
        await until(record.exists)
        monkeypatch.setattr(second._store, "exists", lambda _: asyncio.sleep(0, result=False))
        assert await second._store._move_into_place(f"logs/main/{record.name}", memoryview(b"second"))
        monkeypatch.undo()
        with pytest.raises(PositionTakenError):
            await losing
        assert await second.read("main") == [(0, b"second")]


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("gs://bucket/run", MissingExtraError, "pip install gcsfs"),
        ("gcs://bucket/run", MissingExtraError, "pip install gcsfs"),
        ("az://container/run", MissingExtraError, "pip install adlfs"),
        ("abfs://container/run", MissingExtraError, "pip install adlfs"),
        ("sftp://host/run", MissingExtraError, "pip install paramiko"),
        ("ssh://host/run", MissingExtraError, "pip install paramiko"),
        ("smb://host/share/run", MissingExtraError, "pip install smbprotocol"),
        ("fsspec+nothing://run", UsageError, "fsspec has no protocol 'nothing'"),
        ("fsspec://run", UsageError, "fsspec\\+<protocol>"),
        ("fsspec+memory://", UsageError, "names no folder"),
        ("fsspec+memory://run/../other", UsageError, "names no folder"),
        ("fsspec+memory://run?storage_options=[]", UsageError, "storage_options"),
        ("fsspec+memory://run?storage_options={secret", UsageError, "storage_options.*its value"),
    ],
)
def test_what_cannot_be_opened_says_what_to_do(url, error, words):
    with pytest.raises(error, match=words) as caught:
        open_transport(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("protocol", "conditional", "durable", "whole"),
    [
        ("gs", True, True, True),
        ("az", True, True, True),
        ("sftp", False, True, True),
        ("memory", False, False, True),
        ("file", False, False, True),
        ("local", False, False, True),
        ("dropbox", False, True, False),
    ],
)
def test_guarantees_are_those_of_the_protocol(protocol, conditional, durable, whole):
    guarantees = guarantees_of(protocol)
    assert guarantees.conditional_append is conditional
    assert guarantees.durable is durable
    assert guarantees.atomic_visibility is whole
    assert not guarantees.push


async def test_fsspecs_memory_is_not_ours():
    name = f"run-{next(_runs)}"
    async with (
        open_transport(f"fsspec+memory://{name}", settle=0.001) as theirs,
        open_transport(f"memory://{name}") as ours,
    ):
        assert not theirs.guarantees.durable
        await theirs.put("key", b"x")
        with pytest.raises(KeyNotFoundError):
            await ours.get("key")
