"""The round-robin policy."""

from __future__ import annotations

from coordinator.routing.candidates import Candidates, Job


class RoundRobin:
    """Picks the next slot after the last one chosen for the job, even if nodes have changed."""

    def __init__(self) -> None:
        self._last: dict[Job, int] = {}

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        slots = candidates.slots
        following = slots.searchsorted(self._last.get(candidates.job, -1), side="right")
        slot = int(slots[following % len(slots)])
        self._last[candidates.job] = slot
        return slot
