"""`deltabus keygen`: a new key to sign messages with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltabus.bus.signing import Scheme
from deltabus.keys import SIGNING_KEY, VERIFY_KEYS, make_key

__all__ = ["generate_key", "print_key"]


def generate_key(file: Path | None = None, *, hmac: bool = False) -> dict[str, Any]:
    """Make a key, and return what there is to say of it, ready for JSON.

    The secret is in it only when no file holds it. `public_key` is None for HMAC, which has none.

    Args:
        file: Where the secret goes; the public key goes to `FILE.pub`. None writes no file.
        hmac: Whether to make a shared secret instead of a pair.

    Raises:
        UsageError: If a file is there already, or cannot be written; nothing is left behind.
    """
    made = make_key(file, scheme=Scheme.HMAC_SHA256 if hmac else Scheme.ED25519)
    return {
        "id": made.key.id.hex(),
        "file": made.file,
        "public_file": made.public_file,
        "secret_key": None if made.file is not None else made.key.text,
        "public_key": None if hmac else made.key.verify_key.text,
    }


def print_key(made: dict[str, Any]) -> None:
    """Print what `generate_key` returned, for people."""
    print(f"key {made['id']}")
    if made["file"] is None:
        print(f"secret, for {SIGNING_KEY}:\n{made['secret_key']}")
    else:
        print(f"secret, for {SIGNING_KEY}: {made['file']}")
    if made["public_key"] is None:
        print(f"readers need the same secret, in {VERIFY_KEYS}: whoever can check messages can write them too")
    else:
        place = "" if made["public_file"] is None else f" {made['public_file']}"
        print(f"public, for readers, in {VERIFY_KEYS}:{place}\n{made['public_key']}")
