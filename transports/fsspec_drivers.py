"""The few calls that a topic needs of a filesystem of fsspec: awaited, or in threads where it blocks.

Filesystems are made for one event loop each, and without caches: those of fsspec hide what other writers did.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from .threads import NoProgressError, Work, run_in_thread

__all__ = ["AsyncDriver", "Driver", "NotThereError", "ThreadDriver", "open_driver"]

_Result = TypeVar("_Result")
_Info = dict[str, Any]

_BLOCK = 16 << 20
_SLOWEST = 256 << 10
"""Bytes that must go through in a second, in the middle, before a call that tells no progress is given up."""

_UNTOLD = 4 << 30
"""Bytes that are allowed for where a filesystem does not tell how many there are."""

_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_CLIENTS = ("_s3", "session", "_session", "service_client")
"""Where asynchronous filesystems keep what must be closed."""


class NotThereError(Exception):
    """There is no such file."""


@contextlib.contextmanager
def _absence() -> Iterator[None]:
    try:
        yield
    except _ABSENT as error:
        raise NotThereError from error


class Driver(abc.ABC):
    """One filesystem, with paths as it wants them; what its library raises comes through, and `TimeoutError`."""

    @abc.abstractmethod
    async def info(self, path: str) -> _Info:
        """Return what is known of a file or folder; raises `NotThereError` if there is neither."""

    @abc.abstractmethod
    async def read(self, path: str, start: int, stop: int | None) -> bytes:
        """Return bytes of a file; raises `NotThereError` if there is none."""

    @abc.abstractmethod
    async def write(self, path: str, data: memoryview, *, exclusive: bool) -> None:
        """Write a file, and fail if there is one and it must be new; the filesystem must know how to, and be probed."""

    @abc.abstractmethod
    async def make_folder(self, path: str) -> None:
        """Make a folder and those above it, where the filesystem has any."""

    @abc.abstractmethod
    async def move(self, source: str, target: str, nbytes: int) -> None:
        """Rename a file of so many bytes, over one that may be there."""

    @abc.abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file; raises `NotThereError` if there is none."""

    @abc.abstractmethod
    async def list(self, path: str) -> list[_Info]:
        """Return what is in a folder; raises `NotThereError` if there is none."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections."""


class AsyncDriver(Driver):
    """A filesystem that is asynchronous itself.

    Args:
        filesystem: Of fsspec, made in the running loop as `asynchronous`.
        timeout: Seconds that a call may take, and some more for each byte.
    """

    def __init__(self, filesystem: Any, *, timeout: float) -> None:  # noqa: ANN401 - fsspec has no types
        self._filesystem = filesystem
        self._timeout = timeout
        parameters = inspect.signature(filesystem._pipe_file).parameters
        self._create = {"mode": "create"} if "mode" in parameters else {"overwrite": False}

    async def info(self, path: str) -> _Info:  # noqa: D102
        with _absence():
            return await self._bounded(self._filesystem._info(path))

    async def read(self, path: str, start: int, stop: int | None) -> bytes:  # noqa: D102
        if stop is not None:
            nbytes = stop - start
        else:
            size = (await self.info(path)).get("size")
            nbytes = _UNTOLD if size is None else max(0, size - start)
        with _absence():
            if start == 0 and stop is None:
                return await self._bounded(self._filesystem._cat_file(path), nbytes)
            return await self._bounded(self._filesystem._cat_file(path, start=start, end=stop), nbytes)

    async def write(self, path: str, data: memoryview, *, exclusive: bool) -> None:  # noqa: D102
        await self._bounded(
            self._filesystem._pipe_file(path, bytes(data), **(self._create if exclusive else {})), data.nbytes
        )

    async def make_folder(self, path: str) -> None:  # noqa: D102
        await self._bounded(self._filesystem._makedirs(path, exist_ok=True))

    async def move(self, source: str, target: str, nbytes: int) -> None:  # noqa: D102
        await self._bounded(self._filesystem._cp_file(source, target), nbytes)
        await self._bounded(self._filesystem._rm_file(source))

    async def remove(self, path: str) -> None:  # noqa: D102
        with _absence():
            await self._bounded(self._filesystem._rm_file(path))

    async def list(self, path: str) -> list[_Info]:  # noqa: D102
        with _absence():
            return await self._bounded(self._filesystem._ls(path, detail=True))

    async def close(self) -> None:  # noqa: D102
        for name in _CLIENTS:
            close = getattr(getattr(self._filesystem, name, None), "close", None)
            if close is not None and inspect.isawaitable(closing := close()):
                await self._bounded(closing)

    async def _bounded(self, call: Awaitable[_Result], nbytes: int = 0) -> _Result:
        """Return what a call returns that carries so many bytes, within a limit."""
        async with asyncio.timeout(self._timeout + nbytes / _SLOWEST):
            return await call


class ThreadDriver(Driver):
    """A filesystem that blocks, in threads.

    Args:
        open_filesystem: Makes it; called in a thread, because some connect at once.
        timeout: Seconds without progress after which a call is given up.
    """

    def __init__(self, open_filesystem: Callable[[], Any], *, timeout: float) -> None:
        self._open = open_filesystem
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._opened: Any = None

    async def info(self, path: str) -> _Info:  # noqa: D102
        with _absence():
            return await self._run(lambda filesystem, _: filesystem.info(path))

    async def read(self, path: str, start: int, stop: int | None) -> bytes:  # noqa: D102
        def work(filesystem: Any, work: Work) -> bytes:  # noqa: ANN401
            # Not by an open file: some filesystems give all who open it the same one, with one place to read at.
            blocks = []
            at, short = start, False
            while not short and (stop is None or at < stop):
                work.advance()
                end = at + _BLOCK if stop is None else min(at + _BLOCK, stop)
                blocks.append(filesystem.cat_file(path, start=at, end=end))
                short = len(blocks[-1]) < end - at
                at = end
            return b"".join(blocks)

        with _absence():
            return await self._run(work)

    async def write(self, path: str, data: memoryview, *, exclusive: bool) -> None:  # noqa: D102
        if exclusive:
            raise NotImplementedError("of filesystems that block none is known to refuse to overwrite")

        def work(filesystem: Any, work: Work) -> None:  # noqa: ANN401
            try:
                with filesystem.open(path, "wb") as file:
                    for at in range(0, data.nbytes, _BLOCK):
                        work.advance()
                        file.write(data[at : at + _BLOCK].tobytes())
            except BaseException:
                with contextlib.suppress(Exception):  # the fault is told, and the file has a name that nobody reads
                    filesystem.rm_file(path)
                raise

        await self._run(work)

    async def make_folder(self, path: str) -> None:  # noqa: D102
        await self._run(lambda filesystem, _: filesystem.makedirs(path, exist_ok=True))

    async def move(self, source: str, target: str, nbytes: int) -> None:  # noqa: D102
        await self._run(lambda filesystem, _: filesystem.mv(source, target))

    async def remove(self, path: str) -> None:  # noqa: D102
        with _absence():
            await self._run(lambda filesystem, _: filesystem.rm_file(path))

    async def list(self, path: str) -> list[_Info]:  # noqa: D102
        with _absence():
            return await self._run(lambda filesystem, _: filesystem.ls(path, detail=True))

    async def close(self) -> None:  # noqa: D102
        opened, self._opened = self._opened, None
        close = getattr(getattr(opened, "client", None), "close", None)
        if close is not None:
            await asyncio.to_thread(close)

    async def _run(self, function: Callable[[Any, Work], _Result]) -> _Result:
        try:
            async with self._lock:
                if self._opened is None:
                    self._opened = await run_in_thread(lambda _: self._open(), limit=self._timeout)
            filesystem = self._opened
            return await run_in_thread(lambda work: function(filesystem, work), limit=self._timeout)
        except NoProgressError:
            raise TimeoutError from None


def open_driver(kind: Any, arguments: Mapping[str, Any], *, timeout: float) -> Driver:  # noqa: ANN401
    """Return a driver for a class of fsspec; call it in the loop that will use it.

    Args:
        kind: The class.
        arguments: What the filesystem is made with.
        timeout: Seconds, as the drivers understand it.
    """
    given = {**arguments, "skip_instance_cache": True, "use_listings_cache": False}
    if getattr(kind, "async_impl", False):
        return AsyncDriver(kind(**given, asynchronous=True, loop=asyncio.get_running_loop()), timeout=timeout)
    return ThreadDriver(lambda: kind(**given), timeout=timeout)
