"""Requests that have token 1 and not yet token 2: they wait for a place on their decode node."""

from __future__ import annotations

from collections import defaultdict


class Handovers:
    """Those under way, by the decode node's slot."""

    def __init__(self) -> None:
        self._begun_s: defaultdict[int, dict[str, float]] = defaultdict(dict)  # oldest first

    def begin(self, slot: int, request_id: str, now_s: float) -> None:
        """Token 1 is here."""
        self._begun_s[slot][request_id] = now_s

    def end(self, slot: int, request_id: str) -> None:
        """Token 2 is here, or the request is over; again does nothing."""
        self._begun_s[slot].pop(request_id, None)

    def longest_s(self, slot: int, now_s: float) -> float:
        """How long the one that waits longest has waited; 0 if nobody does."""
        return now_s - next(iter(self._begun_s[slot].values()), now_s)

    def clear(self, slot: int) -> None:
        """The node is gone."""
        self._begun_s[slot].clear()
