"""The last hour of a coordinator, in bounded rings: what the page is drawn from.

Of the requests that have ended, the last ones are kept, and the slowest and failed of the hour.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import floor, log
from typing import Final

from coordinator.api.observer import RequestSummary
from coordinator.observers.endings import Ending, attainment, ending_of_code, ending_of_status
from coordinator.page.told import JourneyView, Kept, Period, Share, Step
from coordinator.requests.journey import Journey, phases
from pdserve.protocol.status import RoleName

MOST_LAST: Final = 100
MOST_SLOWEST: Final = 50
MOST_UNANSWERED: Final = 50
_KEPT_S: Final = 3600.0
_FORGET_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True, order=True)
class _Ended:
    """A request, in the order of how long it took."""

    took_s: float
    number: int
    at: float = field(compare=False)  # seconds since 1970
    ending: Ending = field(compare=False)
    journey: Journey = field(compare=False)


class EndedRequests:
    """Journeys, numbered from 1."""

    def __init__(self) -> None:
        self.num_ended = 0
        self._last: deque[_Ended] = deque(maxlen=MOST_LAST)
        self._unanswered: deque[_Ended] = deque(maxlen=MOST_UNANSWERED)
        self._slowest: list[_Ended] = []  # a heap: the fastest of them first
        self._forget_at = 0.0  # when some of them may be too old, seconds since 1970

    def add(self, journey: Journey, at: float) -> None:
        """A request has ended, in whatever way, at `at` (seconds since 1970)."""
        self.num_ended += 1
        took_s = (journey.ended_s or journey.received_s) - journey.received_s
        ended = _Ended(took_s, self.num_ended, at, ending_of_code(journey.error), journey)
        self._last.append(ended)
        if ended.ending is not Ending.ANSWERED:
            self._unanswered.append(ended)
        if len(self._slowest) >= MOST_SLOWEST and at >= self._forget_at:
            self._forget(at - _KEPT_S)
            self._forget_at = at + _FORGET_EVERY_S
        if len(self._slowest) < MOST_SLOWEST:
            heapq.heappush(self._slowest, ended)
        elif self._slowest[0] < ended:
            heapq.heapreplace(self._slowest, ended)

    def _forget(self, before: float) -> None:
        """Make room for what is slow now."""
        self._slowest = [ended for ended in self._slowest if ended.at >= before]
        heapq.heapify(self._slowest)

    def since(self, number: int) -> list[JourneyView]:
        """Return those after the first `number` ones, as far as they are kept, oldest first."""
        kept = {one.number: one for one in (*self._slowest, *self._unanswered, *self._last)}
        return [_view(kept[index]) for index in sorted(kept) if index > number]


def _view(ended: _Ended) -> JourneyView:
    journey = ended.journey
    begin_s = journey.received_s
    return JourneyView(
        request_id=journey.request_id,
        ended_at=ended.at,
        ending=ended.ending,
        slo_class=journey.slo_class,
        tenant=journey.tenant,
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


GROWTH: Final = 1.05  # of a bucket's bounds: medians are right within 2.5 %
MOST_TENANTS: Final = 50  # in one period
OTHERS: Final = "(others)"
_LEAST_MS: Final = 0.01


def bucket(seconds: float) -> int:
    """Return the bucket of a latency."""
    return floor(log(max(seconds * 1e3, _LEAST_MS)) / log(GROWTH))


class LoadLevel:
    """The most and the mean over time of a number that changes now and then."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._value = 0
        self._begin_s = self._since_s = now()
        self._sum = 0.0  # value x seconds
        self.most = 0

    def set(self, value: int) -> None:
        """It has changed, or perhaps not."""
        self._add_up()
        self._value = value
        self.most = max(self.most, value)

    def mean(self) -> float:
        """Return the mean since the last `restart`."""
        self._add_up()
        span_s = self._since_s - self._begin_s
        return self._sum / span_s if span_s > 0 else float(self._value)

    def restart(self) -> None:
        """Begin anew, with the value that it has."""
        self._add_up()
        self._begin_s, self._sum, self.most = self._since_s, 0.0, self._value

    def _add_up(self) -> None:
        now_s = self._now()
        self._sum += self._value * (now_s - self._since_s)
        self._since_s = now_s


@dataclass(slots=True)
class TenantCounts:
    """What one tenant has had."""

    endings: Counter[Ending] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0

    def share(self) -> Share:
        """Return it as the page is told it."""
        return Share(
            endings=dict(self.endings),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


@dataclass(slots=True)
class Counts:
    """The calls that have ended."""

    endings: Counter[Ending] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    tpot: Counter[int] = field(default_factory=Counter)
    promises: dict[str, Kept] = field(default_factory=dict)
    tenants: dict[str, TenantCounts] = field(default_factory=dict)

    def add(self, summary: RequestSummary) -> None:
        """A call has ended, in whatever way."""
        ending = ending_of_status(summary.status)
        self.endings[ending] += 1
        if summary.error_code is not None:
            self.errors[summary.error_code] += 1
        self.prompt_tokens += summary.num_prompt_tokens
        self.cached_tokens += summary.num_cached_tokens
        self.output_tokens += summary.num_completion_tokens
        if summary.ttft_s is not None:
            self.ttft[bucket(summary.ttft_s)] += 1
        if summary.tpot_s is not None:
            self.tpot[bucket(summary.tpot_s)] += 1
        self._add_promise(summary)
        if summary.tenant:
            self._add_to_tenant(summary, ending)

    def _add_promise(self, summary: RequestSummary) -> None:
        """Count it if its class promises anything: otherwise there was nothing to keep."""
        slo = summary.slo
        if slo is None or not (slo.ttft_s or slo.tpot_s):
            return
        attained = attainment(summary, slo)
        if attained is not None:
            before = self.promises.get(slo.name, Kept(0, 0))
            self.promises[slo.name] = Kept(before.kept + attained.both, before.calls + 1)

    def _add_to_tenant(self, summary: RequestSummary, ending: Ending) -> None:
        name = summary.tenant
        if name not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            name = OTHERS
        counts = self.tenants.setdefault(name, TenantCounts())
        counts.endings[ending] += 1
        counts.prompt_tokens += summary.num_prompt_tokens
        counts.output_tokens += summary.num_completion_tokens


PERIOD_S: Final = 5.0
MOST_PERIODS: Final = 720  # an hour


class History:
    """What the last hour was like, and requests that ended in it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.periods: deque[Period] = deque(maxlen=MOST_PERIODS)
        self._now = now
        self._ended = EndedRequests()
        self._began_s = now()
        self._counts = Counts()
        self._inflight = LoadLevel(now)
        self._waiting = LoadLevel(now)

    @property
    def num_journeys(self) -> int:
        """How many requests have ended so far."""
        return self._ended.num_ended

    def call_ended(self, summary: RequestSummary) -> None:
        """A call has ended, in whatever way."""
        self._counts.add(summary)

    def journey_ended(self, journey: Journey) -> None:
        """A request has ended, in whatever way."""
        self._ended.add(journey, time.time())

    def load_changed(self, inflight: int, waiting: int) -> None:
        """So many requests are there now, and so many of them wait in line."""
        self._inflight.set(inflight)
        self._waiting.set(waiting)

    def journeys_since(self, number: int) -> list[JourneyView]:
        """Return the requests after the first `number` ones, as far as they are kept."""
        return self._ended.since(number)

    def current(self, kv_used: Mapping[RoleName, float]) -> Period:
        """Return the period that is not over, as it would be if it ended now.

        `kv_used`: share of the KV blocks of each pool.
        """
        counts = self._counts
        return Period(
            ends_at=time.time(),
            seconds=self._now() - self._began_s,
            endings=dict(counts.endings),
            errors=dict(counts.errors),
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            output_tokens=counts.output_tokens,
            ttft=dict(counts.ttft),
            tpot=dict(counts.tpot),
            promises=dict(counts.promises),
            most_inflight=self._inflight.most,
            mean_inflight=self._inflight.mean(),
            most_waiting=self._waiting.most,
            kv_used=dict(kv_used),
            tenants={name: tenant.share() for name, tenant in counts.tenants.items()},
        )

    def end_period(self, kv_used: Mapping[RoleName, float]) -> None:
        """Begin the next period."""
        self.periods.append(self.current(kv_used))
        self._counts, self._began_s = Counts(), self._now()
        self._inflight.restart()
        self._waiting.restart()
