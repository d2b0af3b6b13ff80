"""Scores runs: which share of the requests was in time.

* Attainment is the share of *all* requests sent that met both targets: refused, failed and
  unfinished requests count as missed. For TTFT alone it is enough that token 1 came in time.
* With several kinds of requests, attainment is that of the worst kind. Otherwise a server that
  refuses the few expensive requests would look best.
* Percentiles are of the requests that have such a time: TTFT of those with a token, TPOT of those
  that finished. So where many are missing, they look better than attainment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import msgspec
import numpy as np

from pdserve.commands.bench.load.outcome import Outcome, Percentiles, Promise

_Z95 = 1.96


class KindScore(msgspec.Struct, frozen=True):
    """The score of one kind of requests in a run."""

    sent: int
    met: int  # in time: both targets were met
    ttft_ms: Percentiles
    tpot_ms: Percentiles

    @property
    def attainment(self) -> float:
        """Share that was in time."""
        return self.met / self.sent


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one run of one mode at one rate."""

    sent: int
    finished: int
    refused: int
    failed: int
    unfinished: int
    worst_kind: str  # the kind of requests with the lowest attainment
    kinds: dict[str, KindScore]
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
    tokens_in_time: float  # share of the received tokens; see Promise.num_in_time
    tokens_at_once: float  # that come together after waits over the TPOT; Outcome.num_moments
    tokens_per_piece: float  # by the server's own count, which nobody has checked
    tokens_per_s: float  # received tokens, from the first due time to the last token
    errors: dict[str, int]  # error |-> count
    prompts_shortened: int = 0  # requests of whose prompts the server counts fewer tokens than sent

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Kind |-> (requests in time, requests sent)."""
        return {name: (kind.met, kind.sent) for name, kind in self.kinds.items()}


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """What single tokens say of a run; see the fields of Score."""

    itl_ms: Percentiles
    in_time: float = 0.0
    at_once: float = 1.0
    per_piece: float = 1.0

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], promise: Promise) -> TokenFigures:
        """Of the arrivals of every token."""
        return cls(
            itl_ms=Percentiles.of([gap for outcome in outcomes for gap in outcome.gaps_s]),
            in_time=_tokens_in_time(outcomes, promise),
            at_once=_per(outcomes, lambda o: o.num_moments(promise.tpot_s)),
            per_piece=_per(outcomes, lambda o: len(o.arrivals_s)),
        )


def score(
    outcomes: Sequence[Outcome],
    promise: Promise,
    target: float,
    tokens: TokenFigures | None = None,
) -> Score:
    """Score a run by the outcomes of its requests (at least one).

    `tokens`: for outcomes that do not have the arrivals of all tokens.
    """
    tokens = tokens or TokenFigures.of(outcomes, promise)
    ends = [outcome.end for outcome in outcomes]
    sent = len(outcomes)
    factors = {  # kind |-> factor on the targets for each request, ascending
        kind: sorted(promise.factor(o) for o in outcomes if o.kind == kind)
        for kind in sorted({outcome.kind for outcome in outcomes})
    }
    kinds = {
        kind: _kind_score([o for o in outcomes if o.kind == kind], of_kind)
        for kind, of_kind in factors.items()
    }
    worst = min(kinds, key=lambda kind: kinds[kind].attainment)
    low, high = wilson(kinds[worst].met, kinds[worst].sent)
    enough = max(of_kind[int(np.ceil(target * len(of_kind))) - 1] for of_kind in factors.values())
    said = [outcome.error for outcome in outcomes if outcome.error]
    return Score(
        sent=sent,
        finished=ends.count("finished"),
        refused=ends.count("refused"),
        failed=ends.count("failed"),
        unfinished=ends.count("unfinished"),
        worst_kind=worst,
        kinds=kinds,
        attainment=kinds[worst].attainment,
        attainment_low=low,
        attainment_high=high,
        ttft_attainment=sum(o.ttft_s <= promise.ttft_s for o in outcomes) / sent,
        tpot_attainment=sum(o.tpot_s <= promise.tpot_s for o in outcomes) / sent,
        slo_scale=None if enough == inf else enough,
        ttft_ms=Percentiles.of([outcome.ttft_s for outcome in outcomes]),
        ttft_sent_ms=Percentiles.of([outcome.ttft_sent_s for outcome in outcomes]),
        tpot_ms=Percentiles.of([outcome.tpot_s for outcome in outcomes]),
        itl_ms=tokens.itl_ms,
        late_ms=Percentiles.of([outcome.late_s for outcome in outcomes]),
        tokens_in_time=tokens.in_time,
        tokens_at_once=tokens.at_once,
        tokens_per_piece=tokens.per_piece,
        tokens_per_s=throughput(outcomes),
        errors={text: said.count(text) for text in sorted(set(said))},
        prompts_shortened=sum(0 < o.num_prompt_counted < o.num_prompt for o in outcomes),
    )


def _tokens_in_time(outcomes: Sequence[Outcome], promise: Promise) -> float:
    num_received = sum(outcome.num_received for outcome in outcomes)
    return sum(map(promise.num_in_time, outcomes)) / num_received if num_received else 0.0


def _per(outcomes: Sequence[Outcome], count: Callable[[Outcome], int]) -> float:
    """Return the tokens per `count` of answers that have ended with several; 1 without any."""
    streams = [o for o in outcomes if o.end == "finished" and o.num_received > 1]
    counted = sum(map(count, streams))
    return sum(stream.num_received for stream in streams) / counted if counted else 1.0


def _kind_score(outcomes: Sequence[Outcome], factors: Sequence[float]) -> KindScore:
    return KindScore(
        sent=len(outcomes),
        met=sum(factor <= 1 for factor in factors),
        ttft_ms=Percentiles.of([outcome.ttft_s for outcome in outcomes]),
        tpot_ms=Percentiles.of([outcome.tpot_s for outcome in outcomes]),
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
