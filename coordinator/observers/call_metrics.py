"""Turns the API's observations of calls into metrics of what clients experience."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.api.observer import RequestSummary
from coordinator.observers.endings import attainment
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Slo


class MetricsObserver:
    """A `coordinator.api.observer.Observer` that records to Prometheus metrics."""

    def __init__(
        self,
        metrics: CoordinatorMetrics,
        on_finished: Sequence[Callable[[RequestSummary], None]] = (),
    ) -> None:
        """Each of `on_finished` is told of each call, too."""
        self._metrics = metrics
        self._on_finished = on_finished

    def first_token(self, ttft_s: float) -> None:
        """Record the TTFT."""
        self._metrics.ttft.observe(ttft_s)

    def inter_token(self, itl_s: float) -> None:
        """Record an inter-token latency."""
        self._metrics.itl.observe(itl_s)

    def request_finished(self, summary: RequestSummary) -> None:
        """Record outcome, end-to-end latency and TPOT."""
        outcome = summary.error_code or summary.finish_reason or "none"
        self._metrics.requests.labels(outcome=outcome).inc()
        if summary.error_code is None:
            self._metrics.e2e.observe(summary.e2e_s)
        if summary.tpot_s is not None:
            self._metrics.tpot.observe(summary.tpot_s)
        if summary.slo is not None:
            self._observe_class(summary, summary.slo)
        for told in self._on_finished:
            told(summary)

    def _observe_class(self, summary: RequestSummary, slo: Slo) -> None:
        """Record attainment, TTFT and TPOT by class."""
        metrics, name = self._metrics, slo.name
        attained = attainment(summary, slo)
        if attained is not None:
            metrics.class_requests.labels(slo_class=name).inc()
            for what in ("ttft", "tpot", "both"):
                kept = metrics.class_attained.labels(slo_class=name, slo=what)
                kept.inc(getattr(attained, what))
        if summary.ttft_s is not None:
            metrics.class_ttft.labels(slo_class=name).observe(summary.ttft_s)
        if summary.tpot_s is not None:
            metrics.class_tpot.labels(slo_class=name).observe(summary.tpot_s)
