"""Metrics of prefix cache hits and of what broke prefixes; counts and positions only, no text."""

from __future__ import annotations

from coordinator.prefixes.stability import PrefixStability
from pdserve.clock import Clock
from pdserve.kv import need
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Prompt
from pdserve.protocol.status import PrefixStatus


class PrefixWatch:
    """Records prefix cache statistics; must be told about every prefilled prompt."""

    def __init__(self, metrics: CoordinatorMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._stability = PrefixStability()
        self._num_tokens = 0
        self._num_cached = 0

    def prefilled(self, prompt: Prompt, block_size: int, num_cached: int) -> None:
        """Record a prefilled prompt of which the first `num_cached` tokens were cached."""
        metrics, num_tokens = self._metrics, prompt.num_tokens
        self._num_tokens += num_tokens
        self._num_cached += num_cached
        metrics.cached_tokens.inc(num_cached)
        # The last token is always computed, and with it the whole of its block.
        if num_cached < need.full_tokens(num_tokens - 1, block_size):
            metrics.prefix_break.observe(num_cached)
        change = self._stability.observe(prompt, block_size, num_cached, self._clock.now())
        if change is not None:
            metrics.prefix_unstable_position.observe(change.at_token)
            metrics.prefix_unstable_tokens.inc(change.num_tokens)

    def status(self) -> PrefixStatus:
        """Return shares of prompt tokens for GET /status; `unstable_*` are about recent prompts."""
        return PrefixStatus(
            cached_share=self._num_cached / self._num_tokens if self._num_tokens else 0.0,
            unstable_share=self._stability.unstable_share,
            unstable_token=self._stability.unstable_token,
        )
