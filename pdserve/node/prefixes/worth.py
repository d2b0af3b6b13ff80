"""Decides whether fetching blocks is worth it, and how long to wait for them."""

from __future__ import annotations

import logging

from pdserve.clock import Clock
from pdserve.kv import KvLayout
from pdserve.node.prefixes.cost import Forecast, PullCosts, is_worth_pulling, patience_s
from pdserve.settings.config import PrefixPull

log = logging.getLogger(__name__)


class PrefixWorth:
    """`PullCosts` per block of this node. Asked before each fetch, and updated after it."""

    def __init__(self, costs: PullCosts, layout: KvLayout, clock: Clock, pull: PrefixPull) -> None:
        self._costs = costs
        self._layout = layout
        self._clock = clock
        self._is_always = pull == "always"

    def patience_s(self, num_blocks: int, timeout_s: float) -> float:
        """How long a fetch of `num_blocks` blocks may take; at most `timeout_s`."""
        if self._is_always:
            return timeout_s
        return min(timeout_s, patience_s(self._forecast("", num_blocks)))

    def pays(self, transport: str, num_blocks: int) -> bool:
        """Whether fetching these blocks is predicted to be faster than computing them.

        Transport "" stands for one that is not known yet.
        """
        forecast = self._forecast(transport, num_blocks)
        pays = self._is_always or is_worth_pulling(forecast)
        log.debug(
            "%d blocks: %.4f s to pull by %s, %.4f s to compute: %s",
            num_blocks,
            forecast.pull_s,
            transport or "a transport not known yet",
            forecast.compute_s,
            "pull" if pays else "compute",
        )
        if not pays:
            self._costs.declined(transport)
        return pays

    def learn(self, transport: str, num_blocks: int, num_wanted: int, started_s: float) -> None:
        """Learn from an attempt to fetch `num_wanted` blocks, which got `num_blocks`; 0: failed."""
        seconds = self._clock.now() - started_s
        block_bytes = self._layout.block_bytes
        if num_blocks > 0:
            self._costs.observe_pull(transport, num_blocks * block_bytes, seconds)
        else:
            self._costs.observe_at_least(transport, num_wanted * block_bytes, seconds)

    def _forecast(self, transport: str, num_blocks: int) -> Forecast:
        layout = self._layout
        num_bytes = num_blocks * layout.block_bytes
        return self._costs.forecast(transport, num_bytes, layout.tokens_in(num_blocks))
