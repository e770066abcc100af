"""Writes the golden records beside it; run once for each version of the protocol, never again for the same.

Their message and keys are those of `tests/bus/test_signing.py`.
"""

import zlib
from pathlib import Path

import msgspec

from deltabus.bus.message import Blob, Kind, Message, Stats, encode_message, unframe
from deltabus.bus.signing import NO_RECORD, Scheme, SigningKey, sign_message

HERE = Path(__file__).parent
KEYS = {
    "ed25519": SigningKey(Scheme.ED25519, bytes(range(32))),
    "hmac-sha256": SigningKey(Scheme.HMAC_SHA256, bytes(range(32))),
}
LOG_ID = bytes(range(100, 116))
MESSAGE = Message(
    writer="trainer",
    position=0,
    epoch=1,
    kind=Kind.ANCHOR,
    step=7,
    base={},
    version=1,
    group=("trainer",),
    schema=Blob(key="schemas/" + "ab" * 32 + ".json", size=99, checksum=b"\xab" * 32),
    digest_before=None,
    digest_after=0xFEDC_BA98_7654_3210,
    blobs=(Blob(key="blobs/trainer/000000000001-anchor-0000-cdcdcdcdcdcdcdcd", size=1000, checksum=b"\xcd" * 32),),
    stats=Stats(changed=500, total=500, encodings={"full": 990}),
    created=1_700_000_000.5,
    metadata={"run": "golden"},
)


def without_a_key():
    """The record as writers made it before messages could be signed: `protocol` stood last."""
    fields = msgspec.msgpack.decode(unframe(encode_message(MESSAGE)))
    body = msgspec.msgpack.encode({**{name: fields[name] for name in fields if name != "protocol"}, "protocol": 1})
    return b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body


if __name__ == "__main__":
    for name, key in KEYS.items():
        _, record = sign_message(MESSAGE, key, log_id=LOG_ID, previous=NO_RECORD)
        (HERE / f"v1-{name}.record").write_bytes(record)
    (HERE / "v1-unsigned.record").write_bytes(without_a_key())
