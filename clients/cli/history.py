"""What the messages of a log may say, one behind the other.

These are the rules that `verify` holds them to before it reads a payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltabus.bus.errors import MessageFormatError, SignatureError
from deltabus.bus.logs import Link, admit
from deltabus.bus.message import Kind, Message
from deltabus.bus.signing import KeyRing
from deltabus.bus.transport import Record

__all__ = ["Problem", "check_log", "decode_log", "group_text"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a topic that is not as it should be.

    Attributes:
        writer: Whose log.
        position: Where in the log.
        key: The blob concerned; None when it is the record itself.
        what: What is wrong.
    """

    writer: str
    position: int
    key: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.writer} at {self.position}{f', {self.key}' if self.key else ''}: {self.what}"


def decode_log(
    topic: str, writer: str, records: Iterable[Record], *, keys: KeyRing | None = None
) -> tuple[list[Message], list[Problem]]:
    """Return the messages of a log that can be trusted, and a problem for each that cannot, and for each hole.

    A log may begin behind position 0: retention removes what is old.

    Args:
        topic: Named in problems.
        writer: Whose log.
        records: By position.
        keys: Whose messages are believed; None believes everybody.
    """
    messages: list[Message] = []
    problems: list[Problem] = []
    due: int | None = None
    link: Link | None = None
    for record in records:
        if due is not None and record.position != due:
            missing = f"{due}" if record.position == due + 1 else f"{due} to {record.position - 1}"
            what = f"the log has a hole: position {missing} is missing, but later ones are there"
            problems.append(Problem(writer, due, None, what))
        due = record.position + 1
        try:
            message, link = admit(record, topic=topic, writer=writer, keys=keys, after=link)
            messages.append(message)
        except (MessageFormatError, SignatureError) as error:
            problems.append(Problem(writer, record.position, None, str(error)))
            # What follows is held against what stands there, so that each fault is told once.
            link = None if link is None else Link.behind(record, link.log_id)
    return messages, problems


def check_log(messages: Sequence[Message], *, whole: bool) -> list[Problem]:
    """Return where messages of one log contradict each other.

    Epochs do not fall, and within an epoch the group stays the same. Versions rise, unless a message leads once more to
    a version, with its digest and schema. A delta starts from a version that is there, with its digest and schema.
    Where a log begins behind position 0, a message may lead once more to a version that retention removed.

    Args:
        messages: By position.
        whole: Whether all messages are there, so that a delta from a version that none leads to is a problem.
    """
    problems: list[Problem] = []
    reached: dict[int, Message] = {}
    # Versions below this one, and those that deltas start from, may have been removed.
    lost_below = messages[0].version if messages and messages[0].position > 0 else 0
    removed: set[int] = set()
    newest = 0
    previous: Message | None = None

    def wrong(message: Message, what: str) -> None:
        problems.append(Problem(message.writer, message.position, None, what))

    for message in messages:
        if previous is not None and message.epoch < previous.epoch:
            wrong(message, f"epoch {message.epoch} follows epoch {previous.epoch}: an old process wrote once more")
        if previous is not None and message.epoch == previous.epoch and group_text(message) != group_text(previous):
            wrong(message, f"the group is {group_text(message)}, but was {group_text(previous)} in the same epoch")
        if message.kind is Kind.DELTA:
            start = message.base[message.writer]
            base = reached.get(start)
            if base is not None:
                for what in _differences(base, message.digest_before, message):
                    wrong(message, f"it starts from version {start} with {what}")
            elif whole:
                wrong(message, f"it starts from version {start}, which no message leads to")
            elif lost_below:
                removed.add(start)
        known = reached.get(message.version)
        if known is not None:
            for what in _differences(known, message.digest_after, message):
                wrong(message, f"it leads once more to version {message.version}, with {what}")
        elif lost_below <= message.version < newest and message.version not in removed:
            wrong(message, f"version {message.version} is new, but follows version {newest}")
        reached.setdefault(message.version, message)
        newest = max(newest, message.version)
        previous = message
    return problems


def group_text(message: Message) -> str:
    """Return who makes a cut with a message's writer, for people."""
    names = f"{message.ranks} ranks" if message.ranks else ", ".join(sorted(message.group))
    return f"{names}, generation {message.generation}" if message.generation else names


def _differences(reached: Message, digest: int | None, message: Message) -> list[str]:
    """Return how a message's words about a version differ from those of the message that led to it."""
    found: list[str] = []
    if digest != reached.digest_after:
        found.append(
            f"digest {digest or 0:016x}, but position {reached.position} led to it with {reached.digest_after:016x}"
        )
    if message.schema.checksum != reached.schema.checksum:
        found.append(f"another schema than position {reached.position}, which led to it")
    return found
