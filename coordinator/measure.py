"""What clients experience, from the API's observations into metrics."""

from __future__ import annotations

from coordinator.api.observer import RequestSummary
from pdserve.metrics import CoordinatorMetrics


class MetricsObserver:
    """`coordinator.api.observer.Observer` over prometheus."""

    def __init__(self, metrics: CoordinatorMetrics) -> None:
        self._metrics = metrics

    def request_started(self, endpoint: str) -> None:
        """Counted when it is finished, with its outcome."""

    def first_token(self, endpoint: str, ttft_s: float) -> None:
        """TTFT."""
        self._metrics.ttft.observe(ttft_s)

    def inter_token(self, endpoint: str, itl_s: float) -> None:
        """ITL."""
        self._metrics.itl.observe(itl_s)

    def request_finished(self, summary: RequestSummary) -> None:
        """Outcome, E2E and TPOT."""
        outcome = summary.error_code or summary.finish_reason or "none"
        self._metrics.requests.labels(outcome=outcome).inc()
        if summary.error_code is None:
            self._metrics.e2e.observe(summary.e2e_s)
        if summary.tpot_s is not None:
            self._metrics.tpot.observe(summary.tpot_s)
