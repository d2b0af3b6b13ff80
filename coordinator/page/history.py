"""The last hour of a coordinator, in bounded rings: what the page is drawn from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from coordinator.api.observer import RequestSummary
from coordinator.page.counts import Counts, Level
from coordinator.page.ended import EndedRequests
from coordinator.page.told import JourneyView, Period
from coordinator.requests.journey import Journey
from pdserve.protocol.status import ClusterStatus, RoleName

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
        self._inflight = Level(now)
        self._waiting = Level(now)

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

    def current(self, status: ClusterStatus) -> Period:
        """Return the period that is not over, as it would be if it ended now."""
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
            kv_used=_kv_used(status),
            tenants={name: tenant.share() for name, tenant in counts.tenants.items()},
        )

    def end_period(self, status: ClusterStatus) -> None:
        """Begin the next period."""
        self.periods.append(self.current(status))
        self._counts, self._began_s = Counts(), self._now()
        self._inflight.restart()
        self._waiting.restart()


def _kv_used(status: ClusterStatus) -> dict[RoleName, float]:
    used: dict[RoleName, float] = {}
    roles: Sequence[RoleName] = ("prefill", "decode")
    for role in roles:
        pool = [node for node in status.nodes if node.role == role]
        num_blocks = sum(node.num_blocks for node in pool)
        if num_blocks:
            used[role] = 1 - sum(node.free_blocks for node in pool) / num_blocks
    return used
