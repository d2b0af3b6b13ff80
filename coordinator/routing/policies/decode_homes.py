"""What published rules of adaptive mode have in common: only decode nodes serve whole requests."""

from __future__ import annotations

import numpy as np

from coordinator.routing.candidates import Candidates
from coordinator.routing.policies.plain import Predicted
from coordinator.routing.sides import OnOneNode
from pdserve.protocol import NodeRole


class DecodeHomes(Predicted):
    """Picks as `predicted` does; whole requests go to decode nodes, unless there is none."""

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        if candidates.job == "local":
            candidates = _on_decode_nodes(candidates)
            if (home := self.home(candidates)) is not None:
                return home
        return super().pick(candidates)

    def home(self, candidates: Candidates) -> int | None:
        """Return the slot of the one node that may serve all of the request; None: any."""
        return None


def goes_on(one: OnOneNode) -> bool:
    """Return whether the node has most of the prompt already: it is a later turn there."""
    return 2 * one.placement.uncached_tokens <= one.placement.prompt_tokens


def _on_decode_nodes(candidates: Candidates) -> Candidates:
    is_decode = [
        (member := candidates.members[slot]) is not None and member.role is NodeRole.DECODE
        for slot in candidates.slots.tolist()
    ]
    if all(is_decode) or not any(is_decode):
        return candidates
    return candidates._replace(slots=candidates.slots[np.array(is_decode)])
