"""Whether a call met the promise of its class: SLO attainment as in DistServe.

TTFT and TPOT count jointly, so calls that were refused, failed or timed out did not attain their
SLO; for TTFT alone it is enough that token 1 came in time. Calls that failed because of a client
error are not counted. A call whose client disconnected is judged by what it had received until
then.
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
