"""What counts as kept, per class."""

from __future__ import annotations

import pytest

from coordinator.api.observer import RequestSummary
from coordinator.observers.endings import Attainment, MetricsObserver, attainment
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Slo

SLO = Slo(name="interactive", ttft_s=2.0, tpot_s=0.1)


def summary(
    *,
    status: int = 200,
    code: str | None = None,
    ttft_s: float | None = 1.0,
    tpot_s: float | None = 0.05,
    e2e_s: float = 3.0,
    slo: Slo | None = SLO,
) -> RequestSummary:
    return RequestSummary(
        request_id="r",
        endpoint="/v1/completions",
        slo=slo,
        is_streaming=True,
        status=status,
        error_code=code,
        finish_reason=None if code else "stop",
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_completion_tokens=9,
        e2e_s=e2e_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


@pytest.mark.parametrize(
    ("call", "ttft", "tpot"),
    [
        (summary(), True, True),
        (summary(ttft_s=2.1), False, True),
        (summary(tpot_s=0.11), True, False),
        (summary(tpot_s=None), True, True),  # one token
        (summary(ttft_s=None, tpot_s=None, e2e_s=1.9), True, True),  # nothing was said, in time
        (summary(ttft_s=None, tpot_s=None, e2e_s=2.1), False, True),
        (summary(status=429, code="slo_unreachable", ttft_s=None, tpot_s=None), False, False),
        (summary(status=504, code="deadline_exceeded", ttft_s=None, e2e_s=0.1), False, False),
        (summary(status=502, code="node_lost"), True, False),  # after token 1
        (summary(status=499, code="client_disconnected"), True, True),
        (summary(status=499, code="client_disconnected", ttft_s=None), False, True),
    ],
)
def test_calls_are_judged(call: RequestSummary, ttft: bool, tpot: bool) -> None:
    kept = attainment(call, SLO)
    assert kept == Attainment(ttft, tpot)
    assert kept.both == (ttft and tpot)


@pytest.mark.parametrize("status", [400, 404])
def test_faults_of_the_client_are_no_misses(status: int) -> None:
    assert attainment(summary(status=status, code="invalid_request"), SLO) is None


def test_a_class_without_promises_keeps_them() -> None:
    late = summary(ttft_s=99.0, tpot_s=99.0)
    assert attainment(late, Slo(name="batch")) == Attainment(True, True)


def test_metrics_by_class() -> None:
    metrics = CoordinatorMetrics()
    observer = MetricsObserver(metrics)
    for call in (
        summary(),
        summary(tpot_s=0.5),
        summary(status=429, code="slo_unreachable", ttft_s=None, tpot_s=None),
        summary(status=400, code="invalid_request", ttft_s=None, tpot_s=None),
        summary(slo=None, status=503, code="node_draining", ttft_s=None, tpot_s=None),
        summary(slo=Slo(name="batch"), ttft_s=30.0),
    ):
        observer.request_finished(call)
    lines = metrics.exposition().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['pdserve_slo_requests_total{slo_class="interactive"}'] == "3.0"
    attained = 'pdserve_slo_attained_total{{slo="{}",slo_class="interactive"}}'
    assert [values[attained.format(k)] for k in ("ttft", "tpot", "both")] == ["2.0", "1.0", "1.0"]
    assert values['pdserve_slo_requests_total{slo_class="batch"}'] == "1.0"
    assert values['pdserve_slo_ttft_seconds_sum{slo_class="batch"}'] == "30.0"
    assert values['pdserve_slo_tpot_seconds_count{slo_class="interactive"}'] == "2.0"
