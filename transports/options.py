"""Options of a transport: declared beside its class, given in the URL's query or as keywords."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deltabus.bus.errors import UnknownOptionError, UsageError

__all__ = ["Option", "is_secret", "parse_flag", "parse_seconds", "parse_size", "read_options"]

_SECRET = re.compile("token|secret|password|passwd|credential|signature|key", re.IGNORECASE)
_LOGIN = re.compile(r"^(.*?//)?.*@", re.DOTALL)
"""What may be a user's name and password in front of a host; a name that holds '/' or '@' included."""
_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1 << 10 * (power + 1) for power, prefix in enumerate("KMGT")}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting that a transport takes.

    Attributes:
        name: As it is written in a URL: `?name=value`.
        parse: Makes the value from its text; raises `ValueError` that says what a value looks like.
        default: The value when it is not given.
        help: One line for people.
        secret: Whether its value must never be shown; names like `token` or `access_key` are secret in any case.
    """

    name: str
    parse: Callable[[str], object]
    default: object
    help: str
    secret: bool = False


def is_secret(name: str, declared: Sequence[Option]) -> bool:
    """Return whether an option's value must never be shown: declared so, named so, or not known at all."""
    known = {option.name: option for option in declared}
    return name not in known or known[name].secret or bool(_SECRET.search(name))


def read_options(declared: Sequence[Option], given: Mapping[str, str], *, where: str) -> dict[str, object]:
    """Return a value for each declared option.

    Args:
        declared: The options that there are.
        given: Texts by name.
        where: What has these options, for the error.

    Raises:
        UnknownOptionError: If an option is given that is not declared; it lists those that are.
        UsageError: If a text cannot be parsed; it names the option, and shows the text, without what may be secret.
    """
    names = [option.name for option in declared]
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            there = "; ".join(f"{option.name} ({option.help})" for option in declared) or "none"
            raise UnknownOptionError(f"{where} has no option {name!r}; {hint}its options are: {there}")
    values: dict[str, object] = {}
    for option in declared:
        values[option.name] = option.default
        if option.name in given:
            secret = is_secret(option.name, declared)
            shown = "its value" if secret else repr(_LOGIN.sub(r"\1***@", given[option.name]))
            try:
                values[option.name] = option.parse(given[option.name])
            except ValueError as error:
                # The parser's own words may repeat the value.
                reason = "malformed" if secret else error
                cause = None if secret else error
                raise UsageError(f"option {option.name!r} of {where}: {shown} is {reason}") from cause
    return values


def parse_seconds(text: str) -> float:
    """Return a time above 0, in seconds.

    Raises:
        ValueError: If the text is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("not a number of seconds above 0, such as 0.5")
    return seconds


def parse_flag(text: str) -> bool:
    """Return whether the text says yes.

    Raises:
        ValueError: If it says neither yes nor no.
    """
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError("neither 'true' nor 'false'")


def parse_size(text: str) -> int:
    """Return a number of bytes above 0.

    >>> parse_size("64MiB")
    67108864

    Raises:
        ValueError: If the text is none.
    """
    match = re.fullmatch(r"([0-9]{1,18}) ?([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS or not int(match[1]):
        raise ValueError("not a size above 0, such as 1048576, 64MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]
