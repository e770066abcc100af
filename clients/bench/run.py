"""`deltabus bench`: the whole measurement on one's own weights, machine and backend."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deltabus.bus.errors import DeltabusError, UsageError
from deltabus.transports import open_transport
from deltabus.workers import usable_cores

from . import end_to_end
from .backend import directory_of, remove_topic, topic_below
from .end_to_end import EndToEnd
from .machine import machine
from .rows import count_rows
from .source import Source, load_pair
from .tables import Table, backend_table, formats_table, machine_table, memory_table, ratios_table, stages_table
from .timing import PairFigures, measure, warm_up

__all__ = ["Plan", "Report", "run_bench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        source: The two states.
        url: The backend: a topic is made below this URL, and removed afterwards. None is a temporary directory.
        repeats: How often each time is taken, and how many steps are published.
        formats: Whether to measure each format in memory.

    Raises:
        UsageError: If a value is out of range, or the URL is wrong.
    """

    source: Source
    url: str | None = None
    repeats: int = 3
    formats: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"repeats={self.repeats} measures nothing; 3 is usual")
        if self.url is not None:
            topic_below(self.url)  # says what is wrong with it, and connects to nothing yet

    @property
    def checkpoints(self) -> bool:
        """Whether the whole way is compared with checkpoints, as where the backend is a disk."""
        return self.url is None or directory_of(topic_below(self.url)) is not None

    def count(self) -> int:
        """Return how often `run_bench` tells its progress."""
        rows = count_rows(pool=usable_cores() > 1) * (1 + self.repeats) + 1 if self.formats else 0
        return 1 + rows + end_to_end.count_stages(self.repeats, checkpoints=self.checkpoints, plain=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run measured.

    Attributes:
        label: What was measured.
        url: The topic that was made, without secrets.
        machine: What figures depend on.
        formats: Every format in memory; None where it was not measured.
        end_to_end: From `publish` to applied.
        seconds: Duration of everything.
        left: What could not be removed, in words; empty when nothing is left.
    """

    label: str
    url: str
    machine: dict[str, str] = field(default_factory=dict)
    formats: PairFigures | None
    end_to_end: EndToEnd
    seconds: float
    left: str = ""

    @property
    def exact(self) -> bool:
        """Whether every bit came out right, each time."""
        rows = [] if self.formats is None else self.formats.rows
        return self.end_to_end.exact and all(row.exact for row in rows)

    def tables(self, command: str) -> list[Table]:
        """Return everything for people; `command` is what was typed."""
        way = self.end_to_end
        found = [] if self.formats is None else [formats_table(self.formats)]
        found += [stages_table(way, where=f"Over {self.url}"), ratios_table(way), backend_table(way)]
        if way.memory:
            found.append(memory_table(way))
        return [*found, machine_table(self.machine, command=command, seconds=self.seconds)]


def run_bench(plan: Plan, *, progress: Callable[[str], object] = lambda what: None) -> Report:
    """Measure what a plan says.

    Args:
        plan: What to measure.
        progress: Is told what begins, `plan.count()` times.

    Raises:
        UsageError: If a checkpoint is not there, two hold the same bits, or a directory cannot be made.
        CodecError: If a checkpoint cannot be read or published, or the two do not fit together.
        ClientError: If one of the two processes of the way failed.
        TransportError: If the backend fails.
        DeltabusError: If the topic lives in this process, as a side raised it.
    """
    started = time.monotonic()
    about = machine()
    progress("loading both states")
    formats = _measure_formats(plan, progress) if plan.formats else None
    with _fresh_topic(plan.url) as (url, removal):
        topic = directory_of(url)
        place = None if topic is None else topic.parent  # the topic's own disk
        if place is not None:
            _make(place)
        way = end_to_end.run(plan.source, url, steps=plan.repeats, checkpoints=place, plain=True, progress=progress)
        shown = open_transport(url).url
    return Report(
        label=plan.source.label,
        url=shown,
        machine=about,
        formats=formats,
        end_to_end=way,
        seconds=time.monotonic() - started,
        left=removal.left,
    )


def _make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"directory {place} cannot be made: {error.strerror or error}") from error


def _measure_formats(plan: Plan, progress: Callable[[str], object]) -> PairFigures:
    pair = load_pair(plan.source)
    cores = usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        with ThreadPoolExecutor(cores) as executor:
            pool = executor if cores > 1 else None
            progress("compiling")
            warm_up(pair.schema, pool=pool)
            return measure(pair, repeats=plan.repeats, pool=pool, progress=progress)
    finally:
        torch.set_num_threads(before)


@dataclass(slots=True)
class _Removal:
    left: str = ""


@contextlib.contextmanager
def _fresh_topic(url: str | None) -> Iterator[tuple[str, _Removal]]:
    """Give a topic that does not exist yet, and remove it."""
    removal = _Removal()
    if url is None:
        with tempfile.TemporaryDirectory(prefix="deltabus-bench-") as folder:
            yield Path(folder, "topic").as_uri(), removal
        return
    topic = topic_below(url)
    try:
        yield topic, removal
    except BaseException as error:
        try:
            remove_topic(topic)
        except DeltabusError as second:
            error.add_note(f"what was stored could not be removed either: {second}")
        raise
    try:
        removal.left = remove_topic(topic)
    except DeltabusError as error:
        removal.left = f"what was stored could not be removed: {error}"
