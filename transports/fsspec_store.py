"""Objects as files of any filesystem that fsspec knows.

Where the filesystem can create a file only if there is none, it is told to, after a probe that it really does.
Elsewhere a file is written aside, moved into place where none is even then, and a moment later read back: of two
writers who found the place empty at once the later one's file stays, and the other learns it, unless the moves are
further apart. A writer that is stopped right before its move overwrites, when it goes on, what others stored since.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from deltabus.bus.errors import AccessDeniedError, StorageFullError, TransientTransportError, TransportError
from deltabus.bus.transport import StoredBlob

from .fsspec_drivers import Driver, NotThereError
from .objects import ObjectStore, UncertainError
from .parallel import run_parallel
from .probe import refuses_to_overwrite

__all__ = ["FsspecStore"]

_Result = TypeVar("_Result")

_COMPARED = 32 << 20
_END = 512 << 10
"""Bytes at either end of a large file that are read back: all of it would be sent twice. Messages have checksums."""

_WIDTH = 4
_TOO_MANY = 429
_DENIED = {401, 403}
_SERVER_FAULT = 500
_WORDS_OF_DENIED = re.compile("Authenti|Credential|Logon|AccessDenied|Forbidden")
"""How libraries call the errors of those who may not."""


_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


class FsspecStore(ObjectStore):
    """Files below a folder.

    Args:
        root: The folder, as the filesystem wants it, without a slash behind it.
        connect: Returns a driver; called in the loop that uses it, once.
        url: The topic's URL, without secrets, for errors.
        exclusive: Whether the filesystem can create a file only if there is none.
        settle: Seconds after which a file that was moved into place is read back, where it cannot.
    """

    def __init__(self, root: str, connect: Callable[[], Driver], *, url: str, exclusive: bool, settle: float) -> None:
        self._root = root
        self._connect = connect
        self._url = url
        self._exclusive = exclusive
        self._settle = settle
        self._driver: Driver | None = None
        self._probed = False
        self._ready: set[str] = set()
        self._closed = False

    async def fetch(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:  # noqa: D102
        if stop is not None and stop <= start:
            return b"" if await self.exists(name) else None
        path, what = self._path(name), f"read {name!r}"
        try:
            return await self._driver_of().read(path, start, stop)
        except NotThereError:
            return None
        except Exception as error:
            # Some refuse a range that begins behind the end.
            info = await self._info(name)
            if info is None:
                return None
            size = info.get("size")
            if size is not None and size <= start:
                return b""
            raise self._explain(error, what) from error

    async def exists(self, name: str) -> bool:  # noqa: D102
        return await self._info(name) is not None

    async def create(self, name: str, data: memoryview) -> bool:  # noqa: D102
        if self._exclusive:
            await self._check_exclusive()
            return await self._create_exclusively(name, data)
        if await self.exists(name):
            return False
        if not await self._move_into_place(name, data):
            return False
        await asyncio.sleep(self._settle)
        return await self._is_still(name, data)

    async def _is_still(self, name: str, data: memoryview) -> bool:
        """Return whether a file that was written a moment ago is still the same, as far as its ends tell."""
        if data.nbytes <= 2 * _END:
            return bool(await self.holds(name, data))
        info = await self._info(name)
        if info is None or info.get("size") not in {None, data.nbytes}:
            return False
        ends = ((0, _END), (data.nbytes - _END, data.nbytes))
        return all([await self.fetch(name, start, stop) == bytes(data[start:stop]) for start, stop in ends])

    async def holds(self, name: str, data: memoryview) -> bool | None:  # noqa: D102
        info = await self._info(name)
        if info is None:
            return None
        if info.get("size") not in {None, data.nbytes}:
            return False
        for at in range(0, data.nbytes, _COMPARED):
            part = data[at : at + _COMPARED]
            if await self.fetch(name, at, at + part.nbytes) != bytes(part):  # views compare item by item, bytes at once
                return False
        return True

    async def remove(self, names: Sequence[str]) -> None:  # noqa: D102
        if names:
            await run_parallel([partial(self._remove, name) for name in names], width=_WIDTH)

    async def _remove(self, name: str) -> None:
        if await self._info(name) is not None:
            with contextlib.suppress(NotThereError):
                await self._call(self._driver_of().remove(self._path(name)), f"delete {name!r}")

    async def find_names(self, folder: str, after: str, limit: int) -> list[str]:  # noqa: D102
        entries = await self._list(folder)
        return sorted(name for name in map(_last_part, entries) if name > after)[:limit]

    async def find_all(self, folder: str) -> list[StoredBlob]:  # noqa: D102
        found: list[StoredBlob] = []
        waiting = [folder]
        while waiting:
            inside = waiting.pop()
            for entry in await self._list(inside):
                name = f"{inside}/{_last_part(entry)}"
                itself = str(entry["name"]).strip("/") == self._path(inside).strip("/")  # a file is listed as its own
                if itself or _last_part(entry).startswith("."):
                    continue
                if entry["type"] == "directory":
                    waiting.append(name)
                else:
                    found.append(StoredBlob(name, entry.get("size"), _stored_of(entry)))
        return found

    async def find_folders(self, folder: str) -> list[str]:  # noqa: D102
        names = [_last_part(entry) for entry in await self._list(folder) if entry["type"] == "directory"]

        async def is_used(name: str) -> bool:
            return any(not _last_part(entry).startswith(".") for entry in await self._list(f"{folder}/{name}"))

        used = await run_parallel([partial(is_used, name) for name in names], width=_WIDTH) if names else []
        return [name for name, is_one in zip(names, used, strict=True) if is_one]

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.close()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _driver_of(self) -> Driver:
        self._check_open()
        if self._driver is None:
            try:
                self._driver = self._connect()
            except Exception as error:
                raise self._explain(error, "open the filesystem") from error
        return self._driver

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self._url} is closed; open another", url=self._url)

    async def _info(self, name: str) -> dict[str, Any] | None:
        """Return what is known of a file, None if there is none, or a folder."""
        try:
            info = await self._call(self._driver_of().info(self._path(name)), f"look for {name!r}")
        except NotThereError:
            return None
        return None if info["type"] == "directory" else info

    async def _list(self, folder: str) -> list[dict[str, Any]]:
        try:
            return await self._call(self._driver_of().list(self._path(folder)), f"list {folder!r}")
        except NotThereError:
            return []

    async def _create_exclusively(self, name: str, data: memoryview) -> bool:
        try:
            await self._driver_of().write(self._path(name), data, exclusive=True)
        except FileExistsError:
            return False
        except Exception as error:
            self._check_open()
            # Libraries tell of a refusal in many ways; that something is there is the one sure sign.
            if await self.exists(name):
                return False
            raise self._explain(error, f"store {name!r}", write=True) from error
        return True

    async def _check_exclusive(self) -> None:
        """Make sure, once, that nothing is overwritten; libraries are known to ignore what they do not understand."""
        self._probed = self._probed or await refuses_to_overwrite(self._create_exclusively, url=self._url)
        if self._probed:
            return
        raise TransportError(
            f"{self._url} is on a filesystem that overwrites although told not to, so that two writers would destroy "
            "what the other wrote; nothing was written but a probe. Use a newer version of its library",
            url=self._url,
        )

    async def _move_into_place(self, name: str, data: memoryview) -> bool:
        """Write a file aside and move it into place; return False if the place was taken meanwhile."""
        path, what = self._path(name), f"store {name!r}"
        folder, _, last = path.rpartition("/")
        aside = f"{folder}/.tmp-{last[:100]}-{secrets.token_hex(8)}"
        driver = self._driver_of()
        if folder not in self._ready:
            await self._call(driver.make_folder(folder), what)
            self._ready.add(folder)
        try:
            await self._call(driver.write(aside, data, exclusive=False), what)
            # Writing may have taken long; between this look and the move a writer that is stopped can still do harm.
            if taken := await self.exists(name):
                await self._discard(aside)
            else:
                await self._move(aside, path, data.nbytes, what)
        except BaseException:
            self._ready.discard(folder)  # perhaps somebody removed it; the next attempt makes it again
            await self._discard(aside)
            raise
        return not taken

    async def _move(self, source: str, target: str, nbytes: int, what: str) -> None:
        try:
            await self._driver_of().move(source, target, nbytes)
        except Exception as error:
            self._check_open()
            raise self._explain(error, what, write=True) from error

    async def _discard(self, path: str) -> None:
        """Remove a file that was written aside, as far as that is possible; nobody reads one of its name."""
        with contextlib.suppress(Exception):
            await self._driver_of().remove(path)

    async def _call(self, call: Awaitable[_Result], what: str) -> _Result:
        try:
            return await call
        except NotThereError:
            raise
        except Exception as error:
            self._check_open()
            raise self._explain(error, what) from error

    def _explain(self, error: Exception, what: str, *, write: bool = False) -> Exception:
        """Return our error for one of whatever library a filesystem uses."""
        if isinstance(error, TransportError):
            return error
        kind, advice = _judge(error)
        reason = str(error) or type(error).__name__
        if kind is TransientTransportError and write:
            return UncertainError(reason)
        return kind(f"cannot {what} in {self._url}: {reason}; {advice}", url=self._url)


def _last_part(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _stored_of(entry: dict[str, Any]) -> float | None:
    """Return when a file was stored; filesystems call it by many names, and some do not tell."""
    for name in _TIMES:
        moment = entry.get(name)
        if isinstance(moment, str):
            with contextlib.suppress(ValueError):
                moment = datetime.fromisoformat(moment)
        if isinstance(moment, datetime):
            # fsspec's own are in UTC where they say nothing.
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(moment, int | float):
            return float(moment)
    return None


def _judge(error: Exception) -> tuple[type[TransportError], str]:
    """Return which of our errors it is, and what to do; libraries of clouds carry the status of the server's answer."""
    numbers = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    status = next((number for number in numbers if isinstance(number, int)), 0)
    if isinstance(error, PermissionError) or status in _DENIED or _WORDS_OF_DENIED.search(type(error).__name__):
        return AccessDeniedError, "check the credentials, and that they allow to read, and a writer to write and delete"
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageFullError, "free space or raise the quota; nothing was left behind"
    if isinstance(error, ImportError):
        return TransportError, "install what the filesystem needs"
    if isinstance(error, NotThereError | FileNotFoundError | NotADirectoryError):
        return TransportError, "check that the bucket, container or share exists"
    builtin = type(error).__module__ == "builtins"
    if status == _TOO_MANY or status >= _SERVER_FAULT or isinstance(error, OSError) or not (builtin or status):
        return TransientTransportError, "it may be done again; if it goes on, look at the server and the way to it"
    return TransportError, "check the URL and its storage_options"
