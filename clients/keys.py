"""Where keys come from: an argument, the environment, or a file; and how new ones are made.

A key is given as its text (`ed25519:...`), as the path of a file that holds such texts, or as an object of
`deltabus.bus.signing`. A file has one key a line; empty lines and those that begin with `#` are ignored.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltabus.bus.errors import UsageError
from deltabus.bus.signing import KEY_BYTES, KeyRing, Scheme, SigningKey, VerifyKey, parse_key

__all__ = ["ACCEPTED_KEYS", "SIGNING_KEY", "VERIFY_KEYS", "Key", "NewKey", "make_key", "signing_key", "verify_keys"]

SIGNING_KEY = "DELTABUS_SIGNING_KEY"
"""The environment variable with the key that a publisher signs with, or the path of its file."""

VERIFY_KEYS = "DELTABUS_VERIFY_KEYS"
"""The environment variable with the keys that are accepted, or the paths of their files, separated by commas."""

ACCEPTED_KEYS = "DELTABUS_ACCEPTED_KEYS"
"""The environment variable with the keys that a transcoded topic may be signed by besides, as those above."""

Key = str | os.PathLike[str] | SigningKey | VerifyKey

_MAX_FILE_BYTES = 64 << 10
_KINDS = ("ed25519:", "ed25519-public:", "hmac-sha256:")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made.

    Attributes:
        key: What a publisher signs with.
        file: Where it was written; None when it was not.
        public_file: Where the public key was written; None when it was not, or there is none.
    """

    key: SigningKey
    file: Path | None = None
    public_file: Path | None = None


def signing_key(key: Key | None, *, environment: Mapping[str, str] | None = None) -> SigningKey | None:
    """Return the key that a publisher is to sign with; None when neither the argument nor the environment has one.

    Args:
        key: A key, its text, or the path of its file; None looks into the environment.
        environment: Variables; None is the process's own.

    Raises:
        UsageError: If it is no key, a public one, more than one, or in a file that everybody can read.
    """
    said = (os.environ if environment is None else environment).get(SIGNING_KEY)
    source = f"the environment variable {SIGNING_KEY}" if key is None else "key="
    if key is None and said is None:
        return None
    if key is None and not (said or "").strip():
        # A secret that came out empty must not begin a topic that nobody signs.
        raise UsageError(f"{source} is empty; put a key into it, or unset it to publish unsigned")
    found = list(_keys_of(key if key is not None else said or "", source))
    if len(found) != 1 or not isinstance(found[0], SigningKey):
        raise UsageError(
            f"{source} has {'a public key' if len(found) == 1 else f'{len(found)} keys'}, where one key to sign with "
            "belongs: ed25519:... or hmac-sha256:..., as `deltabus keygen` makes it"
        )
    return found[0]


def verify_keys(keys: Key | Sequence[Key] | None, *, environment: Mapping[str, str] | None = None) -> KeyRing | None:
    """Return the keys whose messages are accepted; None, for all messages, when nothing says which.

    Args:
        keys: Keys, their texts, or the paths of their files; a text may name several, separated by commas. None looks
            into the environment. A key that can sign counts as what is needed to check it.
        environment: Variables; None is the process's own.

    Raises:
        UsageError: If one is no key, or there is none where some were promised: nothing is accepted by mistake.
    """
    said = (os.environ if environment is None else environment).get(VERIFY_KEYS)
    source = f"the environment variable {VERIFY_KEYS}" if keys is None else "keys="
    if keys is None:
        if said is None:
            return None
        keys = said
    given: list[Key] = []
    for item in [keys] if isinstance(keys, str | os.PathLike | SigningKey | VerifyKey) else keys:
        texts = item.replace("\n", ",").split(",") if isinstance(item, str) else [item]
        given += [text for text in texts if not isinstance(text, str) or text.strip()]
    found = [key for item in given for key in _keys_of(item, source)]
    if not found:
        raise UsageError(f"{source} is there, but has no key in it; leave it out to accept what nobody signed")
    return KeyRing(key.verify_key if isinstance(key, SigningKey) else key for key in found)


def make_key(file: Path | None = None, *, scheme: Scheme = Scheme.ED25519) -> NewKey:
    """Make a key, and write it to a file that only its owner can read, and the public key beside it, in `FILE.pub`.

    Args:
        file: Where; None writes nothing.
        scheme: Of which kind.

    Raises:
        UsageError: If a file is there already, or cannot be written; nothing is left behind.
    """
    key = SigningKey(scheme, secrets.token_bytes(KEY_BYTES))
    if file is None:
        return NewKey(key)
    about = f"# deltabus key {key.id.hex()}"
    public = None if scheme is Scheme.HMAC_SHA256 else file.with_name(f"{file.name}.pub")
    _write(file, f"{about}: signs; keep it secret\n{key.text}\n", mode=0o600)
    try:
        if public is not None:
            _write(public, f"{about}: checks signatures\n{key.verify_key.text}\n", mode=0o644)
    except BaseException:
        file.unlink()
        raise
    return NewKey(key, file, public)


def _keys_of(key: Key, source: str) -> Iterator[SigningKey | VerifyKey]:
    """Yield what one item of an argument or variable stands for."""
    if isinstance(key, SigningKey | VerifyKey):
        yield key
    elif isinstance(key, str) and key.strip().startswith(_KINDS):
        yield parse_key(key)
    else:
        yield from _read(Path(key.strip() if isinstance(key, str) else key), source, shown=not isinstance(key, str))


def _read(path: Path, source: str, *, shown: bool) -> Iterator[SigningKey | VerifyKey]:
    """Yield the keys of a file; its name is shown in errors once it is plain that it is one, and no misspelt secret."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read(_MAX_FILE_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        name = f"the file {path}" if shown or os.path.lexists(str(path).replace("\0", "")) else "a text"
        raise UsageError(
            f"{source} has {name} that is no key, and cannot be read as a file of keys "
            f"({getattr(error, 'strerror', None) or 'it is no text'}); give a key that begins with "
            f"{', '.join(_KINDS)} or the path of a file"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.strip().startswith("#"):
            try:
                found.append(parse_key(line))
            except UsageError as error:
                raise UsageError(f"{path}, line {number}: {error}") from None
    if not found:
        raise UsageError(f"{path} has no key in it; `deltabus keygen` makes one")
    if mode & stat.S_IRWXO and any(isinstance(key, SigningKey) for key in found):
        raise UsageError(
            f"{path} holds a secret key, and everybody on this machine can read or write it (mode {mode:03o}): "
            f"run `chmod 600 {path}`, and make a new key if others may have seen it"
        )
    yield from found


def _write(path: Path, text: str, *, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UsageError(f"{path} is there already; give another name, a key is never written over") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
