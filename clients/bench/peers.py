"""Driving the two sides: each in a process of its own, or both in this one where the topic lives in it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

import msgspec

from deltabus.bus.errors import ClientError, DeltabusError, WaitTimeoutError

from .peer import LIMIT, Answer, Setup, make_side

__all__ = ["LocalPeer", "Peer", "ProcessPeer", "in_this_process", "start_peer"]

_RUN_LIMIT = 3600.0
_CLOSE_SECONDS = 30.0


class Peer(Protocol):
    """A side that does one command at a time; a context manager that ends it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def send(self, command: str, *arguments: object) -> None:
        """Give a command, and go on; its answer must be taken before the next command."""

    def answer(self) -> Answer:
        """Wait for the answer; the first one comes without a command, when the side is ready.

        Raises:
            ClientError: If the command failed, or the side ended.
            WaitTimeoutError: If it takes too long.
        """

    def ask(self, command: str, *arguments: object) -> Answer:
        """Give a command and wait for its answer.

        Raises:
            ClientError: If the command failed, or the side ended.
            WaitTimeoutError: If it takes too long.
        """


class ProcessPeer:
    """A side in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        self._role = setup.role
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deltabus.bench.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interruption is for this process, which then ends the others
        )
        self._late = False
        self._timer = threading.Timer(_RUN_LIMIT, self._expire)
        self._timer.daemon = True
        self._timer.start()
        self._write(msgspec.json.encode(setup).decode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def send(self, command: str, *arguments: object) -> None:
        """Give a command, and go on."""
        self._write(msgspec.json.encode([command, *arguments]).decode())

    def answer(self) -> Answer:
        """Wait for the answer.

        Raises:
            ClientError: If the command failed, or the process ended.
            WaitTimeoutError: If the whole measurement takes too long.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if self._late:
            raise WaitTimeoutError(f"the measurement was not over after {_RUN_LIMIT:.0f} s; take a smaller state")
        if not line:
            raise ClientError(f"the {self._role} ended with status {self._process.wait()}; its output says why")
        return _checked(self._role, msgspec.json.decode(line))

    def ask(self, command: str, *arguments: object) -> Answer:
        """Give a command and wait for its answer.

        Raises:
            ClientError: If the command failed, or the process ended.
            WaitTimeoutError: If the whole measurement takes too long.
        """
        self.send(command, *arguments)
        return self.answer()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ClientError(
                f"the {self._role} ended with status {self._process.wait()}; its output says why"
            ) from None

    def _expire(self) -> None:
        self._late = True
        self._process.kill()


class LocalPeer:
    """A side in a thread of this process, which shares its memory with the other one."""

    def __init__(self, setup: Setup) -> None:
        self._role = setup.role
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"deltabus-bench-{setup.role}")
        self._side = self._thread.submit(make_side, setup)
        self._answer: Future[Answer] = self._thread.submit(dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._side.done() and not self._side.exception():
            if kind is None:
                self._thread.submit(self._side.result().close).result(LIMIT)
            else:
                # Not in its own thread, which may wait for the other side.
                with contextlib.suppress(DeltabusError):  # the first error says more
                    self._side.result().close()
        self._thread.shutdown(wait=kind is None)

    def send(self, command: str, *arguments: object) -> None:
        """Give a command, and go on."""
        self._answer = self._thread.submit(lambda: getattr(self._side.result(), command)(*arguments))

    def answer(self) -> Answer:
        """Wait for the answer.

        Raises:
            DeltabusError: If the command failed.
            WaitTimeoutError: If it takes too long.
        """
        try:
            self._side.result(LIMIT)
            return self._answer.result(LIMIT)
        except TimeoutError as error:
            if isinstance(error, WaitTimeoutError):
                raise
            raise WaitTimeoutError(
                f"the {self._role} did not answer within {LIMIT:.0f} s; take a smaller state"
            ) from error

    def ask(self, command: str, *arguments: object) -> Answer:
        """Give a command and wait for its answer.

        Raises:
            DeltabusError: If the command failed.
            WaitTimeoutError: If it takes too long.
        """
        self.send(command, *arguments)
        return self.answer()


def start_peer(setup: Setup) -> Peer:
    """Start a side: in this process if the topic lives in it (`memory://`), in one of its own otherwise.

    Raises:
        ClientError: If its process ended at once.
    """
    return LocalPeer(setup) if in_this_process(setup.url) else ProcessPeer(setup)


def in_this_process(url: str) -> bool:
    """Return whether a topic lives in the memory of this process, so that both sides must run in it."""
    return url.lower().startswith("memory:")


def _checked(role: str, answer: Answer) -> Answer:
    if "error" in answer:
        raise ClientError(f"the {role}: {answer['error']}")
    return answer
