"""What the Hub and its store answer when they refuse or fail, as our errors, without secrets."""

from __future__ import annotations

import re

from deltabus.bus.errors import AccessDeniedError, StorageFullError, TransientTransportError, TransportError

__all__ = ["FileMissingError", "StatusError", "UnansweredError", "clean", "judge_status", "judge_store"]

_TRANSIENT = {408, 425, 429}
_FULL = {402, 413, 507}
_FULL_WORDS = re.compile(r"quota|storage limit|storage is full|out of storage", re.IGNORECASE)
_STATUS = re.compile(r"\b(?:client|server) error \(([0-9]{3})\b")
_QUERY = re.compile(r"\?[^\s)\"'>]+")
_TOKEN = re.compile(r"\b(?:hf|xet|api|oauth)_[A-Za-z0-9_.-]{6,}|Bearer\s+\S+|[a-z+]+://[^\s/@]+@", re.IGNORECASE)
_LONGEST = 300
_LOG_IN = (
    "log in with `hf auth login`, or set HF_TOKEN or the option 'token' to a token that is valid and sees bucket {}"
)
_MISSING = (
    "there is no bucket {}, or this token does not see it: create it with `hf buckets create`, or add the option "
    "create=true"
)


class UnansweredError(TransientTransportError):
    """A request may or may not have had its effect."""


class FileMissingError(TransportError):
    """A file is not in the bucket."""


class StatusError(TransportError):
    """The Hub refused a request, for a reason that only who made it can judge.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, *, url: str, status: int) -> None:
        super().__init__(message, url=url)
        self.status = status


def clean(text: str, secret: str = "") -> str:
    """Return a text from outside without what may be a secret: tokens, and the queries of signed addresses.

    >>> clean("no access to https://host/file?Signature=abc with hf_abcdefgh")
    'no access to https://host/file?... with ***'
    """
    if secret:
        text = text.replace(secret, "***")
    return " ".join(_QUERY.sub("?...", _TOKEN.sub("***", text)).split())[:_LONGEST]


def judge_status(status: int, code: str, said: str, *, what: str, url: str, bucket: str) -> TransportError:
    """Return the error for a refusal.

    Args:
        status: The HTTP status.
        code: What the Hub calls it, such as `RepoNotFound`; may be empty.
        said: What it says, cleaned.
        what: What was wanted.
        url: The topic's, without secrets.
        bucket: Its name.
    """
    kind: type[TransportError]
    where = f"cannot {what} in {url}: the Hub answered {status}" + (f": {said}" if said else "")
    if status in _FULL or (status == 403 and _FULL_WORDS.search(said)):
        kind, advice = StorageFullError, "free space in the namespace, or raise its storage limit"
    elif status == 401:
        kind, advice = AccessDeniedError, _LOG_IN.format(bucket)
    elif status == 403:
        kind, advice = AccessDeniedError, f"use a token that may do this with bucket {bucket}"
    elif status in _TRANSIENT or status >= 500:
        kind, advice = TransientTransportError, "it may be done again"
    elif code == "EntryNotFound":
        return FileMissingError(where, url=url)
    else:
        return StatusError(f"{where}; {_MISSING.format(bucket)}" if status == 404 else where, url=url, status=status)
    return kind(f"{where}; {advice}", url=url)


def judge_store(error: Exception, *, what: str, url: str, bucket: str, secret: str) -> TransportError:
    """Return the error for what `hf_xet` raised: it raises builtin errors, and tells a status only in the text."""
    said = clean(str(error), secret)
    found = _STATUS.search(said)
    if found:
        status = int(found[1])
        if status == 404:
            return TransportError(f"cannot {what} in {url}: its bytes are not in the Hub's store: {said}", url=url)
        return judge_status(status, "", said, what=what, url=url, bucket=bucket)
    return TransientTransportError(f"cannot {what} in {url}: {said}; it may be done again", url=url)
