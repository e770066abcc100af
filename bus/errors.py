"""Every error deltabus raises, in one tree.

    DeltabusError
    ├── UsageError (ValueError)            the call or the URL is wrong; nothing was started
    │   ├── UnknownSchemeError                 no transport is registered for the URL's scheme
    │   ├── UnknownOptionError                 the URL carries an option its transport does not have
    │   └── MissingExtraError (ImportError)    the transport's library is not installed
    ├── TransportError                     a backend failed; carries `url`
    │   ├── TransientTransportError            may succeed when tried again; retried with backoff
    │   ├── AppendUnknownError                 the answer to an append was lost: it may or may not have happened
    │   ├── AccessDeniedError (PermissionError)
    │   ├── StorageFullError (OSError)
    │   ├── KeyNotFoundError (LookupError)
    │   ├── KeyExistsError                     another blob is stored under this write-once key
    │   └── PositionTakenError                 another record is at this position of the log
    ├── ProtocolError                      messages break the rules of the bus; carries `topic` and `writer`
    │   ├── MessageFormatError (ValueError)    a record or schema from outside cannot be read
    │   ├── FencedError                        another process took this writer's log over; this one must stop
    │   ├── OvertakenError                     the log went on unseen; this writer may go on behind it, with an anchor
    │   ├── ConflictError                      two messages claim the same place in history
    │   ├── RetentionGapError (LookupError)    what is asked for is no longer, or not yet, in the topic
    │   └── SignatureError                     a message is unsigned, or signed by an unknown key
    ├── CodecError                         bits do not fit
    │   ├── SchemaMismatchError (ValueError)   names, shapes or dtypes differ from what the topic has
    │   ├── UnsupportedTensorError (TypeError) a tensor of a kind that cannot be published or written
    │   ├── CorruptPayloadError (ValueError)   a payload is truncated, damaged or out of range
    │   └── DivergedError                      the model does not hold the bits this update starts from
    └── ClientError                        publisher, subscriber, or what drives engines
        ├── ClosedError                        used after it was closed
        ├── EngineError                        an inference engine cannot be reached, or refuses; carries `url`
        ├── PublishError                       a publication failed in the background; its cause is chained
        ├── StaleUpdateError                   the update was overtaken and can no longer be applied
        ├── StragglerError (TimeoutError)      writers did not publish what a step waits for; names them
        └── WaitTimeoutError (TimeoutError)    a wait reached its limit

Each message says what happened, where, and what to do. An error is raised before anything was changed.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "AppendUnknownError",
    "ClientError",
    "ClosedError",
    "CodecError",
    "ConflictError",
    "CorruptPayloadError",
    "DeltabusError",
    "DivergedError",
    "EngineError",
    "FencedError",
    "KeyExistsError",
    "KeyNotFoundError",
    "MessageFormatError",
    "MissingExtraError",
    "OvertakenError",
    "PositionTakenError",
    "ProtocolError",
    "PublishError",
    "RetentionGapError",
    "SchemaMismatchError",
    "SignatureError",
    "StaleUpdateError",
    "StorageFullError",
    "StragglerError",
    "TransientTransportError",
    "TransportError",
    "UnknownOptionError",
    "UnknownSchemeError",
    "UnsupportedTensorError",
    "UsageError",
    "WaitTimeoutError",
]


class DeltabusError(Exception):
    """The root of every error that deltabus raises."""


class UsageError(DeltabusError, ValueError):
    """The call or the URL is wrong; nothing was started."""


class UnknownSchemeError(UsageError):
    """No transport is registered for the URL's scheme."""


class UnknownOptionError(UsageError):
    """The URL carries an option that its transport does not have."""


class MissingExtraError(UsageError, ImportError):
    """The library that a transport or command needs is not installed."""


class TransportError(DeltabusError):
    """A backend failed for good.

    Attributes:
        url: The topic's URL, without secrets.
    """

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class TransientTransportError(TransportError):
    """A backend failed in a way that may pass; the same call may be made again."""


class AppendUnknownError(TransportError):
    """The answer to an append was lost, so that the record may or may not be in the log."""


class AccessDeniedError(TransportError, PermissionError):
    """The backend refuses this reader or writer."""


class StorageFullError(TransportError, OSError):
    """The backend has no room left."""


class KeyNotFoundError(TransportError, LookupError):
    """No blob is stored under this key."""


class KeyExistsError(TransportError):
    """Another blob, with other bytes, is stored under this write-once key."""


class PositionTakenError(TransportError):
    """Another record is at this position of the log."""


class ProtocolError(DeltabusError):
    """Messages break the rules of the bus.

    Attributes:
        topic: The topic's URL, where known.
        writer: The writer whose log is concerned, where known.
    """

    def __init__(self, message: str, *, topic: str = "", writer: str = "") -> None:
        super().__init__(message)
        self.topic = topic
        self.writer = writer


class MessageFormatError(ProtocolError, ValueError):
    """A record or a schema from outside cannot be read."""


class FencedError(ProtocolError):
    """Another process took this writer's log over; this one must stop publishing."""


class OvertakenError(ProtocolError):
    """The log went on unseen by its rightful writer, which may go on behind it, with an anchor; nothing was written."""


class ConflictError(ProtocolError):
    """Two messages claim the same place in history."""


class RetentionGapError(ProtocolError, LookupError):
    """What is asked for is no longer, or not yet, in the topic."""


class SignatureError(ProtocolError):
    """A message is unsigned, or signed by a key that is not known here."""


class CodecError(DeltabusError):
    """Bits do not fit.

    Attributes:
        tensor: The canonical name of the tensor concerned, where one is.
    """

    def __init__(self, message: str, *, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class SchemaMismatchError(CodecError, ValueError):
    """Names, shapes or dtypes differ from what the topic has."""


class UnsupportedTensorError(CodecError, TypeError):
    """A tensor is of a kind that cannot be published or written."""


class CorruptPayloadError(CodecError, ValueError):
    """A payload is truncated, damaged or out of range."""


class DivergedError(CodecError):
    """The model does not hold the bits that this update starts from."""


class ClientError(DeltabusError):
    """A publisher or subscriber could not do what was asked."""


class ClosedError(ClientError):
    """A publisher or subscriber was used after it was closed."""


class EngineError(ClientError):
    """An inference engine cannot be reached, or refuses what it is told.

    Attributes:
        url: The engine's.
    """

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class PublishError(ClientError):
    """A publication failed in the background; the reason is its `__cause__`."""


class StaleUpdateError(ClientError):
    """The update was overtaken by a later one and can no longer be applied."""


class StragglerError(ClientError, TimeoutError):
    """Writers did not publish what a step waits for: their part of it, or what it rests on.

    Attributes:
        writers: Their names.
    """

    def __init__(self, message: str, *, writers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.writers = writers


class WaitTimeoutError(ClientError, TimeoutError):
    """A wait reached its limit."""
