"""What of a topic may go: a pure decision over its messages, the leases of its readers, and a policy.

A log is only ever cut off in front. What stays begins at an **anchor's start**: the anchor itself, or the first message
that leads beyond its version, whichever stands first, because an anchor may land behind later deltas. So whoever takes
the anchor finds everything that leads on from it. Rules that hold whatever the policy says:

- The newest state that all writers of the group have reached can be taken by a reader that holds nothing, from what
  stays. An anchor with a blob that is missing, or of a wrong length, does not count.
- A live lease keeps every message that leads beyond what its holder has, of the writers that it reads.
- A blob goes only if every record that names it goes. Schemas never go: they are small, and a writer that comes back
  to one stores it again without making it younger.
- Records behind which an append may still be under way stay: a record may go once the payload of a message that was
  made behind it is older than the policy's `grace`.

Records go before blobs, oldest first: a crash in between leaves blobs that no record names. Such garbage is found later
by its age, and by its name: what is being published is of a version that no anchor has passed yet, or young.

It has no clock, no randomness and no I/O.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .errors import UsageError
from .leases import HeldLease
from .message import Blob, Kind, Message
from .sequencer import Sequencer
from .transport import StoredBlob
from .version import VersionVector

__all__ = ["Removal", "Retention", "garbage", "parse_duration", "parse_retention", "parse_size", "plan_removal"]

_OWN = re.compile(r"blobs/(?P<writer>[A-Za-z0-9][A-Za-z0-9_-]{0,62})/(?P<version>[0-9]{12,19})-[A-Za-z0-9._=-]+")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = {"": 1, "B": 1} | {f"{p}B": 1000 ** (n + 1) for n, p in enumerate(["k", "M", "G", "T", "P"])}
_BYTES |= {"KB": 1000} | {f"{p}iB": 1024 ** (n + 1) for n, p in enumerate("KMGTP")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep; what any of the limits would remove may go, and the newest anchor with what follows it stays.

    Args:
        keep_anchors: Keep so many of the newest anchors of each log, and what follows them.
        max_age: Keep what is needed to reach every state of the last so many seconds, and let go what is older.
        max_bytes: Keep so many of the newest anchors that all that stays has at most so many bytes.
        grace: Seconds that a write may be under way: records stay until a payload that was made behind them is so old.
            0 says that nobody writes.
        garbage_age: Seconds after which a blob that no record names is no part of a publication any more.

    Raises:
        UsageError: If no limit is given, or a figure is out of range.
    """

    keep_anchors: int | None = None
    max_age: float | None = None
    max_bytes: int | None = None
    grace: float = 600.0
    garbage_age: float = 86400.0

    def __post_init__(self) -> None:
        if self.keep_anchors is None and self.max_age is None and self.max_bytes is None:
            raise UsageError("say what to keep: a number of anchors, an age or a number of bytes")
        if self.keep_anchors is not None and self.keep_anchors < 1:
            raise UsageError(f"keep_anchors={self.keep_anchors} would leave nothing to begin with; keep 1 or more")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise UsageError(f"max_bytes={self.max_bytes} is negative")
        for name, value in (("max_age", self.max_age), ("grace", self.grace), ("garbage_age", self.garbage_age)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value} is not a number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What may go.

    Attributes:
        trims: For each log that loses records, the position that it begins with afterwards.
        records: The messages that go, by log and position.
        blobs: Keys that only these name, in the order in which to remove them.
        nbytes: The bytes of these.
        held_by: Names of the readers whose leases keep messages that the policy would let go, sorted.
        kept: The messages that stay, by log and position.
    """

    trims: Mapping[str, int]
    records: tuple[Message, ...]
    blobs: tuple[str, ...]
    nbytes: int
    held_by: tuple[str, ...]
    kept: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Start:
    """An anchor that a log may begin with.

    Attributes:
        position: The first that stays then.
        anchor: The anchor.
        leads: Whether it leads on to the newest state.
    """

    position: int
    anchor: Message
    leads: bool


def plan_removal(
    messages: Iterable[Message],
    *,
    stored: Mapping[str, StoredBlob],
    leases: Sequence[HeldLease],
    now: float,
    policy: Retention,
    newer: Iterable[Message] = (),
    topic: str = "",
) -> Removal:
    """Return which records may go, and which blobs with them.

    Args:
        messages: All messages of the topic's logs, without holes.
        stored: The blobs that the backend holds, listed after the messages were read.
        leases: Those of readers, dead ones too.
        now: On the clock of `stored`, in seconds.
        policy: What to keep.
        newer: Messages that were read after the blobs were listed: they stay, and so does what they name.
        topic: Named in errors.

    Raises:
        ConflictError: If the logs contradict themselves.
    """
    logs = _by_writer(messages)
    targets = _targets(logs, topic)
    starts = {w: _starts(log, targets.get(w, 0), lambda m: _intact(m, stored)) for w, log in logs.items()}

    def age(message: Message) -> float:
        return now - _made(message, stored)

    wanted = {w: _wanted(log, starts[w], policy, age) for w, log in logs.items()}
    _fit_bytes(wanted, logs, starts, policy.max_bytes)
    live = [lease for lease in leases if lease.is_live(now)]
    cuts: dict[str, int] = {}
    held_by: set[str] = set()
    for writer, log in logs.items():
        bound = min(wanted[writer], log[-1].position)
        if policy.grace:
            bound = min(bound, _settled(log, lambda m: age(m) >= policy.grace))
        cut = bound
        beyond = _Beyond(log)
        for lease in live:
            version = lease.version_of(writer)
            needed = None if version is None else beyond.first(version)
            if needed is not None and needed < bound:
                held_by.add(lease.reader)
                cut = min(cut, needed)
        if cut > log[0].position:
            cuts[writer] = cut
    gone = tuple(m for w, log in logs.items() for m in log if m.position < cuts.get(w, 0))
    kept = tuple(m for w, log in logs.items() for m in log if m.position >= cuts.get(w, 0))
    named = _named([*kept, *newer]) | {message.schema.key for message in gone}
    sizes = {blob.key: blob.size for message in gone for blob in message.blobs if blob.key not in named}
    return Removal(
        trims=cuts,
        records=gone,
        blobs=tuple(sizes),
        nbytes=sum(sizes.values()),
        held_by=tuple(sorted(held_by)),
        kept=kept,
    )


def garbage(
    stored: Iterable[StoredBlob], *, messages: Iterable[Message], now: float, policy: Retention
) -> tuple[StoredBlob, ...]:
    """Return the blobs that no message names, nor will: what crashes left, oldest versions first.

    A blob counts only if its name is one that writers here give (`blobs/<writer>/<version>-...`), the log has an anchor
    of a later version, or a message of a later epoch than any up to its version, and it is older than the policy's
    `garbage_age`. An anchor may be uploaded for long beside deltas, under a version that the log has; the next one
    begins only when it has landed or was given up.

    Args:
        stored: The blobs that the backend holds, listed before the last of `messages` were read.
        messages: All messages of the topic's logs.
        now: On the clock of `stored`, in seconds.
        policy: What to keep.
    """
    messages = list(messages)
    named = _named(messages)
    ends = {writer: _End(log) for writer, log in _by_writer(messages).items()}
    found = []
    for blob in stored:
        own = _OWN.fullmatch(blob.key)
        if own is None or blob.key in named or blob.stored is None or now - blob.stored < policy.garbage_age:
            continue
        if own["writer"] in ends and ends[own["writer"]].is_past(int(own["version"])):
            found.append(blob)
    return tuple(sorted(found, key=lambda blob: blob.key))


def _by_writer(messages: Iterable[Message]) -> dict[str, list[Message]]:
    logs: dict[str, list[Message]] = {}
    for message in sorted(messages, key=lambda message: (message.writer, message.position)):
        logs.setdefault(message.writer, []).append(message)
    return logs


def _targets(logs: Mapping[str, Sequence[Message]], topic: str) -> VersionVector:
    """Return the newest state that a reader may apply."""
    cut = Sequencer.of((message for log in logs.values() for message in log), topic=topic).newest_cut()
    return cut.state if cut is not None else VersionVector()


def _starts(log: Sequence[Message], target: int, intact: Callable[[Message], bool]) -> list[_Start]:
    """Return the anchors of the target and before, the newest first."""
    whole = [message for message in log if intact(message)]
    # Versions rise along a way, so that all of it leads beyond the version of the anchor that it begins with.
    into: dict[int, list[int]] = {}
    for message in whole:
        if message.kind is Kind.DELTA and message.version <= target:
            into.setdefault(message.version, []).append(message.base[message.writer])
    leading, waiting = {target}, [target]
    while waiting:
        for version in into.get(waiting.pop(), ()):
            if version not in leading:
                leading.add(version)
                waiting.append(version)
    anchors = {message.version: message for message in whole if message.kind is Kind.ANCHOR}
    beyond = _Beyond(log)
    found = []
    for version in sorted((version for version in anchors if version <= target), reverse=True):
        first = beyond.first(version)
        position = anchors[version].position if first is None else min(anchors[version].position, first)
        found.append(_Start(position, anchors[version], version in leading))
    return found


class _Beyond:
    """Finds the first message of a log that leads beyond a version."""

    def __init__(self, log: Sequence[Message]) -> None:
        self._log = log
        self._greatest = list(accumulate((message.version for message in log), max))

    def first(self, version: int) -> int | None:
        """Return its position; None if there is none."""
        place = bisect_right(self._greatest, version)
        return self._log[place].position if place < len(self._log) else None


class _End:
    """Tells which versions of a log nobody publishes any more."""

    def __init__(self, log: Sequence[Message]) -> None:
        rising = sorted(log, key=lambda message: message.version)
        self._versions = [message.version for message in rising]
        self._epochs = list(accumulate((message.epoch for message in rising), max))
        self._anchor = max((message.version for message in log if message.kind is Kind.ANCHOR), default=0)

    def is_past(self, version: int) -> bool:
        """Return whether an anchor, or a later incarnation of the writer, has gone beyond a version."""
        place = bisect_right(self._versions, version)
        epoch = self._epochs[place - 1] if place else 0
        return version < self._anchor or (place > 0 and epoch < self._epochs[-1])


def _wanted(
    log: Sequence[Message], starts: Sequence[_Start], policy: Retention, age: Callable[[Message], float]
) -> int:
    """Return where a log would begin if anchors and ages alone decided."""
    wanted = log[0].position
    if policy.keep_anchors is not None and len(starts) >= policy.keep_anchors:
        wanted = max(wanted, starts[policy.keep_anchors - 1].position)
    if policy.max_age is not None:
        old = next((start for start in starts if age(start.anchor) >= policy.max_age), None)
        wanted = wanted if old is None else max(wanted, old.position)
    return min(wanted, _latest(log, starts))


def _latest(log: Sequence[Message], starts: Sequence[_Start]) -> int:
    """Return where a log may begin at the latest, so that the newest state can be reached."""
    return next((start.position for start in starts if start.leads), log[0].position)


def _fit_bytes(
    wanted: dict[str, int],
    logs: Mapping[str, Sequence[Message]],
    starts: Mapping[str, Sequence[_Start]],
    most: int | None,
) -> None:
    """Let logs begin later, until what stays of all of them fits; each keeps as many anchors as the others."""
    if most is None:
        return
    # Logs begin later from one number of anchors to the next: what goes is subtracted, and each message is met once.
    uses = Counter(blob.key for log in logs.values() for m in log for blob in (m.schema, *m.blobs))
    left = _nbytes(m for log in logs.values() for m in log)
    places = dict.fromkeys(logs, 0)
    latest = {w: _latest(logs[w], starts[w]) for w in logs}
    for anchors in range(max(map(len, starts.values()), default=0) + 1, 0, -1):
        begins = {
            w: max(wanted[w], min(starts[w][anchors - 1].position, latest[w]))
            if len(starts[w]) >= anchors
            else wanted[w]
            for w in logs
        }
        for w, log in logs.items():
            while places[w] < len(log) and log[places[w]].position < begins[w]:
                for blob in (log[places[w]].schema, *log[places[w]].blobs):
                    uses[blob.key] -= 1
                    left -= 0 if uses[blob.key] else blob.size
                places[w] += 1
        if anchors == 1 or left <= most:
            wanted.update(begins)
            return


def _settled(log: Sequence[Message], is_old: Callable[[Message], bool]) -> int:
    """Return the first position that must stay because an append there, or at an earlier one, may be under way.

    A message of a new version is made behind the one that brought the version before; whoever still wants to append
    there began before its payload was stored.
    """
    brought: list[Message] = []
    for message in log:
        if not brought or message.version > brought[-1].version:
            brought.append(message)
    settled = log[0].position
    for earlier, later in pairwise(brought):
        if later.blobs and is_old(later):
            settled = earlier.position + 1
    return settled


def _made(message: Message, stored: Mapping[str, StoredBlob]) -> float:
    """Return when a message's payload was stored; where the backend does not tell, when its writer says."""
    times = [blob.stored for key in message.blobs if (blob := stored.get(key.key)) and blob.stored is not None]
    return max(times) if times else message.created


def _intact(message: Message, stored: Mapping[str, StoredBlob]) -> bool:
    """Return whether all that a message names is there, as far as a listing tells."""

    def is_there(blob: Blob) -> bool:
        found = stored.get(blob.key)
        return found is not None and found.size in (None, blob.size)

    return is_there(message.schema) and all(map(is_there, message.blobs))


def _named(messages: Iterable[Message]) -> set[str]:
    return {blob.key for message in messages for blob in (message.schema, *message.blobs)}


def _nbytes(messages: Iterable[Message]) -> int:
    return sum({blob.key: blob.size for m in messages for blob in (m.schema, *m.blobs)}.values())


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as `90s`, `10m`, `12h`, `7d` or `2w` stands for.

    >>> parse_duration("7d"), parse_duration("1.5h"), parse_duration("30")
    (604800.0, 5400.0, 30.0)

    Raises:
        UsageError: If it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)", text.strip())
    if found is None:
        raise UsageError(f"{text!r} is not a time such as 90s, 10m, 12h, 7d or 2w")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def parse_size(text: str) -> int:
    """Return the bytes that a text such as `500MB` or `1.5TiB` stands for.

    >>> parse_size("100GB"), parse_size("2GiB"), parse_size("17")
    (100000000000, 2147483648, 17)

    Raises:
        UsageError: If it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in _BYTES:
        raise UsageError(f"{text!r} is not a number of bytes such as 500MB, 100GB or 1.5TiB")
    return int(float(found[1]) * _BYTES[found[2]])


def parse_retention(value: str | int | Retention) -> Retention:
    """Return the policy that a text, or a number of anchors, stands for; a policy is returned as it is.

    >>> parse_retention(3) == parse_retention("anchors:3") == Retention(keep_anchors=3)
    True
    >>> parse_retention("anchors:3,age:7d,bytes:1TB") == Retention(keep_anchors=3, max_age=604800, max_bytes=10**12)
    True

    Raises:
        UsageError: If it is none.
    """
    if isinstance(value, Retention):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Retention(keep_anchors=value)
    given: dict[str, str] = {}
    for part in str(value).split(","):
        name, _, figure = part.strip().partition(":")
        if name not in ("anchors", "age", "bytes") or name in given:
            raise UsageError(
                f"retention {value!r} is not one such as 3, 'anchors:3', 'age:7d' or 'anchors:3,bytes:1TB'"
            )
        given[name] = figure
    anchors, age, size = (given.get(name) for name in ("anchors", "age", "bytes"))
    if anchors is not None and not anchors.isdecimal():
        raise UsageError(f"retention {value!r} has {anchors!r} where a number of anchors belongs")
    return Retention(
        keep_anchors=None if anchors is None else int(anchors),
        max_age=None if age is None else parse_duration(age),
        max_bytes=None if size is None else parse_size(size),
    )
