"""What became of requests, and whether it was in time. Definitions as in DistServe (OSDI'24).

* TTFT is the time of the first token less the time at which the request was *due*: a client that
  is late itself gives nobody an excuse. TTFT from the real time of sending is kept beside it.
* TPOT is (last token - first token) / (tokens - 1), and 0 for one token. What lies between tokens 1
  and 2, such as the way from a prefill to a decode node, counts.
* ITL is each gap between two tokens. Tokens that come in one piece have gaps of 0 between them.
* Attainment is the share of *all* requests sent that met both promises: what was refused, failed
  or did not end counts as missed. For TTFT alone it is enough that token 1 came in time.
* Where requests are of several kinds, attainment is that of the kind that fares worst. Else whoever
  refuses the few requests that are much work would look best.
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
    arrivals_s: list[float] = []  # of pieces of one token or, if the server is behind, more
    num_received: int = 0  # tokens
    num_prompt_counted: int = 0  # tokens of the prompt, as the server counts; 0: it did not say
    end: End = "unfinished"
    error: str = ""  # what was said, of those that were refused or failed
    prefill_node: str = ""
    decode_node: str = ""

    @property
    def late_s(self) -> float:
        """By how much the client itself missed the time it was due."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From when it was due; infinite without a token."""
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else inf

    @property
    def ttft_sent_s(self) -> float:
        """From when it was really sent."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else inf

    @property
    def tpot_s(self) -> float:
        """Mean gap; infinite for a request that did not finish."""
        if self.end != "finished":
            return inf
        if self.num_received < 2:
            return 0.0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_received - 1)

    @property
    def e2e_s(self) -> float:
        """From when it was due to its last token; infinite for a request that did not finish."""
        return self.arrivals_s[-1] - self.due_s if self.end == "finished" else inf

    @property
    def gaps_s(self) -> list[float]:
        """Every gap between two tokens, as far as it got."""
        gaps = [later - earlier for earlier, later in pairwise(self.arrivals_s)]
        together = self.num_received - len(self.arrivals_s)
        return gaps + [0.0] * max(0, together)


class Promise(msgspec.Struct, frozen=True):
    """What every request is promised."""

    ttft_s: float
    tpot_s: float

    def factor(self, outcome: Outcome) -> float:
        """By what both promises must be multiplied for this request to meet them just so."""
        if outcome.end != "finished":
            return inf
        return max(outcome.ttft_s / self.ttft_s, outcome.tpot_s / self.tpot_s)


class Percentiles(msgspec.Struct, frozen=True):
    """Of some times, in milliseconds, linear between observations; None without any."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Infinite times (no token, no end) are not among them: counts tell how many."""
        finite = [second for second in seconds if second != inf]
        if not finite:
            return cls(None, None, None)
        return cls(*(float(p) * 1e3 for p in np.percentile(finite, (50, 90, 99))))


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one way of serving at one rate."""

    sent: int
    finished: int
    refused: int
    failed: int
    unfinished: int
    worst_kind: str  # of requests,
    worst_sent: int
    worst_met: int
    attainment: float  # of both promises, by that kind
    attainment_low: float  # Wilson's 95 % interval
    attainment_high: float
    ttft_attainment: float  # of each alone
    tpot_attainment: float
    slo_scale: float | None  # by it `target` of each kind would meet both promises; None: never
    ttft_ms: Percentiles
    ttft_sent_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    late_ms: Percentiles  # the client itself
    tokens_per_s: float  # received, over the time from the first due one to the last token
    errors: dict[str, int]  # what was said |-> how often


def score(outcomes: Sequence[Outcome], promise: Promise, target: float) -> Score:
    """Everything about a run that follows from what became of its requests (at least one)."""
    ends = [outcome.end for outcome in outcomes]
    sent = len(outcomes)
    factors = {  # kind |-> by what promises must be multiplied for each request, ascending
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
    """Wilson's 95 % interval of a share: right for few requests, and near 0 and 1."""
    share, z2 = met / sent, _Z95**2
    centre = share + z2 / (2 * sent)
    half = _Z95 * sqrt(share * (1 - share) / sent + z2 / (4 * sent**2))
    return max(0.0, (centre - half) / (1 + z2 / sent)), min(1.0, (centre + half) / (1 + z2 / sent))


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Tokens a second of one run, from the first request that was due to the last token."""
    lasts = [outcome.arrivals_s[-1] for outcome in outcomes if outcome.arrivals_s]
    if not lasts:
        return 0.0
    seconds = max(lasts) - min(outcome.due_s for outcome in outcomes)
    return sum(outcome.num_received for outcome in outcomes) / seconds if seconds > 0 else 0.0
