"""How large everything gets at a trillion parameters: sizes by the real encoders, times from measured rates.

python benchmarks/scale.py               # prints the tables of docs/scale.md; half a minute
python benchmarks/scale.py --docs docs   # writes them there
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill as fill_text

from msgspec import UNSET
from scale_rates import Rates

from deltabus.bench.tables import Table
from deltabus.bus.message import (
    MAX_RECORD_BYTES,
    Blob,
    Cohort,
    Kind,
    Message,
    Stats,
    decode_message,
    encode_message,
    rank_writer,
)
from deltabus.bus.sequencer import Sequencer
from deltabus.bus.version import VersionVector
from deltabus.codecs.container import part_bytes_of
from deltabus.codecs.schema import MAX_SCHEMA_BYTES, Box, Schema, TensorSpec

__all__ = ["Case", "Rates", "computed", "fill", "limits", "main", "measured"]

_DOCS = Path(__file__).parents[1] / "docs"
_COMPUTED = "<!-- computed: written by `python benchmarks/scale.py --docs docs` -->", "<!-- end of computed -->"
_LIMITS = "<!-- limits: written by `python benchmarks/scale.py --docs docs` -->", "<!-- end of limits -->"
_MEASURED = "<!-- measured: written by `python benchmarks/scale.py --docs docs` -->", "<!-- end of measured -->"
_STEPS = 4
_UPLINKS = {"10 Gbit/s": 1e10, "100 Gbit/s": 1e11}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be carried.

    Attributes:
        parameters: Of the model, in bf16.
        tensors: Of the model.
        writers: Ranks of the trainer, each with a log.
        readers: Engines.
        density: Share of the elements that a step changes.
    """

    parameters: int = 10**12
    tensors: int = 100_000
    writers: int = 1024
    readers: int = 1000
    density: float = 0.01

    @property
    def group(self) -> tuple[str, ...]:
        """The names of the writers."""
        return tuple(rank_writer("rank", number) for number in range(self.writers))

    @property
    def share(self) -> int:
        """Elements of a rank."""
        return -(-self.parameters // self.writers)


# What can be computed


def computed(case: Case, rates: Rates) -> list[Table]:
    """Return the tables that are the same wherever they are computed."""
    return [_sizes(case, rates), _bytes(case, rates), _requests(case, rates), _rank(case, rates)]


def _message(
    case: Case,
    *,
    kind: Kind,
    nbytes: int,
    whole_base: bool = False,
    rank: int = 0,
    step: int = 1000,
    position: int = 1000,
    ranked: bool = True,
) -> Message:
    """Return a message as a rank of the case writes it."""
    group = case.group
    writer = group[rank]
    base: dict[str, int] = {}
    if kind is Kind.DELTA:
        base = dict.fromkeys(group, step - 1) if whole_base else {writer: step - 1}
    part = part_bytes_of(2 * case.share)
    sizes = [min(part, nbytes - start) for start in range(0, nbytes, part)]
    return Message(
        writer=writer,
        position=position,
        epoch=3,
        kind=kind,
        step=step,
        base=base,
        version=step,
        group=() if ranked else group,
        cohort=Cohort(generation=3, ranks=case.writers if ranked else 0),
        schema=Blob(key=f"schemas/{'0' * 64}.json", size=10**7, checksum=bytes(32)),
        digest_before=None if kind is Kind.ANCHOR else (1 << 64) - step,
        digest_after=(1 << 64) - step - 1,
        blobs=tuple(
            Blob(key=f"blobs/{writer}/{step:012}-{kind}-{part:04}-{'0' * 16}", size=size, checksum=bytes(32))
            for part, size in enumerate(sizes)
        ),
        stats=Stats(changed=case.share // 100, total=case.share, encodings={"conditional": nbytes}),
        created=1.8e9,
    )


def _delta_bytes(case: Case, rates: Rates) -> int:
    return math.ceil(case.share * case.density * rates.bits / 8)


def _anchor_bytes(case: Case, rates: Rates) -> int:
    return math.ceil(2 * case.share * rates.anchor)


def _schema(tensors: int, elements: int, *, ranks: int = 0) -> Schema:
    """Return the schema of a rank with so many tensors; with `ranks`, it has one row of each, of as many rows."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")
    columns = -(-elements // tensors)
    return Schema.of(
        TensorSpec(
            name=f"model.layers.{number // 1600}.mlp.experts.{number // 8 % 200}.{names[number % 8]}.weight",
            dtype="BF16",
            shape=(1, columns),
            slice=Box(start=(ranks - 1, 0), whole=(ranks, columns)) if ranks else UNSET,
        )
        for number in range(tensors)
    )


def _sizes(case: Case, rates: Rates) -> Table:
    delta, anchor = _delta_bytes(case, rates), _anchor_bytes(case, rates)
    own = case.tensors // case.writers
    rows = [
        ("record of a delta", len(encode_message(_message(case, kind=Kind.DELTA, nbytes=delta)))),
        (
            "record of a delta whose base names all writers",
            len(encode_message(_message(case, kind=Kind.DELTA, nbytes=delta, whole_base=True))),
        ),
        (
            f"record of an anchor, {-(-anchor // part_bytes_of(2 * case.share))} parts",
            len(encode_message(_message(case, kind=Kind.ANCHOR, nbytes=anchor))),
        ),
        (
            "record of a delta that names its group instead of counting ranks",
            len(encode_message(_message(case, kind=Kind.DELTA, nbytes=delta, ranked=False))),
        ),
        ("largest record that is read", MAX_RECORD_BYTES),
        (f"schema of a rank with {own} whole tensors", len(_schema(own, case.share).encode())),
        (
            f"schema of a rank with a slice of each of {case.tensors:,} tensors",
            len(_schema(case.tensors, case.share, ranks=case.writers).encode()),
        ),
        ("largest schema that is read", MAX_SCHEMA_BYTES),
    ]
    return Table("Headers and schemas", ("what", "bytes"), [(name, f"{size:,}") for name, size in rows])


def _bytes(case: Case, rates: Rates) -> Table:
    record = len(encode_message(_message(case, kind=Kind.DELTA, nbytes=_delta_bytes(case, rates))))
    delta, anchor = _delta_bytes(case, rates), _anchor_bytes(case, rates)
    whole = case.writers * (delta + record)
    rows = [
        ("raw state", f"{2 * case.parameters / 1e12:,.2f} TB", "", ""),
        ("anchor, all ranks", f"{case.writers * anchor / 1e12:,.2f} TB", *_times(anchor, case.writers * anchor)),
        ("step, all ranks", f"{whole / 1e9:,.2f} GB", *_times(delta + record, whole)),
        ("of it records", f"{case.writers * record / 1e6:,.1f} MB", "", ""),
        ("step of one rank", f"{(delta + record) / 1e6:,.2f} MB", "", ""),
        (f"step to {case.readers:,} readers of everything", f"{case.readers * whole / 1e12:,.2f} TB", "", ""),
    ]
    return Table("Bytes", ("what", "bytes", "up at 10 Gbit/s a rank, s", "down at 100 Gbit/s a reader, s"), rows)


def _times(up: int, down: int) -> tuple[str, str]:
    return f"{8 * up / _UPLINKS['10 Gbit/s']:.3f}", f"{8 * down / _UPLINKS['100 Gbit/s']:.2f}"


def _requests(case: Case, rates: Rates) -> Table:
    rows = []
    for name, (writer, reader, waiting) in rates.requests.items():
        logs = case.writers
        rows.append(
            (
                f"`{name}`",
                f"{writer * logs:,.0f}",
                f"{reader * logs:,.0f}",
                f"{reader * logs * case.readers:,.0f}",
                f"{waiting * logs / 60:,.0f}",
                f"{waiting * logs * case.readers / 60:,.0f}",
            )
        )
    heads = (
        "backend",
        "writers, a step",
        "one reader, a step",
        f"{case.readers:,} readers, a step",
        "one waiting reader, a second",
        f"{case.readers:,} waiting readers, a second",
    )
    return Table("Requests, or messages", heads, rows)


def _rank(case: Case, rates: Rates) -> Table:
    ratio = case.share / rates.elements
    shadow = 2 * case.share
    rows = [
        ("elements", f"{case.share / 1e6:,.0f} M", f"{case.parameters / 1e6:,.0f} M"),
        ("copy of the bits", f"{shadow / 1e9:,.2f} GB", f"{2 * case.parameters / 1e12:,.2f} TB"),
    ]
    for stage in ("blocked", "encode"):
        rows.append((f"{stage}, s", f"{rates.seconds[stage] * ratio:.2f}", ""))
    everything = case.parameters / rates.elements
    for stage in ("decode", "apply"):
        rows.append((f"{stage}, s", f"{rates.seconds[stage] * ratio:.2f}", f"{rates.seconds[stage] * everything:,.0f}"))
    title = f"Memory and time on {rates.cores} cores, at the rates of docs/benchmarks.md"
    return Table(title, ("what", "a rank, and an engine that takes a rank's share", "an engine that takes all"), rows)


def limits(case: Case, rates: Rates) -> str:
    """Return what the figures come to, in the order in which they become a wall."""
    waiting = rates.requests["s3://"][2] * case.writers / 60
    step = case.writers * _delta_bytes(case, rates)
    decode = rates.seconds["decode"] * case.parameters / rates.elements
    record = len(encode_message(_message(case, kind=Kind.DELTA, nbytes=_delta_bytes(case, rates))))
    sliced = len(_schema(case.tensors, case.share, ranks=case.writers).encode())
    named = len(encode_message(_message(case, kind=Kind.DELTA, nbytes=_delta_bytes(case, rates), ranked=False)))
    points = (
        f"**Requests of readers that wait**, on stores that do not push. One reader asks for the next record of "
        f"{case.writers:,} logs, each {rates.requests['s3://'][2]:.0f} times a minute: {waiting:,.0f} requests a "
        f"second, and {case.readers:,} readers {waiting * case.readers:,.0f}. Amazon promises 5,500 a second for a "
        f"prefix. `notify=` with `poll=30` makes it {waiting / 30 * case.readers:,.0f}; one reader behind which all "
        f"others stand makes it {waiting:,.0f}, and one writer for 8 ranks {waiting / 8:,.0f}.",
        f"**Bytes down.** {case.readers:,} readers of everything take {case.readers * step / 1e12:,.2f} TB a step; "
        f"readers that each take a rank's share alone, {case.readers * step / case.writers / 1e9:,.2f} GB together. "
        "Behind relays the store sends each byte once to each relay.",
        f"**An engine that takes all** decodes {case.parameters / 1e12:g} T elements in {decode:,.0f} s of "
        f"{rates.cores} slow cores, and holds a copy of {2 * case.parameters / 1e12:g} TB. Ranks of an engine must "
        "divide the work as those of the trainer do.",
        f"**Schemas of slices.** Where each rank has a slice of each tensor, its schema has {case.tensors:,} entries "
        f"and {sliced / 1e6:,.1f} MB; a reader of everything reads {case.writers * sliced / 1e9:,.1f} GB of them once, "
        f"and keeps {case.writers * case.tensors / 1e6:,.0f} M entries. Where ranks have whole tensors, these are "
        f"{case.tensors:,} in all.",
        f"**Headers** are {case.writers * record / 1e6:,.1f} MB a step, since ranks are counted ({record:,} bytes a "
        f"record). A group that names its members takes {named:,} bytes a record, and "
        f"{case.writers * named / 1e6:,.1f} MB a step. What readers keep of them is above.",
        f"**The sequencer** takes a step of {case.writers:,} records in a fraction of a second (above), and what "
        f"a **rank** does, bytes up included, is that of a model of {case.share / 1e9:.1f} G "
        "parameters: these are no wall.",
    )
    lines = (fill_text(f"{number}. {point}", 125, subsequent_indent="   ") for number, point in enumerate(points, 1))
    return "\n".join(lines)


# What is measured


def measured(case: Case, rates: Rates) -> Table:
    """Return what the real sequencer and planner take at these counts, on this machine."""
    writers, delta = case.writers, _delta_bytes(case, rates)

    def step(number: int) -> Iterator[Message]:
        for rank in range(writers):
            kind = Kind.ANCHOR if number == 1 else Kind.DELTA
            message = _message(case, kind=kind, nbytes=delta, rank=rank, step=number, position=number - 1)
            yield decode_message(encode_message(message))

    sequencer, fed, before = Sequencer(), [], _resident()
    for number in range(1, _STEPS + 1):
        messages = list(step(number))
        began = time.perf_counter()
        for message in messages:
            sequencer.feed(message)
        fed.append(time.perf_counter() - began)
    memory = _resident() - before
    cut = sequencer.newest_cut()
    assert cut is not None and cut.step == _STEPS and len(cut.state) == writers
    have = VersionVector(dict.fromkeys(case.group, _STEPS - 1))
    began = time.perf_counter()
    plan = sequencer.plan(have=have, target=cut.state)
    planned = time.perf_counter() - began
    assert len(plan.messages) == writers and plan.nbytes == writers * delta
    record = encode_message(plan.messages[0])
    rows = [
        ("one step fed, all logs", f"{fed[-1]:.3f} s"),
        ("one message fed", f"{1e6 * fed[-1] / writers:.0f} us"),
        ("way from one cut to the next", f"{planned:.3f} s"),
        ("memory of a step's messages, this process", f"{memory / _STEPS / 1e6:,.1f} MB"),
        (
            "one record encoded",
            f"{1e6 * _timed(lambda: encode_message(plan.messages[0])):.0f} us, {len(record):,} bytes",
        ),
        ("load when this was measured", f"{os.getloadavg()[0]:.1f}"),
    ]
    return Table(f"The real sequencer and planner, {writers:,} logs", ("what", "takes"), rows)


def _timed(work: object) -> float:
    assert callable(work)
    began = time.perf_counter()
    for _ in range(20):
        work()
    return (time.perf_counter() - began) / 20


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# The page


def fill(page: str, case: Case, rates: Rates) -> str:
    """Return docs/scale.md with all that can be computed replaced.

    Raises:
        ValueError: If the page has no place for it.
    """
    tables = "\n".join(table.markdown() for table in computed(case, rates))
    return _between(_between(page, tables, _COMPUTED), limits(case, rates) + "\n", _LIMITS)


def _between(page: str, text: str, marks: tuple[str, str]) -> str:
    """Return a page with what stands between two lines replaced.

    Raises:
        ValueError: If the page has no place for them.
    """
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page needs the lines {marks[0]} and {marks[1]}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def main() -> int:
    """Print the tables, and write them into the page if told to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docs", type=Path, help="the folder of scale.md, to be written")
    options = parser.parse_args()
    case, rates = Case(), Rates.read((_DOCS / "benchmarks.md").read_text("utf-8"))
    live = measured(case, rates)
    for table in (*computed(case, rates), live):
        print(table.markdown())
    print(limits(case, rates))
    if options.docs is not None:
        page = options.docs / "scale.md"
        text = fill(page.read_text("utf-8"), case, rates)
        page.write_text(_between(text, live.markdown(), _MEASURED), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
