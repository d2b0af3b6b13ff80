"""The GenAI histograms of all calls, counted here and sent by a thread at intervals.

The SDK's own instruments take 7 us for a value, most of it for hashing attributes that are the same
for nearly all calls. With three values, that was more than the traces of every tenth call.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from coordinator.api.observer import RequestSummary
from coordinator.tracing.spans import Attributes, common_attributes, operation_of

with suppress(ImportError):  # the extra; `make_tracing` says so if it is needed
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Histogram,
        HistogramDataPoint,
        Metric,
        MetricsData,
        ResourceMetrics,
        ScopeMetrics,
    )

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

log = logging.getLogger(__name__)

# Seconds; the conventions give them with the metrics.
BUCKETS: Final = {
    "request.duration": (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
        *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    "time_to_first_token": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
        *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    "time_per_output_token": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
}


class _Distribution:
    """The values of one metric with one set of attributes, since the start."""

    __slots__ = ("bounds", "counts", "least", "most", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.least, self.most = inf, -inf

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1  # a bound is in the bucket below it
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)


class CallHistograms:
    """Counts calls, by operation and error; both have few values. For any threads."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._start_ns = time.time_ns()
        self._lock = threading.Lock()
        # (operation, error) |-> (attributes, by the metric's name)
        self._counted: dict[
            tuple[str, str | None], tuple[Attributes, dict[str, _Distribution]]
        ] = {}

    def add(self, summary: RequestSummary, server: Attributes) -> None:
        """Count a call that has ended; `server` are attributes of this process."""
        key = operation_of(summary.endpoint), summary.error_code
        with self._lock:
            counted = self._counted.get(key)
            if counted is None:
                attributes = common_attributes(summary, self._model) | server
                fresh = {name: _Distribution(bounds) for name, bounds in BUCKETS.items()}
                counted = self._counted[key] = (attributes, fresh)
            _, distributions = counted
            distributions["request.duration"].add(summary.duration_s)
            if summary.ttft_s is not None:
                distributions["time_to_first_token"].add(summary.ttft_s)
            if summary.tpot_s is not None:
                distributions["time_per_output_token"].add(summary.tpot_s)

    def metrics(self) -> list[Metric]:
        """Return what has been counted since the start."""
        with self._lock:
            return [
                Metric(
                    f"gen_ai.server.{name}",
                    None,
                    "s",
                    Histogram(self._points(name), AggregationTemporality.CUMULATIVE),
                )
                for name in BUCKETS
            ]

    def _points(self, name: str) -> list[HistogramDataPoint]:
        now_ns = time.time_ns()
        return [
            HistogramDataPoint(
                attributes=attributes,
                start_time_unix_nano=self._start_ns,
                time_unix_nano=now_ns,
                count=sum(found.counts),
                sum=found.total,
                bucket_counts=list(found.counts),
                explicit_bounds=found.bounds,
                min=found.least,
                max=found.most,
            )
            for attributes, distributions in self._counted.values()
            if any((found := distributions[name]).counts)
        ]


class MetricsSender:
    """Sends the histograms at intervals, and once more at the end."""

    def __init__(
        self,
        exporter: MetricExporter,
        histograms: CallHistograms,
        resource: Resource,
        scope: InstrumentationScope,
        every_s: float,
    ) -> None:
        self._exporter = exporter
        self._histograms = histograms
        self._resource = resource
        self._scope = scope
        self._every_s = every_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._send_always, name="otlp-metrics", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Send what was counted, and end."""
        self._is_closing.set()
        self._thread.join(within_s)
        self._exporter.shutdown(within_s * 1e3)

    def _send_always(self) -> None:
        while not self._is_closing.wait(self._every_s):
            self._send()
        self._send()

    def _send(self) -> None:
        scope = ScopeMetrics(self._scope, self._histograms.metrics(), "")
        try:  # it tells of what a collector does not take, and drops it
            self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))
        except Exception:  # the next ones may be taken
            log.exception("metrics could not be sent")
