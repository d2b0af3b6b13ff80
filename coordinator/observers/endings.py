"""How a call ended, and through whose fault: a client's mistake is no failure of the cluster.

A call meets the promise of its class, or not: SLO attainment as in DistServe. TTFT and TPOT count
jointly, so calls that were refused, failed or timed out did not attain their SLO; for TTFT alone it
is enough that token 1 came in time. Calls that failed because of a client error are not counted. A
call whose client disconnected is judged by what it had received until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import Final

import msgspec

from coordinator.api.observer import RequestSummary
from coordinator.api.server.callers import CLIENT_GONE
from coordinator.api.server.errors import describe
from pdserve._native import Histogram
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Slo
from pdserve.protocol.status import RecentCalls
from pdserve.shared.errors import RequestCancelled, from_code

_TOO_MANY_REQUESTS: Final = 429


class Ending(StrEnum):
    """The ways in which a call, or a request of one, ends."""

    ANSWERED = "answered"
    FAILED = "failed"  # through no fault of the client
    REFUSED = "refused"  # there was no room, or the tenant is beyond its limits
    REJECTED = "rejected"  # the client asked for what cannot be
    LEFT = "left"  # the client has hung up, or cancelled it


def ending_of_status(status: int) -> Ending:
    """Return how a call with this HTTP status ended."""
    if status < 400:
        return Ending.ANSWERED
    if status >= 500:
        return Ending.FAILED
    return {_TOO_MANY_REQUESTS: Ending.REFUSED, CLIENT_GONE: Ending.LEFT}.get(
        status, Ending.REJECTED
    )


@cache
def ending_of_code(code: str) -> Ending:
    """Return how a request with this error code ended; empty: it has none."""
    if not code:
        return Ending.ANSWERED
    error = from_code(code, "")
    if isinstance(error, RequestCancelled):
        return Ending.LEFT
    return ending_of_status(describe(error, "", 0).status)


_HALF_S: Final = 30.0


class CallWatch:
    """Counts calls by error code, of which there are few, in this half minute and the last one."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._half = 0
        self._began_s = inf  # since when calls count
        self._counts: Counter[tuple[Ending, str]] = Counter()
        self._before: Counter[tuple[Ending, str]] = Counter()

    def begin(self) -> None:
        """Count calls that come from now on: nodes are ready, and whoever fails has a fault."""
        self._began_s = self._now()

    def call_ended(self, summary: RequestSummary) -> None:
        """A call has ended, in whatever way."""
        if self._now() - summary.duration_s < self._began_s:
            return
        self._turn()
        self._counts[ending_of_status(summary.status), summary.error_code or ""] += 1

    def recent(self) -> RecentCalls:
        """Return how the calls of this half minute and the last one ended."""
        self._turn()
        counts = self._counts + self._before
        return RecentCalls(
            calls=counts.total(),
            refused={code: n for (ending, code), n in counts.items() if ending is Ending.REFUSED},
            failed={code: n for (ending, code), n in counts.items() if ending is Ending.FAILED},
        )

    def _turn(self) -> None:
        half = int(self._now() / _HALF_S)
        if half != self._half:
            self._before = self._counts if half == self._half + 1 else Counter()
            self._half, self._counts = half, Counter()


_GONE = "client_disconnected"


class Attainment(msgspec.Struct, frozen=True):
    """Which parts of its promise one call attained."""

    ttft: bool
    tpot: bool

    @property
    def both(self) -> bool:
        """Whether the call met its promise as a whole."""
        return self.ttft and self.tpot


def attainment(summary: RequestSummary, slo: Slo) -> Attainment | None:
    """Return the attainment of a call; None if the client made an error."""
    code = summary.error_code
    has_failed = code is not None and code != _GONE
    if has_failed and summary.status // 100 == 4 and summary.status != _TOO_MANY_REQUESTS:
        return None
    is_in_time = _waited_s(summary) <= (slo.ttft_s or inf)
    return Attainment(
        ttft=is_in_time and not (has_failed and summary.ttft_s is None),
        tpot=not has_failed and (summary.tpot_s or 0.0) <= (slo.tpot_s or inf),
    )


def _waited_s(summary: RequestSummary) -> float:
    """Return the time until the first text, or the whole duration if there was no text."""
    return summary.e2e_s if summary.ttft_s is None else summary.ttft_s


class MetricsObserver:
    """A `coordinator.api.observer.Observer` that records to Prometheus metrics."""

    def __init__(
        self,
        metrics: CoordinatorMetrics,
        on_finished: Sequence[Callable[[RequestSummary], None]] = (),
        models: Mapping[str, CoordinatorMetrics] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            metrics: of calls for a model that has none of its own.
            on_finished: each is told of each call, too.
            models: the metrics of each of several models, by its name.
        """
        self._models = {name: MetricsObserver(own, on_finished) for name, own in models.items()}
        self._metrics = metrics
        self._on_finished = on_finished

    @property
    def gaps(self) -> Histogram:
        """See Observer."""
        return self._metrics.itl.counts

    def of(self, model: str) -> MetricsObserver:
        """Return the one of a model's own metrics, if it has some."""
        return self._models.get(model, self)

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

    def tier_ended(self, cascade: str, model: str, outcome: str) -> None:
        """Count it."""
        self._metrics.cascade_tiers.labels(cascade=cascade, model=model, outcome=outcome).inc()

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
