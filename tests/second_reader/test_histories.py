"""Random histories of several writers: the second reader finds the states that deltabus does, and its conflicts."""

from __future__ import annotations

import random
from collections import Counter

from deltabus.bus.errors import ConflictError
from deltabus.bus.message import Blob, Cohort, Kind, Message, Stats, encode_message
from deltabus.bus.sequencer import Sequencer

from .schema import RefusedError
from .topic import Topic

HISTORIES = 300
SCHEMAS = [Blob(key=f"schemas/{name * 64}.json", size=1, checksum=name.encode() * 32) for name in "ab"]
BLOBS = (Blob(key="blobs/x", size=1, checksum=bytes(32)),)
WRITERS = ["run-0", "run-1", "other"]


class Log:
    """Messages of one writer that mostly keep the rules."""

    def __init__(self, writer: str, chosen: random.Random, begin: int) -> None:
        self.writer, self.chosen, self.messages = writer, chosen, []
        self.position, self.epoch, self.generation, self.version, self.step = begin, 1, 0, 0, 0
        # Where retention cut the log off, versions in front of it are known by name alone.
        self.states = {0: (0, 0), **({1: (1, 0), 2: (2, 0)} if begin else {})}
        self.version = 2 if begin else 0
        self.needs: dict[str, int] = {}

    def strange(self) -> bool:
        return self.chosen.random() < 0.02

    def group(self) -> tuple[tuple[str, ...], Cohort | None]:
        if not self.generation or self.writer == "other":
            return (self.writer,), None
        if self.generation == 2 or self.strange():
            return (), Cohort(generation=self.generation, ranks=2)
        # A group that lost a member, or both by name.
        return (("run-0", "run-1") if self.generation == 1 else (self.writer,)), Cohort(generation=self.generation)

    def add(self) -> None:
        chosen = self.chosen
        restarts = chosen.random() < 0.15 or self.strange()
        if restarts:
            self.epoch += -1 if self.strange() else 1
            self.generation += 1 if self.writer != "other" and not self.strange() else 0
        repeats = self.version > 0 and chosen.random() < 0.15
        base = self.version - (1 if repeats or self.strange() else 0) - (chosen.random() < 0.1)
        version = self.version if repeats else self.version + 1 + self.strange()
        anchor = base < 1 or base not in self.states or chosen.random() < 0.2
        if not repeats:
            self.step += 1 if chosen.random() < 0.95 else 0
        new = chosen.choice([version, version, version, 1]), self.states.get(base, (0, 0))[1]
        if anchor and not repeats and chosen.random() < 0.3:
            new = new[0], 1 - new[1]
        after = self.states.get(version, new) if not self.strange() else new
        before = self.states.get(base, (0, 0)) if not self.strange() else (9, 0)
        if not anchor:
            after = (after[0], before[1]) if version not in self.states else after
        if chosen.random() < 0.2:
            other = chosen.choice([name for name in WRITERS if name != self.writer])
            self.needs = self.needs | {other: chosen.randrange(1, 5)}
        group, cohort = self.group()
        needs = self.needs if chosen.random() < 0.9 else {}
        message = Message(
            writer=self.writer,
            position=self.position,
            epoch=max(self.epoch, 1),
            kind=Kind.ANCHOR if anchor else Kind.DELTA,
            step=self.step,
            base=needs if anchor else {**needs, self.writer: base},
            version=version,
            group=group,
            schema=SCHEMAS[after[1]],
            digest_before=None if anchor else before[0],
            digest_after=after[0],
            blobs=BLOBS,
            stats=Stats(changed=0, total=0),
            created=0.0,
            **({"cohort": cohort} if cohort else {}),
        )
        self.messages.append(message)
        self.states[version] = after
        self.version, self.position = max(version, self.version), self.position + 1


def history(seed: int) -> list[Message]:
    chosen = random.Random(seed)
    messages = []
    for writer in WRITERS:
        log = Log(writer, chosen, chosen.choice([0, 0, 0, 5]))
        for _ in range(chosen.randrange(7)):
            log.add()
        messages += log.messages
    return messages


def theirs(messages: list[Message]):
    try:
        cut = Sequencer.of(messages).newest_cut()
    except ConflictError:
        return "conflict"
    return "nothing" if cut is None else dict(cut.state)


def ours(place, messages: list[Message]):
    (place / "logs").mkdir(parents=True)
    for message in messages:
        path = place / "logs" / message.writer / f"{message.position:020d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_message(message))
    try:
        topic = Topic(place)
        topic.cuts()
    except RefusedError:
        return "conflict"
    try:
        return topic.newest()
    except RefusedError:
        return "nothing"


def test_both_readers_find_the_same_states(tmp_path):
    found = Counter()
    for seed in range(HISTORIES):
        messages = history(seed)
        expected = theirs(messages)
        assert ours(tmp_path / str(seed), messages) == expected, messages
        found[expected if isinstance(expected, str) else len(expected)] += 1
    assert found.keys() == {"conflict", "nothing", 1, 2, 3}
    assert all(count >= HISTORIES // 40 for count in found.values()), found
