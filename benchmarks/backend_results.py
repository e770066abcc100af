"""What one run found out about backends, and its tables for the terminal and docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import dataclass

from deltabus.bench.tables import Table, machine_table

__all__ = ["BackendFigures", "BackendResults", "Requests", "Speed", "Steps", "fill_page", "tables"]

_BEGIN, _END = "<!-- backends: written by `make bench-backends` -->", "<!-- end of backends -->"
_GOAL = 0.9
"""Share of the speed of the server's own client that a transport is to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps from a trainer to an engine; medians.

    Attributes:
        nbytes: Bytes of a step.
        applied: Seconds from the call of `publish` until the engine holds the step.
        moving: Of these, what neither side spends on encoding, decoding and applying, nor inside `publish`.
        exact: Whether the engine held the trainer's bits each time.
    """

    nbytes: int
    applied: float
    moving: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Plain bytes, in bytes a second; medians.

    Attributes:
        up: `put` of the transport.
        down: `get` of the transport.
        plain_up: Storing by the server's own client.
        plain_down: Fetching by it.
        exact: Whether all bytes came back as they were stored.
    """

    up: float
    down: float
    plain_up: float
    plain_down: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What is asked of a server, by what it is: requests, or messages to a broker.

    Attributes:
        writer: By the writer in a step.
        reader: By the reader in a step.
        idle: By a reader that waits, in a minute.
        exact: Whether the engine held the trainer's bits each time.
    """

    writer: dict[str, float]
    reader: dict[str, float]
    idle: dict[str, float]
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFigures:
    """One backend.

    Attributes:
        name: Of its rows.
        server: What answered.
        steps: From end to end.
        speed: Of plain bytes; None where they go the way of another backend.
        requests: What is asked of a server; None where there is none.
    """

    name: str
    server: str
    steps: Steps
    speed: Speed | None
    requests: Requests | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendResults:
    """One run.

    Attributes:
        command: What was typed.
        quick: Whether everything was tiny, so that the figures mean nothing.
        label: The states between which steps go to and fro.
        moved: Bytes that were stored and fetched at a time.
        idle: Seconds for which a waiting reader was watched.
        machine: What figures depend on, with the load before and after.
        backends: Each backend.
        seconds: Duration of everything.
    """

    command: str
    quick: bool
    label: str
    moved: int
    idle: float
    machine: dict[str, str]
    backends: list[BackendFigures]
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether every bit came out right."""
        found = [part for each in self.backends for part in (each.steps, each.speed, each.requests)]
        return all(part.exact for part in found if part is not None)


def tables(results: BackendResults) -> list[Table]:
    """Return everything that was measured."""
    return [
        _steps(results),
        _speeds(results),
        _requests(results),
        machine_table(results.machine, command=results.command, seconds=results.seconds),
    ]


def fill_page(page: str, results: BackendResults) -> str:
    """Return docs/benchmarks.md with the figures of backends replaced.

    Raises:
        ValueError: If the page has no place for them.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {_BEGIN} and {_END}")
    figures = "\n".join(table.markdown() for table in tables(results))
    return f"{before}{_BEGIN}\n\n{figures}\n{_END}{after}"


def _steps(results: BackendResults) -> Table:
    rows = [
        (
            each.name,
            each.server,
            f"{each.steps.nbytes / 1e6:.2f}",
            f"{each.steps.applied:.3f}",
            f"{each.steps.moving:.3f}",
            "yes" if each.steps.exact else "**no**",
        )
        for each in results.backends
    ]
    heads = ("backend", "server", "MB a step", "`publish` -> applied, s", "of it moving, s", "exact")
    return Table(f"Steps over each backend, {results.label}", heads, rows)


def _speeds(results: BackendResults) -> Table:
    rows = []
    for each in results.backends:
        speed = each.speed
        if speed is None:
            continue
        for way, ours, plain in (("up", speed.up, speed.plain_up), ("down", speed.down, speed.plain_down)):
            share = ours / plain
            met = "yes" if share >= _GOAL else "**no**"
            exact = "yes" if speed.exact else "**no**"
            rows.append((f"{each.name}, {way}", f"{ours / 1e6:.0f}", f"{plain / 1e6:.0f}", f"{share:.2f}", met, exact))
    heads = ("bytes", "deltabus, MB/s", "own client, MB/s", "share", f">= {_GOAL}", "exact")
    return Table(f"{results.moved / 1e6:.0f} MB through each transport, and by the server's own client", heads, rows)


def _requests(results: BackendResults) -> Table:
    rows = []
    for each in results.backends:
        found = each.requests
        if found is None:
            rows.append((each.name, "none", "none", "none"))
        else:
            rows.append((each.name, _words(found.writer), _words(found.reader), _words(found.idle)))
    heads = ("backend", "writer, a step", "reader, a step", "waiting reader, a minute")
    return Table(f"What is asked of a server; a waiting reader was watched for {results.idle:.0f} s", heads, rows)


def _words(counts: dict[str, float]) -> str:
    """Return counts for people.

    >>> _words({"requests": 3.0, "messages": 1.25})
    '3 requests, 1.2 messages'
    """
    return ", ".join(f"{number:.1f}".removesuffix(".0") + f" {what}" for what, number in counts.items())
