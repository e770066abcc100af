"""The requests of JetStream that are used here; see https://docs.nats.io/reference/reference-protocols/nats_api_reference."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from nats.aio.msg import Msg

from deltabus.bus.errors import TransientTransportError, TransportError
from deltabus.bus.transport import Buffer

from .connection import Connection
from .faults import ApiError, no_responders
from .session import UnansweredError

__all__ = ["Ack", "Head", "JetStream", "LostPlaceError", "Stored", "lift"]

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_PENDING = "Nats-Num-Pending"
_HEADS = 1000
_CONSUMER_SECONDS = 60


class LostPlaceError(TransientTransportError):
    """A list broke off, as with the server that had it, or was asked for before all servers knew of it."""


class Ack(NamedTuple):
    """What the server says of a message that it stored.

    Attributes:
        seq: The message's number in its stream.
        duplicate: Whether it was there already, under the same message id.
    """

    seq: int
    duplicate: bool


class Stored(NamedTuple):
    """A message in a stream.

    Attributes:
        seq: Its number.
        subject: Where it was sent.
        headers: By name.
        data: Its bytes.
        time: When it was stored, as RFC 3339.
    """

    seq: int
    subject: str
    headers: Mapping[str, str]
    data: bytes
    time: str

    def age(self, now: float) -> float:
        """Return how long it has been there, in seconds, at a time in seconds since 1970."""
        return now - datetime.fromisoformat(self.time).timestamp()


class Head(NamedTuple):
    """What is known of a stored message without its bytes.

    Attributes:
        subject: Where it was sent.
        headers: By name.
        size: The length of its bytes.
        stored: When it was stored, in seconds since 1970 on the server's clock.
    """

    subject: str
    headers: Mapping[str, str]
    size: int
    stored: float


class _Error(msgspec.Struct):
    code: int = 500
    err_code: int = 0
    description: str = ""


class _Message(msgspec.Struct):
    """A stored message; in JSON its headers and bytes are base64."""

    seq: int
    subject: str
    time: str
    hdrs: bytes = b""
    data: bytes = b""


class _Answer(msgspec.Struct):
    error: _Error | None = None
    seq: int = 0
    duplicate: bool = False
    message: _Message | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


class JetStream:
    """Speaks with the servers for one topic.

    Its methods raise `ApiError` when the server answers with an error, and the errors of `Connection.request`.

    Args:
        connection: To the servers.
        url: The topic's URL, for errors.
        domain: The JetStream domain; None is the server's own.
    """

    def __init__(self, connection: Connection, *, url: str, domain: str | None = None) -> None:
        self.connection = connection
        self._url = url
        self._api = f"$JS.{domain}.API" if domain else "$JS.API"
        self._known = False

    def subject(self, action: str) -> str:
        """Return the subject of an action of the API."""
        return f"{self._api}.{action}"

    async def call(self, action: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Ask for an action of the API, and return the answer.

        Raises:
            ApiError: If it is an error.
            TransportError: If there is no JetStream, or no answer.
        """
        data = await self._request(action, body)
        try:
            answer = json.loads(data)
            error = msgspec.convert(answer, _Answer).error
        except (ValueError, msgspec.MsgspecError) as fault:
            raise self._unreadable(action) from fault
        if error is not None:
            raise _api_error(error)
        return dict(answer)

    async def publish(
        self,
        subject: str,
        payload: Buffer,
        *,
        headers: Mapping[str, str] | None = None,
        expected: int | None = None,
        patient: bool = False,
    ) -> Ack:
        """Store a message.

        Args:
            subject: One of a stream's.
            payload: As for `Connection.request`.
            headers: Besides.
            expected: The number of the last message on the subject, 0 for none; another one is an error.
            patient: As for `Connection.request`.

        Raises:
            ApiError: If the server does not store it.
            UnansweredError: If no answer came: it may be stored.
            TransportError: If it cannot be sent, or nobody takes it; nothing is stored.
        """
        given = dict(headers or {})
        if expected is not None:
            given[_EXPECTED] = str(expected)
        message = await self.connection.request(subject, payload, headers=given or None, patient=patient)
        if _status(message) == "503":
            raise TransientTransportError(f"{self._url}: no stream takes {subject} at the moment", url=self._url)
        try:
            answer = _ANSWERS.decode(message.data)
        except msgspec.MsgspecError as error:
            raise UnansweredError(f"{self._url}: the answer to {subject} is not readable", url=self._url) from error
        if answer.error is not None:
            raise _api_error(answer.error)
        return Ack(answer.seq, answer.duplicate)

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Return the last message on a subject as the stream's leader has it; None if there is none."""
        return await self._ask(stream, {"last_by_subj": subject})

    async def following(self, stream: str, subject: str, seq: int) -> Stored | None:
        """Return the first message on a subject with at least a number, as the leader has it; None if there is none."""
        return await self._ask(stream, {"seq": max(seq, 1), "next_by_subj": subject})

    async def nearby_last(self, stream: str, subject: str) -> Stored | None:
        """Return the last message on a subject as the nearest replica has it, which may lag behind; else None."""
        message = await self.connection.request(self.subject(f"DIRECT.GET.{stream}.{subject}"))
        return None if _status(message) else lift(message)

    async def at(self, stream: str, seq: int) -> Stored | None:
        """Return the message with a number, whichever replica has it; None if there is none."""
        message = await self.connection.request(self.subject(f"DIRECT.GET.{stream}"), b'{"seq":%d}' % seq, patient=True)
        # A replica may lag behind, or the stream not allow direct access: the leader knows.
        return await self._ask(stream, {"seq": seq}) if _status(message) else lift(message)

    async def batch(self, stream: str, subject: str, seq: int, count: int, *, max_bytes: int) -> list[Stored]:
        """Return messages on a subject from a number on, as the nearest replica has them: perhaps fewer than there are.

        Servers before 2.11 return one.

        Args:
            stream: Which.
            subject: Which.
            seq: The least number.
            count: The most messages.
            max_bytes: About the most bytes.
        """
        subject_of_request = self.subject(f"DIRECT.GET.{stream}")
        body = {"seq": max(seq, 1), "next_by_subj": subject, "batch": count, "max_bytes": max_bytes}
        found: list[Stored] = []
        async with self.connection.inbox(subject_of_request) as (session, reply, arrived):
            await session.send(subject_of_request, json.dumps(body).encode(), reply=reply)
            while len(found) < count:
                message = await self.connection.next_of(arrived, what=subject_of_request)
                if _status(message):
                    break
                found.append(lift(message))
                if _PENDING not in (message.headers or {}):
                    break
        return found

    async def purge(self, stream: str, subject: str, *, before: int | None = None) -> int:
        """Remove the messages on a subject, those in front of a number or all; return how many; 0 without a stream."""
        body: dict[str, object] = {"filter": subject}
        if before is not None:
            body["seq"] = before
        try:
            answer = await self.call(f"STREAM.PURGE.{stream}", body)
        except ApiError as error:
            if error.missing:
                return 0
            raise
        return int(answer.get("purged", 0))

    async def info(self, stream: str) -> dict[str, Any] | None:
        """Return what the server says of a stream; None if there is none."""
        try:
            return await self.call(f"STREAM.INFO.{stream}")
        except ApiError as error:
            if error.missing:
                return None
            raise

    async def clock(self, stream: str) -> float | None:
        """Return the time on the clock of a stream's leader, in seconds since 1970; None without a stream."""
        told = (await self.info(stream) or {}).get("ts")
        return None if told is None else datetime.fromisoformat(told).timestamp()

    async def subjects(self, stream: str, pattern: str) -> dict[str, int]:
        """Return how many messages each subject of a pattern holds, for those that hold any; empty without a stream."""
        found: dict[str, int] = {}
        while True:
            try:
                answer = await self.call(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
            except ApiError as error:
                if error.missing:
                    return {}
                raise
            page = (answer.get("state") or {}).get("subjects") or {}
            before = len(found)
            found |= page
            if len(found) == before or len(found) >= int(answer.get("total", 0)):
                return found

    async def heads(self, stream: str, pattern: str) -> list[Head]:
        """Return the last message of each subject of a pattern, without their bytes; empty without a stream.

        Raises:
            ApiError: If the server answers with an error.
            LostPlaceError: If it lost its place on the way; nothing is returned then.
            TransportError: As `Connection.request` does.
        """
        name = f"deltabus-{secrets.token_hex(8)}"
        config = {
            "name": name,
            "deliver_policy": "last_per_subject",
            "filter_subject": pattern,
            "headers_only": True,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _CONSUMER_SECONDS * 1_000_000_000,
        }
        try:
            made = await self.call(
                f"CONSUMER.CREATE.{stream}.{name}.{pattern}", {"stream_name": stream, "config": config}
            )
        except ApiError as error:
            if error.missing:
                return []
            raise
        try:
            return await self._collect_heads(stream, name, int(made.get("num_pending", 0)))
        finally:
            try:
                await self.call(f"CONSUMER.DELETE.{stream}.{name}")
            except ApiError as error:
                if not error.missing:
                    raise

    async def _collect_heads(self, stream: str, consumer: str, count: int) -> list[Head]:
        subject = self.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
        found: list[Head] = []
        async with self.connection.inbox(subject, own=True) as (session, reply, arrived):
            while len(found) < count:
                before = len(found)
                left = min(_HEADS, count - before)
                await session.send(subject, json.dumps({"batch": left, "no_wait": True}).encode(), reply=reply)
                for _ in range(left):
                    message = await self.connection.next_of(arrived, what=subject, limit=None)
                    status = _status(message)
                    if status == "404":
                        await self._check_delivered(stream, consumer, len(found))
                        return found  # the rest was removed meanwhile
                    if status == "408" and len(found) > before:
                        break  # this request ended early: the next one learns whether there are more
                    # A consumer that its server forgot begins anew, and would skip as many as it repeats.
                    if status is not None or message.metadata.sequence.consumer != len(found) + 1:
                        raise self._lost_place(stream, status or "out of order")
                    headers = message.headers or {}
                    size = int(headers.get("Nats-Msg-Size", "0"))
                    found.append(Head(message.subject, headers, size, message.metadata.timestamp.timestamp()))
        return found

    async def _check_delivered(self, stream: str, consumer: str, count: int) -> None:
        """Check that a consumer with nothing more to give is the one that gave `count`, and did not begin anew."""
        try:
            info = await self.call(f"CONSUMER.INFO.{stream}.{consumer}")
        except ApiError as error:
            raise self._lost_place(stream, str(error)) from error
        if int((info.get("delivered") or {}).get("consumer_seq", 0)) != count:
            raise self._lost_place(stream, "begun anew")

    def _lost_place(self, stream: str, why: str) -> LostPlaceError:
        return LostPlaceError(
            f"{self._url} lost its place in {stream} while it was listed ({why}); list again", url=self._url
        )

    async def _ask(self, stream: str, body: Mapping[str, object]) -> Stored | None:
        action = f"STREAM.MSG.GET.{stream}"
        try:
            answer = _ANSWERS.decode(await self._request(action, body))
        except msgspec.MsgspecError as fault:
            raise self._unreadable(action) from fault
        if answer.error is not None:
            error = _api_error(answer.error)
            if error.missing:
                return None
            raise error
        message = answer.message
        if message is None:
            raise self._unreadable(action)
        return Stored(message.seq, message.subject, _read_headers(message.hdrs), message.data, message.time)

    async def _request(self, action: str, body: Mapping[str, object] | None) -> bytes:
        payload = b"" if body is None else json.dumps(body).encode()
        message = await self.connection.request(self.subject(action), payload)
        if _status(message) == "503":
            raise no_responders(self._url, known=self._known)
        self._known = True
        return message.data

    def _unreadable(self, action: str) -> TransportError:
        return TransportError(f"{self._url}: what answered {action} is not JetStream", url=self._url)


def lift(message: Msg) -> Stored:
    """Return the stored message that an answer to a direct request is."""
    headers = message.headers or {}
    return Stored(
        int(headers.get("Nats-Sequence", "0")),
        headers.get("Nats-Subject", ""),
        headers,
        message.data,
        headers.get("Nats-Time-Stamp", ""),
    )


def _status(message: Msg) -> str | None:
    return (message.headers or {}).get("Status")


def _api_error(error: _Error) -> ApiError:
    return ApiError(error.code, error.err_code, error.description)


def _read_headers(block: bytes) -> dict[str, str]:
    """Return the headers in a block as the server keeps it: `NATS/1.0`, then a line for each."""
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
