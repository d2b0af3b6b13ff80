"""Whether a call got what its class promises: DistServe's attainment.

TTFT and TPOT count jointly, so nothing was attained for what was refused, failed or timed out; for
TTFT alone it is enough that token 1 came in time. What the client itself got wrong is no call of
its class at all. One that went away is judged by what it had seen until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coordinator.api.observer import RequestSummary
from pdserve.protocol import Slo

_GONE = "client_disconnected"
_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, slots=True)
class Attainment:
    """Of one call."""

    ttft: bool
    tpot: bool

    @property
    def both(self) -> bool:
        """What counts."""
        return self.ttft and self.tpot


def attainment(summary: RequestSummary, slo: Slo) -> Attainment | None:
    """None for what the client got wrong."""
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
    """For the first text; for all there was, when that was none."""
    return summary.e2e_s if summary.ttft_s is None else summary.ttft_s
