"""A stand-in for the module `os` that notes what writing files asks of the system, and strikes at one of the calls."""

import os
import signal
import threading

CALLS = frozenset({"open", "mkdir", "write", "fsync", "link", "unlink", "close"})
"""What `deltabus.transports.atomic` asks of the system when it writes."""


class System:
    """Stands for `os` in `deltabus.transports.atomic`; may be called from several threads.

    Args:
        before: Called with the number of each call, from 0, and its name, before it is made; what it raises, it raises.
        after: Likewise, when it was made, successfully or not.

    Attributes:
        calls: The names of the calls, in the order in which they were begun.
    """

    def __init__(self, *, before=lambda number, name: None, after=lambda number, name: None):
        self.calls = []
        self._before = before
        self._after = after
        self._lock = threading.Lock()

    def __getattr__(self, name):
        function = getattr(os, name)
        return self._wrap(name, function) if name in CALLS else function

    def _wrap(self, name, function):
        def call(*arguments, **options):
            with self._lock:
                number = len(self.calls)
                self.calls.append(name)
            self._before(number, name)
            try:
                return function(*arguments, **options)
            finally:
                self._after(number, name)

        return call


def deadly(number, moment, report):
    """A system that kills the process before or after one call, once it has written the call's name to a file."""

    def strike(called, name):
        if called == number:
            os.write(report, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    return System(**{moment: strike})


def failing(first, error, *, last=None, moment="before"):
    """A system whose calls from one number to another fail, before or after they take effect.

    A descriptor is closed all the same: no system keeps it open.
    """
    last = first if last is None else last

    def strike(called, name, late):
        if first <= called <= last and late == (moment == "after" or name == "close"):
            raise OSError(error, os.strerror(error))

    return System(
        before=lambda called, name: strike(called, name, False), after=lambda called, name: strike(called, name, True)
    )
