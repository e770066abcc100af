from __future__ import annotations

import hashlib
import hmac
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import VerifyKey as PublicKey

from deltabus.bus.errors import DeltabusError, MessageFormatError, SignatureError, UsageError
from deltabus.bus.message import MAX_RECORD_BYTES, decode_message, encode_message, unframe
from deltabus.bus.signing import (
    NO_RECORD,
    KeyRing,
    Scheme,
    Seal,
    SigningKey,
    VerifyKey,
    check_record,
    parse_key,
    seal_of,
    sign_message,
)

from .golden.make import KEYS, LOG_ID, MESSAGE
from .support import anchor, delta
from .test_message import messages

GOLDEN = Path(__file__).parent / "golden"
SECRETS = st.binary(min_size=32, max_size=32)
SIGNING_KEYS = st.builds(SigningKey, st.sampled_from(Scheme), SECRETS)
BY_SCHEME = pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)


def framed(body: bytes) -> bytes:
    """A record whose checksum is right, as whoever changes one would make it."""
    return b"DBM1" + zlib.crc32(body).to_bytes(4, "little") + body


def signed(message=MESSAGE, key=KEYS["ed25519"], *, log_id=LOG_ID, previous=NO_RECORD) -> bytes:
    return sign_message(message, key, log_id=log_id, previous=previous)[1]


# keys


@given(SIGNING_KEYS)
def test_keys_survive_their_text(key):
    assert parse_key(f"  {key.text}\n") == key
    assert parse_key(f"{key.text}=") == key
    known = parse_key(key.verify_key.text)
    assert (known if isinstance(known, VerifyKey) else known.verify_key) == key.verify_key


@given(SIGNING_KEYS)
def test_secrets_do_not_show(key):
    shown = f"{key!r} {key} {key.verify_key!r} {KeyRing([key.verify_key])!r} {key.id.hex()}"
    assert key.text.partition(":")[2] not in shown
    assert key.secret.hex() not in shown
    assert str(key.secret) not in shown
    assert key.id.hex() in repr(key)


def test_the_ids_of_keys_tell_all_apart():
    keys = [SigningKey(scheme, bytes([byte]) * 32) for scheme in Scheme for byte in range(50)]
    assert len({key.id for key in keys}) == 100
    assert all(key.id == key.verify_key.id and len(key.id) == 8 for key in keys)


@given(st.text(max_size=60) | st.sampled_from(["ed25519:", "ed25519-public:", "hmac-sha256:"]).flatmap(
    lambda kind: st.text(max_size=60).map(lambda rest: kind + rest)
))  # fmt: skip
def test_what_is_no_key_is_refused_and_not_repeated(text):
    with pytest.raises(UsageError) as caught:
        parse_key(text)
    secret = text.partition(":")[2].strip()
    assert len(secret) < 8 or secret not in str(caught.value)


@BY_SCHEME
def test_a_key_with_a_character_too_few_too_many_or_wrong_is_refused(key):
    for text in (key.text[:-1], key.text + "A", key.text[:-2] + "!A", key.text.replace(":", ""), "x" + key.text):
        with pytest.raises(UsageError):
            parse_key(text)


def test_bits_beyond_a_key_are_refused():
    """Two texts for one key would make a misspelt key pass for another."""
    text = SigningKey(Scheme.ED25519, bytes(32)).text
    assert text.endswith("A")
    with pytest.raises(UsageError, match="damaged"):
        parse_key(text[:-1] + "B")


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_keys_of_another_length_are_refused(size):
    for kind in (SigningKey, VerifyKey):
        with pytest.raises(UsageError, match="32 bytes"):
            kind(Scheme.ED25519, bytes(size))


def test_a_ring_without_keys_is_refused():
    with pytest.raises(UsageError, match="no key"):
        KeyRing([])


@given(SIGNING_KEYS, st.binary(max_size=100))
def test_proofs_are_those_of_the_standards(key, data):
    proof = key.prove(data)
    if key.scheme is Scheme.ED25519:
        assert PublicKey(key.verify_key.material).verify(data, proof) == data
    else:
        assert proof == hmac.new(key.secret, data, "sha256").digest()
    assert key.verify_key.proves(data, proof)
    assert not key.verify_key.proves(data + b"\0", proof)
    assert not key.verify_key.proves(data, proof[:-1])


def test_ed25519_gives_what_rfc_8032_says():
    key = SigningKey(Scheme.ED25519, bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.verify_key.material.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.prove(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


@pytest.mark.parametrize("material", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32])
def test_public_keys_for_which_anything_would_be_a_proof_prove_nothing(material):
    """Points of small order: with them, a signature of zeros would hold for many texts."""
    key = VerifyKey(Scheme.ED25519, material)
    assert not any(key.proves(bytes([n]), head + bytes(32)) for n in range(64) for head in (material, bytes(32)))


# seals


@given(messages(), SIGNING_KEYS, st.binary(min_size=16, max_size=16), SECRETS)
def test_a_signed_message_shows_who_wrote_it(message, key, log_id, previous):
    said, record = sign_message(message, key, log_id=log_id, previous=previous)
    seal = check_record(record, KeyRing([key.verify_key]))
    assert (seal.scheme, seal.key_id, seal.log_id, seal.previous) == (key.scheme, key.id, log_id, previous)
    assert decode_message(record) == said
    assert encode_message(said) == record
    assert seal_of(said) == seal
    assert msgspec.structs.replace(said, signature=None) == msgspec.structs.replace(message, signature=None)


@pytest.mark.parametrize("name", KEYS)
def test_golden_records_are_read_and_written_bit_for_bit(name):
    record = (GOLDEN / f"v1-{name}.record").read_bytes()
    key = KEYS[name]
    seal = check_record(record, KeyRing([key.verify_key]), writer="trainer", position=0)
    assert (seal.key_id, seal.log_id, seal.previous) == (key.id, LOG_ID, NO_RECORD)
    assert msgspec.structs.replace(decode_message(record), signature=None) == MESSAGE
    assert signed(key=key) == record


def test_records_from_before_signatures_are_read():
    assert decode_message((GOLDEN / "v1-unsigned.record").read_bytes()) == MESSAGE


@pytest.mark.parametrize("name", KEYS)
def test_protocol_md_suffices_to_check_a_golden_record(name):
    """A second implementation, from the page alone."""
    record = (GOLDEN / f"v1-{name}.record").read_bytes()
    body = record[8:]
    scheme, proof_bytes = {"ed25519": (1, 64), "hmac-sha256": (2, 32)}[name]
    size = 57 + proof_bytes
    assert body[-size - 12 : -size] == b"\xa9signature\xc4" + bytes([size])
    seal = body[-size:]
    assert seal[0] == scheme
    covered = b"deltabus message, protocol 1\0" + body[:-proof_bytes]
    secret = bytes(range(32))
    if name == "ed25519":
        public = KEYS[name].verify_key.material
        assert seal[1:9] == hashlib.sha256(b"deltabus key id\0" + public).digest()[:8]
        PublicKey(public).verify(covered, seal[-64:])
    else:
        assert seal[1:9] == hmac.new(secret, b"deltabus key id\0", "sha256").digest()[:8]
        assert seal[-32:] == hmac.new(secret, covered, "sha256").digest()


@BY_SCHEME
def test_every_flipped_bit_is_refused(key):
    record, ring = signed(key=key), KeyRing([key.verify_key])
    body = bytearray(unframe(record))
    for bit in range(len(body) * 8):
        body[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SignatureError):
            check_record(framed(bytes(body)), ring)
        body[bit // 8] ^= 1 << bit % 8
    frame = bytearray(record)
    for bit in range(64):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageFormatError):
            check_record(bytes(frame), ring)
        frame[bit // 8] ^= 1 << bit % 8
    check_record(bytes(frame), ring)


@given(messages(), SIGNING_KEYS, st.data())
def test_any_change_to_a_signed_record_is_refused(message, key, data):
    record = signed(message, key)
    body = unframe(record)
    start = data.draw(st.integers(0, len(body)))
    stop = data.draw(st.integers(start, len(body)))
    changed = body[:start] + data.draw(st.binary(max_size=80)) + body[stop:]
    if changed != body:
        with pytest.raises(SignatureError):
            check_record(framed(changed), KeyRing([key.verify_key]))


@given(messages(), SIGNING_KEYS, SIGNING_KEYS)
def test_another_key_is_refused(message, key, other):
    if key != other:
        with pytest.raises(SignatureError, match=f"is signed by key {key.id.hex()}, and only {other.id.hex()}"):
            check_record(signed(message, key), KeyRing([other.verify_key]))


@pytest.mark.parametrize("scheme", Scheme)
def test_a_public_key_is_no_shared_secret(scheme):
    """Whoever knows what checks signatures cannot make an authentication code that passes for one."""
    public = SigningKey(scheme, bytes(range(32))).verify_key
    forged = SigningKey(Scheme.HMAC_SHA256 if scheme is Scheme.ED25519 else Scheme.ED25519, public.material)
    _, record = sign_message(MESSAGE, forged, log_id=LOG_ID, previous=NO_RECORD)
    with pytest.raises(SignatureError):
        check_record(record, KeyRing([public]))
    body = unframe(record)
    renamed = body.replace(forged.id, public.id)
    with pytest.raises(SignatureError):
        check_record(framed(renamed), KeyRing([public]))


@given(messages())
def test_what_is_not_signed_is_refused(message):
    with pytest.raises(SignatureError, match=r"is not signed|is signed by key"):
        check_record(encode_message(message), KeyRing([KEYS["ed25519"].verify_key]))


def test_a_seal_that_is_not_at_the_end_counts_for_nothing():
    said, _ = sign_message(MESSAGE, KEYS["ed25519"], log_id=LOG_ID, previous=NO_RECORD)
    fields = msgspec.msgpack.decode(unframe(encode_message(said)))
    last = fields.pop("signature")
    body = msgspec.msgpack.encode({"signature": last, **fields})
    assert decode_message(framed(body)) == said
    with pytest.raises(SignatureError, match="is not signed"):
        check_record(framed(body), KeyRing([KEYS["ed25519"].verify_key]), writer="trainer", position=3)


def with_colour(colour: str) -> bytes:
    """What a later version may write: a field that this one does not know, signed too."""
    fields = msgspec.msgpack.decode(unframe(signed()))
    last = fields.pop("signature")
    return msgspec.msgpack.encode({**fields, "colour": colour, "signature": last})


def test_fields_that_are_not_known_here_are_signed_too():
    key = KEYS["ed25519"]
    covered = with_colour("red")[:-64]
    body = covered + key.prove(b"deltabus message, protocol 1\0" + covered)
    ring = KeyRing([key.verify_key])
    assert check_record(framed(body), ring).log_id == LOG_ID
    assert decode_message(framed(body)).writer == "trainer"
    with pytest.raises(SignatureError):
        check_record(framed(body.replace(b"red", b"sad")), ring)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_clear_error(data):
    ring = KeyRing([key.verify_key for key in KEYS.values()])
    tail = unframe(signed())[-133:]
    for record in (data, framed(data), framed(data + tail), framed(tail[:12] + data)):
        with pytest.raises((MessageFormatError, SignatureError)):
            check_record(record, ring)


@given(st.binary(max_size=130))
def test_seals_survive_their_bytes_or_are_none(data):
    for text in (data, b"\1" + data, b"\2" + data):
        seal = Seal.decode(text)
        assert seal is None or seal.encode() == text


def test_errors_name_the_place():
    with pytest.raises(SignatureError, match="record 4 of log a in fake://topic is not signed") as caught:
        check_record(encode_message(anchor(4, 1)), KeyRing([KEYS["ed25519"].verify_key]), topic="fake://topic", writer="a", position=4)  # fmt: skip  # noqa: E501
    assert (caught.value.topic, caught.value.writer) == ("fake://topic", "a")


def test_what_does_not_fit_is_not_signed():
    key = KEYS["ed25519"]
    for log_id, previous in ((b"", NO_RECORD), (LOG_ID, b"short")):
        with pytest.raises(UsageError, match="16 bytes"):
            sign_message(MESSAGE, key, log_id=log_id, previous=previous)
    large = delta(1, 2, metadata={"a": "x" * (MAX_RECORD_BYTES - 500)})
    encode_message(large)
    with pytest.raises(UsageError, match="limit"):
        signed(msgspec.structs.replace(large, metadata={"a": "x" * (MAX_RECORD_BYTES - 420)}), key)
    with pytest.raises(DeltabusError):
        signed(msgspec.structs.replace(large, step=1 << 64), key)
