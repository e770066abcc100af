"""Pruning a topic that others use, with crashes anywhere: against an oracle that only follows what is really there."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltabus.bus import pruner as pruner_module
from deltabus.bus.errors import AccessDeniedError, MessageFormatError, TransientTransportError
from deltabus.bus.leases import LONGEST, Lease, LeaseKeeper, read_leases
from deltabus.bus.message import Blob, Kind, decode_message, encode_message
from deltabus.bus.pruner import Pruner, trimmed_to
from deltabus.bus.retention import Retention

from .support import LIMIT, FakeTransport, Store, Time, anchor, delta

GRACE = 10.0
GARBAGE = 50.0
SECONDS = 30.0


class _CrashError(BaseException):
    """The process that prunes dies here."""


def fields_of(message, **others):
    return type(message)(**{name: getattr(message, name) for name in message.__struct_fields__} | others)


class Trainer:
    """Publishes to a store as a writer does: blobs first, then the record."""

    def __init__(self, store, writer="a"):
        self.store = store
        self.transport = FakeTransport(store)
        self.writer = writer
        self.version = 0
        self.position = 0
        self.schema = self._blob("schemas/1.json", b"{}")

    def _blob(self, key, data):
        return Blob(key=key, size=len(data), checksum=hashlib.sha256(data).digest())

    async def put(self, kind, version, part=0, base=0):
        data = f"{kind} {base} {version} {part}".encode()
        digest = hashlib.sha256(data).hexdigest()[:16]
        key = f"blobs/{self.writer}/{version:012}-{kind}-{part:04}-{digest}"
        await self.transport.put(key, data)
        return self._blob(key, data)

    async def append(self, kind, version, blobs, base=0):
        await self.transport.put(self.schema.key, b"{}")
        made = anchor if kind is Kind.ANCHOR else delta
        options = {} if kind is Kind.ANCHOR else {"base": base}
        message = fields_of(
            made(self.position, version, writer=self.writer, **options), schema=self.schema, blobs=tuple(blobs)
        )
        await self.transport.append(self.writer, self.position, encode_message(message))
        self.position += 1
        self.version = max(self.version, version)
        return message

    async def publish(self, *, whole=False, base=None):
        version = self.version + 1
        kind = Kind.ANCHOR if whole or not self.version else Kind.DELTA
        base = 0 if kind is Kind.ANCHOR else self.version
        return await self.append(kind, version, [await self.put(kind, version, base=base)], base=base)

    async def repeat(self, version):
        """The anchor of an earlier version, which lands behind what was published since."""
        blobs = [await self.put(Kind.ANCHOR, version)]
        return await self.append(Kind.ANCHOR, version, blobs)

    async def skip(self, base):
        return await self.append(
            Kind.DELTA, self.version, [await self.put(Kind.DELTA, self.version, 1, base=base)], base=base
        )


def present(store, writer="a"):
    """The messages of a log whose blobs are all there."""
    messages = [decode_message(data) for _, data in sorted(store.records[writer].items())]
    return [m for m in messages if all(blob.key in store.blobs for blob in (m.schema, *m.blobs))]


def reached(store, start, writer="a"):
    """The versions that can be reached from one by deltas, or from nothing (0)."""
    found = {start}
    grew = True
    while grew:
        grew = False
        for message in present(store, writer):
            origin = 0 if message.kind is Kind.ANCHOR else message.base[writer]
            if origin in found and message.version not in found:
                found.add(message.version)
                grew = True
    return found


class Pruned(RuleBasedStateMachine):
    """A trainer, readers with leases, and processes that prune and may die at each of their calls."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = Store()
        self.trainer = Trainer(self.store)
        self.leases = {}
        self.pending = None
        self.number = 0

    def teardown(self):
        self.loop.close()

    def run(self, work):
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self):
        self.run(self.trainer.publish())

    @rule(whole=st.booleans())
    def publish(self, whole):
        self.run(self.trainer.publish(whole=whole))
        # What was being uploaded for that version was of an attempt that was given up.
        if self.pending is not None and (whole or self.pending[0] is Kind.DELTA):
            self.pending = None

    @rule(back=st.integers(0, 4))
    def repeat(self, back):
        version = max(1, self.trainer.version - back)
        self.run(self.trainer.repeat(version))
        if self.pending is not None and self.pending[0] is Kind.ANCHOR and self.pending[1] < version:
            self.pending = None  # the next anchor begins when the one before has ended

    @precondition(lambda self: self.trainer.version > 2)
    @rule(back=st.integers(2, 6))
    def skip(self, back):
        base = max(1, self.trainer.version - back)
        if base < self.trainer.version:
            self.run(self.trainer.skip(base))

    @precondition(lambda self: self.pending is None)
    @rule()
    def upload_slowly(self):
        version = self.trainer.version + 1
        self.pending = (Kind.DELTA, version, self.trainer.version, [self.run(self.trainer.put(Kind.DELTA, version, 7))])

    @precondition(lambda self: self.pending is None)
    @rule()
    def upload_an_anchor_slowly(self):
        version = self.trainer.version
        self.pending = (Kind.ANCHOR, version, 0, [self.run(self.trainer.put(Kind.ANCHOR, version, 7))])

    def newest_anchor(self):
        return max(m.version for m in present(self.store) if m.kind is Kind.ANCHOR)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def finish_upload(self):
        kind, version, base, blobs = self.pending
        self.pending = None
        assert all(blob.key in self.store.blobs for blob in blobs)
        self.run(self.trainer.append(kind, version, blobs, base=base))

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0, 60.0]))
    def time_goes_on(self, seconds):
        self.store.now += seconds

    @rule(back=st.integers(0, 6))
    def lend(self, back):
        held = max(0, self.trainer.version - back)
        self.number += 1
        key = f"leases/{self.number:016x}/{1:012}"
        lease = Lease(reader=str(self.number), holds={"a": held}, seconds=SECONDS)
        self.run(FakeTransport(self.store).put(key, msgspec.msgpack.encode(lease)))
        ways = {m.position for m in present(self.store) if m.version > held}
        self.leases[key] = (self.store.now + SECONDS, held, ways, reached(self.store, held))

    @rule(
        anchors=st.none() | st.integers(1, 3),
        age=st.none() | st.sampled_from([0.0, 30.0, 100.0]),
        most=st.none() | st.integers(0, 300),
        dies=st.none() | st.integers(0, 30),
    )
    def prune(self, anchors, age, most, dies):
        if anchors is None and age is None and most is None:
            anchors = 1
        policy = Retention(keep_anchors=anchors, max_age=age, max_bytes=most, grace=GRACE, garbage_age=GARBAGE)
        transport = Dying(self.store, dies)
        pruner = Pruner(transport, policy, retry=Time().retry())
        try:
            self.run(pruner.prune())
        except _CrashError:
            pass
        else:
            if dies is None:
                self.nothing_old_is_left()

    def nothing_old_is_left(self):
        named = {blob.key for m in present(self.store) for blob in m.blobs}
        for key, stored in self.store.times.items():
            if key.startswith("blobs/") and key not in named and stored <= self.store.now - GARBAGE:
                assert int(key.split("/")[2][:12]) >= self.newest_anchor()
            if key.startswith("leases/"):
                assert stored + SECONDS > self.store.now

    @invariant()
    def the_newest_version_can_be_reached_from_nothing(self):
        if self.trainer.version:
            assert self.trainer.version in reached(self.store, 0)

    @invariant()
    def the_log_has_no_hole_and_goes_on(self):
        positions = sorted(self.store.records["a"])
        assert positions == list(range(positions[0], self.trainer.position)) if positions else True
        assert len(present(self.store)) == len(positions)

    @invariant()
    def live_leases_go_on(self):
        there = {m.position for m in present(self.store)}
        for ends, held, ways, versions in self.leases.values():
            if self.store.now < ends:
                assert ways <= there
                assert versions <= reached(self.store, held)


class Dying(FakeTransport):
    """Dies at one of its calls, before or after it took effect."""

    def __init__(self, store, dies):
        super().__init__(store)
        self.left = dies

    async def _begin(self, method):
        await super()._begin(method)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _CrashError

    async def trim(self, log, before):
        for position in sorted(self.store.records[log])[:-1]:
            if position < before:
                await super().trim(log, position + 1)

    async def delete(self, keys):
        for key in keys:
            await super().delete([key])


TestPruned = Pruned.TestCase
TestPruned.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


async def published(count, *, anchors=()):
    store = Store()
    trainer = Trainer(store)
    for version in range(1, count + 1):
        await trainer.publish(whole=version in anchors)
    store.now = 1000.0
    return store, trainer


async def test_records_go_before_blobs_and_the_oldest_first():
    store, _ = await published(6, anchors=(1, 4))
    keys = [message.blobs[0].key for message in present(store)]
    del store.order[:]
    pruning = await Pruner(FakeTransport(store), Retention(keep_anchors=1, grace=0)).prune()
    assert not pruning.empty
    gone = [entry for entry in store.order if entry.startswith(("-a@", "-blobs"))]
    assert gone == ["-a@0", "-a@1", "-a@2", *(f"-{key}" for key in keys[:3])]
    assert [message.version for message in present(store)] == [4, 5, 6]
    assert store.order.index(f"trims/a/{3:020}") < store.order.index("-a@0")
    assert await trimmed_to(FakeTransport(store), "a") == 3
    assert not [key for key in store.blobs if key.startswith("marks/")]
    assert (await Pruner(FakeTransport(store), Retention(keep_anchors=1, grace=0)).prune()).empty


async def test_what_may_go_is_found_beside_the_loop(monkeypatch):
    store, _ = await published(6, anchors=(1, 4))
    where = []
    for name in ("plan_removal", "garbage"):
        work = getattr(pruner_module, name)

        def told(*arguments, work=work, **options):
            where.append(threading.current_thread())
            return work(*arguments, **options)

        monkeypatch.setattr(pruner_module, name, told)
    await Pruner(FakeTransport(store), Retention(keep_anchors=1, grace=0)).prune()
    assert len(where) == 2
    assert threading.current_thread() not in where


async def test_a_plan_changes_nothing():
    store, _ = await published(6, anchors=(1, 4))
    before = (dict(store.blobs), {log: dict(records) for log, records in store.records.items()})
    policy = Retention(keep_anchors=1, grace=0)
    transport = FakeTransport(store)
    pruning = await Pruner(transport, policy, clock=lambda: 1000.0).plan()
    assert pruning.removal.trims == {"a": 3}
    assert set(transport.calls) <= {"logs", "read", "blobs", "get"}
    assert before == (store.blobs, store.records)


async def test_only_the_mark_of_the_last_trim_is_kept():
    store, trainer = await published(4, anchors=(1, 2))
    pruner = Pruner(FakeTransport(store), Retention(keep_anchors=1, grace=0))
    await pruner.prune()
    await trainer.publish(whole=True)
    await pruner.prune()
    assert [key for key in store.blobs if key.startswith("trims/")] == [f"trims/a/{4:020}"]
    assert await trimmed_to(FakeTransport(store), "other") == 0


async def test_a_topic_that_cannot_be_read_is_left_alone():
    store, _ = await published(6, anchors=(1, 4))
    store.records["a"][2] = b"damaged"
    blobs = set(store.blobs)
    with pytest.raises(MessageFormatError):
        await Pruner(FakeTransport(store), Retention(keep_anchors=1, grace=0)).prune()
    assert set(store.blobs) == blobs
    assert len(store.records["a"]) == 6


async def test_the_backends_clock_decides():
    store, _ = await published(6, anchors=(1, 4))
    policy = Retention(keep_anchors=1, grace=2000.0)
    # This machine's clock is far ahead; by the backend's all is younger than the grace.
    assert (await Pruner(FakeTransport(store), policy, clock=lambda: 1e9).prune()).removal.trims == {}
    store.now = 2000.0
    assert (await Pruner(FakeTransport(store), policy, clock=lambda: 0.0).prune()).removal.trims == {"a": 3}


class Beginning(FakeTransport):
    """A topic whose first messages come right behind the answer that it has no logs."""

    async def logs(self):
        found = await super().logs()
        if not found:
            trainer = Trainer(self.store)
            for _ in range(3):
                await trainer.publish(whole=True)
        return found


async def test_a_topic_without_logs_is_left_alone_whatever_this_machines_clock_says():
    store = Store()
    await keeper(FakeTransport(store), lambda: {"a": 0}).renew()
    leases = set(store.blobs)
    # Far ahead, so that by this clock the lease is dead, and what is published now is old.
    pruning = await Pruner(Beginning(store), Retention(keep_anchors=1), clock=lambda: 1e9).prune()
    assert pruning.empty and leases <= set(store.blobs)
    assert len(store.records["a"]) == 3


async def test_a_prune_goes_on_after_faults_that_pass():
    store, _ = await published(6, anchors=(1, 4))
    transport = FakeTransport(store)
    for method in ("blobs", "trim", "delete", "put"):
        transport.fail(method, TransientTransportError("later", url="fake://topic"))
    await Pruner(transport, Retention(keep_anchors=1, grace=0), retry=Time().retry()).prune()
    assert [message.version for message in present(store)] == [4, 5, 6]


# Leases


def keeper(transport, holds, *, seconds=SECONDS, folder=b"\1" * 8):
    return LeaseKeeper(
        transport, reader="r", seconds=seconds, holds=holds, retry=Time().retry(limit=1.0), draw=lambda _: folder
    )


async def test_a_lease_is_renewed_in_place_of_the_one_before_and_given_up():
    store = Store()
    transport, held = FakeTransport(store), {"a": 3}
    lease = keeper(transport, lambda: held)
    await lease.renew()
    held = {"a": 5}
    store.now = 10.0
    await lease.renew()
    (found,) = await read_leases(transport, retry=Time().retry(), now=10.0)
    assert (found.reader, found.holds, found.ends) == ("r", {"a": 5}, 10.0 + SECONDS)
    assert found.is_live(39.9)
    assert not found.is_live(40.0)
    await lease.end()
    await lease.end()
    assert store.blobs == {}


async def test_a_lease_that_is_renewed_while_it_is_read_is_not_missed():
    transport = FakeTransport()
    lease = keeper(transport, lambda: {"a": 3})
    await lease.renew()
    (found,) = await read_leases(FakeTransport(transport.store), retry=Time().retry(), now=0.0)
    reading = FakeTransport(transport.store)
    reading.fail("get", lease.renew)
    (again,) = await read_leases(reading, retry=Time().retry(), now=0.0)
    assert (found.key[-1], again.key[-1], again.holds) == ("1", "2", {"a": 3})
    reading.fail("get", *[lease.renew] * 100)
    (vague,) = await read_leases(reading, retry=Time().retry(), now=0.0)
    assert vague.holds is None
    assert vague.is_live(0.0)


async def test_a_renewal_that_fails_is_tried_again_before_the_lease_ends():
    store = Store()
    transport = FakeTransport(store)
    clock = asyncio.get_running_loop().time
    lease = keeper(transport, dict, seconds=2.0)
    await lease.renew()
    began, stored = clock(), asyncio.Event()

    async def told():
        stored.set()

    transport.fail("put", AccessDeniedError("not now", url="fake://topic"))
    transport.fail("put", told, late=True)
    running = asyncio.create_task(lease.run())
    try:
        async with asyncio.timeout(LIMIT):
            await stored.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert 1.1 < clock() - began < 2.0


async def test_a_first_lease_is_given_up_after_ten_seconds():
    time, transport = Time(), FakeTransport()
    transport.fail("put", *[TransientTransportError("busy", url="fake://topic")] * 1000)
    lease = LeaseKeeper(transport, reader="r", seconds=600.0, holds=dict)
    lease._retry = dataclasses.replace(lease._retry, sleep=time.sleep, clock=lambda: time.now)
    await lease.renew()
    assert 0.0 < time.now <= 10.0


async def test_renewals_beside_each_other_leave_one_lease_and_a_cancelled_one_leaves_none():
    transport = FakeTransport()
    lease = keeper(transport, dict)
    await asyncio.gather(*(lease.renew() for _ in range(3)))
    assert [key[-1] for key in transport.store.blobs] == ["3"]
    hangs = asyncio.Event()

    async def hang():
        hangs.set()
        await asyncio.Event().wait()

    transport.fail("put", hang, late=True)  # it is stored, and nobody is told
    renewing = asyncio.create_task(lease.renew())
    async with asyncio.timeout(LIMIT):
        await hangs.wait()
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)
    assert len(transport.store.blobs) == 2
    await lease.end()
    assert transport.store.blobs == {}


async def test_a_reader_that_may_not_write_goes_without_a_lease(caplog):
    transport = FakeTransport()
    transport.fail("put", *[AccessDeniedError("no", url="fake://topic")] * 2)
    lease = keeper(transport, dict)
    await lease.renew()
    await lease.renew()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    await lease.renew()
    assert len(transport.store.blobs) == 1


async def test_a_lease_that_cannot_be_read_holds_everything_for_an_hour():
    store, _ = await published(6, anchors=(1, 4))
    key = f"leases/{7:016x}/{1:012}"
    await FakeTransport(store).put(key, b"\xff\xff")
    pruner = Pruner(FakeTransport(store), Retention(keep_anchors=1, grace=0))
    assert (await pruner.prune()).removal.held_by == (key,)
    store.now += 3600.0
    assert (await pruner.prune()).removal.trims == {"a": 3}
    assert key not in store.blobs


async def test_no_lease_lasts_longer_than_a_week():
    store = Store()
    lease = Lease(reader="r", holds={}, seconds=1e12)
    await FakeTransport(store).put(f"leases/{7:016x}/{1:012}", msgspec.msgpack.encode(lease))
    await FakeTransport(store).put("leases/not one", b"")
    (found,) = await read_leases(FakeTransport(store), retry=Time().retry(), now=0.0)
    assert found.ends == LONGEST
    (found,) = await read_leases(FakeTransport(store), retry=Time().retry(), now=LONGEST)
    assert not found.is_live(LONGEST)
