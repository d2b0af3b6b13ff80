"""Requests with token 1 but not token 2, which wait for a place on their decode node."""

from __future__ import annotations

from collections import defaultdict


class Handoffs:
    """Handoffs in progress, by the decode node's slot."""

    def __init__(self) -> None:
        self._begun_s: defaultdict[int, dict[str, float]] = defaultdict(dict)  # oldest first

    def begin(self, slot: int, request_id: str, now_s: float) -> None:
        """Record that token 1 has arrived."""
        self._begun_s[slot][request_id] = now_s

    def end(self, slot: int, request_id: str) -> None:
        """Record that token 2 has arrived or the request has ended. Idempotent."""
        self._begun_s[slot].pop(request_id, None)

    def longest_s(self, slot: int, now_s: float) -> float:
        """Return how long the oldest handoff has waited; 0 if there is none."""
        return now_s - next(iter(self._begun_s[slot].values()), now_s)

    def clear(self, slot: int) -> None:
        """Forget the handoffs of a lost node."""
        self._begun_s[slot].clear()
