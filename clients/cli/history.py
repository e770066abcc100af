"""What the messages of a log may say, one behind the other.

These are the rules that `verify` holds them to before it reads a payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltabus.bus.errors import MessageFormatError
from deltabus.bus.message import Kind, Message, decode_message
from deltabus.bus.transport import Record

__all__ = ["Problem", "check_log", "decode_log"]


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


def decode_log(topic: str, writer: str, records: Iterable[Record]) -> tuple[list[Message], list[Problem]]:
    """Return the messages of a log that can be read, and a problem for each that cannot, and for each hole.

    A log may begin behind position 0: retention removes what is old.
    """
    messages: list[Message] = []
    problems: list[Problem] = []
    due: int | None = None
    for record in records:
        if due is not None and record.position != due:
            missing = f"{due}" if record.position == due + 1 else f"{due} to {record.position - 1}"
            what = f"the log has a hole: position {missing} is missing, but later ones are there"
            problems.append(Problem(writer, due, None, what))
        due = record.position + 1
        try:
            messages.append(decode_message(record.data, topic=topic, writer=writer, position=record.position))
        except MessageFormatError as error:
            problems.append(Problem(writer, record.position, None, str(error)))
    return messages, problems


def check_log(messages: Sequence[Message], *, whole: bool) -> list[Problem]:
    """Return where messages of one log contradict each other.

    Epochs do not fall, and within an epoch the group stays the same. Versions rise, unless a message leads once more to
    a version, with its digest and schema. A delta starts from a version that is there, with its digest and schema.

    Args:
        messages: By position.
        whole: Whether all messages are there, so that a delta from a version that none leads to is a problem.
    """
    problems: list[Problem] = []
    reached: dict[int, Message] = {}
    previous: Message | None = None

    def wrong(message: Message, what: str) -> None:
        problems.append(Problem(message.writer, message.position, None, what))

    for message in messages:
        if previous is not None and message.epoch < previous.epoch:
            wrong(message, f"epoch {message.epoch} follows epoch {previous.epoch}: an old process wrote once more")
        if previous is not None and message.epoch == previous.epoch and message.group != previous.group:
            wrong(message, f"the group is {message.group}, but was {previous.group} in the same epoch")
        if message.kind is Kind.DELTA:
            start = message.base[message.writer]
            base = reached.get(start)
            if base is not None:
                for what in _differences(base, message.digest_before, message):
                    wrong(message, f"it starts from version {start} with {what}")
            elif whole:
                wrong(message, f"it starts from version {start}, which no message leads to")
        known = reached.get(message.version)
        if known is not None:
            for what in _differences(known, message.digest_after, message):
                wrong(message, f"it leads once more to version {message.version}, with {what}")
        elif reached and message.version < max(reached):
            wrong(message, f"version {message.version} is new, but follows version {max(reached)}")
        reached.setdefault(message.version, message)
        previous = message
    return problems


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
