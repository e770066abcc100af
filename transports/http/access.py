"""Who may do what: bearer tokens, each with a scope and the topics that it is for.

    [[tokens]]
    name = "trainer"
    sha256 = "9f86d0..."        # of the token, in hexadecimal; or, where the file is secret, token = "..."
    scope = "write"             # read, write or admin
    topics = ["team/*"]         # all unless given

`anonymous = "read"` lets those without a token read. Only hashes are held, and all are compared, in constant time.
"""

from __future__ import annotations

import enum
import fnmatch
import hashlib
import hmac
import ipaddress
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltabus.bus.errors import AccessDeniedError, UsageError

__all__ = ["Access", "Grant", "Scope", "check_exposure", "is_loopback", "read_access"]

_EVERYBODY = "everybody"
_SHORTEST = 16


class Scope(enum.IntEnum):
    """What may be done; each includes those before it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Grant:
    """What somebody may do.

    Attributes:
        name: Whose it is, for logs.
        scope: What may be done.
        topics: With which topics, as shell patterns.
    """

    name: str
    scope: Scope
    topics: tuple[str, ...] = ("*",)

    def allows(self, scope: Scope, topic: str | None) -> bool:
        """Return whether something may be done with a topic; None is the service itself."""
        if scope > self.scope:
            return False
        return topic is None or any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.topics)


class _Token(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    scope: str
    sha256: str | None = None
    token: str | None = None
    topics: tuple[str, ...] = ("*",)


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: tuple[_Token, ...] = ()
    anonymous: str = "none"


class Access:
    """Decides who may do what.

    Args:
        grants: What each token allows, by the SHA-256 of the token.
        anonymous: What those may do who show none.
    """

    def __init__(self, grants: Sequence[tuple[bytes, Grant]] = (), *, anonymous: Scope = Scope.ADMIN) -> None:
        self._grants = tuple(grants)
        self._anonymous = Grant(_EVERYBODY, anonymous)

    @property
    def open(self) -> bool:
        """Whether everybody may do everything."""
        return self._anonymous.scope is Scope.ADMIN

    def with_token(self, token: str, grant: Grant) -> Access:
        """Return the same with one token more."""
        digest = hashlib.sha256(token.encode()).digest()
        return Access((*self._grants, (digest, grant)), anonymous=self._anonymous.scope)

    def find(self, authorization: str | None) -> Grant:
        """Return what a request may do, by its header `Authorization`.

        Raises:
            AccessDeniedError: If it shows a token that is not known, or none where one is needed.
        """
        if authorization is None:
            if self._anonymous.scope is Scope.NONE:
                raise AccessDeniedError("a token is needed")
            return self._anonymous
        kind, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, grant in self._grants:
            if hmac.compare_digest(known, digest):
                found = grant
        if kind.lower() == "bearer" and found is not None:
            return found
        if self.open:
            return self._anonymous
        raise AccessDeniedError("the token is not known")


def read_access(file: Path) -> Access:
    """Return what a file of tokens allows: TOML, or JSON if its name ends so.

    Raises:
        UsageError: If it cannot be read, or says something that makes no sense; it never repeats a token.
    """
    try:
        data = file.read_bytes()
        text = data.decode("utf-8")
        told = msgspec.json.decode(data) if file.suffix == ".json" else tomllib.loads(text)
        held = msgspec.convert(told, _File)
    except OSError as error:
        raise UsageError(f"the file of tokens {file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError):
        raise UsageError(f"the file of tokens {file} is malformed; docs/operations.md shows one") from None
    grants = [_grant(token, file) for token in held.tokens]
    anonymous = _scope(held.anonymous, "anonymous", file)
    if not grants and anonymous is Scope.NONE:
        raise UsageError(f"the file of tokens {file} lets nobody in; add a token")
    return Access(grants, anonymous=anonymous)


def _grant(token: _Token, file: Path) -> tuple[bytes, Grant]:
    what = f"token {token.name[:80]!r} in {file}"
    if (token.sha256 is None) == (token.token is None):
        raise UsageError(f"{what}: give one of sha256 and token")
    if token.token is not None:
        if len(token.token) < _SHORTEST or not token.token.isascii() or not token.token.isprintable():
            raise UsageError(f"{what}: a token is at least {_SHORTEST} printable ASCII characters")
        digest = hashlib.sha256(token.token.encode()).digest()
    else:
        try:
            digest = bytes.fromhex(token.sha256 or "")
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise UsageError(f"{what}: sha256 is not 64 hexadecimal digits")
    if not token.topics:
        raise UsageError(f"{what}: topics is empty; leave it out for all")
    return digest, Grant(token.name, _scope(token.scope, what, file), token.topics)


def _scope(text: str, what: str, file: Path) -> Scope:
    try:
        return Scope[text.upper()]
    except KeyError:
        raise UsageError(f"{what} in {file}: scope {text[:40]!r} is not one of none, read, write, admin") from None


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, access: Access, *, allowed: bool) -> None:
    """Check that a service without tokens is not reached from elsewhere by mistake.

    Raises:
        UsageError: If it would be.
    """
    if access.open and not allowed and not is_loopback(host):
        raise UsageError(
            f"{host} is reached from other machines, and without tokens everybody there may change everything; give "
            "--token-file, or --insecure if that is meant"
        )
