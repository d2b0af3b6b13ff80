"""The prfaas policy: long prompts are handed off, short ones stay (PrfaaS, arXiv 2604.15039).

A prompt is long by its tokens that are not cached. The threshold follows load and links: each
decision moves it a little to where the request would end sooner.
"""

from __future__ import annotations

from typing import Final

from coordinator.routing.placement import Placement
from coordinator.routing.policies.decode_homes import DecodeHomes
from coordinator.routing.sides import OnOneNode
from pdserve.protocol import Slo

_FIRST: Final = 1024.0  # tokens
_STEP: Final = 1.02
_LEAST, _MOST = 16.0, 1e6  # tokens


class Prfaas(DecodeHomes):
    """One threshold on uncached tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._threshold = _FIRST

    def choose(self, slo: Slo, pair: Placement, one: OnOneNode) -> Placement:
        """See SidesPolicy."""
        local = one.placement
        step = _STEP if _end_s(pair) > _end_s(local) else 1 / _STEP
        self._threshold = min(max(self._threshold * step, _LEAST), _MOST)
        return local if local.uncached_tokens <= self._threshold else pair


def _end_s(placement: Placement) -> float:
    return placement.ttft_s + placement.output_tokens * placement.tpot_s
