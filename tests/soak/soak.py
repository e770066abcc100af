"""A trainer and readers on a real server, and what happens to them: kills, outages, lost answers, a second trainer.

What happens, and in which order, is drawn from a seed. Between two faults a few more steps must become durable.
"""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter

from deltabus.bus.core import TopicReader
from deltabus.cli.verify import verify_topic
from deltabus.transports import open_transport

from ..clients.players import Player
from ..clients.scenario import new_model
from ..transports.proxy import Proxy

__all__ = ["Ledger", "Soak"]

READERS = ((False, True), (True, True), (True, False))
"""Whether each reader goes to the newest version at once, and whether it has a lease."""

SURE = 10.0
"""Seconds of a lease that is renewed in time however busy the machine is."""

MOST_STEPS = 6
BITS = sum(tensor.numel() * tensor.element_size() * 8 for tensor in new_model().state_dict().values())


class Ledger:
    """What was told of each version by whom, and what of it contradicts itself.

    Attributes:
        durable: The bits of each version that a trainer was told is durable.
        applied: The bits of each version that a reader held.
        states: How many states of readers were compared.
        lost: Versions that were durable, and are not in the topic.
        mixed: Versions whose bits differ between two who had them, or that came in the wrong order.
        undetected: Updates that led to other bits than their message says, and no error was raised.
    """

    def __init__(self):
        self.durable = {}
        self.applied = {}
        self.states = 0
        self.lost, self.mixed, self.undetected = [], [], []

    def trained(self, lines):
        """Take in what a trainer told."""
        for version, _, bits in (line for line in lines if line[0] != "fenced"):
            self._compare(self.durable.setdefault(int(version), bits), bits, f"{version}, durable twice")

    def read(self, lines, who, *, every):
        """Take in what one life of a reader told.

        One that wants every version, and has asked retention to leave them since it began, must get each.
        """
        before, held = None, False
        for kind, told, *rest in lines:
            version = int(told)
            if kind != "held":
                bits, meant = rest
                self.states += 1
                if bits != meant:
                    self.undetected.append(f"{version} of {who}")
                self._compare(self.applied.setdefault(version, bits), bits, f"{version} of {who}")
                if before is not None and version <= before:
                    self.mixed.append(f"{version} behind {before} of {who}")
                if every and before is not None and not held and version != before + 1:
                    self.lost.append(f"{kind} {version} behind {before} of {who}")
            before, held = version, kind == "held"

    def close(self, history):
        """Hold what was told against the topic's messages."""
        said = {message.version: message.metadata["bits"] for message in history}
        first = min(said)
        for version, bits in self.durable.items():
            if version >= first and version not in said:
                self.lost.append(f"{version}, durable, is not in the topic")
            self._compare(self.applied.get(version, bits), bits, f"{version}, applied and durable")
            self._compare(said.get(version, bits), bits, f"{version}, durable and in the topic")

    def _compare(self, one, other, what):
        if one != other:
            self.mixed.append(what)


class Soak:
    """One run on one backend.

    Args:
        backend: Its server, started.
        company: Where its processes come from.
        directory: Where they keep what they save.
        seed: Decides what happens.
        lease: Seconds of a reader's lease.

    Attributes:
        faults: How often each kind happened.
        ledger: What came of it.
    """

    def __init__(self, backend, company, directory, *, seed, lease):
        self.faults = Counter()
        self.ledger = Ledger()
        self.removed = 0
        self._backend = backend
        self._company = company
        self._directory = directory
        self._lease = lease
        self._chance = random.Random(f"{seed} {backend.scheme}")
        self._topic = backend.new_topic()
        self._proxy = None
        self._lives = Counter()
        self._trainer = None
        self._readers = []
        self._stack = contextlib.AsyncExitStack()

    async def play(self, seconds, *, least):
        """Let things happen for a time, and so many at least, and come to an end that everybody reaches."""
        async with self._stack as stack:
            if self._backend.port is not None:
                self._proxy = await stack.enter_async_context(Proxy(self._backend.port))
            self._trainer = await self._hire()
            self._readers = [await self._follow(number) for number in range(len(READERS))]
            end = time.monotonic() + seconds
            while time.monotonic() < end or self.faults.total() < least:
                await self._progress()
                name, event = self._draw()
                await event()
                self.faults[name] += 1
            (self._directory / "stop").touch()
            await self._trainer.end()
            self.ledger.trained(self._trainer.lines)
            for number, reader in enumerate(self._readers):
                await reader.end()
                self._note_read(number, reader)
        await self._look_back()

    async def _look_back(self):
        url = self._backend.url(self._topic)
        async with open_transport(url) as transport:
            reader = TopicReader(transport)
            history = await reader.load()
            self.removed = sum(reader.starts.values())
        self.ledger.close(history)
        newest = max(message.version for message in history)
        assert newest == max(self.ledger.durable) == max(self.ledger.applied)
        assert all(int(reader.lines[-1][1]) == newest for reader in self._readers)
        report = await asyncio.to_thread(verify_topic, url)
        assert report.ok, report.problems

    async def _progress(self):
        """Wait until a few more steps are durable."""
        trainer, steps = self._trainer, self._chance.randint(1, MOST_STEPS)
        told = len(trainer.lines)
        await trainer.until(lambda lines: len(lines) >= told + steps)

    # What happens

    def _draw(self):
        events = [("trainer killed", self._kill_trainer), ("reader killed", self._kill_reader)]
        events += [("trainer stopped and replaced", self._replace_trainer)]
        events += [("pruned", self._prune), ("pruner killed", self._kill_pruner)]
        if self._proxy is not None:
            events += [
                ("answers lost", self._lose_answers),
                ("connections cut", self._cut),
                ("outage", self._refuse),
                ("slow line", self._slow_down),
            ]
        if self._backend.kills and self._chance.random() < 0.1:  # it takes longest
            return "server killed", self._restart_server
        return self._chance.choice(events)

    async def _kill_trainer(self):
        await self._trainer.kill()
        self.ledger.trained(self._trainer.lines)
        self._trainer = await self._hire()

    async def _replace_trainer(self):
        """Stop a trainer, let another take over, and let the first one go on."""
        old = self._trainer
        old.signal(signal.SIGSTOP)
        self._trainer = await self._hire()
        await self._trainer.until(bool)
        old.signal(signal.SIGCONT)
        await old.end()
        assert old.lines[-1] == ["fenced"]
        self.ledger.trained(old.lines)

    async def _kill_reader(self):
        number = self._chance.randrange(len(self._readers))
        reader = self._readers[number]
        if reader.lines:
            await reader.kill()
            self._note_read(number, reader)
            if self._chance.random() < 0.3:
                self._saved(number).unlink(missing_ok=True)
            self._readers[number] = await self._follow(number)

    async def _prune(self):
        pruner = await self._send_pruner()
        await pruner.end()

    async def _kill_pruner(self):
        """Let somebody prune, and kill it a moment later, wherever it is."""
        pruner = await self._send_pruner()
        await asyncio.sleep(self._chance.uniform(0, 0.03))
        await pruner.kill()

    async def _send_pruner(self):
        pruner = await self._stack.enter_async_context(Player(self._company, "soak-pruner", self._url))
        await pruner.until(bool)
        pruner.say("go")
        return pruner

    async def _lose_answers(self):
        for request, answer in self._backend.writes(self._topic):
            self._proxy.drop(request, answer=answer)

    async def _cut(self):
        self._proxy.cut()

    async def _refuse(self):
        self._proxy.refusing = True
        self._proxy.cut()
        await asyncio.sleep(self._chance.uniform(0.1, 1.5))
        self._proxy.refusing = False

    async def _slow_down(self):
        self._proxy.latency = 0.0 if self._proxy.latency else self._chance.uniform(0.001, 0.03)

    async def _restart_server(self):
        await asyncio.to_thread(self._backend.kill)
        await asyncio.to_thread(self._backend.start)

    # Who comes

    @property
    def _url(self):
        return self._backend.url(self._topic, port=self._proxy and self._proxy.port)

    def _life(self, name):
        self._lives[name] += 1
        return f"{name}-{self._lives[name]}"

    async def _hire(self):
        arguments = "soak-trainer", self._url, str(self._directory), self._life("trainer")
        return await self._stack.enter_async_context(Player(self._company, *arguments))

    async def _follow(self, number):
        latest, leases = READERS[number]
        lease = self._lease if leases else None
        arguments = self._url, str(self._saved(number)), self._life("reader"), latest, lease
        return await self._stack.enter_async_context(Player(self._company, "soak-reader", *arguments))

    def _saved(self, number):
        return self._directory / f"reader-{number}"

    def _note_read(self, number, reader):
        latest, leases = READERS[number]
        self.ledger.read(reader.lines, f"reader {number}", every=not latest and leases and self._lease >= SURE)

    def report(self):
        """What came of it, in a line for each figure."""
        ledger = self.ledger
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        yield f"faults survived: {self.faults.total()} ({kinds})"
        yield f"steps durable: {len(ledger.durable)}; records that retention removed: {self.removed}"
        yield f"states compared: {ledger.states}, {ledger.states * BITS / 1e9:.1f} Gbit"
        yield f"lost: {len(ledger.lost)}, mixed: {len(ledger.mixed)}, undetected: {len(ledger.undetected)}"
