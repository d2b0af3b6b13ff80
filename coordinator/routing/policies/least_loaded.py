"""The least-loaded policy."""

from __future__ import annotations

from coordinator.routing.candidates import Candidates


class LeastLoaded:
    """Picks the node with the fewest pending prompt tokens, or decoding requests, at present."""

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        slots = candidates.slots
        return int(slots[candidates.load.take(slots).argmin()])
