"""The ppd policy: appended prompts disturb streams far less than whole ones (arXiv 2603.13358).

The first prompt of a conversation is handed off. For each later turn, its decode node and a pair
are weighed by their latencies in units of what was promised.
"""

from __future__ import annotations

from coordinator.routing.placement import Placement
from coordinator.routing.policies.decode_homes import DecodeHomes, goes_on
from coordinator.routing.sides import OnOneNode, score
from pdserve.protocol import Slo


class Ppd(DecodeHomes):
    """Weighs both ways for later turns only."""

    def choose(self, slo: Slo, pair: Placement, one: OnOneNode) -> Placement:
        """See SidesPolicy."""
        local = one.placement
        if not goes_on(one):
            return pair
        local_score = score(slo, local.ttft_s, local.tpot_s)
        return local if local_score <= score(slo, pair.ttft_s, pair.tpot_s) else pair
