"""Writers of one log as a machine: restarts, zombies, lost answers and crashes in any order, against a plain list."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deltabus.bus.core import LogWriter
from deltabus.bus.errors import AppendUnknownError, FencedError, OvertakenError, TransientTransportError
from deltabus.bus.message import Kind, Stats, decode_message
from deltabus.bus.sequencer import Sequencer

from .support import FakeTransport, Store, Time, digest

LOST = AppendUnknownError("the answer was lost", url="fake://topic")
BUSY = TransientTransportError("busy", url="fake://topic")
FAULTS = {
    "none": ("", False, None),
    "nothing was written": ("append", False, LOST),
    "the answer was lost": ("append", True, LOST),
    "blobs could not be stored": ("put", False, BUSY),
}


class Life:
    """One incarnation of the writer, and the state that its next delta leads from."""

    def __init__(self, name, store):
        self.name = name
        self.transport = FakeTransport(store)
        # No second attempt: what a fault leaves open stays open.
        self.log = LogWriter(self.transport, "a", retry=Time().retry(limit=0.0), clock=lambda: 7.0)
        self.base = None
        self.fenced = False


class Writers(RuleBasedStateMachine):
    """Several incarnations of one writer, most of which should not be there any more."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = Store()
        self.lives = []
        self.told = {}
        self.opened = 0

    def teardown(self):
        self.loop.close()

    def there(self):
        return [decode_message(data) for _, data in sorted(self.store.records["a"].items())]

    @precondition(lambda self: len(self.lives) < 4)
    @rule()
    def start(self):
        """Another process opens the log."""
        self.opened += 1
        life = Life(f"life {self.opened}", self.store)
        self.loop.run_until_complete(life.log.open())
        last = self.there()[-1].epoch if self.there() else 0
        assert life.log.epoch == last + 1
        newest = max(life.log.history, key=lambda m: (m.version, m.position), default=None)
        life.base = newest
        self.lives.append(life)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 3))
    def die(self, number):
        self.lives.pop(number % len(self.lives))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 3), fault=st.sampled_from(sorted(FAULTS)), whole=st.booleans())
    def publish(self, number, fault, whole):
        life = self.lives[number % len(self.lives)]
        method, late, error = FAULTS[fault]
        if error is not None:
            life.transport.fail(method, error, late=late)
        length = len(self.there())
        try:
            message = self.loop.run_until_complete(self.commit(life, None if whole else life.base))
        except FencedError:
            assert life.fenced or any(m.epoch >= life.log.epoch for m in self.there() if m.metadata["by"] != life.name)
            life.fenced = True
        except OvertakenError:
            # Only by an earlier incarnation, or by its own message whose answer was lost.
            behind = self.there()[-1]
            assert behind.epoch < life.log.epoch or behind.metadata["by"] == life.name
            life.base = None
        except (AppendUnknownError, TransientTransportError):
            assert error is not None
        else:
            assert not life.fenced
            self.told[message.position] = message
            life.base = message
        for faults in (life.transport.before, life.transport.after):
            faults.clear()
        if life.fenced:
            assert len(self.there()) == length

    async def commit(self, life, base):
        version = life.log.next_version
        text = f"{life.name} {version}"
        blob = await life.log.store(text.encode(), name=f"{version:012d}")
        return await life.log.commit(
            kind=Kind.ANCHOR if base is None else Kind.DELTA,
            step=version,
            version=version,
            base={} if base is None else {"a": base.version},
            schema=await life.log.store_schema(b"{}"),
            digest_before=None if base is None else base.digest_after,
            digest_after=digest(text, version),
            blobs=[blob],
            stats=Stats(changed=1, total=2),
            metadata={"by": life.name},
        )

    @invariant()
    def what_was_acknowledged_is_there(self):
        there = self.there()
        assert all(there[position] == message for position, message in self.told.items())

    @invariant()
    def each_epoch_is_of_one_life_and_epochs_never_fall(self):
        there = self.there()
        assert [m.epoch for m in there] == sorted(m.epoch for m in there)
        assert len({(m.epoch, m.metadata["by"]) for m in there}) == len({m.epoch for m in there})

    @invariant()
    def it_is_a_history(self):
        sequencer = Sequencer()
        for message in self.there():
            sequencer.feed(message)
        assert list(sequencer.messages) == self.there()


TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
