"""Who wrote a record: keys, and the seal that a signed record ends with.

The field `signature` of a message is the last of its record, and holds a seal:

| bytes | what |
|---|---|
| 1 | the scheme: 1 is Ed25519 (RFC 8032), 2 is HMAC-SHA-256 (RFC 2104) |
| 8 | the key's id |
| 16 | the log's id, drawn by the writer of its first message |
| 32 | the SHA-256 of the record before, its frame included; zeros at position 0 |
| 64 or 32 | the proof: signature or authentication code of everything before it in the body, behind `DOMAIN` |

So the proof is of the very bytes that stand in the log, fields that a reader does not know included, and is checked
before any of them is parsed. Secrets appear in no `repr` and in no error.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey as Ed25519Key
from nacl.signing import VerifyKey as Ed25519PublicKey

from .errors import SignatureError, UsageError
from .message import Message, encode_message, unframe

__all__ = [
    "DOMAIN",
    "KEY_BYTES",
    "LOG_ID_BYTES",
    "NO_RECORD",
    "KeyRing",
    "Scheme",
    "Seal",
    "SigningKey",
    "VerifyKey",
    "accepted",
    "check_record",
    "parse_key",
    "seal_of",
    "sign_message",
]

DOMAIN = b"deltabus message, protocol 1\0"
"""What every signed text begins with, so that a key that signs other things too cannot be made to sign a message."""

KEY_BYTES = 32
"""The length of every key, secret or public, in bytes."""

LOG_ID_BYTES = 16
"""The length of a log's id, in bytes."""

NO_RECORD = bytes(32)
"""What a log's first message says in place of the hash of the record before it."""

_KEY_ID_BYTES = 8
_HEAD_BYTES = 1 + _KEY_ID_BYTES + LOG_ID_BYTES + len(NO_RECORD)
# The key of the map's last entry, and the head of a binary value of less than 256 bytes, in MessagePack.
_FIELD = b"\xa9signature\xc4"


class Scheme(enum.IntEnum):
    """How a proof is made."""

    ED25519 = 1
    """A signature: who checks it needs the public key alone."""
    HMAC_SHA256 = 2
    """An authentication code: who can check it can make it too."""

    @property
    def proof_bytes(self) -> int:
        """The length of a proof, in bytes."""
        return 64 if self is Scheme.ED25519 else 32


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """What a reader needs to check who wrote a message.

    Args:
        scheme: How proofs are made.
        material: The public key; for HMAC the shared secret. 32 bytes.

    Raises:
        UsageError: If the material has another length.
    """

    scheme: Scheme
    material: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_length(self.scheme, self.material)

    def __repr__(self) -> str:
        return f"<VerifyKey {self.id.hex()}, {self.scheme.name}>"

    @property
    def id(self) -> bytes:
        """The key's name in messages, 8 bytes; tells nothing of a secret."""
        if self.scheme is Scheme.ED25519:
            return hashlib.sha256(b"deltabus key id\0" + self.material).digest()[:_KEY_ID_BYTES]
        return hmac.digest(self.material, b"deltabus key id\0", "sha256")[:_KEY_ID_BYTES]

    @property
    def text(self) -> str:
        """The key as `parse_key` reads it; of HMAC it is the secret."""
        return _text("ed25519-public" if self.scheme is Scheme.ED25519 else "hmac-sha256", self.material)

    def proves(self, data: bytes, proof: bytes) -> bool:
        """Return whether the holder of the key made this proof for these bytes."""
        if len(proof) != self.scheme.proof_bytes:
            return False
        if self.scheme is Scheme.HMAC_SHA256:
            return hmac.compare_digest(hmac.digest(self.material, data, "sha256"), proof)
        try:
            Ed25519PublicKey(self.material).verify(data, proof)
        except BadSignatureError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """What a writer signs with.

    Args:
        scheme: How proofs are made.
        secret: 32 random bytes: the seed of an Ed25519 key, or the secret of an HMAC.

    Raises:
        UsageError: If the secret has another length.
    """

    scheme: Scheme
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_length(self.scheme, self.secret)

    def __repr__(self) -> str:
        return f"<SigningKey {self.id.hex()}, {self.scheme.name}>"

    @property
    def verify_key(self) -> VerifyKey:
        """What readers need."""
        if self.scheme is Scheme.HMAC_SHA256:
            return VerifyKey(self.scheme, self.secret)
        return VerifyKey(self.scheme, bytes(Ed25519Key(self.secret).verify_key))

    @property
    def id(self) -> bytes:
        """The key's name in messages, 8 bytes."""
        return self.verify_key.id

    @property
    def text(self) -> str:
        """The secret as `parse_key` reads it."""
        return _text("ed25519" if self.scheme is Scheme.ED25519 else "hmac-sha256", self.secret)

    def prove(self, data: bytes) -> bytes:
        """Return the proof for bytes; the same for the same bytes."""
        if self.scheme is Scheme.HMAC_SHA256:
            return hmac.digest(self.secret, data, "sha256")
        return bytes(Ed25519Key(self.secret).sign(data).signature)


class KeyRing:
    """The keys that a reader accepts; during a rotation, the old one and the new one.

    Args:
        keys: At least one.

    Raises:
        UsageError: If there is none: a ring that accepts nothing is a mistake, and one that accepts all is no ring.
    """

    def __init__(self, keys: Iterable[VerifyKey]) -> None:
        self._keys = {(key.scheme, key.id): key for key in keys}
        if not self._keys:
            raise UsageError("no key is given to check messages with; leave keys out to accept what nobody signed")

    def __repr__(self) -> str:
        return f"<KeyRing of {self.names}>"

    @property
    def names(self) -> str:
        """The ids of all keys, in hexadecimal."""
        return ", ".join(key_id.hex() for _, key_id in self._keys)

    def find(self, scheme: Scheme, key_id: bytes) -> VerifyKey | None:
        """Return the key of an id; None when it is not accepted here."""
        return self._keys.get((scheme, key_id))

    def joined(self, key: VerifyKey) -> KeyRing:
        """Return a ring that accepts this key too."""
        return KeyRing([*self._keys.values(), key])


def accepted(key: SigningKey | None, keys: KeyRing | None) -> KeyRing | None:
    """Return whose messages a writer accepts in its log: its own key's, and others'; None, all, when it has no key.

    Args:
        key: What it signs with.
        keys: Whose messages it accepts besides.
    """
    if key is None:
        return None
    return keys.joined(key.verify_key) if keys else KeyRing([key.verify_key])


@dataclass(frozen=True, slots=True)
class Seal:
    """What a signed message says of who wrote it, and behind what.

    Attributes:
        scheme: How the proof was made.
        key_id: Which key made it; 8 bytes.
        log_id: The log that the message belongs to; 16 bytes.
        previous: The SHA-256 of the record before it; `NO_RECORD` at position 0.
        proof: Over everything before it in the record's body.
    """

    scheme: Scheme
    key_id: bytes
    log_id: bytes
    previous: bytes
    proof: bytes

    def encode(self) -> bytes:
        """Return the bytes of the field `signature`."""
        return bytes([self.scheme]) + self.key_id + self.log_id + self.previous + self.proof

    @classmethod
    def decode(cls, data: bytes) -> Seal | None:
        """Return the seal that bytes hold; None when they hold none that is known here."""
        try:
            scheme = Scheme(data[0]) if data else None
        except ValueError:
            return None
        if scheme is None or len(data) != _HEAD_BYTES + scheme.proof_bytes:
            return None
        ends = (1, 1 + _KEY_ID_BYTES, 1 + _KEY_ID_BYTES + LOG_ID_BYTES, _HEAD_BYTES)
        key_id, log_id, previous = (data[start:end] for start, end in itertools.pairwise(ends))
        return cls(scheme, key_id, log_id, previous, data[_HEAD_BYTES:])


def parse_key(text: str) -> SigningKey | VerifyKey:
    """Return the key that a text holds: `ed25519:...`, `ed25519-public:...` or `hmac-sha256:...`.

    Behind the colon stand 32 bytes in base64 for URLs, without padding.

    >>> parse_key("ed25519-public:O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik")
    <VerifyKey 45f5390203144da3, ED25519>

    Raises:
        UsageError: If it is no key; the error does not repeat it.
    """
    kind, colon, encoded = text.strip().partition(":")
    if not colon or kind not in {"ed25519", "ed25519-public", "hmac-sha256"}:
        raise UsageError(
            "this is no key: a key begins with ed25519:, ed25519-public: or hmac-sha256:, as `deltabus keygen` makes it"
        )
    try:
        material = base64.b64decode(encoded.rstrip("=") + "=", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        material = b""
    if len(material) != KEY_BYTES or _text(kind, material) != f"{kind}:{encoded.rstrip('=')}":
        raise UsageError(
            f"a key of the kind {kind} is damaged: behind the colon stand {KEY_BYTES} bytes in base64 for URLs, which "
            "are 43 characters; copy it again"
        )
    if kind == "ed25519-public":
        return VerifyKey(Scheme.ED25519, material)
    return SigningKey(Scheme.ED25519 if kind == "ed25519" else Scheme.HMAC_SHA256, material)


def sign_message(message: Message, key: SigningKey, *, log_id: bytes, previous: bytes) -> tuple[Message, bytes]:
    """Return a message with its seal, and its record.

    Args:
        message: What it says; a signature that it has is replaced.
        key: Whose holder says it.
        log_id: The log's id, 16 bytes.
        previous: The SHA-256 of the record before it; `NO_RECORD` at position 0.

    Raises:
        UsageError: If an id or hash has another length, a field is out of range, or the record would be too large.
    """
    if len(log_id) != LOG_ID_BYTES or len(previous) != len(NO_RECORD):
        raise UsageError(f"a log's id has {LOG_ID_BYTES} bytes and a record's hash {len(NO_RECORD)}")
    size = key.scheme.proof_bytes
    seal = Seal(key.scheme, key.id, log_id, previous, bytes(size))
    record = encode_message(msgspec.structs.replace(message, signature=seal.encode()))
    proof = key.prove(DOMAIN + unframe(record)[:-size])
    signed = msgspec.structs.replace(message, signature=seal.encode()[:-size] + proof)
    return signed, encode_message(signed)


def seal_of(message: Message) -> Seal | None:
    """Return what a message says of who wrote it, unchecked; None when it is not signed in a way known here."""
    return None if message.signature is None else Seal.decode(message.signature)


def check_record(
    record: bytes, keys: KeyRing, *, topic: str = "", writer: str = "", position: int | None = None
) -> Seal:
    """Return the seal of a record once it is proved; nothing of the record is parsed before.

    Args:
        record: The bytes as they stood in the log.
        keys: Those accepted.
        topic: Named in errors.
        writer: The log that it was read from, for errors.
        position: The place that it was read from, for errors.

    Raises:
        MessageFormatError: If the record is truncated or damaged.
        SignatureError: If it is unsigned, signed by a key that is not accepted, or was changed since.
    """

    def refused(what: str) -> SignatureError:
        place = f"record {position if position is not None else '?'} of log {writer or '?'} in {topic or 'this topic'}"
        return SignatureError(f"{place} {what}", topic=topic, writer=writer)

    body = unframe(record, topic=topic, writer=writer, position=position)
    seal = _find_seal(body)
    if seal is None:
        raise refused(
            f"is not signed, and only messages signed by {keys.names} are accepted here; somebody else wrote it, or "
            "the publisher has no key"
        )
    key = keys.find(seal.scheme, seal.key_id)
    if key is None:
        raise refused(
            f"is signed by key {seal.key_id.hex()}, and only {keys.names} are accepted here; if the writer's key was "
            "exchanged, give the new one too"
        )
    if not key.proves(DOMAIN + body[: -len(seal.proof)], seal.proof):
        raise refused(f"was changed after key {seal.key_id.hex()} signed it; restore it from a copy")
    return seal


def _find_seal(body: bytes) -> Seal | None:
    """Return the seal that a body ends with."""
    for scheme in Scheme:
        size = _HEAD_BYTES + scheme.proof_bytes
        if body[-size - len(_FIELD) - 1 : -size] == _FIELD + bytes([size]):
            seal = Seal.decode(body[-size:])
            if seal is not None and seal.scheme is scheme:
                return seal
    return None


def _check_length(scheme: Scheme, material: bytes) -> None:
    if len(material) != KEY_BYTES:
        raise UsageError(f"a key of {scheme.name} has {KEY_BYTES} bytes, not {len(material)}")


def _text(kind: str, material: bytes) -> str:
    return f"{kind}:{base64.urlsafe_b64encode(material).rstrip(b'=').decode()}"
