"""Which of our errors an answer of JetStream is, and what to do about it.

The numbers are those of the server: https://github.com/nats-io/nats-server/blob/main/server/errors.json
"""

from __future__ import annotations

from deltabus.bus.errors import (
    AccessDeniedError,
    StorageFullError,
    TransientTransportError,
    TransportError,
)

__all__ = ["IN_PROCESS", "NAME_TAKEN", "NO_STREAM", "WRONG_LAST", "ApiError", "no_responders", "translate"]

NO_STREAM = 10059
NAME_TAKEN = 10058
IN_PROCESS = 10158
WRONG_LAST = frozenset({10071, 10164})

_NO_MESSAGE = 10037
_FULL = frozenset({10002, 10023, 10028, 10047, 10077})
_NOT_ENABLED = frozenset({10035, 10039, 10076})
_TOO_LARGE = 10054
_NO_CLUSTER = 10074
_TOO_FEW = 10005
_OVERLAP = 10065
_MAX_BYTES_NEEDED = 10113
_DENIED = frozenset({10110, 10101, 10109})


class ApiError(Exception):
    """JetStream answered with an error; for the callers in this package, which translate what they do not expect.

    Attributes:
        code: As in HTTP.
        number: The server's number of the error.
        description: The server's words.
    """

    def __init__(self, code: int, number: int, description: str) -> None:
        super().__init__(f"{description} ({number})")
        self.code = code
        self.number = number
        self.description = description

    @property
    def missing(self) -> bool:
        """Whether there is no such stream or message."""
        return self.number in {NO_STREAM, _NO_MESSAGE} or self.code == 404


def no_responders(url: str, *, known: bool) -> TransportError:
    """Return what it means that nobody listens for requests to JetStream.

    Args:
        url: The topic's URL.
        known: Whether JetStream answered before.
    """
    if known:
        return TransientTransportError(f"{url}: JetStream does not answer; its server may be starting", url=url)
    return TransportError(
        f"{url}: JetStream is not enabled on the server, or not in this domain; start nats-server with -js, or check "
        "the option 'domain'",
        url=url,
    )


def translate(error: ApiError, what: str, *, url: str) -> TransportError:
    """Return which of our errors an error of JetStream is.

    Args:
        error: As answered.
        what: What was asked for: "store blob 'a'".
        url: The topic's URL.
    """
    kind: type[TransportError] = TransportError
    if error.number in _FULL:
        kind, advice = StorageFullError, "delete blobs, or raise the stream's or the account's limits"
    elif error.number in _NOT_ENABLED:
        advice = "enable JetStream on the server (-js) and for this account"
    elif error.number in _DENIED or error.code in {401, 403}:
        kind, advice = AccessDeniedError, "let the account's administrator allow it"
    elif error.number == _TOO_LARGE:
        advice = "the stream was made with a maximal message size; remove that limit"
    elif error.number == _NO_CLUSTER:
        advice = "the option 'replicas' above 1 needs a cluster"
    elif error.number == _OVERLAP:
        advice = "another stream takes this topic's subjects; rename the topic, or change that stream"
    elif error.number == _MAX_BYTES_NEEDED:
        advice = "set the option 'max_bytes'"
    elif error.number == _TOO_FEW:
        kind, advice = TransientTransportError, "too few servers of the cluster are up for the option 'replicas'"
    elif error.code in {408, 500, 503} or error.number == IN_PROCESS:
        kind, advice = TransientTransportError, "it may be done again; if it goes on, look at the servers"
    else:
        advice = "look at the stream and its limits with: nats stream info"
    return kind(f"cannot {what} in {url}: {error}; {advice}", url=url)
