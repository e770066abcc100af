"""Seals of records, checked as docs/protocol.md says in section 9; Ed25519 as RFC 8032 says, section 5.1.7."""

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass

from .schema import RefusedError, require

ED25519, HMAC = 1, 2
PROOF_BYTES = {ED25519: 64, HMAC: 32}
PURPOSE = b"deltabus message, protocol 1\0"
FIELD = b"\xa9signature\xc4"
FIRST = bytes(32)  # stands for the record in front of the first
P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P


@dataclass(frozen=True)
class Key:
    scheme: int
    secret: bytes  # of Ed25519 the public key

    @property
    def id(self) -> bytes:
        text = b"deltabus key id\0"
        if self.scheme == HMAC:
            return hmac.digest(self.secret, text, "sha256")[:8]
        return hashlib.sha256(text + self.secret).digest()[:8]

    @staticmethod
    def parse(text: str) -> "Key":
        kind, _, value = text.partition(":")
        try:
            data = base64.b64decode(value + "=", altchars=b"-_", validate=True)
        except binascii.Error as error:
            raise RefusedError("no key") from error
        require(len(data) == 32 and kind in ("ed25519", "ed25519-public", "hmac-sha256"), "no key")
        if kind == "ed25519":
            return Key(ED25519, public_key(data))
        return Key(HMAC if kind == "hmac-sha256" else ED25519, data)

    def proves(self, proof: bytes, text: bytes) -> bool:
        if self.scheme == HMAC:
            return hmac.compare_digest(hmac.digest(self.secret, text, "sha256"), proof)
        return verify(self.secret, proof, text)


@dataclass(frozen=True)
class Seal:
    log: bytes  # id of the log
    previous: bytes  # SHA-256 of the record before


def open_seal(body: bytes, keys) -> Seal:
    """The seal at the end of a record's body, once one of the keys proves it."""
    for scheme, length in PROOF_BYTES.items():
        size = 57 + length
        seal = body[-size:]
        if body[:-size].endswith(FIELD + bytes([size])) and seal[0] == scheme:
            for key in keys:
                if (key.scheme, key.id) == (scheme, seal[1:9]):
                    require(key.proves(seal[57:], PURPOSE + body[:-length]), "a wrong signature")
                    return Seal(seal[9:25], seal[25:57])
            raise RefusedError("signed with another key")
    raise RefusedError("not signed")


# Points are (X, Y, Z, T) with x = X/Z, y = Y/Z, x*y = T/Z.
def add(a, b):
    e, f = (a[1] - a[0]) * (b[1] - b[0]) % P, (a[1] + a[0]) * (b[1] + b[0]) % P
    g, h = 2 * a[3] * b[3] * D % P, 2 * a[2] * b[2] % P
    e, f, g, h = f - e, h - g, h + g, f + e
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(scalar, point):
    total = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            total = add(total, point)
        point, scalar = add(point, point), scalar >> 1
    return total


def decompress(data: bytes):
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    require(y < P, "no point")
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    require((x * x - square) % P == 0 and (x or not sign), "no point")
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


BASE = decompress(bytes([0x58]) + bytes([0x66]) * 31)


def public_key(seed: bytes) -> bytes:
    scalar = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little") & ((1 << 254) - 8) | (1 << 254)
    x, y, z, _ = times(scalar, BASE)
    inverse = pow(z, -1, P)
    return (y * inverse % P | (x * inverse % P & 1) << 255).to_bytes(32, "little")


def verify(public: bytes, proof: bytes, text: bytes) -> bool:
    try:
        key, r = decompress(public), decompress(proof[:32])
    except RefusedError:
        return False
    s = int.from_bytes(proof[32:], "little")
    h = int.from_bytes(hashlib.sha512(proof[:32] + public + text).digest(), "little")
    left, right = times(s, BASE), add(r, times(h % ORDER, key))
    same = all((left[i] * right[2] - right[i] * left[2]) % P == 0 for i in (0, 1))
    return s < ORDER and same
