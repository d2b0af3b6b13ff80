"""Results of load rounds on several servers: percentiles of each, and ratios."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf

import msgspec

from pdserve.commands.bench.load.client_run import Run
from pdserve.commands.bench.load.outcome import Outcome, Percentiles
from pdserve.commands.bench.load.slo_score import throughput
from pdserve.commands.bench.serve.config import Load


class ServeRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one server under one load, all rounds together. Percentiles in milliseconds."""

    server: str  # its name, or its URL if it has none
    model: str
    concurrency: int  # 0: open loop
    rate: float
    rounds: int
    sent: int
    finished: int
    refused: int
    failed: int  # failed, or did not end in time
    output_tokens_per_s: float  # median of the rounds
    requests_per_s: float  # likewise
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    prompt_tokens: float  # mean, as the server counts them; 0: not reported
    tokens_per_piece: float
    client_late_ms: Percentiles
    client_core_share: float  # CPU share of the client while the load ran, in cores
    errors: dict[str, int]  # error |-> count


class ServeRatio(msgspec.Struct, frozen=True):
    """A server against the first one: medians of the ratios of neighbouring rounds."""

    server: str
    concurrency: int
    rate: float
    output_tokens_per_s: float | None  # above 1: more than the first
    ttft_p50: float | None  # above 1: later than the first
    tpot_p50: float | None


class ServeReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench serve`."""

    rows: list[ServeRow]
    ratios: list[ServeRatio]


def serve_row(server: str, model: str, load: Load, rounds: Sequence[Run]) -> ServeRow:
    """Combine all rounds of a load on one server."""
    outcomes = [outcome for some in rounds for outcome in some.outcomes]
    ends = Counter(outcome.end for outcome in outcomes)
    counted = [outcome.num_prompt_counted for outcome in outcomes if outcome.num_prompt_counted]
    num_pieces = sum(len(outcome.arrivals_s) for outcome in outcomes)
    return ServeRow(
        server=server,
        model=model,
        concurrency=load.concurrency,
        rate=load.rate,
        rounds=len(rounds),
        sent=len(outcomes),
        finished=ends["finished"],
        refused=ends["refused"],
        failed=ends["failed"] + ends["unfinished"],
        output_tokens_per_s=statistics.median(throughput(some.outcomes) for some in rounds),
        requests_per_s=statistics.median(_requests_per_s(some) for some in rounds),
        ttft_ms=Percentiles.of([outcome.ttft_s for outcome in outcomes]),
        tpot_ms=Percentiles.of([outcome.tpot_s for outcome in outcomes]),
        itl_ms=Percentiles.of([gap for outcome in outcomes for gap in outcome.gaps_s]),
        e2e_ms=Percentiles.of([outcome.e2e_s for outcome in outcomes]),
        prompt_tokens=statistics.fmean(counted) if counted else 0.0,
        tokens_per_piece=sum(o.num_received for o in outcomes) / max(1, num_pieces),
        client_late_ms=Percentiles.of([lag for some in rounds for lag in some.lags_s]),
        client_core_share=sum(r.cpu_s for r in rounds) / sum(r.elapsed_s for r in rounds),
        errors=dict(Counter(_complaint(outcome) for outcome in outcomes if _complaint(outcome))),
    )


def _requests_per_s(some: Run) -> float:
    """Return the finished requests per second, over the same time as the throughput."""
    tokens = sum(outcome.num_received for outcome in some.outcomes)
    finished = sum(outcome.end == "finished" for outcome in some.outcomes)
    return throughput(some.outcomes) * finished / tokens if tokens else 0.0


def _complaint(outcome: Outcome) -> str:
    return "not ended in time" if outcome.end == "unfinished" else outcome.error


def serve_ratio(server: str, load: Load, first: Sequence[Run], others: Sequence[Run]) -> ServeRatio:
    """Compare the rounds of one server with those of the first one."""

    def median(figure: Callable[[Run], float]) -> float | None:
        pairs = [(figure(a), figure(b)) for a, b in zip(first, others, strict=True)]
        ratios = [b / a for a, b in pairs if 0 < a < inf and b < inf]
        return statistics.median(ratios) if ratios else None

    return ServeRatio(
        server=server,
        concurrency=load.concurrency,
        rate=load.rate,
        output_tokens_per_s=median(lambda some: throughput(some.outcomes)),
        ttft_p50=median(lambda some: _p50(o.ttft_s for o in some.outcomes)),
        tpot_p50=median(lambda some: _p50(o.tpot_s for o in some.outcomes)),
    )


def _p50(seconds: Iterator[float]) -> float:
    """Return the median of the finite ones; infinite if there are none."""
    finite = [second for second in seconds if second < inf]
    return statistics.median(finite) if finite else inf
