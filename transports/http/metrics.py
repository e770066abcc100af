"""Figures for Prometheus; labels are routes, statuses and codes, and the topics that were used last."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metrics", "TopicFigures", "TranscoderFigures"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TopicFigures = Callable[[], Iterable[tuple[str, str, int, int | None]]]
"""Gives, for some topics, name, log, version, and the greatest lag of a reader."""

TranscoderFigures = Callable[[], Iterable[tuple[str, bool, int, int | None]]]
"""Gives, for topics that are made, name, whether its process runs, restarts, and versions behind its source."""

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """All figures of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"deltabus_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests that were answered.", ("route", "status"))
        self.errors = counter("errors", "Answers that are errors, by their code.", ("code",))
        self.sent_bytes = counter("sent_bytes", "Bytes of blobs and records that were sent.")
        self.received_bytes = counter("received_bytes", "Bytes of blobs and records that were received.")
        self.upstream_bytes = counter("upstream_bytes", "Bytes of blobs that were read from the backend.")
        self.cache_hits = counter("cache_hits", "Blobs that were in the cache.")
        self.cache_shared = counter("cache_shared", "Blobs that were being fetched for somebody else.")
        self.cache_misses = counter("cache_misses", "Blobs that were fetched into the cache.")
        self.cut_off = counter("cut_off", "Clients that were cut off because they were too slow.")
        self.refused = counter("refused_connections", "Connections that were one too many.")
        self.events = counter("events", "Records that were pushed to those who follow.")
        self.seconds = Histogram(
            "deltabus_request_seconds",
            "Time until an answer was sent whole; not of those who follow.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.followers = Gauge("deltabus_followers", "Lines of those who follow a log.", registry=self.registry)
        self.cache_used = Gauge("deltabus_cache_bytes", "Bytes in the cache.", registry=self.registry)
        self.cache_limit = Gauge("deltabus_cache_limit_bytes", "Bytes that it may take.", registry=self.registry)

    def watch_topics(self, figures: TopicFigures) -> None:
        """Show what is known of topics."""
        self.registry.register(_Topics(figures))

    def watch_transcoders(self, figures: TranscoderFigures) -> None:
        """Show what is known of topics that are made."""
        self.registry.register(_Transcoders(figures))

    def text(self) -> bytes:
        """Return all figures as Prometheus reads them."""
        return generate_latest(self.registry)

    def hit_rate(self) -> float | None:
        """Return the share of blobs that were not fetched from the backend; None before the first."""
        hits = _value(self.cache_hits) + _value(self.cache_shared)
        total = hits + _value(self.cache_misses)
        return hits / total if total else None

    def totals(self) -> dict[str, float]:
        """Return what the page shows."""
        return {
            "sent_bytes": _value(self.sent_bytes),
            "received_bytes": _value(self.received_bytes),
            "upstream_bytes": _value(self.upstream_bytes),
            "events": _value(self.events),
            "followers": _value(self.followers),
            "cache_bytes": _value(self.cache_used),
            "cache_limit_bytes": _value(self.cache_limit),
        }

    def error_counts(self) -> dict[str, float]:
        """Return how often each code was answered."""
        return {
            sample.labels["code"]: sample.value
            for metric in self.errors.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }


def _value(metric: Counter | Gauge) -> float:
    return next(s.value for m in metric.collect() for s in m.samples if not s.name.endswith("_created"))


class _Topics(Collector):
    def __init__(self, figures: TopicFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        version = GaugeMetricFamily("deltabus_topic_version", "The newest version.", labels=("topic", "log"))
        lag = GaugeMetricFamily(
            "deltabus_topic_lag_versions", "Versions that the slowest reader is behind.", labels=("topic",)
        )
        lags: dict[str, int] = {}
        for topic, log, newest, behind in self._figures():
            version.add_metric((topic, log), newest)
            if behind is not None:
                lags[topic] = max(behind, lags.get(topic, 0))
        for topic, behind in lags.items():
            lag.add_metric((topic,), behind)
        return (version, lag)


class _Transcoders(Collector):
    def __init__(self, figures: TranscoderFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("deltabus_transcoder_up", "Whether the process runs.", labels=("topic",))
        restarts = CounterMetricFamily(
            "deltabus_transcoder_restarts", "How often it was begun again.", labels=("topic",)
        )
        lag = GaugeMetricFamily(
            "deltabus_transcoder_lag_versions", "Versions that it is behind its source.", labels=("topic",)
        )
        for topic, running, count, behind in self._figures():
            up.add_metric((topic,), int(running))
            restarts.add_metric((topic,), count)
            if behind is not None:
                lag.add_metric((topic,), behind)
        return (up, restarts, lag)
