"""What an error of an S3 server or its client means for a topic, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    ResponseStreamingError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)

from deltabus.bus.errors import AccessDeniedError, StorageFullError, TransientTransportError, TransportError

from .objects import UncertainError

__all__ = ["S3_FAULTS", "code_of", "explain", "status_of"]

S3_FAULTS = (BotoCoreError, ClientError, aiohttp.ClientError, OSError)
"""What a call of the client may raise; a `TimeoutError` is an `OSError`."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Which of our errors it is, what to do, and whether the server may have done what it was told nevertheless."""

    kind: type[TransportError]
    advice: str
    uncertain: bool = False


_KEYS = (
    "give the options access_key and secret_key, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of "
    "AWS's files by the option 'profile' or AWS_PROFILE"
)
_AGAIN = "it may be done again; if it goes on, look at the server"
_LOST = _Verdict(TransientTransportError, _AGAIN, uncertain=True)
_BUSY = _Verdict(TransientTransportError, _AGAIN)
_UNSENT = _Verdict(TransientTransportError, "nothing was sent; check that the server runs, and the endpoint")
_FORBIDDEN = _Verdict(
    AccessDeniedError, "let the key's policy allow GetObject and ListBucket, and to a writer PutObject and DeleteObject"
)
_KEYLESS = _Verdict(AccessDeniedError, _KEYS)
_EXPIRED = _Verdict(AccessDeniedError, "renew the temporary credentials")
_FULL = _Verdict(StorageFullError, "free space or raise the quota; nothing was left behind")
_ELSEWHERE = _Verdict(
    TransportError, "the bucket is in another region; give it as the option 'region' or AWS_DEFAULT_REGION"
)
_LACKING = _Verdict(TransportError, "the server lacks what is needed, such as conditional writes; use another")

_BY_CODE = {
    "NoSuchBucket": _Verdict(TransportError, "create the bucket, or check its name, the endpoint and the region"),
    "InvalidAccessKeyId": _Verdict(AccessDeniedError, "check the access key: " + _KEYS),
    "SignatureDoesNotMatch": _Verdict(AccessDeniedError, "check the secret key: " + _KEYS),
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": _Verdict(AccessDeniedError, "set this machine's clock"),
    **dict.fromkeys(
        ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"),
        _ELSEWHERE,
    ),
    **dict.fromkeys(("SlowDown", "RequestTimeout", "Throttling", "TooManyRequests", "OperationAborted"), _BUSY),
}
_BY_STATUS = {
    **dict.fromkeys((301, 307, 308), _ELSEWHERE),
    **dict.fromkeys((401, 403), _FORBIDDEN),
    **dict.fromkeys((409, 429, 503), _BUSY),
    501: _LACKING,
    507: _FULL,
}
_BY_CLASS: tuple[tuple[tuple[type[Exception], ...], _Verdict], ...] = (
    ((NoCredentialsError, PartialCredentialsError), _KEYLESS),
    (
        (CredentialRetrievalError, TokenRetrievalError, SSOError),
        _Verdict(AccessDeniedError, "log in again (such as by `aws sso login`), or " + _KEYS),
    ),
    ((ProfileNotFound,), _Verdict(TransportError, "check the option 'profile' or AWS_PROFILE, and AWS's files")),
    ((SSLError,), _Verdict(TransportError, "check the certificate; AWS_CA_BUNDLE names a file of those to trust")),
    ((ConnectTimeoutError, ProxyConnectionError, aiohttp.ClientConnectorError), _UNSENT),
    ((HTTPClientError, ResponseStreamingError, IncompleteReadError, aiohttp.ClientError, OSError), _LOST),
)
_WORDS_OF_FULL = re.compile("StorageFull|Quota|InsufficientStorage|InsufficientCapacity", re.IGNORECASE)


def status_of(error: ClientError) -> int:
    """Return the HTTP status of an answer, 0 if it had none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    """Return S3's name for what went wrong; a HEAD request's is but the status."""
    return str(error.response.get("Error", {}).get("Code", ""))


def explain(error: Exception, what: str, url: str, *, timeout: float, write: bool) -> TransportError | UncertainError:
    """Return our error for one of `S3_FAULTS`.

    Args:
        error: What was raised.
        what: Was to be done, as it stands behind "cannot".
        url: The topic's URL, without secrets.
        timeout: The limit in seconds, for the message.
        write: Whether it matters if the request was carried out.

    Returns:
        A `TransportError`, or, for a write whose answer was lost, an `UncertainError`.
    """
    if isinstance(error, ClientError):
        verdict = _judge_answer(error)
        reason = ": ".join(filter(None, (code_of(error), str(error.response.get("Error", {}).get("Message", "")))))
    else:
        verdict = _judge_client(error)
        reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
    reason = reason.rstrip(". ") or type(error).__name__
    if verdict.uncertain and write:
        return UncertainError(reason)
    return verdict.kind(f"cannot {what} in {url}: {reason}; {verdict.advice}", url=url)


def _judge_answer(error: ClientError) -> _Verdict:
    status, code = status_of(error), code_of(error)
    if _WORDS_OF_FULL.search(code):
        return _FULL
    other = _LOST if status >= 500 else _Verdict(TransportError, "check the URL, and that the server speaks S3")
    return _BY_CODE.get(code) or _BY_STATUS.get(status, other)


def _judge_client(error: Exception) -> _Verdict:
    # A connection that was refused and one that broke come as the same class.
    inner = error.kwargs.get("error") if isinstance(error, EndpointConnectionError) else None
    for classes, verdict in _BY_CLASS:
        if isinstance(inner or error, classes):
            return verdict
    return _Verdict(TransportError, "check the URL, its options, and AWS's environment variables and files")
