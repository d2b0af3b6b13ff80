"""Outcomes of requests, and whether they were in time. Definitions as in DistServe (OSDI'24).

* TTFT is the time of the first token less the time at which the request was *due*, so a late client
  does not hide latency. TTFT from the actual time of sending is reported as well.
* TPOT is (last token - first token) / (tokens - 1), and 0 for one token. The time between tokens 1
  and 2, such as the handoff to a decode node, counts.
* ITL is each gap between two tokens. Tokens that arrive in one piece have gaps of 0 between them.
* Attainment is the share of *all* requests sent that met both targets: refused, failed and
  unfinished requests count as missed. For TTFT alone it is enough that token 1 came in time.
* With several kinds of requests, attainment is that of the worst kind. Otherwise a server that
  refuses the few expensive requests would look best.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, sqrt
from typing import Literal

import msgspec
import numpy as np

End = Literal["finished", "refused", "failed", "unfinished"]

_Z95 = 1.96


class Outcome(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times in seconds since the start of the run."""

    kind: str
    due_s: float
    num_prompt: int
    num_output: int  # tokens asked for
    sent_s: float = 0.0
    arrivals_s: list[float] = []  # of pieces: one token each, or more if the server is behind
    num_received: int = 0  # tokens
    num_prompt_counted: int = 0  # prompt tokens by the server's count; 0: not reported
    end: End = "unfinished"
    error: str = ""  # error of refused or failed requests
    prefill_node: str = ""
    decode_node: str = ""

    @property
    def late_s(self) -> float:
        """How late the client itself sent the request."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time from the due time to token 1; infinite without a token."""
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else inf

    @property
    def ttft_sent_s(self) -> float:
        """Time from the actual sending to token 1; infinite without a token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else inf

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens; infinite if the request did not finish."""
        if self.end != "finished":
            return inf
        if self.num_received < 2:
            return 0.0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_received - 1)

    @property
    def e2e_s(self) -> float:
        """Time from the due time to the last token; infinite if the request did not finish."""
        return self.arrivals_s[-1] - self.due_s if self.end == "finished" else inf

    @property
    def gaps_s(self) -> list[float]:
        """All gaps between two tokens received so far."""
        gaps = [later - earlier for earlier, later in pairwise(self.arrivals_s)]
        together = self.num_received - len(self.arrivals_s)
        return gaps + [0.0] * max(0, together)


class Promise(msgspec.Struct, frozen=True):
    """The latency targets of every request."""

    ttft_s: float
    tpot_s: float

    def factor(self, outcome: Outcome) -> float:
        """Return the factor on both targets at which this request would just meet them."""
        if outcome.end != "finished":
            return inf
        return max(outcome.ttft_s / self.ttft_s, outcome.tpot_s / self.tpot_s)


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of times in milliseconds, linear between observations; None without any."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Compute percentiles without infinite times (no token, no end), which counts report."""
        finite = [second for second in seconds if second != inf]
        if not finite:
            return cls(None, None, None)
        return cls(*(float(p) * 1e3 for p in np.percentile(finite, (50, 90, 99))))


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one run of one mode at one rate."""

    sent: int
    finished: int
    refused: int
    failed: int
    unfinished: int
    worst_kind: str  # the kind of requests with the lowest attainment
    worst_sent: int
    worst_met: int
    attainment: float  # of both targets, of the worst kind
    attainment_low: float  # Wilson's 95 % interval
    attainment_high: float
    ttft_attainment: float  # of each target alone
    tpot_attainment: float
    slo_scale: float | None  # factor on both targets with which `target` of each kind is met
    ttft_ms: Percentiles
    ttft_sent_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    late_ms: Percentiles  # the client's own lag
    tokens_per_s: float  # received tokens, from the first due time to the last token
    errors: dict[str, int]  # error |-> count


def score(outcomes: Sequence[Outcome], promise: Promise, target: float) -> Score:
    """Score a run by the outcomes of its requests (at least one)."""
    ends = [outcome.end for outcome in outcomes]
    sent = len(outcomes)
    factors = {  # kind |-> factor on the targets for each request, ascending
        kind: sorted(promise.factor(o) for o in outcomes if o.kind == kind)
        for kind in sorted({outcome.kind for outcome in outcomes})
    }
    met = {kind: sum(factor <= 1 for factor in of_kind) for kind, of_kind in factors.items()}
    worst = min(factors, key=lambda kind: met[kind] / len(factors[kind]))
    worst_met, worst_sent = met[worst], len(factors[worst])
    low, high = wilson(worst_met, worst_sent)
    enough = max(of_kind[int(np.ceil(target * len(of_kind))) - 1] for of_kind in factors.values())
    said = [outcome.error for outcome in outcomes if outcome.error]
    return Score(
        sent=sent,
        finished=ends.count("finished"),
        refused=ends.count("refused"),
        failed=ends.count("failed"),
        unfinished=ends.count("unfinished"),
        worst_kind=worst,
        worst_sent=worst_sent,
        worst_met=worst_met,
        attainment=worst_met / worst_sent,
        attainment_low=low,
        attainment_high=high,
        ttft_attainment=sum(o.ttft_s <= promise.ttft_s for o in outcomes) / sent,
        tpot_attainment=sum(o.tpot_s <= promise.tpot_s for o in outcomes) / sent,
        slo_scale=None if enough == inf else enough,
        ttft_ms=Percentiles.of([outcome.ttft_s for outcome in outcomes]),
        ttft_sent_ms=Percentiles.of([outcome.ttft_sent_s for outcome in outcomes]),
        tpot_ms=Percentiles.of([outcome.tpot_s for outcome in outcomes]),
        itl_ms=Percentiles.of([gap for outcome in outcomes for gap in outcome.gaps_s]),
        late_ms=Percentiles.of([outcome.late_s for outcome in outcomes]),
        tokens_per_s=throughput(outcomes),
        errors={text: said.count(text) for text in sorted(set(said))},
    )


def wilson(met: int, sent: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share: valid for few requests, and near 0 and 1."""
    share, z2 = met / sent, _Z95**2
    centre = share + z2 / (2 * sent)
    half = _Z95 * sqrt(share * (1 - share) / sent + z2 / (4 * sent**2))
    return max(0.0, (centre - half) / (1 + z2 / sent)), min(1.0, (centre + half) / (1 + z2 / sent))


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Return the tokens per second of a run, from the first due request to the last token."""
    lasts = [outcome.arrivals_s[-1] for outcome in outcomes if outcome.arrivals_s]
    if not lasts:
        return 0.0
    seconds = max(lasts) - min(outcome.due_s for outcome in outcomes)
    return sum(outcome.num_received for outcome in outcomes) / seconds if seconds > 0 else 0.0
