"""`s3://bucket/prefix`: topics in a bucket of Amazon S3, or of any server that speaks its protocol.

Credentials, region, profile and endpoint are looked up as AWS's own tools do, in the environment and in AWS's files,
unless they are given as options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self
from urllib.parse import quote, urlencode, urlsplit

from deltabus.bus.errors import UsageError
from deltabus.bus.transport import Guarantees

from .objects import POLL, ObjectTransport
from .options import Option, parse_seconds
from .registry import Address
from .s3_client import S3Settings
from .s3_store import S3Store

__all__ = ["S3Transport"]

_TIMEOUT = 60.0
_MAX_PREFIX = 511  # a key of S3 has 1024 bytes at most, and one of a blob 512


def _parse_endpoint(text: str) -> str:
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        raise ValueError("not a URL such as http://127.0.0.1:9000") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment or "@" in text:
        raise ValueError("not a URL such as http://127.0.0.1:9000, without user name, options and fragment")
    return text.rstrip("/")


def _parse_addressing(text: str) -> str:
    if text not in {"path", "virtual", "auto"}:
        raise ValueError("not one of 'path', 'virtual' and 'auto'")
    return text


class S3Transport(ObjectTransport):
    """A topic below a prefix of a bucket; the bucket must exist.

    Args:
        settings: Where, and who asks.
        poll: The longest pause between two looks for a new record, in seconds.
    """

    guarantees = Guarantees(
        conditional_append=True,
        push=False,
        durable=True,
        atomic_visibility=True,
        remark="A server that ignores conditional writes is found out before the first write, and refused.",
    )
    options: ClassVar[Sequence[Option]] = (
        Option(name="endpoint", parse=_parse_endpoint, default="", help="URL of the server, if it is not Amazon's"),
        Option(name="region", parse=str, default="", help="region of the bucket"),
        Option(name="profile", parse=str, default="", help="section of AWS's files that holds the credentials"),
        Option(name="addressing", parse=_parse_addressing, default="auto", help="bucket in the path or virtual host"),
        Option(name="access_key", parse=str, default="", help="name of the access key", secret=True),
        Option(name="secret_key", parse=str, default="", help="the access key's secret", secret=True),
        Option(name="session_token", parse=str, default="", help="token of temporary credentials", secret=True),
        Option(name="timeout", parse=parse_seconds, default=_TIMEOUT, help="seconds to wait for a silent server"),
        Option(name="poll", parse=parse_seconds, default=POLL, help="most seconds between looks for new records"),
    )

    def __init__(self, settings: S3Settings, *, poll: float = POLL) -> None:
        place = f"s3://{settings.bucket}/{quote(settings.prefix.rstrip('/'), safe='/')}".rstrip("/")
        named = {
            name: value
            for name in ("endpoint", "region", "profile", "addressing")
            if (value := str(getattr(settings, name))) not in {"", "auto"}
        }
        url = f"{place}?{urlencode(named, safe=':/')}" if named else place
        super().__init__(S3Store(settings, url=url), url=url, poll=poll)

    @classmethod
    def from_address(
        cls,
        address: Address,
        *,
        endpoint: str = "",
        region: str = "",
        profile: str = "",
        addressing: str = "auto",
        access_key: str = "",
        secret_key: str = "",
        session_token: str = "",
        timeout: float = _TIMEOUT,
        poll: float = POLL,
    ) -> Self:
        """Return the topic in the bucket that the URL names; nothing is connected yet.

        Raises:
            UsageError: If the URL names no bucket, holds credentials or has a malformed prefix, or if but one half of
                the credentials is given.
        """
        if address.username is not None:
            raise UsageError(
                f"{address.text} had a user name; credentials go into the options access_key and secret_key, the "
                "environment or AWS's files"
            )
        if not address.host or ":" in address.host:
            raise UsageError(
                f"{address.text} names no bucket; write s3://bucket/prefix, and the server as the option 'endpoint'"
            )
        if bool(access_key) != bool(secret_key) or (session_token and not access_key):
            raise UsageError(
                f"{address.text} has but a part of the credentials; give access_key and secret_key together, and with "
                "temporary ones session_token"
            )
        settings = S3Settings(
            bucket=address.host,
            prefix=_read_prefix(address),
            endpoint=endpoint,
            region=region,
            profile=profile,
            addressing=addressing,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            timeout=timeout,
        )
        return cls(settings, poll=poll)


def _read_prefix(address: Address) -> str:
    """Return what stands in front of the topic's names, with a slash behind it."""
    text = address.path.strip("/")
    if not text:
        return ""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"the prefix in {address.text} is not UTF-8; choose another") from None
    if size > _MAX_PREFIX or any(part in {"", ".", ".."} for part in text.split("/")) or not text.isprintable():
        raise UsageError(
            f"the prefix in {address.text} has an empty part, '.', '..' or a character that cannot be shown, or over "
            f"{_MAX_PREFIX} bytes; choose another"
        )
    return text + "/"
