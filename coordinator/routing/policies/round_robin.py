"""One after the other."""

from __future__ import annotations

from coordinator.routing.candidates import Candidates, Job


class RoundRobin:
    """The slot that follows the last one chosen for such a job, whoever has joined or left."""

    def __init__(self) -> None:
        self._last: dict[Job, int] = {}

    def pick(self, candidates: Candidates) -> int:
        """As Policy."""
        slots = candidates.slots
        following = slots.searchsorted(self._last.get(candidates.job, -1), side="right")
        slot = int(slots[following % len(slots)])
        self._last[candidates.job] = slot
        return slot
