"""Protocols with one rule broken, each as the context in which it is: a simulation must fail in all of them.

They change the real code by hand, in this process, and put it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest.mock import patch

import msgspec

from deltabus.bus import pruner, retention, writer
from deltabus.bus.core import LogWriter, TopicReader
from deltabus.bus.cuts import Cuts
from deltabus.bus.errors import AppendUnknownError, OvertakenError, PositionTakenError
from deltabus.bus.leases import HeldLease
from deltabus.bus.message import Cohort
from deltabus.bus.pruner import Pruner
from deltabus.bus.retry import Retry
from deltabus.bus.sequencer import Sequencer
from deltabus.route import Router

from .follower import Follower
from .trainer import Trainer

__all__ = ["MUTANTS"]


@contextlib.contextmanager
def _both(one, other):
    with one, other:
        yield


def no_epoch_check():
    """Whoever loses the race for a position goes on behind the winner, whatever its epoch."""

    async def yield_to_others(self, there, taken):
        for entry in await self._read(self._link):
            self._take_in(entry)
        raise OvertakenError("somebody else was faster") from taken

    return patch.object(LogWriter, "_yield_to_others", yield_to_others)


def epochs_stay():
    """A restart takes the epoch of the one before."""
    opened = LogWriter.open

    async def open_(self):
        await opened(self)
        self._epoch = max(1, self._epoch - 1)

    return patch.object(LogWriter, "open", open_)


def versions_start_again():
    """A restart counts its versions from 1."""
    opened = LogWriter.open

    async def open_(self):
        await opened(self)
        self._version = 0
        self._states.clear()

    return patch.object(LogWriter, "open", open_)


def base_before_durable():
    """What was captured is the base of the next delta, whether or not it became durable."""
    publish = Trainer._publish

    async def ahead(self):
        captured = self.state
        durable = await publish(self)
        self._base_state = captured
        return durable

    return patch.object(Trainer, "_publish", ahead)


def lost_answers_are_good_news():
    """An append whose answer was lost counts as done."""
    call = Retry.call

    async def believing(self, what, work, **options):
        async def once():
            with contextlib.suppress(AppendUnknownError):
                return await work()

        return await call(self, what, once if "appending" in what else work, **options)

    return patch.object(Retry, "call", believing)


def taken_is_done():
    """Whoever finds its position taken believes that it was itself."""
    append = LogWriter._append

    async def believing(self, record):
        with contextlib.suppress(PositionTakenError, OvertakenError):
            await append(self, record)

    return patch.object(LogWriter, "_append", believing)


def records_before_blobs():
    """A record is appended while its last blob is on the way."""
    put = LogWriter._put

    async def later(self, key, data, digest):
        if "delta" not in key:
            return await put(self, key, data, digest)
        writer.asyncio.get_running_loop().create_task(put(self, key, data, digest))
        return writer.Blob(key=key, size=len(data), checksum=digest)

    return patch.object(LogWriter, "_put", later)


def no_leases():
    """Retention asks nobody."""

    async def none(transport, *, retry, now):
        return []

    return patch.object(pruner, "read_leases", none)


def leases_end_early():
    """Retention heeds a lease only until half a minute before its end, as if by a clock that is wrong."""
    return patch.object(HeldLease, "is_live", lambda self, now: now + 30.0 < self.ends)


def no_grace():
    """Retention removes records behind which an append may be under way."""
    return patch.object(retention, "_settled", lambda log, is_old: log[-1].position)


def any_anchor_will_do():
    """Retention lets a log begin at its newest anchor, though deltas that lead on stand in front of it."""
    starts = retention._starts

    def at_the_anchor(log, target, intact):
        return [retention._Start(s.anchor.position, s.anchor, s.leads) for s in starts(log, target, intact)]

    return patch.object(retention, "_starts", at_the_anchor)


def blobs_before_records():
    """Retention removes blobs while records still name them."""
    trim, delete = Pruner._trim, Pruner._delete
    waiting = []

    async def later(self, log, before):
        waiting.append((self, log, before))

    async def delete_first(self, keys):
        await delete(self, keys)
        while waiting and waiting[-1][0] is self:
            await trim(*waiting.pop())

    return _both(patch.object(Pruner, "_trim", later), patch.object(Pruner, "_delete", delete_first))


def garbage_of_any_age():
    """Whatever no record names is garbage at once."""

    def unnamed(stored, *, messages, now, policy):
        named = retention._named(messages)
        return tuple(blob for blob in stored if blob.key not in named)

    return patch.object(pruner, "garbage", unnamed)


def starts_are_not_told():
    """A reader is not told that a log begins later than it did."""
    return patch.object(TopicReader, "starts", {})


def missing_is_not_avoided():
    """A reader goes on trying what is not there."""
    return patch.object(Router, "avoid", lambda self, message, reason: None)


def whatever_was_staged():
    """A reader hands over what a way led to that broke off, though that is older than what it handed over before."""
    return patch.object(Follower, "_is_onward", lambda self, state: True)


def newest_from_anything():
    """A reader takes a delta for a way from whatever it holds."""
    plan_of = Sequencer.plan

    def shortest(self, *, have, target):
        found = plan_of(self, have=have, target=target)
        if have is None or len(found.messages) < 2:
            return found
        return type(found)({w: path[-1:] for w, path in found.by_writer.items()})

    return patch.object(Sequencer, "plan", shortest)


def generations_are_one():
    """A cut takes what members published of a step in whatever incarnation of their group."""
    enter = Cuts.enter

    def mixed(self, message, needs):
        same = Cohort(generation=1, ranks=message.ranks)
        enter(self, msgspec.structs.replace(message, cohort=same) if message.generation else message, needs)

    return _both(patch.object(Cuts, "enter", mixed), patch.object(Cuts, "check", lambda self, known, message: ""))


def some_are_enough():
    """A cut is made as soon as anybody of a group has published a step."""
    enter = Cuts.enter

    def alone(self, message, needs):
        one = msgspec.structs.replace(
            message, group=(message.writer,), cohort=Cohort(generation=message.generation or 1)
        )
        enter(self, one if message.generation else message, needs)

    return _both(patch.object(Cuts, "enter", alone), patch.object(Cuts, "check", lambda self, known, message: ""))


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    mutant.__name__: mutant
    for mutant in (
        no_epoch_check,
        epochs_stay,
        versions_start_again,
        base_before_durable,
        lost_answers_are_good_news,
        taken_is_done,
        records_before_blobs,
        no_leases,
        leases_end_early,
        no_grace,
        any_anchor_will_do,
        blobs_before_records,
        garbage_of_any_age,
        starts_are_not_told,
        missing_is_not_avoided,
        newest_from_anything,
        whatever_was_staged,
        generations_are_one,
        some_are_enough,
    )
}
