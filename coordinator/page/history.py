"""The last minutes of a coordinator, in a bounded ring: what the page's charts are drawn from."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from coordinator.api.observer import RequestSummary
from coordinator.observers.attainment import attainment
from coordinator.requests.journey import Journey
from coordinator.requests.phases import PhaseName, phases
from pdserve.protocol.status import ClusterStatus, RoleName

PERIOD_S: Final = 5.0
MOST_PERIODS: Final = 120  # ten minutes
MOST_JOURNEYS: Final = 100
_MOST_SAMPLES: Final = 512  # of latencies in a period; beyond, a random choice
_GONE = "client_disconnected"


class Kept(msgspec.Struct, frozen=True):
    """How many calls of a class there were, and how many got what the class promises."""

    kept: int
    calls: int


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What five seconds were like. Latencies are in milliseconds; None: there were none."""

    ends_at: float  # seconds since 1970
    calls: int
    failed: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    promises: dict[str, Kept]  # by class
    inflight: int
    waiting: int
    queued_tokens: int  # in prefill queues
    kv_used: dict[RoleName, float]  # share of the pool's blocks


class Step(msgspec.Struct, frozen=True):
    """A phase of a journey, milliseconds from its receipt."""

    name: PhaseName
    start: float
    end: float
    node: str


class JourneyView(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended, as the page shows it. Nothing of its text."""

    request_id: str
    ended_at: float  # seconds since 1970
    slo_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    interruptions: int
    error: str  # code; empty: none
    steps: list[Step]


@dataclass(slots=True)
class _Latencies:
    """A sample of what was observed, of bounded size."""

    samples: list[float] = field(default_factory=list)
    num_seen: int = 0

    def observe(self, seconds: float | None) -> None:
        if seconds is None:
            return
        self.num_seen += 1
        if len(self.samples) < _MOST_SAMPLES:
            self.samples.append(seconds)
        elif (place := random.randrange(self.num_seen)) < _MOST_SAMPLES:
            self.samples[place] = seconds

    def quantile_ms(self, share: float) -> float | None:
        """Return the smallest sample that this share of them does not exceed."""
        if not self.samples:
            return None
        ordered = sorted(self.samples)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3


@dataclass(slots=True)
class _Counts:
    """The period that is not over."""

    calls: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: _Latencies = field(default_factory=_Latencies)
    tpot: _Latencies = field(default_factory=_Latencies)
    promises: dict[str, tuple[int, int]] = field(default_factory=dict)  # (kept, calls)


class History:
    """What the last minutes were like, and the requests that ended last."""

    def __init__(self) -> None:
        self.periods: deque[Period] = deque(maxlen=MOST_PERIODS)
        self._journeys: deque[tuple[int, float, Journey]] = deque(maxlen=MOST_JOURNEYS)
        self._num_journeys = 0
        self._now = _Counts()

    @property
    def num_journeys(self) -> int:
        """How many requests have ended so far."""
        return self._num_journeys

    def call_ended(self, summary: RequestSummary) -> None:
        """A call has ended, in whatever way."""
        now = self._now
        now.calls += 1
        now.refused += summary.status == 429
        now.failed += summary.error_code not in (None, _GONE) and summary.status != 429
        now.prompt_tokens += summary.num_prompt_tokens
        now.output_tokens += summary.num_completion_tokens
        now.ttft.observe(summary.ttft_s)
        now.tpot.observe(summary.tpot_s)
        if summary.slo is not None and (attained := attainment(summary, summary.slo)) is not None:
            kept, calls = now.promises.get(summary.slo.name, (0, 0))
            now.promises[summary.slo.name] = (kept + attained.both, calls + 1)

    def journey_ended(self, journey: Journey) -> None:
        """A request has ended, in whatever way."""
        self._num_journeys += 1
        self._journeys.append((self._num_journeys, time.time(), journey))

    def journeys_since(self, number: int) -> list[JourneyView]:
        """Return the requests after the first `number` ones, as far as they are kept."""
        first = bisect_left(self._journeys, number + 1, key=lambda entry: entry[0])
        entries = list(self._journeys)[first:]
        return [_view(journey, ended_at) for _, ended_at, journey in entries]

    def current(self, status: ClusterStatus) -> Period:
        """Return the period that is not over, as it would be if it ended now."""
        now, nodes = self._now, status.nodes
        return Period(
            ends_at=time.time(),
            calls=now.calls,
            failed=now.failed,
            refused=now.refused,
            prompt_tokens=now.prompt_tokens,
            output_tokens=now.output_tokens,
            ttft_p50=now.ttft.quantile_ms(0.5),
            ttft_p99=now.ttft.quantile_ms(0.99),
            tpot_p50=now.tpot.quantile_ms(0.5),
            tpot_p99=now.tpot.quantile_ms(0.99),
            promises={name: Kept(*counts) for name, counts in now.promises.items()},
            inflight=status.inflight,
            waiting=status.waiting,
            queued_tokens=sum(node.queued_tokens for node in nodes),
            kv_used=_kv_used(status),
        )

    def end_period(self, status: ClusterStatus) -> None:
        """Begin the next period."""
        self.periods.append(self.current(status))
        self._now = _Counts()


def _kv_used(status: ClusterStatus) -> dict[RoleName, float]:
    used: dict[RoleName, float] = {}
    roles: Sequence[RoleName] = ("prefill", "decode")
    for role in roles:
        pool = [node for node in status.nodes if node.role == role]
        num_blocks = sum(node.num_blocks for node in pool)
        if num_blocks:
            used[role] = 1 - sum(node.free_blocks for node in pool) / num_blocks
    return used


def _view(journey: Journey, ended_at: float) -> JourneyView:
    begin_s = journey.received_s
    return JourneyView(
        request_id=journey.request_id,
        ended_at=ended_at,
        slo_class=journey.slo_class,
        prompt_tokens=journey.num_prompt_tokens,
        cached_tokens=journey.num_cached_tokens,
        output_tokens=journey.num_tokens,
        interruptions=sum(attempt.interrupted_s is not None for attempt in journey.attempts),
        error=journey.error,
        steps=[
            Step(
                phase.name,
                (phase.start_s - begin_s) * 1e3,
                (phase.end_s - begin_s) * 1e3,
                phase.node,
            )
            for phase in phases(journey)
        ],
    )
