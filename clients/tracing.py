"""OpenTelemetry spans: of what publishers and subscribers do, tied together from trainer to engine.

    with Publisher(url, on_event=TracingListener()) as publisher:
        publisher.publish(step, model, metadata=trace_metadata())
    async with Subscriber(url, on_event=TracingListener()) as subscriber: ...

Needs the extra `deltabus[otel]`. Where spans go is set up as everywhere: by a `TracerProvider`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from deltabus.bus.errors import MissingExtraError

from .events import Event, EventKind

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["TracingListener", "export_spans", "trace_metadata"]

_NAME = "deltabus"
_FIELDS = ("traceparent", "tracestate")
"""The keys of metadata that hold a span, as W3C Trace Context names them."""

_STAGES = {
    EventKind.PUBLISHED: ("blocked", "upload"),
    EventKind.RECEIVED: ("download", "decode"),
}
"""Stages that get spans of their own: the first from the beginning on, the second up to the end."""


class TracingListener:
    """Makes a span of each event, and of its stages: publish with upload, receive with download and decode, apply.

    A published step belongs to the span that its metadata name (`trace_metadata`), if they do; what an engine does with
    it is linked to that. An event is told when it is over: its span begins as long before as it took.

    Args:
        provider: Where spans go; None is the global one.

    Raises:
        MissingExtraError: If OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        trace = _trace()
        self._trace = trace
        self._tracer = trace.get_tracer(_NAME, tracer_provider=provider)

    def __call__(self, event: Event) -> None:
        """Make the spans of an event."""
        end = time.time_ns()
        start = end - _nanoseconds(_duration(event))
        origin = _origin(event.metadata)
        known = self._trace.get_current_span(origin).get_span_context()
        own = event.kind in (EventKind.PUBLISHED, EventKind.FAILED)
        span = self._tracer.start_span(
            f"{_NAME} {event.kind}",
            context=origin if own and known.is_valid else None,
            links=[self._trace.Link(known)] if known.is_valid and not own else None,
            start_time=start,
            attributes=_attributes(event),
        )
        inside = self._trace.set_span_in_context(span)
        first, second = _STAGES.get(event.kind, ("", ""))
        for stage, begins, ends in (
            (first, start, start + _nanoseconds(event.seconds.get(first, 0.0))),
            (second, end - _nanoseconds(event.seconds.get(second, 0.0)), end),
        ):
            if stage in event.seconds:
                self._tracer.start_span(f"{_NAME} {stage}", context=inside, start_time=begins).end(ends)
        if event.kind is EventKind.FAILED:
            span.set_status(self._trace.StatusCode.ERROR, event.detail)
        span.end(end)


def trace_metadata() -> dict[str, str]:
    """Return what names the current span, for `publish(metadata=)`: an engine's spans of that step are linked to it.

    Raises:
        MissingExtraError: If OpenTelemetry is not installed.
    """
    _trace()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def export_spans(service: str) -> Tracer:
    """Return what makes spans that are exported over OTLP in the background, as the variables `OTEL_*` say.

    Args:
        service: What the process is called, unless `OTEL_SERVICE_NAME` says otherwise.

    Raises:
        MissingExtraError: If OpenTelemetry, or its exporter, is not installed.
    """
    trace = _trace()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing() from error
    resource = Resource.create({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer: Tracer = trace.get_tracer(_NAME, tracer_provider=provider)
    return tracer


def _trace() -> ModuleType:
    """Return OpenTelemetry's module of that name."""
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise _missing() from error
    return trace


def _missing() -> MissingExtraError:
    return MissingExtraError("traces need OpenTelemetry: pip install 'deltabus[otel]'")


def _origin(metadata: Mapping[str, str]) -> Context | None:
    """Return the context of the span that metadata name; an empty one if they name none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: metadata[name] for name in _FIELDS if name in metadata}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _duration(event: Event) -> float:
    """Return how long an event took, in seconds."""
    seconds = event.seconds
    if "total" in seconds:
        return seconds["total"]
    # Encoding goes on beside the upload.
    return sum(seconds.get(stage, 0.0) for stage in ("download", "decode", "upload", "apply"))


def _nanoseconds(seconds: float) -> int:
    return int(max(0.0, seconds) * 1e9)


def _attributes(event: Event) -> dict[str, str | int | float | bool]:
    told: dict[str, str | int | float | bool] = {"topic": event.topic}
    if event.step is not None:
        told |= {
            "step": event.step,
            "version": event.version,
            "bytes": event.nbytes,
            "changed": event.changed,
            "total": event.total,
            "whole": event.whole,
            "behind": event.behind,
        }
    if event.writer:
        told["writer"] = event.writer
    if event.detail:
        told["detail"] = event.detail
    told |= {f"seconds.{stage}": seconds for stage, seconds in event.seconds.items()}
    return {f"{_NAME}.{name}": value for name, value in told.items()}
