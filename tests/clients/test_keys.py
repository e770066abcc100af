"""Where keys come from: arguments, the environment, files; and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import UsageError
from deltabus.bus.signing import Scheme, SigningKey
from deltabus.keys import SIGNING_KEY, VERIFY_KEYS, signing_key, verify_keys

ONE, TWO = SigningKey(Scheme.ED25519, b"1" * 32), SigningKey(Scheme.ED25519, b"2" * 32)
SHARED = SigningKey(Scheme.HMAC_SHA256, b"s" * 32)


def accepts(ring, *keys):
    return [ring.find(key.scheme, key.id) is not None for key in keys]


@pytest.fixture
def file(tmp_path):
    """Makes a file of keys that only its owner can read."""

    def make(text, mode=0o600, name="key"):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    return make


def test_nothing_said_is_no_key():
    assert signing_key(None, environment={}) is None
    assert verify_keys(None, environment={}) is None


@pytest.mark.parametrize("said", ["", " "])
def test_a_variable_that_came_out_empty_does_not_switch_signing_off(said):
    with pytest.raises(UsageError, match="DELTABUS_SIGNING_KEY is empty"):
        signing_key(None, environment={SIGNING_KEY: said})


@pytest.mark.parametrize("key", [ONE, SHARED])
def test_a_key_is_an_object_a_text_or_a_file(key, file):
    path = file(f"# a comment\n\n  {key.text}  \n")
    for given_key in (key, key.text, f" {key.text}\n", path, str(path)):
        assert signing_key(given_key, environment={SIGNING_KEY: TWO.text}) == key
        assert accepts(verify_keys(given_key, environment={}), key, TWO) == [True, False]
    for said in (key.text, str(path)):
        assert signing_key(None, environment={SIGNING_KEY: said}) == key
        assert accepts(verify_keys(None, environment={VERIFY_KEYS: said}), key, TWO) == [True, False]


def test_several_keys_are_told_in_a_list_a_line_or_a_file(file):
    public = [key.verify_key.text for key in (ONE, TWO)]
    path = file("\n".join(public), mode=0o644)
    texts = [public, ",".join(public), f"{public[0]} ,\n{public[1]},", path, [path], [ONE, TWO.verify_key]]
    for keys in texts:
        assert accepts(verify_keys(keys, environment={}), ONE, TWO, SHARED) == [True, True, False]
    assert (
        accepts(verify_keys(None, environment={VERIFY_KEYS: f"{path},{SHARED.text}"}), ONE, TWO, SHARED) == [True] * 3
    )


@pytest.mark.parametrize("keys", ["", " , ", [], [""]])
def test_promised_keys_that_are_not_there_are_an_error_not_an_open_door(keys):
    with pytest.raises(UsageError, match="keys= is there, but has no key in it"):
        verify_keys(keys, environment={})
    if isinstance(keys, str):
        with pytest.raises(UsageError, match=f"{VERIFY_KEYS} is there, but has no key in it"):
            verify_keys(None, environment={VERIFY_KEYS: keys})


def test_a_publisher_signs_with_one_secret_key(file):
    with pytest.raises(UsageError, match="key= has a public key"):
        signing_key(ONE.verify_key, environment={})
    with pytest.raises(UsageError, match=f"{SIGNING_KEY} has a public key"):
        signing_key(None, environment={SIGNING_KEY: ONE.verify_key.text})
    with pytest.raises(UsageError, match="key= has 2 keys"):
        signing_key(file(f"{ONE.text}\n{TWO.text}"), environment={})


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601])
def test_a_secret_that_everybody_can_read_is_refused(file, mode):
    path = file(ONE.text, mode=mode)
    for read in (signing_key, verify_keys):
        with pytest.raises(UsageError, match=f"everybody .*chmod 600 {path}"):
            read(path, environment={})


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_secret_for_its_owner_and_group_is_read(file, mode):
    assert signing_key(file(ONE.text, mode=mode), environment={}) == ONE


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "has no key in it"),
        ("# only words\n", "has no key in it"),
        ("ed25519:short\n", "line 1: a key of the kind ed25519 is damaged"),
        ("# fine\nssh-ed25519 AAAA\n", "line 2: this is no key"),
    ],
)
def test_files_without_keys_are_refused(file, text, match):
    with pytest.raises(UsageError, match=match):
        signing_key(file(text), environment={})


def test_files_that_cannot_be_read_are_named_where_that_tells_no_secret(tmp_path, file):
    missing = tmp_path / "missing"
    with pytest.raises(UsageError, match=f"the file {missing} .*No such file"):
        signing_key(missing, environment={})
    with pytest.raises(UsageError, match="a directory"):
        signing_key(tmp_path, environment={})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 50)
    with pytest.raises(UsageError, match="it is no text"):
        signing_key(tmp_path / "bytes", environment={})


@given(st.text(max_size=300))
def test_a_misspelt_secret_is_not_told(rest):
    with pytest.raises(UsageError) as known:
        signing_key("ed5519:", environment={})
    for text in (f"ed5519:{rest}", f"{rest}{ONE.text[8:]}", f"\0{rest}", f"ed25519:{rest}"):
        with pytest.raises(UsageError) as caught:
            signing_key(text, environment={})
        assert ONE.text[8:] not in str(caught.value)
        assert len(rest) < 6 or rest not in str(caught.value) or rest in str(known.value)
