"""Ways to stop code midway: wherever a signal can, at the n-th write, or after some time."""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from deltabus.codecs.kernels import compare

may_strike_finalizers = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Of a test whose interrupts may strike within a finalizer, or the garbage collector: there they are only told."""


class Steps:
    """Counts the places where the interpreter looks for signals while deltabus runs in this thread; interrupts one.

    It looks when a function begins, when a loop begins anew, and within a call of a function written in C, once that
    has returned. Nowhere else could an interrupt strike: at any line or instruction, it might come between the end of a
    `with` block and giving back the lock.

    Args:
        at: Which, from 1; 0 interrupts none.

    Attributes:
        count: How many there were.
    """

    def __init__(self, at: int = 0) -> None:
        self.count = 0
        self._at = at

    def __enter__(self) -> Steps:
        self._before = sys.gettrace(), sys.getprofile()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before[1])
        sys.settrace(self._before[0])

    def _profile(self, frame, event, argument):
        if event in {"call", "c_return"} and "deltabus" in frame.f_code.co_filename:
            self._look()

    def _trace(self, frame, event, argument):
        if "deltabus" not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in jumps_back(frame.f_code):
            self._look()
        return self._trace

    def _look(self):
        self.count += 1
        if self.count == self._at:
            raise KeyboardInterrupt


@functools.cache
def jumps_back(code):
    """Where a function's loops begin anew."""
    return {
        at.offset
        for at in dis.get_instructions(code)
        if "JUMP_BACKWARD" in at.opname and not at.opname.endswith("NO_INTERRUPT")
    }


@contextmanager
def failing_write(monkeypatch, error: BaseException, *, at: int) -> Iterator[list[int]]:
    """Let the n-th write to memory raise an error, once it was made; gives a list that grows by one at each write."""
    calls: list[int] = []

    def wrapped(write):
        def call(*arguments):
            calls.append(at)
            result = write(*arguments)
            if len(calls) == at:
                raise error
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_copy_", wrapped(torch.Tensor.index_copy_))
        patch.setattr(compare, "scatter", wrapped(compare.scatter))
        yield calls


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Interrupt this process's main thread after some time, as somebody at the keyboard would; only within."""

    armed = True

    def strike(number, frame):
        if armed:  # one that comes late would end whatever runs then
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    limit, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, limit)  # the clock is that of the test's own time limit
