"""What an `http://` or `https://` URL says: where the service is, which topic, and who asks."""

from __future__ import annotations

import os
import re
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from deltabus.bus.errors import AccessDeniedError, UsageError

from ..options import Option, parse_seconds
from ..registry import Address
from .wire import check_reader, check_topic

__all__ = ["OPTIONS", "Settings", "read_settings"]

_TIMEOUT = 60.0
_POLL = 2.0
_TOKEN = re.compile(r"[\x21-\x7e]+")
_VARIABLE = "DELTABUS_TOKEN"

OPTIONS = (
    Option(name="timeout", parse=parse_seconds, default=_TIMEOUT, help="seconds to wait for a silent service"),
    Option(name="poll", parse=parse_seconds, default=_POLL, help="most seconds between attempts to follow again"),
    Option(name="token", parse=str, default="", help="token to show, instead of DELTABUS_TOKEN", secret=True),
    Option(name="token_file", parse=str, default="", help="file that holds the token"),
    Option(name="ca_file", parse=str, default="", help="PEM file of certificates to trust"),
    Option(name="reader", parse=str, default="", help="who asks, for people; by default host and process"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a URL says.

    Attributes:
        url: The topic's URL, without secrets.
        base: Where the service is: scheme, host and port.
        topic: Which topic.
        timeout: Seconds to wait for a silent service.
        poll: Most seconds between attempts to follow again.
        reader: Who asks, for people.
        token: What to show; None shows nothing.
        token_file: A file that holds it; it is read anew for each session.
        ca_file: Certificates to trust, PEM; None trusts those of the system.
    """

    url: str
    base: str
    topic: str
    timeout: float
    poll: float
    reader: str
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca_file: str | None = None

    def read_token(self) -> str | None:
        """Return the token to show; None when there is none.

        Raises:
            AccessDeniedError: If the file cannot be read, or what is given is no token.
        """
        token, source = self.token, "the option 'token'"
        if self.token_file is not None:
            source = f"{self.token_file} (option 'token_file')"
            try:
                token = Path(self.token_file).read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not text"
                raise AccessDeniedError(f"{self.url}: {source} cannot be read: {reason}", url=self.url) from None
        elif token is None and _VARIABLE in os.environ:
            token, source = os.environ[_VARIABLE].strip(), f"the variable {_VARIABLE}"
        if token is not None and not _TOKEN.fullmatch(token):
            raise AccessDeniedError(
                f"{self.url}: {source} holds no token, which is letters, digits and signs without spaces", url=self.url
            )
        return token

    def make_context(self) -> ssl.SSLContext | None:
        """Return the context of a line with TLS; None for one without.

        Raises:
            AccessDeniedError: If the file of certificates cannot be used.
        """
        if not self.base.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as error:
            raise AccessDeniedError(
                f"{self.url}: the option 'ca_file' names no readable PEM file ({error})", url=self.url
            ) from error


def read_settings(
    address: Address,
    *,
    timeout: float = _TIMEOUT,
    poll: float = _POLL,
    token: str = "",
    token_file: str = "",
    ca_file: str = "",
    reader: str = "",
) -> Settings:
    """Return what a URL and its options say.

    Raises:
        UsageError: If it names no host or topic, or a user; or if options exclude each other.
    """
    if not address.host:
        raise UsageError(f"{address.text} names no host; write {address.scheme}://host:8700/topic")
    if address.username is not None:
        raise UsageError(f"{address.text}: user and password are not used; give the option 'token'")
    if token and token_file:
        raise UsageError(f"{address.text}: of the options 'token' and 'token_file' give one")
    if ca_file and address.scheme != "https":
        raise UsageError(f"{address.text}: the option 'ca_file' is for https://")
    try:
        topic = check_topic(address.path.removeprefix("/").removesuffix("/"))
    except UsageError as error:
        raise UsageError(f"{address.text}: {error}") from None
    return Settings(
        url=address.text,
        base=f"{address.scheme}://{address.host}",
        topic=topic,
        timeout=timeout,
        poll=poll,
        reader=check_reader(reader) if reader else _default_reader(),
        token=token or None,
        token_file=token_file or None,
        ca_file=ca_file or None,
    )


def _default_reader() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:80].lstrip(".-") or "host"
    return f"{host}-{os.getpid()}"
