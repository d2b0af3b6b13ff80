"""The conserve policy: conversations are placed, not their turns (ConServe, arXiv 2606.01839).

The first prompt of a conversation is handed off. Its later turns go to the decode node that has its
KV, whatever the load. Nothing is predicted.
"""

from __future__ import annotations

import numpy as np

from coordinator.routing.candidates import Candidates
from coordinator.routing.placement import Placement
from coordinator.routing.policies.decode_homes import DecodeHomes, goes_on
from coordinator.routing.sides import OnOneNode
from pdserve.protocol import Slo


class Conserve(DecodeHomes):
    """Pins a conversation to its first decode node."""

    def home(self, candidates: Candidates) -> int | None:
        """Return the node with the conversation's KV: most of the prompt."""
        hits = candidates.hits
        held = np.where(np.isin(hits.slots, candidates.slots), hits.held, 0)
        if len(held) == 0 or 2 * held.max() < hits.num_tokens:
            return None
        return int(hits.slots[held.argmax()])

    def choose(self, slo: Slo, pair: Placement, one: OnOneNode) -> Placement:
        """See SidesPolicy."""
        return one.placement if goes_on(one) else pair
