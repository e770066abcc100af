"""From a URL to its transport.

The table below maps a scheme to where its class is found, so that a backend's library is imported only when a URL of
its scheme is opened. Other packages add schemes by entry point, without deltabus knowing them:

    [project.entry-points."deltabus.transports"]
    carrier = "pigeons.transport:CarrierTransport"

Such a class is a `Transport` that declares its `options` and can be made `from_address` (see `Backend`). The schemes
of deltabus itself cannot be replaced.

Where a transport's tails can be woken, the option `notify` is taken here: a URL of its own, that names a channel of
announcements on a broker.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from deltabus.bus.errors import MissingExtraError, UnknownSchemeError, UsageError
from deltabus.bus.transport import Transport

from .notified import NotifiedTransport
from .notifier import Notifier, WakeableTransport
from .options import Option, is_secret, read_options

__all__ = ["Address", "Backend", "known_schemes", "open_transport"]

_GROUP = "deltabus.transports"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//?)?")


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a scheme's class is found.

    Attributes:
        path: `module:Class`.
        install: What to run when the class's library is missing.
    """

    path: str
    install: str


_TARGETS = {
    "file": _Target("deltabus.transports.file:FileTransport", "pip install deltabus"),
    "hf": _Target("deltabus.transports.hub:HubTransport", "pip install deltabus"),
    "http": _Target("deltabus.transports.http:HttpTransport", "pip install deltabus"),
    "https": _Target("deltabus.transports.http:HttpTransport", "pip install deltabus"),
    "memory": _Target("deltabus.transports.memory:MemoryTransport", "pip install deltabus"),
    "s3": _Target("deltabus.transports.s3:S3Transport", "pip install deltabus"),
    "nats": _Target("deltabus.transports.nats:NatsTransport", "pip install deltabus"),
    "tls": _Target("deltabus.transports.nats:NatsTransport", "pip install deltabus"),
}
_FSSPEC = "fsspec+"
"""What a scheme begins with that names a protocol of fsspec."""

_TARGETS |= {
    scheme: _Target("deltabus.transports.filesystems:FilesystemTransport", f"pip install {package}")
    for scheme, package in {
        "abfs": "adlfs",
        "az": "adlfs",
        "fsspec": "fsspec",
        "gcs": "gcsfs",
        "gs": "gcsfs",
        "sftp": "paramiko",
        "smb": "smbprotocol",
        "ssh": "paramiko",
    }.items()
}

_NOTIFIERS = {
    scheme: _Target("deltabus.transports.nats.notifier:NatsNotifier", "pip install deltabus")
    for scheme in ("nats", "tls")
}
_NOTIFY = Option(
    name="notify",
    parse=str,
    default=None,
    help="percent-encoded URL of a channel of announcements, such as nats://host:4222/run-7",
    secret=True,
)


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL says, taken apart.

    Attributes:
        scheme: In lower case.
        host: Host and port as written, without user name and password.
        path: What follows, percent-decoded, with its leading `/`; for a local path the absolute path.
        username: Percent-decoded; None when the URL has none.
        password: Percent-decoded; None when the URL has none.
        text: The whole URL without its secrets, for errors and logs.
    """

    scheme: str
    host: str
    path: str
    username: str | None
    password: str | None
    text: str

    def __repr__(self) -> str:
        # Also a dump of local variables must not show a password.
        return f"Address({self.text!r})"


class Backend(Protocol):
    """What the registry needs of a transport's class."""

    options: ClassVar[Sequence[Option]]

    @classmethod
    def from_address(cls, address: Address, **options: Any) -> Transport:  # noqa: ANN401 - as declared in `options`
        """Return the transport of this address; `options` has a value for each declared one.

        It connects to nothing yet, needs no running event loop, and raises `UsageError` if the address makes no sense.
        """


def known_schemes() -> list[str]:
    """Return the schemes that `open_transport` takes, sorted."""
    return sorted({*_TARGETS, *(point.name for point in entry_points(group=_GROUP))})


def open_transport(url: str | os.PathLike[str], **options: object) -> Transport:
    """Return the transport of a topic's URL, or of a local path; nothing is connected or created yet.

    >>> open_transport("memory://run-7").url
    'memory://run-7'
    >>> open_transport("/data/run-7", poll=0.2).url
    'file:///data/run-7'

    Args:
        url: Such as `file:///data/run-7`, `memory://run-7` or, for a local directory, simply its path.
        options: As they may stand in the URL's query; one given here goes before the same one there.

    Raises:
        UnknownSchemeError: If no transport has the URL's scheme.
        UnknownOptionError: If the transport does not have one of the options.
        MissingExtraError: If the transport's library is not installed.
        UsageError: If the URL or an option's value is malformed.
    """
    parts, given = _split(url)
    backend = _load(parts.scheme)
    given |= {name: str(value) for name, value in options.items()}
    if not issubclass(backend, WakeableTransport):
        address, values = _read(parts, given, backend.options)
        return backend.from_address(address, **values)
    address, values = _read(parts, given, (*backend.options, _NOTIFY))
    channel = values.pop(_NOTIFY.name)
    notifier = None if channel is None else _open_notifier(str(channel))
    store = backend.from_address(address, **values)
    if notifier is None:
        return store
    assert isinstance(store, WakeableTransport)
    return NotifiedTransport(store, notifier)


def _open_notifier(url: str) -> Notifier:
    """Return the channel of announcements that a URL names."""
    if "://" not in url:
        raise UsageError("the option 'notify' is no URL; write one such as nats://host:4222/run-7, percent-encoded")
    parts, given = _split(url)
    if parts.scheme not in _NOTIFIERS:
        there = ", ".join(f"{name}://" for name in sorted(_NOTIFIERS))
        raise UnknownSchemeError(f"the option 'notify' has a {parts.scheme}:// URL; there are {there}")
    target = _NOTIFIERS[parts.scheme]
    kind = _import(target.path, parts.scheme, target.install)
    address, values = _read(parts, given, kind.options)
    notifier: Notifier = kind.from_address(address, **values)
    return notifier


def _read(
    parts: SplitResult, given: Mapping[str, str], declared: Sequence[Option]
) -> tuple[Address, dict[str, object]]:
    """Return what a URL says: where, and a value for each declared option."""
    # File names need not be UTF-8; the system's own way to carry such bytes in a string goes through unharmed.
    path = unquote(parts.path, errors="surrogateescape")
    if "\0" in path:
        raise UsageError("the path holds a zero byte; remove it")
    credentials, _, host = parts.netloc.rpartition("@")
    username, colon, password = credentials.partition(":")
    place = f"{parts.scheme}://{host}{quote(path, safe='/@:+=,~', errors='surrogateescape')}"
    values = read_options(declared, given, where=place)
    shown = {name: text for name, text in given.items() if not is_secret(name, declared)}
    address = Address(
        scheme=parts.scheme,
        host=host,
        path=path,
        username=unquote(username) if credentials else None,
        password=unquote(password) if colon else None,
        text=f"{place}?{urlencode(shown)}" if shown else place,
    )
    return address, values


def _split(url: str | os.PathLike[str]) -> tuple[SplitResult, dict[str, str]]:
    """Return the URL's parts and the options in its query; never say in an error what may be a secret."""
    text = url if isinstance(url, str) else os.fsdecode(os.fspath(url))
    scheme = _SCHEME.match(text) if isinstance(url, str) else None
    if scheme and scheme[2] != "//" and (scheme[2] or scheme[1].lower() in known_schemes()):
        raise UsageError(
            f"a URL begins with {scheme[1]}://, this one with {scheme[0]}; for a local path write ./ first"
        )
    if not scheme or scheme[2] != "//":
        if not text:
            raise UsageError("the URL is empty; write one such as file:///data/run-7")
        try:
            path = Path(text).expanduser().absolute()
        except RuntimeError as error:
            raise UsageError(f"path {text!r} begins with an unknown home directory; write it out") from error
        return SplitResult("file", "", quote(os.fsencode(path)), "", ""), {}
    if any(character < " " or character == "\x7f" for character in text):
        raise UsageError(f"this {scheme[1]}:// URL holds a control character; write it percent-encoded, or remove it")
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        raise UsageError(
            f"this {scheme[1]}:// URL has a malformed host or port; write ':', '/', '?', '#' and '@' in a user name or "
            "password percent-encoded"
        ) from None
    if parts.fragment:
        raise UsageError(f"this {scheme[1]}:// URL has a '#'; write it as %23")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError:
        raise UsageError(f"options of this {scheme[1]}:// URL are malformed; write ?name=value&name=value") from None
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise UsageError(f"this {scheme[1]}:// URL gives an option twice; give each once of {', '.join(sorted(names))}")
    return parts, dict(pairs)


def _load(scheme: str) -> type[Backend]:
    """Return the class that serves a scheme."""
    key = "fsspec" if scheme.startswith(_FSSPEC) else scheme
    points = [] if key in _TARGETS else sorted(entry_points(group=_GROUP, name=scheme))
    if key not in _TARGETS and not points:
        known = known_schemes()
        nearest = difflib.get_close_matches(scheme, known, n=1)
        hint = f"did you mean {nearest[0]}://? " if nearest else ""
        there = ", ".join(f"{name}://" for name in known)
        raise UnknownSchemeError(f"no transport serves {scheme}:// URLs; {hint}there are {there}")
    if points:
        path, package = points[0].value, points[0].dist
        install = f"pip install {package.name}" if package else f"install the package of {points[0].module}"
    else:
        path, install = _TARGETS[key].path, _TARGETS[key].install
    backend: type[Backend] = _import(path, scheme, install)
    return backend


def _import(path: str, scheme: str, install: str) -> Any:  # noqa: ANN401 - whatever stands there
    """Return what stands at `module:name`, for URLs of a scheme."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingExtraError(
            f"{scheme}:// needs a library that is not installed ({error}); run: {install}"
        ) from error
