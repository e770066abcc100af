"""`gs://`, `az://`, `sftp://` and whatever else fsspec knows: topics on any of its filesystems.

`fsspec+<protocol>://` reaches every protocol of fsspec, also those whose scheme means something else here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self
from urllib.parse import quote

import fsspec

from deltabus.bus.errors import MissingExtraError, UsageError
from deltabus.bus.transport import Guarantees

from .fsspec_drivers import open_driver
from .fsspec_store import FsspecStore
from .objects import POLL, ObjectTransport
from .options import Option, parse_seconds
from .registry import Address

__all__ = ["FilesystemTransport", "guarantees_of"]

_PREFIX = "fsspec+"
_TIMEOUT = 60.0
_SETTLE = 0.25

_EXCLUSIVE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs"})
"""Protocols whose libraries can create an object only if there is none."""

_MOVING = frozenset({"file", "local", "memory", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs", "webhdfs"})
"""Protocols that rename in place."""

_UNSYNCED = frozenset({"file", "local"})
"""Protocols of disks of this machine, which fsspec does not force what it wrote to."""

_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "sftp": "paramiko", "ssh": "paramiko"}
_PACKAGES |= {"smb": "smbprotocol", "hdfs": "pyarrow", "webhdfs": "requests", "oss": "ossfs", "oci": "ocifs"}


def guarantees_of(protocol: str) -> Guarantees:
    """Return what is guaranteed on a filesystem of fsspec.

    >>> guarantees_of("gs").conditional_append
    True
    """
    if protocol in _EXCLUSIVE:
        remark = "The library is asked to refuse to overwrite; one that ignores it is found out and refused."
    else:
        remark = "Written aside, moved and read back: only one writer at a time is safe."
        if protocol in _UNSYNCED:
            remark += " Not synced to disk: take file://, which does."
    return Guarantees(
        conditional_append=protocol in _EXCLUSIVE,
        push=False,
        durable=protocol != "memory" and protocol not in _UNSYNCED,
        atomic_visibility=protocol in _EXCLUSIVE | _MOVING,
        remark=remark,
    )


def _parse_storage_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError('not a JSON object such as {"token": "anon"}') from None  # noqa: TRY004 - a parser's error
    return options


class FilesystemTransport(ObjectTransport):
    """A topic in a folder of a filesystem of fsspec.

    Args:
        store: Where.
        url: The topic's URL, without secrets.
        protocol: The filesystem's, which decides what is guaranteed.
        poll: The longest pause between two looks for a new record, in seconds.
    """

    guarantees = guarantees_of("")
    options: ClassVar[Sequence[Option]] = (
        Option(
            name="storage_options",
            parse=_parse_storage_options,
            default={},
            help="what the filesystem is made with, as JSON",
            secret=True,
        ),
        Option(name="timeout", parse=parse_seconds, default=_TIMEOUT, help="seconds to wait for a silent filesystem"),
        Option(name="poll", parse=parse_seconds, default=POLL, help="most seconds between looks for new records"),
        Option(name="settle", parse=parse_seconds, default=_SETTLE, help="seconds before a write is read back"),
    )

    def __init__(self, store: FsspecStore, *, url: str, protocol: str, poll: float = POLL) -> None:
        super().__init__(store, url=url, poll=poll)
        self.guarantees = guarantees_of(protocol)

    @classmethod
    def from_address(
        cls,
        address: Address,
        *,
        storage_options: dict[str, Any],
        timeout: float = _TIMEOUT,
        poll: float = POLL,
        settle: float = _SETTLE,
    ) -> Self:
        """Return the topic in the folder that the URL names; nothing is connected yet.

        Raises:
            UsageError: If fsspec has no such protocol, or the URL names no folder.
            MissingExtraError: If the library of the protocol is not installed.
        """
        protocol = address.scheme.removeprefix(_PREFIX)
        if not (address.host + address.path).strip("/") or ".." in address.path.split("/"):
            raise UsageError(f"{address.text} names no folder; write one such as {address.scheme}://bucket/run-7")
        try:
            kind: Any = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            package = _PACKAGES.get(protocol, f"the package that serves {protocol}://")
            raise MissingExtraError(
                f"{address.scheme}:// needs a library that is not installed ({error}); run: pip install {package}"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"fsspec has no protocol {protocol!r}; write fsspec+<protocol>:// with one that it has"
            ) from error
        place = f"{protocol}://{address.host}{address.path.rstrip('/')}"
        arguments = kind._get_kwargs_from_urls(place)
        arguments.pop("path", None)
        if address.username is not None:
            arguments["username"] = address.username
        if address.password is not None:
            arguments["password"] = address.password
        url = f"{address.scheme}://{address.host}{quote(address.path.rstrip('/'), safe='/@:+=,~')}"
        store = FsspecStore(
            str(kind._strip_protocol(place)).rstrip("/"),
            partial(open_driver, kind, {**arguments, **storage_options}, timeout=timeout),
            url=url,
            exclusive=protocol in _EXCLUSIVE,
            settle=settle,
        )
        return cls(store, url=url, protocol=protocol, poll=poll)
