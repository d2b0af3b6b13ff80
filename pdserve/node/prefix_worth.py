"""Whether fetching blocks is worth it, and for how long: `cost.Costs` in blocks of this node."""

from __future__ import annotations

import logging

from pdserve.clock import Clock
from pdserve.config import PrefixPull
from pdserve.kv_layout import KvLayout
from pdserve.node.cost import Costs, Forecast, is_worth_pulling, patience_s

log = logging.getLogger(__name__)


class PrefixWorth:
    """Asked before every fetch, and told after it."""

    def __init__(self, costs: Costs, layout: KvLayout, clock: Clock, pull: PrefixPull) -> None:
        self._costs = costs
        self._layout = layout
        self._clock = clock
        self._is_always = pull == "always"

    def patience_s(self, num_blocks: int, timeout_s: float) -> float:
        """How long to try for so many blocks; `timeout_s` at most."""
        if self._is_always:
            return timeout_s
        return min(timeout_s, patience_s(self._forecast("", num_blocks)))

    def pays(self, transport: str, num_blocks: int) -> bool:
        """Whether fetching so many blocks this way is sooner done than computing them.

        "" is a transport that is not known yet.
        """
        forecast = self._forecast(transport, num_blocks)
        pays = self._is_always or is_worth_pulling(forecast)
        log.debug(
            "%d blocks: %.4f s to pull them by %s, %.4f s to compute them: %s",
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
        """What an attempt at `num_wanted` blocks took; it has brought `num_blocks`, or failed."""
        seconds = self._clock.now() - started_s
        block_bytes = self._layout.block_bytes
        if num_blocks > 0:
            self._costs.observe_pull(transport, num_blocks * block_bytes, seconds)
        else:
            self._costs.observe_at_least(transport, num_wanted * block_bytes, seconds)

    def _forecast(self, transport: str, num_blocks: int) -> Forecast:
        layout = self._layout
        num_bytes, num_tokens = num_blocks * layout.block_bytes, num_blocks * layout.block_size
        return self._costs.forecast(transport, num_bytes, num_tokens)
