"""What the tokens of the last minutes have cost, where an operator has said what nodes cost.

Of several coordinators that share the nodes, each counts its own tokens, and an equal part of the
costs. Tokens count when their call ends: until then, what nodes do for it seems to be for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import nan
from typing import Final

from msgspec.structs import replace

from coordinator.api.observer import RequestSummary
from coordinator.nodes.registry import Member
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole
from pdserve.shared.clock import Clock
from pdserve.shared.costs import Prices, TokenCosts, Work

WINDOW_S: Final = 600.0
_NOTHING: Final = Work(
    seconds=0.0,
    paid=0.0,
    busy=0.0,
    prompts=0.0,
    uncached_tokens=0,
    cached_tokens=0,
    output_tokens=0,
)


class Costs:
    """The costs of one coordinator's tokens; `tick` must be called at regular intervals."""

    def __init__(self, prices: Prices, members: Iterable[Member], clock: Clock) -> None:
        self._prices = prices
        self._members = members
        self._clock = clock
        self._looked_s = clock.now()
        self._per_hour = 0.0  # of the nodes that there were at the last look
        self._calls = _NOTHING  # that ended since the last look
        self._work: deque[tuple[float, Work]] = deque()  # (its end, what was done until then)

    def watch(self, metrics: CoordinatorMetrics) -> None:
        """Register the costs as metrics."""
        metrics.watch_each(
            "cost_per_million_tokens",
            "Cost of a million tokens without idle time, in the currency of the prices",
            "kind",
            lambda: costs.per_million if (costs := self.now()) else {},
        )
        metrics.watch(
            "cost_per_hour",
            "Cost of an hour of the nodes that there are",
            lambda: costs.per_hour if (costs := self.now()) else nan,
        )
        metrics.watch(
            "cost_idle_share",
            "Share of the cost for time in which nodes computed nothing",
            lambda: costs.idle_share if (costs := self.now()) else nan,
        )

    def call_ended(self, summary: RequestSummary) -> None:
        """Count the tokens of a call that nodes have computed, in whichever tier."""
        for tier in summary.lost_tiers:
            uncached = tier.prompt_tokens - tier.cached_tokens
            self._count(uncached, tier.cached_tokens, tier.completion_tokens)
        if summary.is_elsewhere:
            return
        cached = summary.num_cached_tokens
        uncached = summary.num_prompt_tokens - cached if summary.ttft_s is not None else 0
        self._count(uncached, cached, summary.num_completion_tokens)

    def _count(self, uncached: int, cached: int, output: int) -> None:
        self._calls = replace(
            self._calls,
            uncached_tokens=self._calls.uncached_tokens + uncached,
            cached_tokens=self._calls.cached_tokens + cached,
            output_tokens=self._calls.output_tokens + output,
        )

    def tick(self) -> None:
        """Count what the nodes have cost since the last look."""
        now_s = self._clock.now()
        seconds = now_s - self._looked_s
        paid = busy = prompts = self._per_hour = 0.0
        for member in self._members:
            is_prefill = member.role is NodeRole.PREFILL
            price = self._prices.prefill if is_prefill else self._prices.decode
            price /= member.load.num_coordinators
            self._per_hour += price
            cost = price * seconds / 3600
            paid += cost
            busy += cost * member.load.busy_share
            prompts += cost * min(member.load.prompt_share, member.load.busy_share)
        work = Work(
            seconds=seconds,
            paid=paid,
            busy=busy,
            prompts=prompts,
            uncached_tokens=self._calls.uncached_tokens,
            cached_tokens=self._calls.cached_tokens,
            output_tokens=self._calls.output_tokens,
        )
        self._work.append((now_s, work))
        self._looked_s, self._calls = now_s, _NOTHING
        while self._work[0][0] <= now_s - WINDOW_S:
            self._work.popleft()

    def now(self) -> TokenCosts | None:
        """Return the costs of the last minutes, and per hour of now; None before there are any."""
        total = _NOTHING
        for _, work in self._work:
            total = total.plus(work)
        if not total.seconds:
            return None
        return replace(TokenCosts.of(total), per_hour=self._per_hour)
