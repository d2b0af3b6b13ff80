"""Where there is the least to do."""

from __future__ import annotations

from coordinator.routing.candidates import Candidates


class LeastLoaded:
    """The fewest pending prompt tokens, or the fewest decoding requests; as of now."""

    def pick(self, candidates: Candidates) -> int:
        """As Policy."""
        slots = candidates.slots
        return int(slots[candidates.load.take(slots).argmin()])
