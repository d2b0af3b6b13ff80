"""Whose turn it is, of payers of one priority: a heap over their shares."""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from pdserve.fair_share import FairShare, Payer

FEW: Final = 64  # turns that are not worth tidying up


class _Turn(NamedTuple):
    """Of one payer; out of date when that has another rank by now, or has left."""

    rank: float
    number: int  # equals take their turns in the order in which these were given out
    payer: Payer


class Turns:
    """Payers who want something. Their ranks change when they are charged, and only then.

    That is what `FairShare` promises to those who are named whenever others are charged. The first
    one is named for all: now never goes past the lowest rank.
    """

    def __init__(self) -> None:
        self._shares = FairShare(burst=0.0, lead=0.0)  # a lead would change ranks besides
        self._heap: list[_Turn] = []
        self._current: dict[str, _Turn] = {}  # by payer
        self._num_given = 0

    def __len__(self) -> int:
        return len(self._current)

    @property
    def first(self) -> Payer | None:
        """Whose turn it is."""
        while self._heap and self._current.get(self._heap[0].payer.payer) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].payer if self._heap else None

    def join(self, payer: Payer) -> None:
        """It wants something from now on."""
        self._look(payer)
        self._give(payer)

    def leave(self, payer: Payer) -> None:
        """It wants nothing more."""
        del self._current[payer.payer]

    def charge(self, payer: Payer, amount: float) -> None:
        """It was given so much, whether it is one of these or not."""
        self._look(payer)
        self._shares.charge(payer, amount)
        if payer.payer in self._current:
            self._give(payer)

    def _look(self, other: Payer) -> None:
        first = self.first
        self._shares.present([other] if first is None else [other, first])

    def _give(self, payer: Payer) -> None:
        turn = _Turn(self._shares.rank(payer), self._num_given, payer)
        self._num_given += 1
        self._current[payer.payer] = turn
        heapq.heappush(self._heap, turn)
        if len(self._heap) > 2 * len(self._current) + FEW:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
