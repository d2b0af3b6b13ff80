"""The deflection policy: decode nodes take the prompts that would wait for prefill nodes.

After "Prefill deflection" (arXiv 2607.02043): most of a late TTFT is queue and transfer, and decode
nodes have room for chunks within their TPOT. How large these chunks may be is up to the decode
policy (`decode_node/policies/lent_time.py`).
"""

from __future__ import annotations

from coordinator.routing.placement import Placement
from coordinator.routing.policies.decode_homes import DecodeHomes
from coordinator.routing.sides import OnOneNode
from pdserve.protocol import Slo


class Deflection(DecodeHomes):
    """Greedy: one node, if token 1 is there sooner and its TPOT is kept."""

    def choose(self, slo: Slo, pair: Placement, one: OnOneNode) -> Placement:
        """See SidesPolicy."""
        local = one.placement
        is_bearable = one.has_place and (not slo.tpot_s or local.tpot_s <= slo.tpot_s)
        return local if is_bearable and local.ttft_s < pair.ttft_s else pair
