"""What publishers and subscribers tell whoever watches them: one small event for each thing that happens.

    with Publisher(url, on_event=LoggingListener()) as publisher: ...
    async with Subscriber(url, on_event=PrometheusListener()) as subscriber: ...

A listener is any callable that takes an `Event`. It is called in the thread where the thing happens, and must return
soon. What it raises is logged, and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Event", "EventKind", "Events", "Listener", "LoggingListener", "PrometheusListener"]

_log = logging.getLogger("deltabus.events")


class EventKind(StrEnum):
    """What happened."""

    PUBLISHED = "published"
    """A step became durable."""
    FAILED = "failed"
    """A step could not be stored; its changes travel with the next one."""
    RECEIVED = "received"
    """An update was downloaded, decoded and verified."""
    APPLIED = "applied"
    """An update was written into a model."""
    DETOUR = "detour"
    """Another way was taken than the one that leads on: something is missing or damaged."""
    WAITING = "waiting"
    """Nothing leads on, or a group's step is not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: What.
        topic: The topic's URL, without secrets.
        writer: Whose step it is; empty where there are several.
        step: The training step; None where no step is concerned.
        version: The writer's state counter; of several writers, the sum of theirs.
        nbytes: Payload bytes that went over the wire.
        changed: Elements that changed.
        total: Elements of the state.
        whole: Whether it is a whole state.
        behind: How many versions newer than this one are known; of an update alone.
        seconds: Duration of each stage, by name.
        detail: In words, for people; empty where figures say all.
        metadata: The publisher's key-value pairs of the step.
    """

    kind: EventKind
    topic: str
    writer: str = ""
    step: int | None = None
    version: int = 0
    nbytes: int = 0
    changed: int = 0
    total: int = 0
    whole: bool = False
    behind: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


Listener: TypeAlias = Callable[[Event], object]
"""Is told of events."""


class Events:
    """Tells events to listeners.

    Args:
        listeners: One, several, or none.
    """

    def __init__(self, listeners: Listener | Iterable[Listener] | None) -> None:
        if listeners is None:
            self._listeners: tuple[Listener, ...] = ()
        else:
            self._listeners = (listeners,) if callable(listeners) else tuple(listeners)

    def tell(self, event: Event) -> None:
        """Tell an event to all; what a listener raises is logged."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("the listener %r failed on an event of kind %s", listener, event.kind)


class LoggingListener:
    """Logs each event on a line of its own, as words or as fields that log processors read.

    Args:
        logger: Where to; None is the logger `deltabus.events`.
        level: Of what goes well; what fails, and detours, are warnings.
    """

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logger or _log
        self._level = level

    def __call__(self, event: Event) -> None:
        """Log an event."""
        well = event.kind in (EventKind.PUBLISHED, EventKind.RECEIVED, EventKind.APPLIED)
        figures = [f"{event.kind} {event.topic}"]
        if event.step is not None:
            figures.append(f"step {event.step} version {event.version}")
        if event.total:
            figures.append(f"{event.changed} of {event.total} elements in {event.nbytes} bytes")
        if event.behind:
            figures.append(f"{event.behind} versions behind")
        figures += [f"{stage} {seconds:.3f} s" for stage, seconds in event.seconds.items()]
        if event.detail:
            figures.append(event.detail)
        level = self._level if well else logging.WARNING
        self._logger.log(level, "%s", ", ".join(figures), extra={"deltabus": event})


class PrometheusListener:
    """Counts events, bytes, elements and times for Prometheus, under names that begin with `deltabus_`.

    Args:
        registry: Where to; None is the default one of `prometheus_client`. Use one listener for all publishers and
            subscribers of a process: a registry takes each name once.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # only where somebody counts

        registry = registry or REGISTRY
        by = ("topic", "kind")
        self._events = Counter("deltabus_events", "What happened.", by, registry=registry)
        self._nbytes = Counter("deltabus_payload_bytes", "Payload bytes over the wire.", by, registry=registry)
        self._changed = Counter("deltabus_changed_elements", "Elements that changed.", by, registry=registry)
        self._version = Gauge("deltabus_version", "The newest version.", by, registry=registry)
        self._step = Gauge("deltabus_step", "The newest training step.", by, registry=registry)
        self._behind = Gauge(
            "deltabus_versions_behind", "Newer versions that are known.", ("topic",), registry=registry
        )
        self._density = Gauge("deltabus_density", "Changed elements over all, of the newest.", by, registry=registry)
        self._seconds = Histogram(
            "deltabus_stage_seconds",
            "Duration of a stage.",
            ("topic", "stage"),
            registry=registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )

    def __call__(self, event: Event) -> None:
        """Count an event."""
        labels = (event.topic, str(event.kind))
        self._events.labels(*labels).inc()
        if event.step is None:
            return
        self._nbytes.labels(*labels).inc(event.nbytes)
        self._changed.labels(*labels).inc(event.changed)
        self._version.labels(*labels).set(event.version)
        self._step.labels(*labels).set(event.step)
        if event.total:
            self._density.labels(*labels).set(event.changed / event.total)
        if event.kind in (EventKind.RECEIVED, EventKind.APPLIED):
            self._behind.labels(event.topic).set(event.behind)
        for stage, seconds in event.seconds.items():
            self._seconds.labels(event.topic, stage).observe(seconds)
