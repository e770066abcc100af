"""Work that is shared out: all of it is done, once, and nobody goes on when the caller does."""

import os
import signal
import sys
import threading
import warnings
from itertools import count

import pytest

from deltabus.codecs.helpers import Helpers, share_out

from ..clients.interrupts import Steps
from ..clients.support import wait_until

LIMIT = 30


@pytest.fixture(params=[0, 1, 3])
def some_helpers(request):
    made = Helpers(request.param)
    yield made
    made.end()


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_each_item_is_worked_on_once(some_helpers, size):
    for used in (some_helpers, None):
        done = []
        share_out(done.append, range(size), used)
        assert sorted(done) == list(range(size))


def test_helpers_take_items_while_the_caller_works():
    shared, both = Helpers(1), threading.Barrier(2, timeout=LIMIT)
    threads = set()

    def work(item):
        threads.add(threading.get_ident())
        both.wait()

    shared.share(work, range(2))
    shared.end()
    assert len(threads) == 2


def test_whoever_calls_does_not_wait_for_helpers_that_are_busy():
    shared, begun, free = Helpers(1), threading.Event(), threading.Event()

    def hold(item):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert free.wait(LIMIT)

    other = threading.Thread(target=lambda: shared.share(hold, range(2)))
    other.start()
    assert begun.wait(LIMIT)
    done = []
    shared.share(done.append, range(10))
    assert done == list(range(10))
    free.set()
    other.join(LIMIT)
    shared.end()


@pytest.mark.parametrize("where", ["caller", "helper"])
@pytest.mark.parametrize("error", [ValueError("no"), IndexError("no"), KeyboardInterrupt()])
def test_an_error_ends_all_and_nobody_goes_on(where, error):
    shared, both, working, begun = Helpers(2), threading.Barrier(3, timeout=LIMIT), [], count()

    def work(item):
        next(begun)
        working.append(item)
        if item < 3:
            both.wait()
        if (threading.current_thread() is threading.main_thread()) == (where == "caller"):
            raise error
        working.remove(item)

    with pytest.raises(type(error)):
        shared.share(work, range(100_000))
    after = next(begun)
    assert after < 100_000
    assert len(working) <= 2  # those that raised
    shared.end()
    assert next(begun) == after + 1


class Terminated(BaseException):
    """What a process's handler of SIGTERM may raise."""


@pytest.fixture
def terminated():
    def handler(number, frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("terminated")
@pytest.mark.parametrize("times", range(5))
def test_interrupts_while_the_caller_waits_do_not_end_the_wait(times):
    shared, inside, ended = Helpers(1), threading.Event(), []
    shared.share(lambda item: None, range(2))  # the thread is there
    caller = threading.main_thread().ident

    def waits():
        code = sys._current_frames()[caller].f_code
        return (code.co_name, code.co_filename) == ("wait", Helpers.share.__code__.co_filename)

    def work(item):
        if threading.get_ident() == caller:
            assert inside.wait(LIMIT)
            raise ValueError("of the caller")
        inside.set()
        wait_until(waits)
        # Both are due at once: the second strikes where the first was just dealt with.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.pthread_kill(caller, number)
        for _ in range(3):
            wait_until(waits)
            signal.pthread_kill(caller, signal.SIGINT)
        ended.append(item)

    with pytest.raises((KeyboardInterrupt, Terminated)):
        shared.share(work, range(2))
    assert len(ended) == 1
    shared.end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one within a finalizer is only told
def test_an_interrupt_anywhere_leaves_nobody_at_work():
    shared, caller = Helpers(1), threading.get_ident()
    shared.share(lambda item: None, range(2))  # the thread is there
    struck = helped = 0
    for at in range(1, 60):  # how many places there are depends on who takes what
        inside, begun, ended = threading.Event(), [], []

        def work(item, inside=inside, begun=begun, ended=ended):
            if threading.get_ident() == caller:
                assert inside.wait(LIMIT)
            else:
                begun.append(item)
                inside.set()
                sum(range(20_000))  # long enough to be met
                ended.append(item)

        try:
            with Steps(at):
                shared.share(work, range(8))
        except KeyboardInterrupt:
            struck += 1
            helped += bool(begun)
        assert begun == ended
    assert struck > 10 and helped > 5
    shared.end()


def test_when_they_have_ended_the_caller_does_all(some_helpers):
    some_helpers.end()
    done = []
    some_helpers.share(done.append, range(5))
    assert done == list(range(5))


def test_a_process_that_was_forked_does_all_by_itself():
    shared = Helpers(1)
    shared.share(lambda item: None, range(100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads beside a fork are what this is about
        child = os.fork()
    if not child:
        done = []
        shared.share(done.append, range(5))
        os._exit(0 if done == list(range(5)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shared.end()
