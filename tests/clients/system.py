"""A stand-in for the module `os` that notes what writing files asks of the system, and strikes at one of the calls."""

import functools
import os
import signal
import threading
from pathlib import Path

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


class Disk(System):
    """A system that knows which new names in directories would not survive if the machine lost its power.

    Attributes:
        unforced: The directories, by inode, that got names since they were last forced to disk.
    """

    def __init__(self, **hooks):
        super().__init__(**hooks)
        self.unforced = set()
        self._here = threading.local()

    @property
    def named(self):
        """Whether this thread has given a name, and has not forced it to disk yet."""
        return getattr(self._here, "named", False)

    def mkdir(self, path):
        directory = Path(path)
        known = directory.is_dir()
        try:
            self._wrap("mkdir", os.mkdir)(path)
        finally:
            if directory.is_dir() and not known:
                self.unforced.add(directory.parent.stat().st_ino)

    def link(self, source, target, *, src_dir_fd, dst_dir_fd):
        try:
            self._wrap("link", os.link)(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        finally:
            self.unforced.add(os.fstat(dst_dir_fd).st_ino)
            self._here.named = True

    def fsync(self, file):
        try:
            self._wrap("fsync", os.fsync)(file)
        finally:
            self._here.named = False
        self.unforced.discard(os.fstat(file).st_ino)


def deadly(number, moment, report):
    """A system that kills the process before or after one call, once it has written the call's name to a file."""

    def strike(called, name):
        if called == number:
            os.write(report, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    return System(**{moment: strike})


def failing(first, error, *, last=None, moment="before"):
    """A disk at which the calls from one number to another fail, before or after they take effect.

    A file is closed all the same: no system keeps it open. The disk's `struck` has the names of those that failed;
    `"fsync of a name"` is one that forces a name to disk that was just given.
    """
    last = first if last is None else last
    struck = []

    def strike(called, name, now):
        if first <= called <= last and now == ("after" if name == "close" else moment):
            struck.append("fsync of a name" if name == "fsync" and disk.named else name)
            raise OSError(error, os.strerror(error))

    disk = Disk(**{now: functools.partial(strike, now=now) for now in ("before", "after")})
    disk.struck = struck
    return disk
