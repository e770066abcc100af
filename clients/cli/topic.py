"""Reading the logs of a topic: what the commands share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import RetentionGapError, UsageError
from deltabus.bus.message import Message
from deltabus.bus.signing import KeyRing
from deltabus.transports import open_transport

__all__ = ["Topic", "choose_writer", "nothing_published", "read_topic", "version_ranges"]


@dataclass(frozen=True, slots=True)
class Topic:
    """What the logs of a topic held when they were read.

    Attributes:
        url: The topic's URL, without secrets.
        messages: All messages, by writer and position.
    """

    url: str
    messages: tuple[Message, ...]

    def log_of(self, writer: str | None) -> tuple[Message, ...]:
        """Return the messages of one writer: the one named, or the only one.

        Raises:
            UsageError: If there is no such writer, or none is named and there are several.
        """
        name = choose_writer(self.url, {message.writer for message in self.messages}, writer)
        return tuple(message for message in self.messages if message.writer == name)


def read_topic(url: str, *, keys: KeyRing | None = None) -> Topic:
    """Return the messages that a topic holds now.

    Args:
        url: The topic.
        keys: Whose messages are believed; None believes everybody.

    Raises:
        UsageError: If the URL is wrong.
        RetentionGapError: If nothing was published there.
        MessageFormatError: If a record cannot be read.
        SignatureError: If keys are given, and a record does not show that it belongs where it stands.
        TransportError: If the topic cannot be reached.
    """
    return asyncio.run(_read(url, keys))


async def _read(url: str, keys: KeyRing | None) -> Topic:
    async with open_transport(url) as transport:
        messages = await TopicReader(transport, keys=keys).load()
        if not messages:
            raise nothing_published(transport.url)
        return Topic(transport.url, tuple(sorted(messages, key=lambda m: (m.writer, m.position))))


def nothing_published(url: str) -> RetentionGapError:
    """Return the error for a topic without messages."""
    return RetentionGapError(f"nothing was published to {url}; check the URL", topic=url)


def choose_writer(url: str, writers: set[str], writer: str | None) -> str:
    """Return the writer that is named, or the only one.

    Raises:
        UsageError: If there is no such writer, or none is named and there are several.
    """
    there = ", ".join(sorted(writers))
    if writer is not None and writer not in writers:
        raise UsageError(f"{url} has no writer {writer!r}; it has {there}")
    if writer is None and len(writers) != 1:
        raise UsageError(f"{url} has {len(writers)} writers; choose one with --writer: {there}")
    return writer if writer is not None else next(iter(writers))


def version_ranges(messages: tuple[Message, ...]) -> str:
    """Return the versions that messages lead to, such as `1-4, 7`."""
    ranges: list[list[int]] = []
    for version in sorted({message.version for message in messages}):
        if ranges and ranges[-1][1] == version - 1:
            ranges[-1][1] = version
        else:
            ranges.append([version, version])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
