"""A second reader of topics in a directory, written from docs/protocol.md and docs/format.md alone.

It shares no line with deltabus and imports nothing of it; of what Python does not bring along it needs a decoder for
zstd. It favours what is plain over what is fast, and keeps each state that it decoded.
"""

import hashlib
import heapq
import itertools
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from .message import WRITER, Blob, Message, body_of, message_of
from .payload import read_payload
from .schema import ALL_64, RefusedError, Schema, require
from .seals import FIRST, Key, Seal, open_seal

POSITION = re.compile(r"[0-9]{20}", re.ASCII)


class Log:
    """What one writer said: its messages in order, and the state that each version is."""

    def __init__(self, place: Path, keys: list[Key]) -> None:
        self.writer = place.name
        found = sorted(int(path.name) for path in place.iterdir() if POSITION.fullmatch(path.name))
        self.begin = found[0] if found else 0
        self.ends_at_hole = found[-1:] > [self.begin + len(found) - 1]
        self.messages: list[Message] = []
        self.rests_on: dict[str, int] = {}
        self.states: dict[int, tuple[int, bytes]] = {}
        self.versions: dict[int, Message] = {}  # the first message that leads to each
        self.applied: dict[int, dict[str, int]] = {}  # of other writers, by version
        seen: tuple[Seal, bytes] | None = None
        for position in itertools.takewhile(set(found).__contains__, itertools.count(self.begin)):
            record = (place / f"{position:020d}").read_bytes()
            body = body_of(record)
            if keys:
                seal = open_seal(body, keys)
                require((seal.previous == FIRST) == (position == 0), "zeros where a record is named, or the reverse")
                require(seen is None or seal == Seal(seen[0].log, seen[1]), "a record that does not follow the last")
                seen = seal, hashlib.sha256(record).digest()
            self.enter(message_of(body, self.writer, position))

    def enter(self, message: Message) -> None:
        last = self.messages[-1] if self.messages else message
        require(message.epoch >= last.epoch, "an epoch falls")
        require(message.generation >= last.generation, "a generation falls")
        if message.generation == last.generation:
            require(message.members == last.members, "two groups in one generation")
            require(message.generation == 0 or message.epoch == last.epoch, "two epochs in one generation")
        said = {name: version for name, version in message.base.items() if name != self.writer}
        self.rests_on = said | {name: max(v, said.get(name, 0)) for name, v in self.rests_on.items()}
        # What was in front of a log that retention cut off is unknown, and taken at its word: digests tell.
        if message.before is not None:
            require(self.begin or message.base[self.writer] in self.states, "a delta from no known version")
            known = self.states.setdefault(message.base[self.writer], message.before)
            require(known == message.before, "a delta from other bits than its base is")
        newer = message.version > max(self.versions, default=0)
        require(self.begin or newer or message.version in self.states, "a version falls")
        known = self.states.setdefault(message.version, message.after)
        require(known == message.after, "one version of two states")
        if message.version not in self.versions:
            self.versions[message.version] = message
            self.applied[message.version] = self.rests_on
        self.messages.append(message)

    def generation(self, version: int) -> int:
        return max((m.generation for v, m in self.versions.items() if v <= version), default=0)


@dataclass(frozen=True)
class Cut:
    generation: int
    names: frozenset[str]  # of all groups that follow one another
    vector: dict[str, int]


@dataclass
class Weights:
    """A whole tensor, and its bits in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    bits: list[int]


class Topic:
    def __init__(self, directory: Path, keys: list[str] | None = None) -> None:
        self.directory = directory
        places = [path for path in sorted((directory / "logs").iterdir()) if WRITER.fullmatch(path.name)]
        parsed = [Key.parse(text) for text in keys or []]
        self.logs = {place.name: Log(place, parsed) for place in places}
        self._schemas: dict[bytes, Schema] = {}
        self._decoded: dict[tuple[str, tuple[int, bytes]], dict[str, list[int]]] = {}

    # Payloads and ways

    def blob(self, blob: Blob) -> bytes:
        path = self.directory / blob.key
        require(path.is_file(), f"{blob.key} is missing")
        data = path.read_bytes()
        require((len(data), hashlib.sha256(data).digest()) == (blob.size, blob.checksum), f"{blob.key} is damaged")
        return data

    def schema(self, message: Message) -> Schema:
        name = message.schema.checksum
        if name not in self._schemas:
            self._schemas[name] = Schema(self.blob(message.schema))
        return self._schemas[name]

    def decode(self, message: Message, old: dict[str, list[int]] | None) -> dict[str, list[int]]:
        """The state that a message leads to from the one in front of it."""
        parts = [self.blob(blob) for blob in message.blobs]
        state, change = read_payload(parts, message.kind, self.schema(message), old)
        digest = ((message.digest_before or 0) + change) & ALL_64
        require(digest == message.digest_after, f"message {message.position} leads to other bits than it says")
        return state

    def way(self, log: Log, goal: tuple[int, bytes], without: set[int] = frozenset()) -> list[Message] | None:
        """The cheapest messages that lead from nothing to a state."""
        edges = defaultdict(list)
        for message in log.messages:
            if message.position not in without:
                edges[message.before].append(message)
        done, waiting = set(), [(0, 0, None, [])]
        order = itertools.count(1)
        while waiting:
            cost, _, state, way = heapq.heappop(waiting)
            if state == goal:
                return way
            if state not in done:
                done.add(state)
                for message in edges[state]:
                    heapq.heappush(waiting, (cost + message.cost, next(order), message.after, [*way, message]))
        return None

    def bits(self, writer: str, version: int) -> dict[str, list[int]]:
        """A version of one writer, by dtype; around messages whose payload is missing or damaged."""
        log, without, first = self.logs[writer], set(), RefusedError(f"nothing leads to version {version}")
        goal = log.states.get(version)
        require(goal is not None, f"{writer} has no version {version}")
        while (way := self.way(log, goal, without)) is not None:
            state = None
            for message in way:
                place = (writer, message.after)
                try:
                    if place not in self._decoded:
                        self._decoded[place] = self.decode(message, state)
                except RefusedError as error:
                    first = error if not without else first
                    without.add(message.position)
                    break
                state = self._decoded[place]
            else:
                return state
        raise first

    # Cuts and states

    def cuts(self) -> list[list[Cut]]:
        """The cuts of each set of groups that follow one another, oldest first."""
        sets: list[set[str]] = []
        for members in {m.members for log in self.logs.values() for m in log.messages}:
            joined = [names for names in sets if names & members]
            sets = [names for names in sets if not names & members] + [set().union(members, *joined)]
        return [cuts for names in sets if (cuts := self.cuts_of(names))]

    def cuts_of(self, names: set[str]) -> list[Cut]:
        groups: dict[int, frozenset[str]] = {}
        steps: dict[int, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for name in names & set(self.logs):
            for message in self.logs[name].messages:
                same = groups.setdefault(message.generation, message.members)
                require(same == message.members, "two groups in one generation")
            for version, message in sorted(self.logs[name].versions.items()):
                # A writer that is alone makes a cut with every version; of several that a member has of a step the
                # newest counts.
                place = message.step if len(message.members) > 1 else version
                steps[message.generation][name][place] = version
        return [
            Cut(generation, frozenset(names), {name: steps[generation][name][step] for name in members})
            for generation, members in sorted(groups.items())
            for step in sorted(set.intersection(*(set(steps[generation][name]) for name in members)))
        ]

    def newest(self) -> dict[str, int]:
        """The newest state: a version of each writer that counts in it."""
        cuts = self.cuts()
        while True:
            chosen = [line[-1] for line in cuts]
            early = [line for line in cuts if not self.rests(line[-1], chosen)]
            if not early:
                break
            for line in early:
                line.pop()
            cuts = [line for line in cuts if line]
        require(chosen, "there is no state yet")
        return {name: version for cut in chosen for name, version in cut.vector.items()}

    def rests(self, cut: Cut, chosen: list[Cut]) -> bool:
        """Whether all that a cut's messages say they rest on is in a state, or was replaced by a later generation."""

        def there(name: str, version: int) -> bool:
            generation = self.logs[name].generation(version) if name in self.logs else 0
            others = [other for other in chosen if name in other.names]
            return any(other.vector.get(name, 0) >= version or other.generation > generation for other in others)

        needs = [item for name, version in cut.vector.items() for item in self.logs[name].applied[version].items()]
        return all(there(name, version) for name, version in needs)

    def tensors(self, state: dict[str, int] | None = None) -> dict[str, Weights]:
        """All tensors of a state, by name and alias; of the newest if none is said."""
        state = self.newest() if state is None else state
        owned: dict[str, dict[str, tuple]] = defaultdict(dict)
        for writer, version in state.items():
            bits = self.bits(writer, version)
            schema = self._schemas[self.logs[writer].states[version][1]]
            begins = {t.name: b for d in schema.dtypes for t, b in zip(schema.lines[d], schema.begins[d], strict=False)}
            for tensor in schema.tensors:
                begin = begins.get(tensor.name, 0)
                values = bits[tensor.dtype][begin : begin + tensor.size] if tensor.size else []
                for name in (tensor.name, *tensor.aliases):
                    owned[name][writer] = (tensor, dict(zip(tensor.places(), values, strict=True)))
        return {name: self.joined(name, parts, state) for name, parts in sorted(owned.items())}

    def joined(self, name: str, parts: dict[str, tuple], state: dict[str, int]) -> Weights:
        kinds = {(tensor.dtype, tensor.whole or tensor.shape) for tensor, _ in parts.values()}
        require(len(kinds) == 1, f"two writers have {name} in other kinds")
        over = {writer: set() for writer in parts}  # whose bits this one's replace
        for one, other in itertools.combinations(parts, 2):
            if parts[one][1].keys() & parts[other][1].keys():
                pairs = ((one, other), (other, one))
                says = [a for a, b in pairs if self.logs[a].applied[state[a]].get(b, 0) >= state[b]]
                require(len(says) == 1, f"two writers have elements of {name}, and neither had applied the other")
                over[says[0]].add(other if says[0] == one else one)
        found: dict[int, int] = {}
        while over:
            free = [writer for writer, under in over.items() if not under & over.keys()]
            require(free, "writers that each had applied the other")
            for writer in free:
                found |= parts[writer][1]
                del over[writer]
        dtype, shape = kinds.pop()
        require(len(found) == math.prod(shape), f"no writer has all elements of {name}")
        return Weights(dtype, shape, [found[place] for place in range(len(found))])

    def check(self) -> None:
        """Read every record, schema and payload, and follow every message."""
        for writer, log in self.logs.items():
            require(not log.ends_at_hole, f"{writer} has a hole")
            for message in log.messages:
                for blob in (message.schema, *message.blobs):
                    self.blob(blob)
                way = [] if message.before is None else self.way(log, message.before)
                if way is not None:
                    old = None
                    for earlier in way:
                        place = (writer, earlier.after)
                        if place not in self._decoded:
                            self._decoded[place] = self.decode(earlier, old)
                        old = self._decoded[place]
                    state = self.decode(message, old)
                    require(self._decoded.setdefault((writer, message.after), state) == state, "two ways, two states")
