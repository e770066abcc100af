"""What a `nats://` URL says: where the servers are, who logs in, how the line is secured."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import nkeys  # type: ignore[import-untyped]

from deltabus.bus.errors import AccessDeniedError, UsageError

from ..options import Option, parse_flag, parse_seconds, parse_size
from ..registry import Address

__all__ = ["OPTIONS", "Limits", "Login", "Settings", "Tls", "read_settings"]

_PORT = 4222
_TOPIC = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_MAX_TOPIC = 128
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_INBOX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TIMEOUT = 10.0
_INBOX_PREFIX = "_INBOX"
_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+(\S+)\s")
_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+(\S+)\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who logs in; at most one way is given.

    Attributes:
        user: A user's name, with `password`.
        password: Its password.
        token: A token.
        nkey_file: A file that holds an nkey seed.
        creds_file: A file that holds a user's JWT and nkey seed, as `nsc` writes it.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    nkey_file: str | None = None
    creds_file: str | None = None

    def read_seed(self, *, url: str) -> str | None:
        """Return the seed in the nkey file; None without such a file.

        Raises:
            AccessDeniedError: If the file cannot be read or holds no seed.
        """
        if self.nkey_file is None:
            return None
        seed = _read_text(self.nkey_file, "nkey_file", url=url).strip()
        _check_seed(seed, self.nkey_file, "nkey_file", url=url)
        return seed

    def read_creds(self, *, url: str) -> str | None:
        """Return what the creds file holds; None without such a file.

        Raises:
            AccessDeniedError: If the file cannot be read or holds no credentials.
        """
        if self.creds_file is None:
            return None
        text = _read_text(self.creds_file, "creds_file", url=url)
        seed = _SEED.search(text + "\n")
        # The library would look for a missing line for ever.
        if not seed or not _JWT.search(text):
            raise AccessDeniedError(
                f"{url}: {self.creds_file} (option 'creds_file') lacks a user JWT or a user nkey seed; "
                "write it with: nsc generate creds",
                url=url,
            )
        _check_seed(seed[1], self.creds_file, "creds_file", url=url)
        return text + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How the line is secured.

    Attributes:
        required: Whether to refuse a line that is not.
        first: Whether the server expects the handshake before it says anything (`handshake_first`).
        ca_file: Certificates to trust, PEM; None trusts those of the system.
        certificate_file: The client's own certificate, PEM, where the server asks for one.
        private_key_file: The certificate's key, PEM; None if it stands in the same file.
        hostname: The name that the server's certificate must have; None is the host of the URL.
    """

    required: bool = False
    first: bool = False
    ca_file: str | None = None
    certificate_file: str | None = None
    private_key_file: str | None = None
    hostname: str | None = None

    def make_context(self, *, url: str) -> ssl.SSLContext:
        """Return the context of a line.

        Raises:
            AccessDeniedError: If a file cannot be read or used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.private_key_file)
        except (OSError, ValueError) as error:
            raise AccessDeniedError(
                f"{url}: a file of the options 'ca_file', 'certificate_file' or 'private_key_file' cannot be used "
                f"({error}); each must be a readable PEM file",
                url=url,
            ) from error
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the topic's streams shall be like; None leaves it as it is, or as the server has it for a new stream.

    Attributes:
        replicas: Servers that hold a copy, 1 to 5.
        storage: `file` or `memory`.
        max_bytes: Bytes that the blobs may take.
        max_age: Seconds after which the server removes a blob.
    """

    replicas: int | None = None
    storage: str | None = None
    max_bytes: int | None = None
    max_age: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a URL says.

    Attributes:
        url: The topic's URL, without secrets.
        topic: The topic's name.
        servers: As `host:port`, at least one.
        login: Who logs in.
        tls: How the line is secured.
        limits: What the streams shall be like.
        domain: The JetStream domain; None is the server's own.
        inbox_prefix: What the subjects begin with on which answers come.
        timeout: Seconds to wait for an answer.
    """

    url: str
    topic: str
    servers: tuple[str, ...]
    login: Login = Login()
    tls: Tls = Tls()
    limits: Limits = Limits()
    domain: str | None = None
    inbox_prefix: str = _INBOX_PREFIX
    timeout: float = _TIMEOUT


def read_settings(
    address: Address,
    *,
    servers: str = "",
    timeout: float = _TIMEOUT,
    token: str = "",
    nkey_file: str = "",
    creds_file: str = "",
    tls: bool = False,
    tls_first: bool = False,
    tls_hostname: str = "",
    ca_file: str = "",
    certificate_file: str = "",
    private_key_file: str = "",
    domain: str = "",
    inbox_prefix: str = _INBOX_PREFIX,
    replicas: int = 0,
    storage: str = "",
    max_bytes: int = 0,
    max_age: float = 0.0,
) -> Settings:
    """Return what an address and the values of `OPTIONS` say.

    Raises:
        UsageError: If the address names no server or topic, or several ways to log in.
    """
    topic = address.path.strip("/")
    if not address.host.strip(":") or not _TOPIC.fullmatch(topic) or len(topic) > _MAX_TOPIC:
        raise UsageError(
            f"{address.text} does not name a server and a topic; write one such as nats://host:4222/run-7, with a "
            f"topic of at most {_MAX_TOPIC} letters, digits, '_', '-' and '/'"
        )
    try:
        server = _parse_server(address.host)
    except ValueError as error:
        raise UsageError(f"{address.text}: the host is {error}") from error
    user, password = address.username, address.password
    if user is not None and password is None:
        if token:
            raise UsageError(f"{address.text} gives two tokens; write one, in front of the host or as the option")
        user, token = "", user  # a name alone is a token, as everywhere with NATS
    if sum(map(bool, (user, token, nkey_file, creds_file))) > 1:
        raise UsageError(
            f"{address.text} gives several ways to log in; choose one of user and password, 'token', 'nkey_file', "
            "'creds_file'"
        )
    return Settings(
        url=address.text,
        topic=topic,
        servers=tuple(dict.fromkeys([server, *filter(None, servers.split(","))])),
        login=Login(
            user=user or None,
            password=password if user else None,
            token=token or None,
            nkey_file=nkey_file or None,
            creds_file=creds_file or None,
        ),
        tls=Tls(
            required=address.scheme == "tls" or any((tls, tls_first, ca_file, certificate_file, private_key_file)),
            first=tls_first,
            ca_file=ca_file or None,
            certificate_file=certificate_file or None,
            private_key_file=private_key_file or None,
            hostname=tls_hostname or None,
        ),
        limits=Limits(
            replicas=replicas or None, storage=storage or None, max_bytes=max_bytes or None, max_age=max_age or None
        ),
        domain=domain or None,
        inbox_prefix=inbox_prefix,
        timeout=timeout,
    )


def _parse_server(text: str) -> str:
    """Return `host:port`.

    Raises:
        ValueError: If the text is neither that nor a host.
    """
    parts = urlsplit(f"//{text.strip()}")
    if not parts.hostname or parts.path or parts.query or parts.username is not None:
        raise ValueError("not host:port, without user and password, which hold for all servers")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or _PORT}"


def _parse_servers(text: str) -> str:
    return ",".join(_parse_server(server) for server in text.split(",")) if text else ""


def _parse_replicas(text: str) -> int:
    if text not in {"0", "1", "2", "3", "4", "5"}:
        raise ValueError("not a number of copies from 1 to 5, or 0 for what is there")
    return int(text)


def _parse_storage(text: str) -> str:
    if text not in {"", "file", "memory"}:
        raise ValueError("neither 'file' nor 'memory'")
    return text


def _parse_limit(text: str) -> int:
    return 0 if text == "0" else parse_size(text)


def _parse_age(text: str) -> float:
    return 0.0 if text in {"0", "0.0"} else parse_seconds(text)


def _parse_domain(text: str) -> str:
    if text and not _TOKEN.fullmatch(text):
        raise ValueError("not a name of letters, digits, '_' and '-'")
    return text


def _parse_inbox(text: str) -> str:
    if not _INBOX.fullmatch(text):
        raise ValueError("not a subject such as _INBOX_reader")
    return text


def _read_text(path: str, option: str, *, url: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise AccessDeniedError(
            f"{url}: {path} (option {option!r}) cannot be read ({error}); check the path and its permissions", url=url
        ) from error


def _check_seed(seed: str, path: str, option: str, *, url: str) -> None:
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except Exception:
        raise AccessDeniedError(
            f"{url}: {path} (option {option!r}) holds no nkey seed; it begins with SU and has 58 characters", url=url
        ) from None


OPTIONS = (
    Option(name="servers", parse=_parse_servers, default="", help="more servers, as host:port,host:port"),
    Option(name="timeout", parse=parse_seconds, default=_TIMEOUT, help="seconds to wait for an answer"),
    Option(name="token", parse=str, default="", help="token to log in with", secret=True),
    Option(name="nkey_file", parse=str, default="", help="file with the nkey seed to log in with"),
    Option(name="creds_file", parse=str, default="", help="file with the JWT and seed to log in with"),
    Option(name="tls", parse=parse_flag, default=False, help="whether to refuse a line without TLS"),
    Option(name="tls_first", parse=parse_flag, default=False, help="whether the handshake comes before all else"),
    Option(name="tls_hostname", parse=str, default="", help="name in the server's certificate"),
    Option(name="ca_file", parse=str, default="", help="PEM file of certificates to trust"),
    Option(name="certificate_file", parse=str, default="", help="PEM file of the client's certificate"),
    Option(name="private_key_file", parse=str, default="", help="PEM file of the certificate's key"),
    Option(name="domain", parse=_parse_domain, default="", help="JetStream domain"),
    Option(name="inbox_prefix", parse=_parse_inbox, default=_INBOX_PREFIX, help="where answers come, if restricted"),
    Option(name="replicas", parse=_parse_replicas, default=0, help="servers that keep a copy, 1 to 5"),
    Option(name="storage", parse=_parse_storage, default="", help="'file' or 'memory'"),
    Option(name="max_bytes", parse=_parse_limit, default=0, help="most bytes of blobs, such as 50GiB"),
    Option(name="max_age", parse=_parse_age, default=0.0, help="seconds after which blobs are removed"),
)
